"""Files of documents and tokens, read as what independent writers put into them."""

import base64
import gc
import gzip
import hashlib
import io
import json
import pathlib
import pickle
import shutil
import struct
import warnings

import fsspec
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from conftest import make_config, open_sources

from maxramp import prepare
from maxramp.data import tokenizers
from maxramp.data.corpus import Corpus
from maxramp.data.files import formats
from maxramp.data.files.megatron import MegatronFile, MegatronWriter
from maxramp.data.mixtures import parse_mixture
from maxramp.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow")  # all of these come with maxramp[test]
hf = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

TEXTS = ["first", "", "zwölf Boxkämpfer 🥊", 'two\nlines\r\n and a \\ " quote', "x" * 5000]
TEXTS += [f"document {i} " + "word " * (i % 17) for i in range(200)]


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        number, out = number >> 7, out + bytes([number & 127 | 128])
    return out + bytes([number])


def field(number: int, content: bytes) -> bytes:
    """A protocol buffer's field of bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features: bytes | list[int]) -> bytes:
    """A tf.train.Example, written by hand after its .proto."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        else:
            feature = field(3, field(1, b"".join(map(varint, value))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def write_jsonl(records: list[dict]) -> bytes:
    """With blank lines and both kinds of line ends."""
    ends = b"\n", b"\r\n", b"\n  \t\r\n"
    lines = [
        json.dumps(record, ensure_ascii=i % 2 == 0).encode() + ends[i % 3]
        for i, record in enumerate(records)
    ]
    return b"".join(lines).rstrip()


def write_zstd(data: bytes) -> bytes:
    """Two frames, as parallel compressors write them."""
    codec = pyarrow.Codec("zstd")
    half = len(data) // 2
    return b"".join(codec.compress(x, asbytes=True) for x in (data[:half], data[half:]))


def write_parquet(records: list[dict]) -> bytes:
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), out, row_group_size=30)
    return out.getvalue()


def write_array_record(path: pathlib.Path, records: list[bytes]) -> bytes:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path.read_bytes()


def write_file(folder: pathlib.Path, kind: str, values: list) -> pathlib.Path:
    """A file of one kind whose records hold `values`: texts or lists of ids."""
    records = [{"id": str(i), "body": value} for i, value in enumerate(values)]
    encoded = [v.encode() if isinstance(v, str) else np.asarray(v, "<i4").tobytes() for v in values]
    examples = [example(id=b"7", body=v.encode() if isinstance(v, str) else v) for v in values]
    writers = {
        "jsonl": ("jsonl", lambda: write_jsonl(records)),
        "gzip": ("json.gz", lambda: gzip.compress(write_jsonl(records))),
        "zstd": ("jsonl.zst", lambda: write_zstd(write_jsonl(records))),
        "parquet": ("parquet", lambda: write_parquet(records)),
        "arrayrecord": ("array_record", lambda: write_array_record(folder / "made", encoded)),
        "example": ("array_record", lambda: write_array_record(folder / "made", examples)),
    }
    folder.mkdir(exist_ok=True)
    suffix, make = writers[kind]
    path = folder / f"{kind}.{suffix}"
    path.write_bytes(make())
    (folder / "made").unlink(missing_ok=True)
    return path


def open_file(path, tokens: bool = False):
    return formats.READERS[formats.detect(str(path))](str(path), "body", tokens)


def read(file, size=10**9) -> list:
    """All records, by pieces of a size."""
    return [record for start, stop, _ in file.split(size) for _, record in file.read(start, stop)]


KINDS = ["jsonl", "gzip", "zstd", "parquet", "arrayrecord", "example"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_closes_its_files(kind, tmp_path):
    file = open_file(write_file(tmp_path, kind, TEXTS))
    with warnings.catch_warnings(record=True) as caught:  # of files that the collector closes
        warnings.simplefilter("always")
        assert read(file, 1000) and file.where(3)
        records = file.read(*file.split(10**9)[0][:2])
        next(records)
        del records
        gc.collect()
    assert not [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_in_order(kind, tmp_path):
    file = open_file(write_file(tmp_path, kind, TEXTS))
    assert not file.is_empty and str(tmp_path) in file.where(3)
    for size in (1, 100, 3000, 10**9):
        pieces = file.split(size)
        assert read(file, size) == TEXTS
        assert len(pieces) > 1 or size > 3000 or kind in ("gzip", "zstd")
    assert read(pickle.loads(pickle.dumps(file))) == TEXTS


@pytest.mark.parametrize("kind", KINDS)
def test_files_far_away(kind, tmp_path):
    data = write_file(tmp_path, kind, TEXTS)
    remote = f"memory://bucket/{data.name}"
    with fsspec.open(remote, "wb") as copy:
        copy.write(data.read_bytes())
    file = open_file(remote)
    assert read(file) == read(file, 500) == TEXTS
    stamp = file.stamp
    assert stamp == open_file(remote).stamp
    with fsspec.open(remote, "wb") as copy:
        copy.write(data.read_bytes())  # again, and of the same size
    assert open_file(remote).stamp != stamp


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_tokens(kind, tmp_path):
    documents = [[1, 2, 3], [70000], list(range(300)), [5] * 17]
    file = open_file(write_file(tmp_path, kind, documents), tokens=True)
    assert [ids.tolist() for ids in read(file)] == documents
    assert read(file)[0].dtype == np.int32


class Lost(io.BytesIO):
    """A file of a storage whose errors have no number."""

    def readline(self, size: int = -1) -> bytes:
        raise OSError("connection\nlost")


def test_an_error_of_a_storage_is_not_that_of_a_decompressor(tmp_path, monkeypatch):
    path = write_file(tmp_path, "jsonl", TEXTS[:1])
    monkeypatch.setattr(formats.storage, "open_binary", lambda path: Lost())
    with pytest.raises(ConfigError) as caught:
        next(open_file(path).read(0, 1))
    assert str(caught.value) == f"{path}: cannot be read: connection lost"


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd"])
def test_a_line_behind_the_end_of_a_file_that_became_shorter_is_its_last(kind, tmp_path):
    path = write_file(tmp_path, kind, ["one", "two"])
    assert open_file(path).where(10**6) == f"{path}: line 2"


def test_a_text_file_is_a_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXTS[2].encode())
    file = open_file(tmp_path / "a.txt")
    assert read(file) == read(file, 1) == TEXTS[2:3]


def test_a_text_that_looks_like_a_message_is_text(tmp_path):
    texts = ["\n", "\n\n", "\n\x03abc", "\nabc", "\n" * 50, "A12345678"]
    file = open_file(write_file(tmp_path, "arrayrecord", texts))
    assert read(file) == texts


CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}
DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[7] * 9], [[], [8, 9, 10, 11]]]  # of sequences


def write_megatron(path, documents, dtype="<i4", gap=0, modes=False) -> list[int]:
    """Writes a pair of files by the format's description, `gap` bytes before each sequence."""
    sequences = [sequence for document in documents for sequence in document]
    data, pointers = b"", []
    for sequence in sequences:
        data += bytes(gap)
        pointers.append(len(data))
        data += np.asarray(sequence, dtype).tobytes()
    borders = [0]
    for document in documents:
        borders.append(borders[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(borders))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(borders)}q", *borders)
    index += bytes(len(sequences)) if modes else b""
    pathlib.Path(f"{path}.bin").write_bytes(data)
    pathlib.Path(f"{path}.idx").write_bytes(index)
    return [token for sequence in sequences for token in sequence]


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", CODES)
def test_megatron_files_are_honoured(dtype, modes, tmp_path):
    stream = write_megatron(tmp_path / "a", DOCUMENTS, dtype, modes=modes)
    for name in ("a", "a.bin", "a.idx"):
        file = MegatronFile(str(tmp_path / name))
        file.check()
        assert file.num_tokens == len(stream) and len(file) == len(DOCUMENTS)
        whole = [sum(document, []) for document in DOCUMENTS]
        assert [file[i].tolist() for i in range(len(file))] == whole
        assert file.lengths().tolist() == list(map(len, whole))
        for size in (1, 10, 10**6):
            assert [document.tolist() for document in read(file, size)] == whole
        copy = pickle.loads(pickle.dumps(file))
        for a in range(len(stream)):
            for b in range(a, len(stream) + 1):
                assert copy.tokens_between(a, b).tolist() == stream[a:b]
        assert file.where_token(5).startswith(f"{tmp_path}/a.bin: document 1")


def test_what_is_written_is_megatrons(tmp_path):
    """Byte for byte what the independent writer makes of one sequence a document."""
    documents = [np.asarray(d, np.int32) for d in ([1, 2], [], [3], [4, 5, 60000])]
    with MegatronWriter(str(tmp_path / "ours"), np.dtype("uint16")) as writer:
        writer.add(documents[:2])
        writer.add(documents[2:])
        assert not (tmp_path / "ours.bin").exists()
        counts = writer.finish()
    write_megatron(tmp_path / "theirs", [[d.tolist()] for d in documents], "<u2")
    for suffix in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{suffix}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()
    index = hashlib.blake2b((tmp_path / "theirs.idx").read_bytes(), digest_size=8).hexdigest()
    assert counts == {"documents": 4, "tokens": 6, "max_token": 60000, "index": index}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, pathlib.Path]:
    """A file of every type of tokenizer, made from TEXTS by its own library."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tokenizer.json").write_bytes(tokenizers.train_bpe(iter(TEXTS), 400))
    plain = {"byte_fallback": False, "minloglevel": 2, "normalization_rule_name": "identity"}
    plain |= {"hard_vocab_limit": False, "vocab_size": 60, "model_prefix": str(folder / "sp")}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS[5:]), **plain)
    ranks = [bytes([i]) for i in range(256)] + [b"wo", b"rd", b"word", b" word"]
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks))
    (folder / "a.tiktoken").write_bytes(b"".join(lines))
    return {
        **{"bytes": pathlib.Path(""), "huggingface": folder / "tokenizer.json"},
        **{"sentencepiece": folder / "sp.model", "tiktoken": folder / "a.tiktoken"},
    }


@pytest.mark.parametrize("kind", tokenizers.TYPES)
def test_ids_decode_to_the_text(kind, models):
    path = "" if kind == "bytes" else str(models[kind])
    bare, marked = (tokenizers.load(kind, path, marks, marks) for marks in (False, True))
    texts = [text.strip() for text in TEXTS[5:]] if kind == "sentencepiece" else TEXTS
    plain = bare.encode(texts)
    assert [bare.decode(ids) for ids in plain] == texts
    assert max(map(max, filter(len, plain))) < bare.vocab_size
    (begin,), (end,) = (
        {ids[0] for ids in marked.encode(texts)},
        {ids[-1] for ids in marked.encode(texts)},
    )
    for with_marks, ids in zip(marked.encode(texts), plain, strict=True):
        np.testing.assert_array_equal(with_marks, [begin, *ids, end])
    assert begin != end and max(begin, end) < marked.vocab_size
    copy = pickle.loads(pickle.dumps(marked))
    np.testing.assert_array_equal(copy.encode(texts)[5], marked.encode(texts)[5])
    assert copy.hash == marked.hash != bare.hash


def test_ids_are_the_librarys(models):
    text = TEXTS[20]
    expected = {
        "huggingface": hf.Tokenizer.from_file(str(models["huggingface"])).encode(text).ids,
        "sentencepiece": sentencepiece.SentencePieceProcessor(
            model_file=str(models["sentencepiece"])
        ).encode(text),
        "bytes": list(text.encode()),
    }
    for kind, ids in expected.items():
        path = "" if kind == "bytes" else str(models[kind])
        assert tokenizers.load(kind, path, False, False).encode([text])[0].tolist() == ids
    ids = tokenizers.load("tiktoken", str(models["tiktoken"]), True, True).encode(["word words"])
    assert ids[0].tolist() == [260, 258, 259, ord("s"), 261]  # begin, "word", " word", "s", end


NAMES = ["say </s> and <s> here", "<|begin_of_text|><|end_of_text|></s>"]


@pytest.mark.parametrize("kind", tokenizers.TYPES)
def test_a_text_that_names_marks_is_text(kind, models):
    """Marks are where a document begins and ends, and in a text only on demand."""
    path = "" if kind == "bytes" else str(models[kind])
    (begin, end), *_ = tokenizers.load(kind, path, True, True).encode([""])
    split = tokenizers.load(kind, path, False, False)
    for text, ids in zip(NAMES, split.encode(NAMES), strict=True):
        assert not {begin, end} & {*ids.tolist()}
        assert split.decode(ids) == text or kind == "sentencepiece"  # it lacks some letters
    if kind in ("bytes", "sentencepiece"):
        with pytest.raises(ConfigError, match=f"split_special_tokens=False .*token of {kind}"):
            tokenizers.load(kind, path, False, False, False)
        return
    parsed = tokenizers.load(kind, path, False, False, False)
    name = NAMES[kind == "tiktoken"]
    assert {begin, end} < {*parsed.encode([name])[0].tolist()}
    assert parsed.hash != split.hash
    assert pickle.loads(pickle.dumps(parsed)).hash == parsed.hash


def test_a_bpe_of_texts_that_name_marks_has_them_as_text(tmp_path):
    texts = ["a</s>b<s>c </s>"] * 100
    (tmp_path / "tokenizer.json").write_bytes(tokenizers.train_bpe(iter(texts), 300))
    bpe = tokenizers.load("huggingface", str(tmp_path), False, False)
    assert not {0, 1} & {*bpe.encode(texts[:1])[0].tolist()}


def test_marks_named_beside_the_tokenizer(models, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(models["huggingface"].read_bytes())
    named = {"bos_token": {"content": "</s>"}, "eos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (swapped,) = tokenizers.load("huggingface", str(tmp_path), True, True).encode([""])
    (usual,) = tokenizers.load("huggingface", str(models["huggingface"]), True, True).encode([""])
    assert swapped.tolist() == usual.tolist()[::-1]


def corpus(files, *arguments: str) -> Corpus:
    options = (f"grain_train_files={files}", "train_data_columns=[body]", "vocab_size=320")
    return open_sources(make_config("dataset_type=grain", *options, *arguments).data)


def test_documents_of_a_corpus(tmp_path):
    """Every document once, encoded, in the order of the files' names; the last ones held out."""
    for name, part in (("a", TEXTS[:100]), ("b", TEXTS[100:])):
        write_file(tmp_path / name, "parquet", part)
    opened = corpus(f"{tmp_path}/*/*.parquet", "eval_fraction=0.1")
    (part,), held_out = opened.train, opened.held_out[0].items
    assert part.noun == "documents" and len(part.items) + len(held_out) == len(TEXTS) == 205
    got = [part.items[i].tokens for i in range(len(part.items))]
    got += [held_out[i].tokens for i in range(len(held_out))]
    assert [bytes(ids[1:-1].astype(np.uint8)).decode() for ids in got] == TEXTS
    assert {(ids[0], ids[-1]) for ids in got} == {(256, 257)} and len(held_out) == 20
    elsewhere = pickle.loads(pickle.dumps(part.items))  # in a process that reads ahead
    np.testing.assert_array_equal(elsewhere[17].tokens, part.items[17].tokens)


def test_a_mixture_keeps_its_weights(tmp_path):
    for kind in ("jsonl", "gzip"):
        write_file(tmp_path, kind, TEXTS)
    opened = corpus(f"{tmp_path}/*.jsonl,0.75;{tmp_path}/*.gz,0.25")
    assert [part.weight for part in opened.train] == [0.75, 0.25]
    assert parse_mixture("k", "a,b*,2; c,1e-3") == [("a,b*", 2.0), ("c", 1e-3)]
    assert parse_mixture("k", "a*") == [("a*", 1.0)]


def test_rows_of_records_are_kept(tmp_path):
    rows = [list(range(i, i + 17)) for i in range(50)]
    path = write_file(tmp_path, "arrayrecord", rows)
    opened = corpus(path, "tokenize_train_data=False", "eval_fraction=0", "eval_interval=-1")
    assert opened.train[0].noun == "rows"
    assert [opened.train[0].items[i].tokens.tolist() for i in range(50)] == rows


def test_the_hash_is_of_the_tokens(tmp_path):
    def hashed(folder, texts, kind="jsonl", *arguments):
        return corpus(write_file(tmp_path / folder, kind, texts), *arguments).train[0].hash

    first = hashed("a", TEXTS)
    assert hashed("elsewhere", TEXTS) == first
    others = [hashed("b", TEXTS[::-1]), hashed("c", TEXTS[1:]), hashed("d", [*TEXTS[:-1], "y"])]
    others += [hashed("e", TEXTS, "jsonl", "add_eos=False")]
    assert len({first, *others}) == 5


def test_the_hash_is_of_where_documents_begin(tmp_path):
    """Of every one, also in a file of many more rows than are looked at."""
    tokens = np.arange(16 * 5000, dtype=np.int32) % 250
    for name, border in (("a", 40007), ("b", 40008)):
        (tmp_path / name).mkdir()
        write_megatron(tmp_path / name / "m", [[tokens[:border]], [tokens[border:]]])
    a, b = (corpus(tmp_path / name / "m", "tokenize_train_data=False") for name in "ab")
    assert (tmp_path / "a/m.bin").read_bytes() == (tmp_path / "b/m.bin").read_bytes()
    assert a.train[0].hash != b.train[0].hash


def test_what_the_hash_of_a_token_file_covers(tmp_path):
    """Its size, and rows from the first to the last; prepared, every token."""
    tokens = np.arange(16 * 5000 + 1, dtype=np.int32) % 250
    variants = [tokens]
    for place in (3, len(tokens) - 2, 16 * 40 + 3):  # of the first row, the last one, the 41st
        variants.append(tokens.copy())
        variants[-1][place] += 1
    variants.append(np.append(tokens, np.int32(1)))
    hashes, prepared_hashes = [], set()
    for number, changed in enumerate(variants):
        path = tmp_path / str(number)
        write_megatron(path, [[changed]])
        hashes.append(corpus(path, "tokenize_train_data=False").train[0].hash)
        assert prepare.main([f"{path}.bin", "--output", f"{path}set"]) == 0
        prepared_hashes.add(corpus(f"{path}set").train[0].hash)
    assert hashes[3] == hashes[0] and len({*hashes}) == 4 and len(prepared_hashes) == 5
    # A set whose tokens were exchanged later has another hash.
    shutil.copy(tmp_path / "1set/shard-00000.bin", tmp_path / "0set")
    assert corpus(tmp_path / "0set").train[0].hash not in prepared_hashes
