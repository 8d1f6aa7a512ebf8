"""Documents of prepared sets and of Megatron's files: apart by the index, with equal tokens."""

import pickle

import numpy as np
import pytest
from conftest import make_config
from test_formats import TEXTS, write_file, write_megatron

from maxramp.checkpoints.changes import changes_since
from maxramp.checkpoints.folder import Checkpoint
from maxramp.data.batch import stack
from maxramp.data.files.megatron import MegatronFile, MegatronWriter
from maxramp.data.opening import open_rows
from maxramp.errors import ConfigError
from maxramp.stage import text_fields

LENGTH = 16  # of conftest.TINY


def make_documents(count: int, seed: int = 0) -> list[list[list[int]]]:
    """Documents of none to three sequences, of none to eleven tokens."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, 200, rng.integers(0, 12)).tolist() for _ in range(rng.integers(0, 4))]
        for _ in range(count)
    ]


def first_tokens(documents) -> list[bool]:
    """Of every token of the stream, whether a document begins with it."""
    sizes = (sum(map(len, document)) for document in documents)
    return [place == 0 for size in sizes for place in range(size)]


def opened(files, *arguments: str):
    options = ("dataset_type=grain", f"grain_train_files={files}", "vocab_size=264")
    config = make_config(*options, "eval_fraction=0", "eval_interval=-1", *arguments)
    return open_rows(config.data, True), config


def batch_of(corpus):
    rows = corpus.train[0].items
    return stack([rows[i] for i in range(len(rows))], text_fields(LENGTH, corpus.packed))


def begins_of(row):
    """Of every token of a row, whether a document begins with it."""
    return np.isin(np.arange(LENGTH + 1), row.begins).tolist()


def test_a_row_of_a_large_index_costs_no_pass_over_it(tmp_path):
    """What is kept of a million documents is a thousandth of their index."""
    count = 300_000
    with MegatronWriter(str(tmp_path / "many"), np.dtype("uint16")) as writer:
        writer.add(np.split(np.zeros(2 * count, np.int32), count))
        writer.finish()
    file = MegatronFile(str(tmp_path / "many"))
    assert file.document_starts(2 * 250_001, 2 * 250_004).tolist() == [500_002, 500_004, 500_006]
    kept = [value for name, value in vars(file).items() if isinstance(value, np.ndarray)]
    in_memory = sum(array.nbytes for array in kept if array.base is None)
    assert in_memory < count


def test_rows_are_the_streams_with_their_documents_apart(tmp_path):
    """As if several files of other types were one."""
    stream, flags = [], []
    for number, dtype in enumerate(("<u2", "<i4", "u1")):
        documents = make_documents((40, 1, 25)[number], seed=number)
        stream += write_megatron(tmp_path / f"m{number}", documents, dtype)
        flags += first_tokens(documents)
    corpus, _ = opened(f"{tmp_path}/m*.bin")
    rows = corpus.train[0].items
    assert corpus.packed and len(rows) == (len(stream) - 1) // LENGTH > 10
    for number in range(len(rows)):
        part = slice(number * LENGTH, number * LENGTH + LENGTH + 1)
        assert rows[number].tokens.tolist() == stream[part]
        assert begins_of(rows[number]) == flags[part]
    again = pickle.loads(pickle.dumps(rows))  # in a process that reads ahead
    for one, two in zip(again[3], rows[3], strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_old_way_gives_the_old_rows_and_hash(tmp_path):
    stream = write_megatron(tmp_path / "m", make_documents(60))
    joined, _ = opened(tmp_path / "m", "separate_documents=False")
    apart, _ = opened(tmp_path / "m")
    batch = batch_of(joined)
    assert batch.segments is None and batch.tokens[5].tolist() == stream[80:96]
    assert batch.targets[5].tolist() == stream[81:97]
    assert apart.hash == joined.hash


def test_rows_of_one_document_are_no_packed_rows(tmp_path):
    """The program has no segments then, and costs what it did."""
    write_megatron(tmp_path / "m", [[list(range(200)), list(range(90))]])
    corpus, _ = opened(tmp_path / "m")
    assert not corpus.packed and batch_of(corpus).segments is None


def test_held_out_documents_are_apart_beside_a_train_file_of_one(tmp_path):
    documents, segments = make_documents(60), []
    write_megatron(tmp_path / "held_out", documents)
    for name, train in (("one", [[list(range(200))]]), ("several", documents)):
        write_megatron(tmp_path / name, train)
        corpus, _ = opened(tmp_path / name, f"grain_eval_files={tmp_path}/held_out")
        (part,) = corpus.held_out
        rows = [part.items[i] for i in range(len(part.items))]
        segments.append(stack(rows, text_fields(LENGTH, corpus.packed)).segments)
    np.testing.assert_array_equal(*segments)
    assert segments[0].max() > 1


def test_documents_packed_while_they_are_read_can_be_joined_too(tmp_path):
    path = write_file(tmp_path, "jsonl", TEXTS[5:60])
    options = (path, "train_data_columns=[body]")
    (apart, _), (joined, _) = opened(*options), opened(*options, "separate_documents=False")
    assert apart.packed and not joined.packed and joined.hash == apart.hash
    stream = np.concatenate([[256, *text.encode(), 257] for text in TEXTS[5:60]])
    assert batch_of(joined).tokens[5].tolist() == stream[80:96].tolist()


def test_a_run_goes_on_as_it_began(tmp_path):
    """Another value at a restart is refused by its name: the tokens are the same."""
    write_megatron(tmp_path / "m", make_documents(60))
    joined, config = opened(tmp_path / "m", "separate_documents=False")
    apart, now = opened(tmp_path / "m")
    checkpoint = Checkpoint(tmp_path, 0, 0, [], joined.hash, dict(config.values), {})
    assert not changes_since(checkpoint, config.values, [], joined.identity({}), {})
    with pytest.raises(ConfigError) as caught:
        changes_since(checkpoint, now.values, [], apart.identity({}), {})
    line = str(caught.value)
    assert "trained with separate_documents=False (now True)" in line and "corpus" not in line
    assert "allow_changed=[separate_documents]" in line
    changes_since(checkpoint, now.values, ["separate_documents"], apart.identity({}), {})


def test_files_of_megatron_core(tmp_path):
    """A set of its builder is read here with its borders, and ours by its reader."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    texts = make_documents(60)
    for name, dtype in (("small", np.uint16), ("large", np.int32)):
        builder = theirs.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=dtype)
        for document in texts:
            builder.add_document(sum(document, []), [len(sequence) for sequence in document])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        corpus, _ = opened(tmp_path / name)
        rows, flags = corpus.train[0].items, first_tokens(texts)
        assert corpus.packed and len(rows) > 10
        for number in range(len(rows)):
            start = number * LENGTH
            assert begins_of(rows[number]) == flags[start : start + LENGTH + 1]
    documents = [np.asarray(sum(document, []), np.int32) for document in texts]
    with MegatronWriter(str(tmp_path / "ours"), np.dtype("uint16")) as writer:
        writer.add(documents)
        writer.finish()
    read = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert len(read) == len(documents) == len(read.document_indices) - 1
    for ours, its in zip(documents, (read[i] for i in range(len(read))), strict=True):
        assert ours.tolist() == its.tolist()
