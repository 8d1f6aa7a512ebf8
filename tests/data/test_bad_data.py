"""Data that is torn, empty or of another kind: one line that names it, and nothing trained."""

import gzip
import json
import pathlib
import shlex
import shutil
import struct
import sys

import numpy as np
import pytest
from conftest import BASE, check_refusal, make_config, open_sources, refused, steps_of, table
from in_process import run_here
from test_bad_input import PLAIN, Case, execute, keys
from test_formats import example, write_array_record, write_megatron, write_parquet, write_zstd

from maxramp import prepare
from maxramp.data.opening import open_rows

pytest.importorskip("tokenizers")

TEXTS = [f"document {i} " * 3 for i in range(40)]
ROWS = [list(range(i, i + 17)) for i in range(40)]


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def make_files(f: pathlib.Path) -> None:
    """Good files, and what can be wrong with them."""
    (f / "good.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    (f / "broken.txt").symlink_to("/proc/self/mem")  # opens, and cannot be read
    good = (f / "good.jsonl").read_bytes()
    for name, data in {
        **{"cut.jsonl": good[:-20], "list.jsonl": b'{"text": "a"}\n[1, 2]\n'},
        "number.jsonl": b'{"text": "a"}\n\n{"text": 3}\n',
        "null.jsonl": b'{"text": "a"}\n{"text": null}\n',
        "field.jsonl": b'{"text": "a"}\n{"body": "b", "url": "c"}\n',
        "latin.jsonl": b'{"text": "caf\xe9"}\n',
        "surrogate.jsonl": b'{"text": "a"}\n{"text": "hm \\ud83d!"}\n',
        "deep.jsonl": b'{"text": "a"}\n{"text": ' + b"[" * 100_000 + b"\n",
        **{"ragged.jsonl": b'{"text": [1, [2, 3]]}\n', "tokens.jsonl": b'{"text": [1, 2, 3]}\n'},
        "negative.jsonl": b'{"text": [1, 2]}\n{"text": [1, -2]}\n',
        **{"floats.jsonl": b'{"text": [1.5]}\n', "empty.jsonl": b"", "blank.jsonl": b"\n   \n\t\n"},
        "utf16.jsonl": '{"text": "a"}\n'.encode("utf-16"),
        "utf16_be.jsonl": '{"text": "a"}\n'.encode("utf-16-be"),
        **{"utf16.txt": "text".encode("utf-16"), "cut.jsonl.gz": gzip.compress(good)[:-10]},
        **{"plain.jsonl.gz": good, "cut.jsonl.zst": write_zstd(good)[:-10]},
        **{"binary.txt": b"te\0xt", "latin.txt": b"caf\xe9", "unknown.xyz": b"text"},
        **{"no.parquet": b"text" * 100, "no.array_record": b"text" * 100, "nothing.txt": b""},
        **{"blank_text.jsonl": b'{"text": ""}', "no.json": b"text", "no.model": b"text"},
        "no.tiktoken": b"text",
    }.items():
        (f / name).write_bytes(data)
    parquet = write_parquet([{"text": text, "id": i} for i, text in enumerate(TEXTS)])
    (f / "good.parquet").write_bytes(parquet)
    (f / "cut.parquet").write_bytes(parquet[:-50])
    (f / "flipped.parquet").write_bytes(patched(parquet, 10, b"\xff" * 200))
    (f / "null.parquet").write_bytes(write_parquet([{"text": "a"}, {"text": None}]))
    import pyarrow.parquet

    latin = pyarrow.array([b"a", b"caf\xe9"])  # called a string, which Arrow does not look into
    latin = pyarrow.Array.from_buffers(pyarrow.string(), 2, latin.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), f / "latin.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": []}), f / "empty.parquet")
    records = write_array_record(f / "good.array_record", [text.encode() for text in TEXTS])
    (f / "cut.array_record").write_bytes(records[: len(records) // 2])
    noise = np.random.default_rng(0).integers(97, 123, (50, 9000), np.uint8)
    many = write_array_record(f / "flipped.array_record", [row.tobytes() for row in noise])
    (f / "flipped.array_record").write_bytes(patched(many, len(many) // 3, b"\1\2\3\4" * 50))
    write_array_record(f / "empty.array_record", [])
    write_array_record(f / "examples.array_record", [example(body=b"a", id=b"1")])
    write_array_record(f / "ids.array_record", [example(text=[1, 2])])
    rows = [np.asarray(row, "<i4").tobytes() for row in ROWS]
    write_array_record(f / "rows.array_record", rows)
    write_array_record(f / "short.array_record", [*rows[:5], rows[0][:-4]])
    write_array_record(f / "odd.array_record", [*rows[:5], rows[0][:-1]])
    _make_megatron(f)
    _make_sets(f)


def _make_megatron(f: pathlib.Path) -> None:
    names = (
        "good magic version code float cut_idx header cut_bin long_bin size borders no_bin no_idx"
    )
    for name in names.split():
        write_megatron(f / name, [[row] for row in ROWS])
    write_megatron(f / "parts", [[row] for row in ROWS], gap=4)
    write_megatron(f / "nothing", [])
    write_megatron(f / "negative", [[[1, 2, -3] * 10]])
    write_megatron(f / "huge", [[[1, 2, 2**32 + 5] * 10]], "<i8")
    # Far behind what is looked at before training starts.
    write_megatron(f / "far", [[[1] * 20_000 + [300] + [1] * 20_000]])
    index, data = (f / "good.idx").read_bytes(), (f / "good.bin").read_bytes()
    write_megatron(f / "high", [[[*row[:-1], 400]] for row in ROWS])
    for name, changed in {
        **{"magic.idx": b"PK" + index[2:], "version.idx": patched(index, 9, struct.pack("<Q", 2))},
        **{"code.idx": patched(index, 17, b"\x63"), "float.idx": patched(index, 17, b"\x07")},
        **{"cut_idx.idx": index[:-9], "header.idx": index[:20], "cut_bin.bin": data[:-10]},
        "long_bin.bin": data + b"\0" * 8,
        "size.idx": patched(index, 34 + 4 * 7, struct.pack("<i", -1)),
        "borders.idx": index[:-8] + struct.pack("<q", 7),
    }.items():
        (f / name).write_bytes(changed)
    (f / "no_bin.bin").unlink()
    (f / "no_idx.idx").unlink()


def _make_sets(f: pathlib.Path) -> None:
    (f / "tiny.jsonl").write_text('{"text": "a"}\n')
    for name, source in (("good", "good.jsonl"), ("tiny", "tiny.jsonl")):
        assert prepare.main([str(f / source), "--output", str(f / f"set_{name}")]) == 0
    for name in ["torn", "version", "lost", "short", "dtype", "exchanged", "unfinished"]:
        shutil.copytree(f / "set_good", f / f"set_{name}")
    (f / "set_unfinished" / "manifest.json").unlink()
    (f / "set_lost" / "shard-00000.bin").unlink()
    shard = f / "set_short" / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    for name, old, new in (("torn", '"dtype"', ""), ("version", '"version": 4', '"version": 7')):
        path = f / f"set_{name}" / "manifest.json"
        path.write_text(path.read_text().replace(old, new, 1))
    index = f / "set_dtype" / "shard-00000.idx"
    index.write_bytes(patched(index.read_bytes(), 17, b"\x03"))
    # As many tokens in as many documents, but the second takes one from the first.
    index = f / "set_exchanged" / "shard-00000.idx"
    data = index.read_bytes()
    documents = int.from_bytes(data[18:26], "little")
    sizes = np.frombuffer(data, "<i4", documents, 34).copy()
    sizes[:2] += [-1, 1]
    starts = (np.cumsum(sizes, dtype="<i8") - sizes) * 2
    index.write_bytes(data[:34] + sizes.tobytes() + starts.tobytes() + data[34 + 12 * documents :])


# What is opened: words without a "=" are grain_train_files, and `ids` is tokenize_train_data=False;
# and what the line must name. {f} is the folder of the files.
TABLES = {
    "Keys": """
{f}/good.jsonl train_data_columns=[text,id] | ['text', 'id']
{f}/good.jsonl grain_file_type=csv | grain_file_type=csv
{f}/good.jsonl,0;{f}/good.parquet,1 | "{f}/good.jsonl,0" | not a number above 0
{f}/good.jsonl,-1 | weight "-1" | above 0
{f}/good.jsonl,much;{f}/good.parquet,1 | "much" | {f}/good.jsonl
{f}/good.jsonl;{f}/good.parquet,1 | no weight | glob,weight
{f}/good.jsonl,1; | entry "" | glob,weight
{f}/good.jsonl,nan | weight "nan"
,1 | entry ",1"
{f}/nowhere.jsonl | {f}/nowhere.jsonl | no such file
{f}/good.jsonl,1;{f}/*.csv,1 | {f}/*.csv | no such file
{f}/good.jsonl grain_eval_files={f}/no*.jsonl | grain_eval_files | {f}/no*.jsonl
{f}/good.[jp]* | {f}/good.jsonl (jsonl) | {f}/good.parquet (parquet)
{f}/unknown.xyz | {f}/unknown.xyz | grain_file_type=
{f} | {f} | not a prepared set | folder/*
{f}/good.bin,1;{f}/good.jsonl,1 | {f}/good.jsonl | do not mix
nope://bucket/a.jsonl | nope://
dataset_type=grain | dataset_type=grain | grain_train_files
dataset_type=synthetic grain_train_files={f}/good.jsonl | grain_train_files= | dataset_type=grain \
    | synthetic
hf_path=a/b | hf_path=a/b is read only with dataset_type=hf
train_split=tiny | train_split=tiny is read only with dataset_type=hf
dataset_type=hf | dataset_type=hf needs hf_path
dataset_type=hf hf_path=a/b grain_train_files=x | files=x is read only
{f}/good.jsonl 'eval_sets={wiki: nowhere/*.jsonl}' | eval_sets.wiki: nowhere/*.jsonl: no such file
{f}/good.jsonl 'eval_sets={wiki: }' | eval_sets={'wiki': None} must give names of letters
{f}/good.jsonl 'eval_sets={a/b: x.jsonl}' | must give names of letters
{f}/good.jsonl 'eval_sets={wiki: [a, b]}' | must give names of letters
{f}/good.jsonl eval_sets=wiki.jsonl | must be a mapping of names to files | not text
{f}/good.jsonl 'eval_sets={wiki: x}' grain_eval_files=x.jsonl | x.jsonl is held out too and has no \
    name
dataset_type=text 'eval_sets={wiki: x}' | is read only with dataset_type=grain
""",
    "JSON lines": """
{f}/cut.jsonl | {f}/cut.jsonl: line 40 | not JSON
{f}/list.jsonl | {f}/list.jsonl: line 2 | not a JSON object
{f}/number.jsonl | {f}/number.jsonl: line 3 | int '3'
{f}/null.jsonl | {f}/null.jsonl: line 2 | text is null
{f}/field.jsonl | {f}/field.jsonl: line 2 | has no text | body, url
{f}/latin.jsonl | {f}/latin.jsonl: line 1: is not UTF-8 text (byte 13 is 0xe9) | iconv -f LATIN1 \
    -t UTF-8
{f}/utf16.jsonl | {f}/utf16.jsonl: line 1 | iconv -f UTF-16 -t UTF-8
{f}/utf16_be.jsonl | line 1: is UTF-16 and not UTF-8
{f}/surrogate.jsonl | {f}/surrogate.jsonl: line 2 | '\\ud83d' | character 3
{f}/deep.jsonl | {f}/deep.jsonl: line 2 | not JSON
{f}/ragged.jsonl ids | ragged.jsonl: line 1 | [1, [2, 3]]
{f}/tokens.jsonl | {f}/tokens.jsonl: line 1 | tokenize_train_data
{f}/good.jsonl ids | good.jsonl: line 1 | no list of token ids
{f}/negative.jsonl ids | line 2 | -2
{f}/floats.jsonl ids | floats.jsonl: line 1
{f}/tokens.jsonl ids vocab_size=3 | record 0 | token id 3 | vocab_size=3
{f}/empty.jsonl | {f}/empty.jsonl | no records
{f}/[eg]*.jsonl | {f}/empty.jsonl | no records
{f}/blank.jsonl | {f}/blank.jsonl | no records
{f}/cut.jsonl.gz | {f}/cut.jsonl.gz | cut off
{f}/plain.jsonl.gz | {f}/plain.jsonl.gz | not a gzip
{f}/cut.jsonl.zst | {f}/cut.jsonl.zst | cut off
""",
    "Text": """
{f}/binary.txt | {f}/binary.txt | zero byte at 2
{f}/utf16.txt | {f}/utf16.txt | is UTF-16 and not UTF-8
{f}/latin.txt | {f}/latin.txt | UTF-8 | byte 3
{f}/latin.txt ids | {f}/latin.txt | no list of token ids
""",
    "Parquet": """
{f}/cut.parquet | {f}/cut.parquet | torn
{f}/no.parquet | {f}/no.parquet | not a Parquet
{f}/flipped.parquet | {f}/flipped.parquet
{f}/latin.parquet | latin.parquet: record 1 | UTF-8 | byte 3
{f}/good.parquet train_data_columns=[body] | {f}/good.parquet | has no body | text, id
{f}/good.parquet train_data_columns=[id] | good.parquet: record 0 | int '0'
{f}/null.parquet | {f}/null.parquet: record 1 | text is null
{f}/empty.parquet | {f}/empty.parquet | no records
""",
    "ArrayRecord": """
{f}/cut.array_record | {f}/cut.array_record | torn
{f}/no.array_record | {f}/no.array_record | not an ArrayRecord
{f}/flipped.array_record | flipped.array_record: record 
{f}/empty.array_record | {f}/empty.array_record | no records
{f}/examples.array_record | examples.array_record: record 0 | has no text | body, id
{f}/ids.array_record | ids.array_record: record 0 | not text
{f}/short.array_record ids | record 5 | 16 tokens | max_target_length=15
{f}/odd.array_record ids | record 5 | 67 bytes | int32
""",
    "Megatron's files": """
{f}/magic | {f}/magic.idx | not a Megatron index
{f}/version.bin | {f}/version.idx | of version 1 | x02
{f}/code.bin | {f}/code.idx | dtype code 99
{f}/float.bin | {f}/float.idx | dtype code 7
{f}/cut_idx.bin | {f}/cut_idx.idx | torn | 40 sequences
{f}/header.bin | {f}/header.idx | torn | 20 bytes
{f}/cut_bin.bin | {f}/cut_bin.idx: sequence 39 | cut_bin.bin
{f}/long_bin.bin | {f}/long_bin.bin | 2728 bytes
{f}/parts.bin | {f}/parts.idx: sequence 0 | from byte 4
{f}/size.bin | {f}/size.idx: sequence 7 | -1 tokens
{f}/borders.bin | {f}/borders.idx | document borders
{f}/no_bin.idx | {f}/no_bin.bin | cannot be read
{f}/no_idx.bin | {f}/no_idx.idx | cannot be read
{f}/nothing.bin | {f}/nothing.bin | no tokens
{f}/high.bin | {f}/high.bin: document 0 | token id 400 | 320
{f}/negative.bin | {f}/negative.bin: document 0, token 2 | -3
{f}/huge.bin | {f}/huge.bin: document 0 | 4294967301
""",
    "Prepared sets": """
{f}/set_unfinished | {f}/set_unfinished | not finished
{f}/set_torn | {f}/set_torn/manifest.json | torn
{f}/set_version | set_version/manifest.json | version 7
{f}/set_lost | {f}/set_lost/shard-00000.bin | cannot be read
{f}/set_short | {f}/set_short/shard-00000.bin | bytes | torn
{f}/set_exchanged | shard-00000.idx is not the one that was prepared | prepare the set
{f}/set_dtype | shard-00000.bin | int16 | uint16
{f}/set_good vocab_size=256 | {f}/set_good | 257 | vocab_size=256 | 320
{f}/set_tiny | {f}/set_tiny | not one row | 17
""",
    "Tokenizers": """
{f}/good.jsonl vocab_size=256 | vocab_size=256 | 258
{f}/good.jsonl tokenizer_type=huggingface | tokenizer_path
{f}/good.jsonl tokenizer_type=huggingface tokenizer_path={f}/nowhere | {f}/nowhere
{f}/good.jsonl tokenizer_type=sentencepiece tokenizer_path={f}/nowhere | {f}/nowhere
{f}/good.jsonl tokenizer_type=tiktoken tokenizer_path={f}/nowhere | {f}/nowhere
{f}/good.jsonl tokenizer_type=huggingface tokenizer_path={f}/no.json | {f}/no.json | not a \
    huggingface tokenizer
{f}/good.jsonl tokenizer_type=sentencepiece tokenizer_path={f}/no.model | {f}/no.model | not a \
    sentencepiece tokenizer
{f}/good.jsonl tokenizer_type=tiktoken tokenizer_path={f}/no.tiktoken | {f}/no.tiktoken | not a \
    tiktoken tokenizer
{f}/good.jsonl tokenizer_path={f} | tokenizer_path={f} | no tokenizer.json
{f}/good.jsonl tokenizer_path=a/b/Llama-3.1-8B | a/b/Llama | no such file | nor a name
{f}/good.jsonl tokenizer_path={f}/good.bin | {f}/good.bin | tokenizer_type
{f}/good.jsonl tokenizer_type=bytes tokenizer_path=a.json | =bytes | =a.json
dataset_type=text tokenizer_path={f}/no.json | tokenizer_path={f}/no.json | dataset_type=text
dataset_type=text tokenizer_type=tiktoken | tokenizer_type=tiktoken | dataset_type=text
dataset_type=text split_special_tokens=False | split_special_tokens=False | dataset_type=text
""",
}
CASES = [case for text in TABLES.values() for case in table(text)]


def keys_of(words: str, f: pathlib.Path) -> list[str]:
    """The keys that the words of a table stand for."""
    keys = ["vocab_size=320"]
    for word in shlex.split(words.replace("{f}", str(f))):
        if word == "ids":
            keys.append("tokenize_train_data=False")
        else:
            is_key = "=" in word
            keys += [word] if is_key else ["dataset_type=grain", f"grain_train_files={word}"]
    return keys


@pytest.fixture(scope="module")
def f(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    make_files(folder)
    return folder


def parts_of(names: list[str], f: pathlib.Path) -> list[str]:
    return [name.replace("{f}", str(f)) for name in names]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_one_line(case, f):
    words, *names = case
    with refused(*parts_of(names, f)):
        open_sources(make_config(*keys_of(words, f)).data)


@pytest.mark.parametrize(
    ("more", "names"),
    (
        (["eval_fraction=0.25"], ("eval_fraction=0.25", "2 documents")),
        (["eval_fraction=0.05"], ("eval_fraction=0.05 of 8 documents", "eval_fraction=0.2, ")),
        (["grain_eval_files={f}/held.jsonl"], ("grain_eval_files=", "held.jsonl", "1 document,")),
        (["packing=False", "eval_fraction=0.25"], ("eval_fraction=0.25",)),
    ),
)
def test_held_out_documents_that_predict_nothing(more, names, tmp_path):
    """Empty ones and those of one token have no loss to tell."""
    texts = ["a document", "another one"] * 3 + ["", "x"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "held.jsonl").write_text('{"text": "y"}\n')
    keys = (f"grain_train_files={tmp_path}/a.jsonl", "add_bos=False", "add_eos=False")
    options = (*keys, *(key.replace("{f}", str(tmp_path)) for key in more))
    with refused(*names, "eval_interval=-1"):
        open_rows(make_config("dataset_type=grain", *options).data, True)
    unread = make_config("dataset_type=grain", *options, "eval_interval=-1")
    assert len(open_rows(unread.data, True).train[0].items)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case[0])
def test_nothing_is_trained(case, f, tmp_path):
    """As a run, one of them as a process: exit status 2 and the line, no step, no checkpoint."""
    words, *names = case
    line = Case(words, [BASE, *PLAIN, *keys_of(words, f)], ())
    done, has_trained = execute(line, f, tmp_path / "run", started=case is CASES[0])
    check_refusal(done, *parts_of(names, f))
    assert not has_trained


@pytest.mark.slow
def test_a_bad_row_far_inside_is_not_trained_on(f, tmp_path):
    """Files are too large to read before training: their rows are looked at as they come."""
    options = f"dataset_type=grain grain_train_files={f}/far.bin vocab_size=264 run_name=far"
    case = keys(f"{options} enable_data_shuffling=False steps=40 per_device_batch_size=50")
    done, _ = execute(case, f, tmp_path / "run", started=True, limited=False)
    assert done.returncode == 2
    names = (f"{f}/far.bin: document 0, token 20000", "token id 300", "vocab_size=264")
    assert all(name in done.stderr for name in names) and done.stderr.count("\n") == 1
    steps = [record["step"] for record in steps_of(tmp_path / "run" / "output" / "far")]
    assert steps == list(range(20_000 // 16 // 50))[: len(steps)]  # the row is in step 25


PACKAGES = {
    "pyarrow": "{f}/good.parquet",
    "tokenizers": "{f}/good.jsonl tokenizer_path={f}/no.json",
    "sentencepiece": "{f}/good.jsonl tokenizer_path={f}/no.model",
    "tiktoken": "{f}/good.jsonl tokenizer_path={f}/no.tiktoken",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_not_installed(package, f, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with refused(f"needs the package {package}: python -m pip install ", "'.[data]'"):
        open_sources(make_config(*keys_of(PACKAGES[package], f)).data)


# Of maxramp.prepare; {o} stands for --output and a new folder.
PREPARE = table("""
{o} | no INPUT
{f}/good.jsonl | no --output
{f}/nowhere.jsonl {o} | {f}/nowhere.jsonl | no such file
{f}/good.jsonl {o} --outptu | --outptu
{f}/good.jsonl {o} --workers many | --workers | many
{f}/good.jsonl {o} --workers 0 | --workers 0
{f}/good.jsonl {o} --shard_megabytes -1 | --shard_megabytes -1
{f}/good.jsonl {o} tokenizer_typ=bytes | did you mean tokenizer_type
{f}/good.jsonl {o} steps=3 | steps=3 | tokenizer_path
{f}/good.jsonl --output gs://bucket/a | gs://bucket/a | local
{f}/good.jsonl --output gs:/bucket/a | gs:/bucket/a | local
{f}/good.jsonl --output {f}/good.bin | {f}/good.bin | write
{f}/set_good {o} | {f}/set_good | prepared set
{f}/good.jsonl {f}/good.bin {o} | INPUT | tokens
{f}/good.jsonl {o} --train_bpe 100 | --train_bpe 100 | 258
{f}/good.bin {o} --train_bpe 300 | --train_bpe 300 | tokens
{f}/empty.jsonl {o} | 0 documents
{f}/cut_bin.bin {o} | {f}/cut_bin.idx: sequence 39
{f}/cut.jsonl {o} | {f}/cut.jsonl: line 40 | not JSON
{f}/broken.txt {o} | {f}/broken.txt: cannot be read: Input/output error
{f}/broken.txt {o} --train_bpe 300 | {f}/broken.txt: cannot be read: Input/output error
{f}/good.jsonl --output {f} | --output {f} holds 
--inspect {f} | {f} | not a prepared set
--inspect {f}/good.jsonl | good.jsonl is not a prepared set | use_dpo=true
--inspect {f}/set_short | shard-00000.bin | torn
{f}/good.jsonl {o} --shard_megabytes nan | --shard_megabytes nan | above 0 and finite
{f}/good.jsonl {o} --shard_megabytes 1e305 | --shard_megabytes 1e+305 | above 0 and finite
{f}/good.jsonl {o} --max_bad_records=-1 | --max_bad_records
{f}/good.jsonl {o} --max_bad_records=0.1 | --max_bad_records
{f}/good.jsonl {o} --max_bad_records= | --max_bad_records
{f}/empty.jsonl {o} --train_bpe 300 | --train_bpe 300: the inputs hold no text
{f}/nothing.txt {o} --train_bpe 300 --tokenizer_only | --train_bpe 300: the inputs hold no text
{f}/blank_text.jsonl {o} --train_bpe 300 --tokenizer_only | --train_bpe 300: the inputs hold no text
{f}/good.jsonl {o} --train_bpe 300 tokenizer_path={f}/no.json | --train_bpe | {f}/no.json
{f}/good.jsonl {o} --train_bpe 300 tokenizer_type=tiktoken | --train_bpe | tiktoken
{f}/good.bin {o} tokenizer_path={f}/no.json | tokenizer_path={f}/no.json | tokens
{f}/good.jsonl {o} tokenizer_path={f} | tokenizer_path={f} | no tokenizer.json
""")


@pytest.mark.parametrize("case", PREPARE, ids=lambda case: case[0])
def test_refused_by_prepare(case, f, tmp_path):
    words, *names = case
    output = f"--output {tmp_path}/set"
    options = words.replace("{f}", str(f)).replace("{o}", output).split()
    check_refusal(run_here(*options, module="prepare"), *parts_of(names, f), begun=True)
    assert not {path.name for path in tmp_path.rglob("*")} & {"manifest.json", "tokenizer.json"}


def test_good_files_are_not_refused(f):
    """What the cases are made from opens: a case fails for its own reason alone."""
    names = ("good.jsonl", "good.parquet", "good.array_record", "good.bin", "good", "set_good")
    lines = [f"{{f}}/{name}" for name in names]
    for line in (*lines, "{f}/rows.array_record ids", "{f}/good.jsonl,1;{f}/good.parquet,2"):
        assert len(open_sources(make_config(*keys_of(line, f)).data).train[0].items)
