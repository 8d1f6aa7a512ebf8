"""Data that is torn, empty or of another kind: one line that names it, and nothing trained."""

import gzip
import json
import pathlib
import shutil
import struct
import sys

import numpy as np
import pytest
from conftest import make_config, open_sources
from test_bad_input import execute, keys
from test_formats import example, write_array_record, write_megatron, write_parquet, write_zstd

from maxramp import prepare
from maxramp.data.opening import open_rows
from maxramp.errors import ConfigError

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
        "cut.jsonl": good[:-20],
        "list.jsonl": b'{"text": "a"}\n[1, 2]\n',
        "number.jsonl": b'{"text": "a"}\n\n{"text": 3}\n',
        "null.jsonl": b'{"text": "a"}\n{"text": null}\n',
        "field.jsonl": b'{"text": "a"}\n{"body": "b", "url": "c"}\n',
        "latin.jsonl": b'{"text": "caf\xe9"}\n',
        "surrogate.jsonl": b'{"text": "a"}\n{"text": "hm \\ud83d!"}\n',
        "deep.jsonl": b'{"text": "a"}\n{"text": ' + b"[" * 100_000 + b"\n",
        "ragged.jsonl": b'{"text": [1, [2, 3]]}\n',
        "tokens.jsonl": b'{"text": [1, 2, 3]}\n',
        "negative.jsonl": b'{"text": [1, 2]}\n{"text": [1, -2]}\n',
        "floats.jsonl": b'{"text": [1.5]}\n',
        "empty.jsonl": b"",
        "blank.jsonl": b"\n   \n\t\n",
        "utf16.jsonl": '{"text": "a"}\n'.encode("utf-16"),
        "utf16_be.jsonl": '{"text": "a"}\n'.encode("utf-16-be"),
        "utf16.txt": "text".encode("utf-16"),
        "cut.jsonl.gz": gzip.compress(good)[:-10],
        "plain.jsonl.gz": good,
        "cut.jsonl.zst": write_zstd(good)[:-10],
        "binary.txt": b"te\0xt",
        "latin.txt": b"caf\xe9",
        "unknown.xyz": b"text",
        "no.parquet": b"text" * 100,
        "no.array_record": b"text" * 100,
        "no.json": b"text",
        "no.model": b"text",
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
        "magic.idx": b"PK" + index[2:],
        "version.idx": patched(index, 9, struct.pack("<Q", 2)),
        "code.idx": patched(index, 17, b"\x63"),
        "float.idx": patched(index, 17, b"\x07"),
        "cut_idx.idx": index[:-9],
        "header.idx": index[:20],
        "cut_bin.bin": data[:-10],
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


def grain(files: str, *names: str, **more: str) -> tuple[list[str], tuple[str, ...]]:
    """A corpus of these files with other keys besides; what the line must name."""
    options = [f"grain_train_files={files}", *(f"{name}={value}" for name, value in more.items())]
    return ["dataset_type=grain", *options], names


TOKENS = {"tokenize_train_data": "False"}
CASES = {
    # The keys.
    "no files": (["dataset_type=grain"], ("dataset_type=grain", "grain_train_files")),
    "files of another dataset_type": (
        ["dataset_type=synthetic", "grain_train_files={f}/good.jsonl"],
        ("grain_train_files=", "dataset_type=grain", "synthetic"),
    ),
    "two columns": grain("{f}/good.jsonl", "['text', 'id']", train_data_columns="[text,id]"),
    "no such format": grain("{f}/good.jsonl", "grain_file_type=csv", grain_file_type="csv"),
    "weight 0": grain(
        "{f}/good.jsonl,0;{f}/good.parquet,1", '"{f}/good.jsonl,0"', "not a number above 0"
    ),
    "negative weight": grain("{f}/good.jsonl,-1", 'weight "-1"', "above 0"),
    "weight of text": grain("{f}/good.jsonl,much;{f}/good.parquet,1", '"much"', "{f}/good.jsonl"),
    "no weight": grain("{f}/good.jsonl;{f}/good.parquet,1", "no weight", "glob,weight"),
    "empty entry": grain("{f}/good.jsonl,1;", 'entry ""', "glob,weight"),
    "missing file": grain("{f}/nowhere.jsonl", "{f}/nowhere.jsonl", "no such file"),
    "missing file of a mixture": grain("{f}/good.jsonl,1;{f}/*.csv,1", "{f}/*.csv", "no such file"),
    "missing evaluation file": grain(
        "{f}/good.jsonl", "grain_eval_files", "{f}/no*.jsonl", grain_eval_files="{f}/no*.jsonl"
    ),
    "files of two formats": grain(
        "{f}/good.[jp]*", "{f}/good.jsonl (jsonl)", "{f}/good.parquet (parquet)"
    ),
    "name of no format": grain("{f}/unknown.xyz", "{f}/unknown.xyz", "grain_file_type="),
    "a folder": grain("{f}", "{f}", "not a prepared set", "folder/*"),
    "rows and documents": grain("{f}/good.bin,1;{f}/good.jsonl,1", "{f}/good.jsonl", "do not mix"),
    "storage of no package": grain("nope://bucket/a.jsonl", "nope://"),
    # JSON lines.
    "cut line": grain("{f}/cut.jsonl", "{f}/cut.jsonl: line 40", "not JSON"),
    "a list": grain("{f}/list.jsonl", "{f}/list.jsonl: line 2", "not a JSON object"),
    "a number for text": grain("{f}/number.jsonl", "{f}/number.jsonl: line 3", "int '3'"),
    "nothing for text": grain("{f}/null.jsonl", "{f}/null.jsonl: line 2", "text is null"),
    "missing field": grain(
        "{f}/field.jsonl", "{f}/field.jsonl: line 2", "has no text", "body, url"
    ),
    "Latin-1": grain(
        "{f}/latin.jsonl",
        "{f}/latin.jsonl: line 1: is not UTF-8 text (byte 13 is 0xe9)",
        "iconv -f LATIN1 -t UTF-8",
    ),
    "UTF-16": grain("{f}/utf16.jsonl", "{f}/utf16.jsonl: line 1", "iconv -f UTF-16 -t UTF-8"),
    "UTF-16 without a mark": grain("{f}/utf16_be.jsonl", "line 1: is UTF-16 and not UTF-8"),
    "half a surrogate pair": grain(
        "{f}/surrogate.jsonl", "{f}/surrogate.jsonl: line 2", "'\\ud83d'", "character 3"
    ),
    "brackets without end": grain("{f}/deep.jsonl", "{f}/deep.jsonl: line 2", "not JSON"),
    "lists of ids": grain("{f}/ragged.jsonl", "ragged.jsonl: line 1", "[1, [2, 3]]", **TOKENS),
    "ids for text": grain("{f}/tokens.jsonl", "{f}/tokens.jsonl: line 1", "tokenize_train_data"),
    "text for ids": grain("{f}/good.jsonl", "good.jsonl: line 1", "no list of token ids", **TOKENS),
    "negative id in a document": grain("{f}/negative.jsonl", "line 2", "-2", **TOKENS),
    "fractions for ids": grain("{f}/floats.jsonl", "floats.jsonl: line 1", **TOKENS),
    "id above the vocabulary in a document": grain(
        "{f}/tokens.jsonl", "record 0", "token id 3", "vocab_size=3", **TOKENS, vocab_size="3"
    ),
    "empty file": grain("{f}/empty.jsonl", "{f}/empty.jsonl", "no records"),
    "empty shard of many": grain("{f}/[eg]*.jsonl", "{f}/empty.jsonl", "no records"),
    "blank lines": grain("{f}/blank.jsonl", "{f}/blank.jsonl", "no records"),
    "cut gzip": grain("{f}/cut.jsonl.gz", "{f}/cut.jsonl.gz", "cut off"),
    "no gzip": grain("{f}/plain.jsonl.gz", "{f}/plain.jsonl.gz", "not a gzip"),
    "cut zstd": grain("{f}/cut.jsonl.zst", "{f}/cut.jsonl.zst", "cut off"),
    # Text.
    "binary text": grain("{f}/binary.txt", "{f}/binary.txt", "zero byte at 2"),
    "UTF-16 text": grain("{f}/utf16.txt", "{f}/utf16.txt", "is UTF-16 and not UTF-8"),
    "Latin-1 text": grain("{f}/latin.txt", "{f}/latin.txt", "UTF-8", "byte 3"),
    "ids in text": grain("{f}/latin.txt", "{f}/latin.txt", "no list of token ids", **TOKENS),
    # Parquet.
    "cut Parquet": grain("{f}/cut.parquet", "{f}/cut.parquet", "torn"),
    "no Parquet": grain("{f}/no.parquet", "{f}/no.parquet", "not a Parquet"),
    "flipped Parquet": grain("{f}/flipped.parquet", "{f}/flipped.parquet"),
    "Latin-1 in Parquet": grain("{f}/latin.parquet", "latin.parquet: record 1", "UTF-8", "byte 3"),
    "missing column": grain(
        "{f}/good.parquet",
        "{f}/good.parquet",
        "has no body",
        "text, id",
        train_data_columns="[body]",
    ),
    "column of numbers": grain(
        "{f}/good.parquet", "good.parquet: record 0", "int '0'", train_data_columns="[id]"
    ),
    "null in a column": grain("{f}/null.parquet", "{f}/null.parquet: record 1", "text is null"),
    "empty Parquet": grain("{f}/empty.parquet", "{f}/empty.parquet", "no records"),
    # ArrayRecord.
    "cut ArrayRecord": grain("{f}/cut.array_record", "{f}/cut.array_record", "torn"),
    "no ArrayRecord": grain("{f}/no.array_record", "{f}/no.array_record", "not an ArrayRecord"),
    "flipped ArrayRecord": grain("{f}/flipped.array_record", "flipped.array_record: record "),
    "empty ArrayRecord": grain("{f}/empty.array_record", "{f}/empty.array_record", "no records"),
    "missing feature": grain(
        "{f}/examples.array_record", "examples.array_record: record 0", "has no text", "body, id"
    ),
    "feature of ids": grain("{f}/ids.array_record", "ids.array_record: record 0", "not text"),
    "row of another length": grain(
        "{f}/short.array_record", "record 5", "16 tokens", "max_target_length=15", **TOKENS
    ),
    "bytes of no type": grain("{f}/odd.array_record", "record 5", "67 bytes", "int32", **TOKENS),
    # Megatron.
    "wrong magic": grain("{f}/magic", "{f}/magic.idx", "not a Megatron index"),
    "unknown version": grain("{f}/version.bin", "{f}/version.idx", "of version 1", "x02"),
    "unknown dtype": grain("{f}/code.bin", "{f}/code.idx", "dtype code 99"),
    "float tokens": grain("{f}/float.bin", "{f}/float.idx", "dtype code 7"),
    "cut index": grain("{f}/cut_idx.bin", "{f}/cut_idx.idx", "torn", "40 sequences"),
    "cut header": grain("{f}/header.bin", "{f}/header.idx", "torn", "20 bytes"),
    "index beyond the file": grain(
        "{f}/cut_bin.bin", "{f}/cut_bin.idx: sequence 39", "cut_bin.bin"
    ),
    "tokens beyond the index": grain("{f}/long_bin.bin", "{f}/long_bin.bin", "2728 bytes"),
    "index of parts": grain("{f}/parts.bin", "{f}/parts.idx: sequence 0", "from byte 4"),
    "negative length": grain("{f}/size.bin", "{f}/size.idx: sequence 7", "-1 tokens"),
    "borders": grain("{f}/borders.bin", "{f}/borders.idx", "document borders"),
    "no .bin": grain("{f}/no_bin.idx", "{f}/no_bin.bin", "cannot be read"),
    "no .idx": grain("{f}/no_idx.bin", "{f}/no_idx.idx", "cannot be read"),
    "no tokens": grain("{f}/nothing.bin", "{f}/nothing.bin", "no tokens"),
    "id above the vocabulary": grain(
        "{f}/high.bin", "{f}/high.bin: document 0", "token id 400", "320"
    ),
    "negative id": grain("{f}/negative.bin", "{f}/negative.bin: document 0, token 2", "-3"),
    "id beyond 32 bits": grain("{f}/huge.bin", "{f}/huge.bin: document 0", str(2**32 + 5)),
    # Prepared sets.
    "unfinished set": grain("{f}/set_unfinished", "{f}/set_unfinished", "not finished"),
    "torn manifest": grain("{f}/set_torn", "{f}/set_torn/manifest.json", "torn"),
    "manifest of another version": grain(
        "{f}/set_version", "set_version/manifest.json", "version 7"
    ),
    "lost shard": grain("{f}/set_lost", "{f}/set_lost/shard-00000.bin", "cannot be read"),
    "short shard": grain("{f}/set_short", "{f}/set_short/shard-00000.bin", "bytes", "torn"),
    "another index": grain(
        "{f}/set_exchanged", "shard-00000.idx is not the one that was prepared", "prepare the set"
    ),
    "shard of another dtype": grain("{f}/set_dtype", "shard-00000.bin", "int16", "uint16"),
    "ids above the vocabulary": grain(
        "{f}/set_good", "{f}/set_good", "257", "vocab_size=256", "320", vocab_size="256"
    ),
    "set shorter than a row": grain("{f}/set_tiny", "{f}/set_tiny", "not one row", "17"),
    # Tokenizers.
    "vocabulary of the bytes": grain("{f}/good.jsonl", "vocab_size=256", "258", vocab_size="256"),
    "no tokenizer": grain("{f}/good.jsonl", "tokenizer_path", tokenizer_type="huggingface"),
    **{
        f"missing {kind}": grain(
            "{f}/good.jsonl", "{f}/nowhere", tokenizer_type=kind, tokenizer_path="{f}/nowhere"
        )
        for kind in ("huggingface", "sentencepiece", "tiktoken")
    },
    **{
        f"no {kind}": grain(
            "{f}/good.jsonl",
            f"{{f}}/{name}",
            f"not a {kind} tokenizer",
            tokenizer_type=kind,
            tokenizer_path=f"{{f}}/{name}",
        )
        for kind, name in {
            "huggingface": "no.json",
            "sentencepiece": "no.model",
            "tiktoken": "no.tiktoken",
        }.items()
    },
}


@pytest.fixture(scope="module")
def f(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    make_files(folder)
    return folder


def check_line(line: str, names: tuple[str, ...], f: pathlib.Path) -> None:
    assert len(line.splitlines()) == 1 and len(line) < 500, line
    for part in names:
        assert part.replace("{f}", str(f)) in line, line


@pytest.mark.parametrize("name", CASES)
def test_one_line(name, f):
    arguments, names = CASES[name]
    options = [argument.replace("{f}", str(f)) for argument in arguments]
    if not any(argument.startswith("vocab_size=") for argument in options):
        options.append("vocab_size=320")
    with pytest.raises(ConfigError) as caught:
        open_sources(make_config(*options).data)
    check_line(str(caught.value), names, f)


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
    with pytest.raises(ConfigError) as caught:
        config = make_config("dataset_type=grain", *options)
        open_rows(config.data, True)
    check_line(str(caught.value), (*names, "eval_interval=-1"), tmp_path)
    unread = make_config("dataset_type=grain", *options, "eval_interval=-1")
    assert len(open_rows(unread.data, True).train[0].items)


@pytest.mark.parametrize("name", list(CASES)[::4])
def test_nothing_is_trained(name, f, tmp_path):
    """As a run, one of them as a process: exit status 2 and the line, no step, no checkpoint."""
    arguments, names = CASES[name]
    options = [argument.replace("{f}", str(f)) for argument in arguments]
    if not any(argument.startswith("vocab_size=") for argument in options):
        options.append("vocab_size=320")
    outcome = execute(keys(" ".join(options)), f, tmp_path / "run", started=name == list(CASES)[0])
    assert outcome.status == 2, outcome.stderr
    assert outcome.stderr.startswith("error: ") and outcome.stdout == "" and not outcome.trained
    check_line(outcome.stderr.removesuffix("\n"), names, f)


@pytest.mark.slow
def test_a_bad_row_far_inside_is_not_trained_on(f, tmp_path):
    """Files are too large to read before training: their rows are looked at as they come."""
    options = f"dataset_type=grain grain_train_files={f}/far.bin vocab_size=264 run_name=far"
    case = keys(f"{options} enable_data_shuffling=False steps=40 per_device_batch_size=50")
    outcome = execute(case, f, tmp_path / "run", started=True, limited=False)
    assert outcome.status == 2
    names = ("{f}/far.bin: document 0, token 20000", "token id 300", "vocab_size=264")
    check_line(outcome.stderr.removesuffix("\n"), names, f)
    lines = (tmp_path / "run" / "output" / "far" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(20_000 // 16 // 50))[: len(steps)]  # the row is in step 25


PACKAGES = {
    "pyarrow": grain("{f}/good.parquet"),
    "tokenizers": grain(
        "{f}/good.jsonl", tokenizer_type="huggingface", tokenizer_path="{f}/no.json"
    ),
    "sentencepiece": grain(
        "{f}/good.jsonl", tokenizer_type="sentencepiece", tokenizer_path="{f}/no.model"
    ),
    "tiktoken": grain("{f}/good.jsonl", tokenizer_type="tiktoken", tokenizer_path="{f}/a.tiktoken"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_not_installed(package, f, monkeypatch):
    """The line that installs it."""
    (f / "a.tiktoken").write_text("YQ== 0\n")
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=f"needs the package {package}: python -m pip install "
    ) as caught:
        options = [argument.replace("{f}", str(f)) for argument in PACKAGES[package][0]]
        open_sources(make_config(*options, "vocab_size=320").data)
    check_line(str(caught.value), ("'.[data]'",), f)


PREPARE = {
    "no input": ("--output {o}", ("no INPUT",)),
    "no output": ("{f}/good.jsonl", ("no --output",)),
    "missing input": ("{f}/nowhere.jsonl --output {o}", ("{f}/nowhere.jsonl", "no such file")),
    "option": ("{f}/good.jsonl --output {o} --outptu", ("--outptu",)),
    "word for a number": ("{f}/good.jsonl --output {o} --workers many", ("--workers", "many")),
    "no workers": ("{f}/good.jsonl --output {o} --workers 0", ("--workers 0",)),
    "no shard": ("{f}/good.jsonl --output {o} --shard_megabytes -1", ("--shard_megabytes -1",)),
    "key": ("{f}/good.jsonl --output {o} tokenizer_typ=bytes", ("did you mean tokenizer_type",)),
    "key of training": ("{f}/good.jsonl --output {o} steps=3", ("steps=3", "tokenizer_path")),
    "far output": ("{f}/good.jsonl --output gs://bucket/a", ("gs://bucket/a", "local")),
    "far output of one slash": ("{f}/good.jsonl --output gs:/bucket/a", ("gs:/bucket/a", "local")),
    "file for output": ("{f}/good.jsonl --output {f}/good.bin", ("{f}/good.bin", "write")),
    "prepared input": ("{f}/set_good --output {o}", ("{f}/set_good", "prepared set")),
    "text and tokens": ("{f}/good.jsonl {f}/good.bin --output {o}", ("INPUT", "tokens")),
    "small BPE": ("{f}/good.jsonl --output {o} --train_bpe 100", ("--train_bpe 100", "258")),
    "BPE of tokens": ("{f}/good.bin --output {o} --train_bpe 300", ("--train_bpe 300", "tokens")),
    "no documents": ("{f}/empty.jsonl --output {o}", ("0 documents",)),
    "torn input": ("{f}/cut_bin.bin --output {o}", ("{f}/cut_bin.idx: sequence 39",)),
    "cut document": ("{f}/cut.jsonl --output {o}", ("{f}/cut.jsonl: line 40", "not JSON")),
    "cut stream": ("{f}/cut.jsonl.zst --output {o}", ("{f}/cut.jsonl.zst", "cut off")),
    "half a surrogate pair": (
        "{f}/surrogate.jsonl --output {o}",
        ("{f}/surrogate.jsonl: line 2", "\\ud83d"),
    ),
    "Latin-1 in Parquet": ("{f}/latin.parquet --output {o}", ("{f}/latin.parquet: record 1",)),
    "input that cannot be read": (
        "{f}/broken.txt --output {o}",
        ("{f}/broken.txt: cannot be read: Input/output error",),
    ),
    "input that no BPE can read": (
        "{f}/broken.txt --output {o} --train_bpe 300",
        ("{f}/broken.txt: cannot be read: Input/output error",),
    ),
    "input in the output": ("{f}/good.jsonl --output {f}", ("--output {f} holds ",)),
    "null document": ("{f}/null.parquet --output {o}", ("{f}/null.parquet: record 1",)),
    "flipped document": (
        "{f}/flipped.array_record --output {o}",
        ("flipped.array_record: record",),
    ),
    "negative token": ("{f}/negative.bin --output {o}", ("{f}/negative.bin: document 0", "-3")),
    "inspected folder": ("--inspect {f}", ("{f}", "not a prepared set")),
    "inspected file": (
        "--inspect {f}/good.jsonl",
        ("good.jsonl is not a prepared set", "use_dpo=true"),
    ),
    "inspected torn set": ("--inspect {f}/set_short", ("shard-00000.bin", "torn")),
}


@pytest.mark.parametrize("name", PREPARE)
def test_refused_by_prepare(name, f, tmp_path, capfd):
    text, names = PREPARE[name]
    options = text.replace("{f}", str(f)).replace("{o}", str(tmp_path / "set")).split()
    assert prepare.main(options) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    check_line(error.removesuffix("\n"), names, f)
    assert not (tmp_path / "set" / "manifest.json").exists()


def test_there_are_enough():
    assert len(CASES) >= 25


def test_good_files_are_not_refused(f):
    """What the cases are made from opens: a case fails for its own reason alone."""
    alone = ("good.jsonl", "good.parquet", "good.array_record", "good.bin", "good", "set_good")
    cases = [grain(f"{f}/{name}") for name in alone]
    cases.append(grain(f"{f}/rows.array_record", **TOKENS))
    cases.append(grain(f"{f}/good.jsonl,1;{f}/good.parquet,2"))
    for arguments, _ in cases:
        config = make_config(*arguments, "vocab_size=320")
        assert len(open_sources(config.data).train[0].items)
