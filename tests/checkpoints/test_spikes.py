"""Spikes: which steps are skipped, after restarts and on other meshes, what checkpoints keep."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
from conftest import BASE, TINY, complete, make_mesh
from jobs import run_signalled
from test_checkpoint import Folder, config_of, equal, first_state

from maxramp.checkpoints import folder as folder_lib
from maxramp.run.metrics import read_records

SPIKES = ("skip_step_on_spikes=True", "skip_step_interval=8")


def with_recent_steps(state):
    numbers = np.arange(9, dtype=np.float32)
    recent = {name: numbers + i for i, name in enumerate(state.recent)}
    return dataclasses.replace(state, recent={n: jax.numpy.asarray(x) for n, x in recent.items()})


def test_what_spikes_are_compared_with_is_kept(tmp_path):
    """On another mesh too; a start may turn it off and on, and take another interval."""
    config = config_of(*SPIKES)
    with jax.set_mesh(make_mesh(config)):
        state = with_recent_steps(first_state(*SPIKES))
    folder = Folder(tmp_path / "on", config).save(12, state=state)
    for keys in ((), ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=4")):
        _, restored, abstract = Folder(folder.path, config_of(*SPIKES, *keys)).restore()
        assert equal(restored, state)
        wanted = [x.sharding for x in jax.tree.leaves(abstract)]
        assert [x.sharding for x in jax.tree.leaves(restored)] == wanted
    _, off, _ = Folder(folder.path, config_of()).restore()
    assert equal(off, dataclasses.replace(state, recent={}))
    _, longer, abstract = Folder(folder.path, config_of(*SPIKES, "skip_step_interval=20")).restore()
    assert equal(longer.trained, state.trained)
    for x, like in zip(*map(jax.tree.leaves, (longer.recent, abstract.recent)), strict=True):
        assert x.shape == (21,) and not x.any() and x.sharding == like.sharding


def test_a_checkpoint_without_spikes_has_nothing_of_them(tmp_path):
    Folder(tmp_path, config_of()).save(12)
    assert not (tmp_path / "12" / "recent").exists()
    _, restored, _ = Folder(tmp_path, config_of(*SPIKES)).restore()
    assert {x.shape for x in restored.recent.values()} == {(9,)}
    assert equal(dataclasses.replace(restored, recent={}), first_state())


LENGTH, INTERVAL, FACTOR = 16, 48, 6.0
NONSENSE = {1104: 40, 1604: 14}  # rows, and how many


def write_text(path):
    """Lines of a few words, and among them rows of random letters."""
    random = np.random.default_rng(0)
    letters = random.permuted(np.tile(np.arange(97, 123), (30, 1)), axis=1)
    words = [bytes(row[: 2 + i % 5].tolist()).decode() for i, row in enumerate(letters)]
    text = " ".join(words[i] for i in random.integers(0, 30, 12_000))
    for row, count in NONSENSE.items():
        nonsense = bytes(random.integers(33, 127, count * LENGTH).tolist()).decode()
        text = text[: row * LENGTH] + nonsense + text[(row + count) * LENGTH :]
    path.write_text(text)


def arguments(folder, *more):
    keys = [f"text_files={folder}/text.txt", f"base_output_directory={folder}"]
    keys += ["total_samples=1800", "enable_data_shuffling=False", "eval_fraction=0"]
    keys += ["step_batch_size_schedule=0:8 1000:16 1400:4", "step_batch_size_unit=samples"]
    keys += ["skip_step_on_spikes=True", f"skip_step_interval={INTERVAL}", "eval_interval=-1"]
    keys += [f"skip_step_scaling_factor={FACTOR}"]
    return [BASE, *TINY, *keys, "checkpoint_period=66", "async_checkpointing=False", *more]


def expected_spikes(records):
    """The formula as docs/optimizers.md has it, in float64."""
    numbers = [[r[n] for n in ("loss", "grad_norm", "target_tokens")] for r in records]
    loss_S, norm_S, targets_S = np.array(numbers).T
    norms = []
    for step in range(INTERVAL // 2 - 1, len(records)):
        last = slice(max(0, step - INTERVAL), step)
        weights = targets_S[last] / targets_S[step]
        for x_S, growth in ((loss_S, 1.0), (norm_S, max(1.0, weights.mean() ** 0.5))):
            mean = np.average(x_S[last], weights=weights)
            variance = weights @ (x_S[last] - mean) ** 2 / (len(weights) - 1)
            if x_S[step] > growth * mean + FACTOR * variance**0.5:
                norms.append(step)
    return sorted({*norms})


@pytest.mark.slow
def test_a_run_skips_nonsense_and_repeats_that_after_a_kill(tmp_path):
    """To the last bit on the same devices, and the same steps on others."""
    write_text(tmp_path / "text.txt")

    def finish(name, *more, devices=1):
        done = complete(*arguments(tmp_path, f"run_name={name}", *more), devices=devices)
        records = read_records(tmp_path / name / "metrics.jsonl")
        names = ("bad_steps", "batch_fingerprint"), ("loss", "grad_norm")
        return done, records, *([[r[n] for n in both] for r in records] for both in names)

    done, records, steps, numbers = finish("whole")
    skipped = [r["step"] for r in records if r["bad_steps"]]
    assert skipped == expected_spikes(records) == [131, 132, 133, 201, 202]
    assert done.stdout.count("skipped: loss") == 5
    killed = run_signalled(136, signal.SIGKILL, *arguments(tmp_path, "run_name=killed"))
    assert killed.returncode == -signal.SIGKILL
    # Between two spikes; there the other run starts, too.
    after = folder_lib.find(tmp_path / "killed")
    assert after.name == "132"
    _, _, steps_there, numbers_there = finish(
        "elsewhere", f"load_full_state_path={after}", devices=4
    )
    assert steps_there == steps[132:]
    np.testing.assert_allclose(numbers_there, numbers[132:], rtol=1e-3)
    _, _, *again = finish("killed")
    assert again == [steps, numbers]
