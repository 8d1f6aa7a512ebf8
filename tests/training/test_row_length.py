"""Samples that a step cuts into shorter rows, against rows of that length on the same stream.

Shapes: R samples of a step, T tokens of a sample, k rows of a sample.
"""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BASE, TINY, batch_of, complete, make_config, make_mesh, run
from jax.sharding import NamedSharding
from jobs import run_signalled

from maxramp.data.batch import Batch
from maxramp.data.loader import count_losses
from maxramp.data.rows import PADDING, Row
from maxramp.errors import EXIT_STAGE_END
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import read_records
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import init_state
from maxramp.training.step import make_train_step, row_ids

R, T, K, STEPS = 16, 64, 4, 3
MESH = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")
MESH += ("gradient_accumulation_steps=4",)


def trained(stream, begins, tokens, samples, *keys):
    """Metrics of a few steps on a stream in rows of so many tokens."""
    config = make_config(
        *("enable_rampup_batch_size=False", f"per_device_batch_size={samples / 8}"),
        *("warmup_steps_fraction=0", "learning_rate_final_fraction=1"),
        *("log_gradient_noise_scale=True", f"max_target_length={tokens}"),
        *keys,
    )
    ramp = RampupBatchManager(config.batch)
    spec, mesh = ramp.stages[0].spec, make_mesh(config)
    assert spec.samples == samples
    rate = LearningRate.from_keys(config.learning_rate, ramp)
    step = make_train_step(config.recipe.with_spec(spec), rate)
    starts = np.arange(STEPS * samples)[:, None] * tokens + np.arange(tokens + 1)
    shape = (STEPS, spec.accumulation, spec.rows, tokens + 1)
    with jax.set_mesh(mesh):
        state, jitted, records = jax.jit(lambda: init_state(config.recipe))(), jax.jit(step), []
        arrays = (x[starts].reshape(shape) for x in (stream, begins))
        for rows, step_begins in zip(*arrays, strict=True):
            batch = jax.device_put(batch_of(rows, step_begins), NamedSharding(mesh, BATCH_ABT))
            state, metrics = jitted(state, batch)
            records.append(jax.device_get(metrics))
    assert int(state.consumed_samples[0]) == STEPS * samples
    return records, [np.asarray(x) for x in jax.tree.leaves(state.trained)]


@pytest.mark.slow
def test_a_cut_sample_is_rows_of_that_length():
    """Losses, gradients, noise scale and weights, to the last bit, with documents kept apart."""
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 264, STEPS * R * T + 1, dtype=np.int32)
    begins = rng.random(stream.size) < 1 / 20
    sizes = ("per_device_batch_size=0.5", f"row_length={T // K}")
    cut, weights = trained(stream, begins, T, R, *MESH, *sizes)
    size = f"per_device_batch_size={K / 2}"
    wanted, expected_weights = trained(stream, begins, T // K, R * K, *MESH, size)
    for ours, theirs in zip(cut, wanted, strict=True):
        for name in theirs.keys() - {"batch_fingerprint"}:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for x, y in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("consumed", [0, 7, 2**32 - 5, 2**40 + 12345])
def test_a_row_drops_by_its_number_in_the_run(consumed):
    """The number of its sample, in two words, and its place in the sample, for any split."""
    samples, k = 8, 4
    for A in (1, 2):
        batch = Batch(
            tokens=jax.ShapeDtypeStruct((A, samples * k // A, 16), jnp.int32),
            targets=None,
            hashes=jax.ShapeDtypeStruct((A, samples // A, 2), jnp.uint32),
        )
        clock = jnp.array([consumed % 2**32, consumed // 2**32], jnp.uint32)
        with jax.set_mesh(make_mesh(make_config("ici_data_parallelism=8"))):
            low, high, place = np.asarray(row_ids(clock, batch), np.uint64).reshape(-1, 3).T
        numbers = low + (high << np.uint64(32))
        assert numbers.tolist() == [consumed + i // k for i in range(samples * k)]
        assert place.tolist() == [i % k for i in range(samples * k)]


def test_targets_lost_at_the_ends_of_rows_are_counted():
    """Documents of 6, 2 and 9 tokens, and one of 3 with padding, in rows of 4."""
    tokens = np.arange(17, dtype=np.int32)
    padded = np.where(np.arange(17) < 3, 1, PADDING).astype(np.int32)
    rows = [Row(tokens, np.array([0, 6, 8])), Row(padded, np.array([0]))]
    # The first is cut at 4; the third, from 8 on, at 12 (16 is what its last token predicts).
    assert count_losses(rows, 4) == (4, 2, 3)


PHASES = {
    "0": {"global_batch_size": 4, "row_length": 8},
    "40": {"global_batch_size": 8},
    "80": {"row_length": 16, "micro_batch_size": 2, "learning_rate": 5e-3, "rope_type": "llama3.1"},
    "120": {"row_length": 32, "global_batch_size": 4, "warmup_steps_fraction": 0.1}
    | {"rope_max_timescale": 100.0},
}
EXACT = ("stage", "global_batch_size", "row_length", "consumed_samples", "consumed_tokens")
EXACT += ("target_tokens", "loss", "grad_norm", "learning_rate", "batch_fingerprint")


def run_keys(folder, cache_dir, *more):
    keys = [*TINY, "max_target_length=32", "total_samples=160", "eval_interval=10"]
    keys += ["eval_samples=16", f"phases={json.dumps(PHASES)}", "phases_unit=samples", "run_name=r"]
    keys += [f"jax_cache_dir={cache_dir}", f"base_output_directory={folder}", *more]
    return [BASE, *keys]


def steps_of(folder):
    records = read_records(folder / "r" / "metrics.jsonl")
    return [{n: r[n] for n in EXACT} if "loss" in r else r["eval_loss"] for r in records]


@pytest.mark.slow
def test_restarts_at_every_change(tmp_path, cache_dir):
    """Uninterrupted; ended at every stage; killed at and after a change."""
    whole, staged, killed = (tmp_path / name for name in ("whole", "staged", "killed"))
    done = complete(*run_keys(whole, cache_dir))
    wanted = steps_of(whole)
    lengths = [r["row_length"] for r in wanted if isinstance(r, dict)]
    assert lengths == [8] * 15 + [16] * 5 + [32] * 10
    assert "of its first 64 samples" in done.stdout and "in rows of 8 tokens" in done.stdout
    plan = json.loads((whole / "r" / "plan.json").read_text())
    assert [stage["row_length"] for stage in plan["stages"]] == [8, 8, 16, 32]

    for _ in range(3):
        stopped = run(*run_keys(staged, cache_dir, "stop_at_stage_end=True"))
        assert stopped.returncode == EXIT_STAGE_END, stopped.stderr
    following = json.loads((staged / "r" / "next_stage.json").read_text())
    assert (following["row_length"], following["global_batch_size"]) == (32, 4)
    assert run(*run_keys(staged, cache_dir, "stop_at_stage_end=True")).returncode == 0
    assert steps_of(staged) == wanted

    for at in (15, 21):
        keys = run_keys(killed, cache_dir, "checkpoint_period=1", "max_num_checkpoints_to_keep=2")
        assert run_signalled(at, signal.SIGKILL, *keys).returncode == -signal.SIGKILL
    assert run(*run_keys(killed, cache_dir)).returncode == 0
    assert steps_of(killed) == wanted


@pytest.mark.slow
def test_a_run_of_short_rows_reads_the_stream_of_short_rows(tmp_path, cache_dir):
    """The same tokens in the same order as a run whose samples are that short."""
    common = ("enable_data_shuffling=False", "eval_interval=-1", "phases={}")
    cut = run_keys(tmp_path / "cut", cache_dir, *common, "row_length=8", "global_batch_size=4")
    short = ("max_target_length=8", "global_batch_size=16", "total_samples=640")
    rows = run_keys(tmp_path / "rows", cache_dir, *common, *short)
    for keys in (cut, rows):
        complete(*keys)
    records, wanted = (
        [(r["loss"], r["learning_rate"], r["consumed_tokens"]) for r in steps_of(tmp_path / name)]
        for name in ("cut", "rows")
    )
    assert len(records) == 40 and records == wanted
    assert os.path.exists(tmp_path / "cut" / "r" / "ramp.png")
