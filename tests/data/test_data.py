"""Which rows there are, and which of them a step trains on."""

import pathlib

import jax
import numpy as np
import pytest
from conftest import make_config, make_mesh, numpy_fingerprint, open_sources

from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.relay import Expansion
from maxramp.data.rows import StreamRows
from maxramp.data.tokenizers import BEGIN, END
from maxramp.errors import ConfigError
from maxramp.rampup.schedule import RampupBatchManager


@pytest.fixture
def texts(tmp_path) -> pathlib.Path:
    """Forty small files in two folders."""
    for i in range(40):
        path = tmp_path / "text" / ("even" if i % 2 == 0 else "odd") / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {i}: " + " ".join(str(i * j) for j in range(40)))
    return tmp_path / "text"


def small(texts, *arguments, devices=8):
    keys = "steps=6 per_device_batch_size=2 per_device_batch_size_start=1"
    keys += " per_device_batch_size_increment=1 global_rampup_samples=24"
    keys += " eval_interval=6 eval_samples=-1 eval_fraction=0.1"
    return make_config(f"text_files={texts}", *keys.split(), *arguments, devices=devices)


def make_loader(config, first_step=0):
    """A loader of the whole corpus in this process, and its ramp."""
    corpus = open_rows(config.data, True)
    ramp = RampupBatchManager(config.batch)
    parts = config.data, config.reading, corpus, ramp
    return Loader(*parts, Expansion(make_mesh(config), 1), first_step), ramp


def whole(batch):
    """The rows of a batch with the token after them, which the last one predicts."""
    return np.concatenate([batch.tokens, batch.targets[..., -1:]], -1)


def read_run(config, first_step=0):
    """The rows of every step from `first_step` on, in order, and the loader's mesh shape."""
    loader, ramp = make_loader(config, first_step)
    rows = []
    for step in range(first_step, config.batch.steps):
        batch, waited = loader.batch(step)
        stage = ramp.stage_at_step(step)
        tokens = whole(batch)
        accumulation = stage.gradient_accumulation_steps
        assert tokens.shape[:2] == (accumulation, stage.global_batch_size // accumulation)
        assert waited >= 0
        rows.append(tokens.reshape(-1, tokens.shape[-1]))
        expected = [int(word) for word in np.asarray(batch.hashes).sum((0, 1), dtype=np.uint32)]
        assert expected == numpy_fingerprint(rows[-1])
    evaluated = loader.eval_batches(ramp.stages[0], config.evaluation)
    held_out = [whole(batch)[0] for batch in evaluated]
    loader.close()
    return rows, held_out


def test_rows_overlap_by_the_token_they_predict():
    rows = StreamRows(np.arange(100, dtype=np.uint16), 9)
    assert len(rows) == 11  # the 12th would lack the token after it
    for i in range(len(rows)):
        np.testing.assert_array_equal(rows[i].tokens, np.arange(9 * i, 9 * i + 10))
    assert len(StreamRows(np.arange(9), 9)) == 0 and len(StreamRows(np.arange(10), 9)) == 1


def test_documents_are_whole_and_marked(texts):
    config = small(texts)
    corpus = open_sources(config.data)
    tokens = corpus.train[0].items._tokens[:]
    begins, ends = np.flatnonzero(tokens == BEGIN), np.flatnonzero(tokens == END)
    assert len(begins) == len(ends) == 40
    documents = {
        bytes(tokens[b + 1 : e].astype(np.uint8)) for b, e in zip(begins, ends, strict=True)
    }
    assert documents == {path.read_bytes() for path in texts.rglob("*.txt")}
    held_out, length = corpus.held_out[0].items, config.data.max_target_length
    assert abs(len(held_out) * length / len(tokens) - config.data.eval_fraction) < length / len(
        tokens
    )
    cut = len(tokens) - round(len(tokens) * config.data.eval_fraction)
    assert len(held_out) == (len(tokens) - cut - 1) // length
    np.testing.assert_array_equal(held_out[0].tokens, tokens[cut : cut + length + 1])


def test_corpus_depends_on_the_files_alone(texts, tmp_path):
    """Another folder, another order of creation: the same rows; one changed byte: another hash."""
    first = open_sources(small(texts).data).train[0].hash
    copy = tmp_path / "copy"
    for path in sorted(texts.rglob("*.txt"), reverse=True):
        target = copy / path.relative_to(texts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (copy / ".hidden").write_text("not read")
    assert open_sources(small(copy).data).train[0].hash == first
    assert open_sources(small(f"{copy}/**/*.txt").data).train[0].hash == first
    target.write_bytes(target.read_bytes()[:-1] + b"!")
    assert open_sources(small(copy).data).train[0].hash != first


def test_standard_library_is_there():
    keys = make_config("max_target_length=128").data
    corpus = open_sources(keys)
    assert len(corpus.train[0].items) > 10_000 and len(corpus.held_out[0].items) > 100
    assert open_sources(keys).train[0].hash == corpus.train[0].hash


SPLITS = {
    "fsdp 8": (),
    "data 8": ("ici_fsdp_parallelism=1", "ici_data_parallelism=8"),
    "tensor 8": ("ici_fsdp_parallelism=1", "ici_tensor_parallelism=8"),
    "2 x 2 x 2": ("ici_data_parallelism=2", "ici_tensor_parallelism=2"),
}


def test_rows_depend_on_no_split(texts):
    """Step k trains on the same rows whatever the mesh, the accumulation or the device count."""
    expected, _ = read_run(small(texts))
    assert [len(rows) for rows in expected] == [8, 8, 8, 16, 16, 16]
    for arguments in SPLITS.values():
        np.testing.assert_equal(read_run(small(texts, *arguments))[0], expected)
    keys = "per_device_batch_size=4 per_device_batch_size_start=2"
    keys += " per_device_batch_size_increment=2 gradient_accumulation_steps=2"
    on_two = small(texts, *keys.split(), devices=2)
    np.testing.assert_equal(read_run(on_two)[0], expected)


def test_any_first_step_goes_on_where_it_stood(texts):
    expected, _ = read_run(small(texts))
    for first in range(1, 6):
        np.testing.assert_equal(read_run(small(texts), first)[0], expected[first:])


def test_rows_do_not_depend_on_the_batch_sizes(texts):
    """A constant batch reads the rows of the ramp in the same order."""
    ramped = np.concatenate(read_run(small(texts))[0])
    constant = small(texts, "enable_rampup_batch_size=False", "per_device_batch_size=1", "steps=9")
    np.testing.assert_array_equal(np.concatenate(read_run(constant)[0]), ramped)


def test_an_epoch_holds_every_row_once(texts):
    count = len(open_sources(small(texts).data).train[0].items)
    keys = ("enable_rampup_batch_size=False", "per_device_batch_size=1", "num_epoch=3")
    config = small(texts, *keys, f"steps={3 * count // 8}")
    rows = np.concatenate(read_run(config)[0])
    epochs = [sorted(map(bytes, rows[e * count : (e + 1) * count])) for e in range(2)]
    items = open_sources(config.data).train[0].items
    assert epochs[0] == epochs[1] == sorted(map(bytes, iter_rows(items)))
    assert not np.array_equal(rows[:count], rows[count : 2 * count])  # shuffled anew
    other = np.concatenate(read_run(small(texts, "data_shuffle_seed=1"))[0])
    assert not np.array_equal(other, rows[: len(other)])


def iter_rows(source):
    return (source[i].tokens for i in range(len(source)))


def test_unshuffled_rows_follow_the_text(texts):
    config = small(texts, "enable_data_shuffling=False")
    rows = np.concatenate(read_run(config)[0])
    items = open_sources(config.data).train[0].items
    np.testing.assert_array_equal(rows, list(iter_rows(items))[: len(rows)])


@pytest.mark.parametrize("arguments", SPLITS.values(), ids=SPLITS)
def test_evaluation_drops_no_row(texts, arguments):
    """Every held-out row once; what fills the last batch is padding and nothing else."""
    config = small(texts, *arguments)
    held_out = open_sources(config.data).held_out[0].items
    rows = np.concatenate(read_run(config)[1])
    is_padding = (rows == -1).all(axis=1)
    assert (rows[~is_padding] >= 0).all() and len(held_out) % 16  # the last batch is not full
    assert sorted(map(bytes, rows[~is_padding])) == sorted(map(bytes, iter_rows(held_out)))


def test_an_evaluation_is_of_the_same_rows_on_any_devices(texts):
    """And in any batches; the last of them is not full."""
    wanted = np.concatenate(read_run(small(texts))[1])[:21]
    for devices, size in ((1, 4), (1, 3), (8, 1), (8, 4)):
        options = f"eval_samples=21 eval_per_device_batch_size={size}".split()
        rows = np.concatenate(read_run(small(texts, *options, devices=devices))[1])
        np.testing.assert_array_equal(rows[:21], wanted)
        assert (rows[21:] == -1).all() and len(rows) == -(-21 // (devices * size)) * devices * size


def test_synthetic_rows_are_a_function_of_seed_and_row():
    keys = make_config("dataset_type=synthetic").data
    first, second = open_sources(keys).train[0].items, open_sources(keys).train[0].items
    np.testing.assert_array_equal(first[10**9].tokens, second[10**9].tokens)
    row = first[0].tokens
    assert row.shape == (17,) and row.max() < keys.vocab_size
    assert not np.array_equal(row, first[1].tokens)
    assert not np.array_equal(row, open_sources(keys).held_out[0].items[0].tokens)


@pytest.mark.parametrize("unit, row", (("total_samples", 1), ("total_tokens", 16)))
def test_too_few_rows_for_a_ramp_that_decides(texts, unit, row):
    """However it decides: the run's samples, and what the last rung's step may take beyond them."""

    def samples(number):
        keys = "rampup_policy=noise", "rampup_ladder=[8,64]", f"{unit}={number * row}"
        return make_config(f"text_files={texts}", *keys)

    expected = rf"^{unit}={10**5 * row} takes 100063 rows \(63 more, as .*one of 64\), but"
    with pytest.raises(ConfigError, match=expected) as caught:
        make_loader(samples(10**5))
    most = int(str(caught.value).rsplit(f"or at most {unit}=", 1)[1]) // row
    make_loader(samples(most))[0].close()
    with pytest.raises(ConfigError, match=f"or at most {unit}={most * row}$"):
        make_loader(samples(most + 1))


def test_batches_are_sharded_over_rows(texts):
    config = small(texts, "ici_tensor_parallelism=2")
    loader, _ = make_loader(config)
    batch, _ = loader.batch(0)
    loader.close()
    assert {shard.data.shape for shard in batch.tokens.addressable_shards} == {(1, 2, 16)}
    assert isinstance(batch.tokens.sharding, jax.sharding.NamedSharding)
