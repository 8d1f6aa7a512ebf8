"""Documents in rows: every token of a document is predicted once, from its own document alone."""

import collections
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh, numpy_fingerprint, refused
from test_formats import TEXTS, write_file, write_megatron

from maxramp.checkpoints.changes import changes_since
from maxramp.checkpoints.folder import Checkpoint
from maxramp.data.batch import stack
from maxramp.data.files.megatron import MegatronFile, MegatronWriter
from maxramp.data.opening import open_rows
from maxramp.data.packing import PackedRows, best_fit, concat_then_split, one_per_row
from maxramp.data.rows import PADDING, Document, Row
from maxramp.model.decoder import Decoder
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.stage import text_fields
from maxramp.training.loss import cross_entropy_sums, next_token_prediction
from maxramp.training.step import eval_step

LENGTH = 16
LAYOUTS = (concat_then_split, best_fit, one_per_row)


def documents(count=200, longest=60, seed=0):
    """Documents of any length, none and one token as well, whose tokens are all different."""
    lengths = np.random.default_rng(seed).integers(0, longest, count)
    ends = np.cumsum(lengths)
    return [np.arange(e - n, e, dtype=np.int32) for e, n in zip(ends, lengths, strict=True)]


def rows_of(texts, *options, **keys):
    return PackedRows([Document(text) for text in texts], *options, **keys)


def pieces_of(row):
    """The pieces in a packed row, without padding."""
    filled = row.tokens[row.tokens != PADDING]
    assert not len(filled) or row.begins[0] == 0
    assert (row.tokens[: len(filled)] == filled).all(), "padding stands at the end"
    return np.split(filled, row.begins[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_decode_to_the_documents(layout):
    """Pieces put together again give every document; its tokens but the first are targets once."""
    texts = documents()
    lengths = np.array([len(text) for text in texts])
    rows = rows_of(texts, layout(lengths, LENGTH), LENGTH, separate=True)
    predicted, pieces = collections.Counter(), []
    for i in range(len(rows)):
        for piece in pieces_of(rows[i]):
            predicted.update(piece[1:].tolist())
            pieces.append(piece)
    assert predicted == collections.Counter(t for text in texts for t in text[1:].tolist())
    decoded = {}
    for piece in sorted(pieces, key=lambda piece: piece[0]):
        which = int(np.searchsorted(np.cumsum(lengths), piece[0], "right"))
        decoded[which] = [*decoded.get(which, [])[:-1], *piece.tolist()]
    whole = {i: text.tolist() for i, text in enumerate(texts) if len(text) > 1}
    assert decoded == whole


def test_what_each_layout_promises():
    texts = documents()
    lengths = np.array([len(text) for text in texts])
    concat, fitted, alone = (layout(lengths, LENGTH) for layout in LAYOUTS)
    # Cut and filled: every row but the last is full, but for a slot that would predict nothing.
    used = np.add.reduceat(concat.size, concat.first[:-1])
    assert (used[:-1] >= LENGTH - 1).all() and len(concat.first) < 1.1 * lengths.sum() / LENGTH
    # Only documents longer than a row are cut, and hardly any room is left.
    whole = np.flatnonzero((lengths >= 2) & (lengths <= LENGTH + 1))
    assert (np.bincount(fitted.document, minlength=len(texts))[whole] == 1).all()
    assert fitted.size.sum() / (len(fitted.first) - 1) > 0.97 * (LENGTH + 1)
    assert (np.diff(fitted.document[fitted.first[:-1]]) >= 0).all()  # in the order of the text
    assert (np.diff(alone.first) == 1).all()


@pytest.mark.parametrize("lengths", ([], [0, 1], [2], [17], [18], [500]))
def test_small_corners(lengths):
    texts = [np.arange(n, dtype=np.int32) for n in lengths]
    targets = sum(max(0, n - 1) for n in lengths)
    for layout in LAYOUTS:
        rows = rows_of(texts, layout(np.array(lengths, int), LENGTH), LENGTH, separate=False)
        assert len(rows) == -(-targets // LENGTH)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_are_one_text(seed):
    """Row r is tokens r * T .. r * T + T of the documents one after another, wherever they end."""
    texts = documents(count=12, longest=9, seed=seed)
    lengths = np.array([len(text) for text in texts])
    rows = rows_of(texts, concat_then_split(lengths, 4, separate=False), 4, separate=False)
    stream = np.concatenate([text for text in texts if len(text) > 1])
    assert len(rows) == -(-(len(stream) - 1) // 4)
    for r, row in enumerate(rows):
        expected = stream[4 * r : 4 * r + 5]
        assert row.tokens.tolist() == [*expected, *[PADDING] * (5 - len(expected))]


TOKENS = np.array([5, 6, 7, 8, 9, 3, 4, PADDING, PADDING], np.int32)
BEGINS = np.array([0, 3, 5])
PACKED = text_fields(len(TOKENS) - 1, True)


def test_a_rows_documents_are_its_segments():
    """The token that begins a document is no target of the one before, empty documents count."""
    rows = [Row(TOKENS, BEGINS), Row(TOKENS), Row(TOKENS, BEGINS[1:])]
    batch = stack(rows, PACKED)
    assert batch.tokens.tolist() == [TOKENS[:-1].tolist()] * 3
    apart = [6, 7, PADDING, 9, PADDING, 4, PADDING, PADDING]
    assert batch.targets.tolist() == [apart, TOKENS[1:].tolist(), apart]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8, [0, 0, 0, 1, 1, 2, 2, 2]]


def test_a_masked_token_is_no_target():
    """Masks and documents leave what both leave; neither length nor mask is in the fingerprint."""
    mask = np.array([True, False, *[True] * 7])
    plain, masked = Row(TOKENS), Row(TOKENS, BEGINS, mask)
    batch = stack([masked, plain], PACKED, numbers=(0, 1))
    masked_targets = [PADDING, 7, PADDING, 9, PADDING, 4, PADDING, PADDING]
    assert batch.targets.tolist() == [masked_targets, TOKENS[1:].tolist()]
    (alone,) = stack(
        [Row(TOKENS, None, mask)], text_fields(len(TOKENS) - 1, False)
    ).targets.tolist()
    assert alone == [PADDING, *TOKENS[2:].tolist()]
    rows = np.stack([TOKENS, TOKENS])
    begins = np.stack([np.isin(np.arange(len(TOKENS)), BEGINS), np.zeros(len(TOKENS), bool)])
    assert batch.hashes.sum(0, dtype=np.uint32).tolist() == numpy_fingerprint(rows, begins)


def test_documents_do_not_see_each_other():
    """No gradient to the other's tokens, the loss of a row of its own; unless they are one text."""
    config = make_config(devices=1)
    first, second = np.arange(10, 17, dtype=np.int32), np.arange(30, 39, dtype=np.int32)
    row = np.concatenate([first, second, [PADDING]]).astype(np.int32)

    @jax.jit
    @jax.value_and_grad
    def loss_of(decoder, batch, kept):
        """The sum over the targets that `kept` holds."""
        targets_BT = batch.targets
        targets_BT = jnp.where((targets_BT[..., None] == kept).any(-1), targets_BT, PADDING)
        execution = config.model
        hidden, _ = decoder.hidden(batch.tokens, execution, batch.token_positions)
        return cross_entropy_sums(hidden, decoder.head(execution.dtype), targets_BT, 0.0, 0)[0]

    with jax.set_mesh(make_mesh(config)):
        decoder = jax.jit(lambda: Decoder(config.model, jax.random.key(0)))()
        for text, other in ((first, second), (second, first)):
            kept = np.pad(text[1:], (0, 9 - len(text)), "edge")
            batch = batch_of(row[None], np.isin(np.arange(LENGTH + 1), (0, 7))[None])
            loss, gradient = loss_of(decoder, batch, kept)
            embedding = np.asarray(gradient.embedding_VD[...])
            assert np.abs(embedding[text[:-1]]).max() > 1e-4
            assert np.abs(embedding[other]).max() == 0
            alone = np.full(LENGTH + 1, PADDING, np.int32)
            alone[: len(text)] = text
            np.testing.assert_allclose(
                loss_of(decoder, batch_of(alone[None]), kept)[0], loss, rtol=1e-6
            )
        _, gradient = loss_of(decoder, batch_of(row[None]), kept)
        assert np.abs(np.asarray(gradient.embedding_VD[...])[first]).max() > 1e-4


@pytest.mark.parametrize("arguments", ((), ("ici_tensor_parallelism=2",)))
def test_a_packed_batch_is_its_documents(arguments):
    """On a mesh: what packed rows sum up to is what one document a row does, padded."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 256, n).astype(np.int32) for n in rng.integers(0, 17, 60)]
    lengths = np.array([len(text) for text in texts])
    config = make_config(*arguments)

    @jax.jit
    def total(decoder, batch):
        zeros = (jnp.float32(0), jnp.float32(0))
        objective = next_token_prediction(config.loss, config.model)
        return eval_step(decoder, zeros, batch, loss=objective)

    def sums_of(layout, packed):
        rows = rows_of(texts, layout(lengths, LENGTH), LENGTH, separate=packed)
        fill = [Row(np.full(LENGTH + 1, PADDING, np.int32))] * (-len(rows) % 8)
        batch = stack([*(rows[i] for i in range(len(rows))), *fill], text_fields(LENGTH, packed))
        batch = jax.device_put(jax.tree.map(lambda x: x[None], batch), BATCH_ABT)
        return jax.device_get(total(decoder, batch))

    with jax.set_mesh(make_mesh(config)):
        decoder = jax.jit(lambda: Decoder(config.model, jax.random.key(0)))()
        alone, packed = sums_of(one_per_row, False), sums_of(best_fit, True)
    assert alone[1] == packed[1] == np.maximum(0, lengths - 1).sum()
    np.testing.assert_allclose(alone[0], packed[0], rtol=1e-6)


ROW_TOKENS = 16  # of conftest.TINY


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


JOINED = ("separate_documents=False",)


def batch_from(corpus):
    rows = corpus.train[0].items
    return stack([rows[i] for i in range(len(rows))], text_fields(ROW_TOKENS, corpus.packed))


def begins_of(row):
    """Of every token of a row, whether a document begins with it."""
    return np.isin(np.arange(ROW_TOKENS + 1), row.begins).tolist()


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
    assert corpus.packed and len(rows) == (len(stream) - 1) // ROW_TOKENS > 10
    for number in range(len(rows)):
        part = slice(number * ROW_TOKENS, number * ROW_TOKENS + ROW_TOKENS + 1)
        assert rows[number].tokens.tolist() == stream[part]
        assert begins_of(rows[number]) == flags[part]
    again = pickle.loads(pickle.dumps(rows))  # in a process that reads ahead
    for one, two in zip(again[3], rows[3], strict=True):
        np.testing.assert_array_equal(one, two)


def test_joined_documents_are_one_stream_of_the_same_hash(tmp_path):
    """Also those that are packed while they are read."""
    stream = write_megatron(tmp_path / "m", make_documents(60))
    texts = write_file(tmp_path, "jsonl", TEXTS[5:60])
    text_stream = [token for text in TEXTS[5:60] for token in (256, *text.encode(), 257)]
    column = "train_data_columns=[body]"
    for files, expected, *more in ((tmp_path / "m", stream), (texts, text_stream, column)):
        (apart, _), (joined, _) = opened(files, *more), opened(files, *more, *JOINED)
        batch = batch_from(joined)
        assert batch.segments is None and batch.tokens[5].tolist() == expected[80:96]
        assert batch.targets[5].tolist() == expected[81:97]
        assert apart.packed and not joined.packed and apart.hash == joined.hash


def test_rows_of_one_document_are_no_packed_rows(tmp_path):
    """The program has no segments then, and costs what it did."""
    write_megatron(tmp_path / "m", [[list(range(200)), list(range(90))]])
    corpus, _ = opened(tmp_path / "m")
    assert not corpus.packed and batch_from(corpus).segments is None


def test_held_out_documents_are_apart_beside_a_train_file_of_one(tmp_path):
    documents, segments = make_documents(60), []
    write_megatron(tmp_path / "held_out", documents)
    for name, train in (("one", [[list(range(200))]]), ("several", documents)):
        write_megatron(tmp_path / name, train)
        corpus, _ = opened(tmp_path / name, f"grain_eval_files={tmp_path}/held_out")
        (part,) = corpus.held_out
        rows = [part.items[i] for i in range(len(part.items))]
        segments.append(stack(rows, text_fields(ROW_TOKENS, corpus.packed)).segments)
    np.testing.assert_array_equal(*segments)
    assert segments[0].max() > 1


def test_a_run_goes_on_as_it_began(tmp_path):
    """Another value at a restart is refused by its name: the tokens are the same."""
    write_megatron(tmp_path / "m", make_documents(60))
    joined, config = opened(tmp_path / "m", "separate_documents=False")
    apart, now = opened(tmp_path / "m")
    checkpoint = Checkpoint(tmp_path, 0, 0, [], joined.hash, dict(config.values), {})
    assert not changes_since(checkpoint, config.values, [], joined.identity({}), {})
    with refused("with separate_documents=False (now True)", "allow_changed=[separate_documents]"):
        changes_since(checkpoint, now.values, [], apart.identity({}), {})
    changes_since(checkpoint, now.values, ["separate_documents"], apart.identity({}), {})


def test_files_of_megatron_core(tmp_path):
    """A set of its builder is read here with its borders, and ours by its reader."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    texts = make_documents(60)
    for name, dtype in (("small", np.uint16), ("large", np.int32)):
        builder = megatron.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=dtype)
        for document in texts:
            builder.add_document(sum(document, []), [len(sequence) for sequence in document])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        corpus, _ = opened(tmp_path / name)
        rows, flags = corpus.train[0].items, first_tokens(texts)
        assert corpus.packed and len(rows) > 10
        for number in range(len(rows)):
            start = number * ROW_TOKENS
            assert begins_of(rows[number]) == flags[start : start + ROW_TOKENS + 1]
    documents = [np.asarray(sum(document, []), np.int32) for document in texts]
    with MegatronWriter(str(tmp_path / "ours"), np.dtype("uint16")) as writer:
        writer.add(documents)
        writer.finish()
    read = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert len(read) == len(documents) == len(read.document_indices) - 1
    for ours, its in zip(documents, (read[i] for i in range(len(read))), strict=True):
        assert ours.tolist() == its.tolist()
