"""The main job as a user runs it: real processes, real text, real kills."""

import json
import pathlib
import random
import re
import shutil
import signal

import events
import numpy as np
import pytest
import yaml
from conftest import BASE, TINY, check_refusal, command, complete, make_config, run, steps_of
from jobs import finish, run_signalled, start

from maxramp.checkpoints.folder import steps_in
from maxramp.errors import EXIT_PREEMPTED
from maxramp.model.size import training_flops_per_token
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import read_records
from maxramp.training.keys import half_lives
from maxramp.training.learning_rate import LearningRate

FIELDS = """
step stage per_device_batch_size gradient_accumulation_steps global_batch_size row_length devices
nodes consumed_samples consumed_tokens target_tokens loss grad_norm learning_rate step_seconds
data_seconds compile_seconds tokens_per_second target_tokens_per_second tflops_per_device
batch_fingerprint time goodput
"""
# What two starts of one run must agree on, to the last bit.
EXACT = ("stage", "global_batch_size", "consumed_samples", "target_tokens", "loss", "grad_norm")
EXACT += ("batch_fingerprint",)

RAMP = [
    *("per_device_batch_size=8", "per_device_batch_size_start=2"),
    *("per_device_batch_size_increment=2", "global_rampup_samples=300", "steps=115"),
    *("checkpoint_period=25", "eval_interval=25", "eval_samples=16"),
]


def arguments(tmp_path, cache_dir, name, *more):
    keys = [*TINY, *RAMP, f"jax_cache_dir={cache_dir}", f"base_output_directory={tmp_path}"]
    return [BASE, *keys, f"run_name={name}", *more]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cache_dir):
    """One run to its end: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = complete(*arguments(folder, cache_dir, "a run", "enable_tensorboard=True"))
    return folder / "a run", done


def test_every_field_is_there_and_means_what_it_says(uninterrupted):
    """2, 4, 6, 8 rows, 100 samples each: 50, 25, 17 steps, then the rest."""
    records = steps_of(uninterrupted[0])
    assert [r["step"] for r in records] == list(range(115))
    sizes = [2] * 50 + [4] * 25 + [6] * 17 + [8] * 23
    assert [r["global_batch_size"] for r in records] == sizes
    assert [r["per_device_batch_size"] for r in records] == sizes
    assert [r["consumed_samples"] for r in records] == np.cumsum(sizes).tolist()
    assert [r["consumed_tokens"] for r in records] == (16 * np.cumsum(sizes)).tolist()
    assert sorted({r["stage"] for r in records}) == [0, 1, 2, 3]
    config = make_config(*RAMP, devices=1)
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch))
    for r in records:
        assert {*r} - {"save_seconds"} == {*FIELDS.split()}
        tokens = r["global_batch_size"] * 16
        assert r["tokens_per_second"] == pytest.approx(tokens / r["step_seconds"])
        assert r["target_tokens"] == tokens  # every row is full
        assert r["target_tokens_per_second"] == r["tokens_per_second"]
        flops = tokens * training_flops_per_token(config.model, config.model.max_target_length)
        assert r["tflops_per_device"] == pytest.approx(flops / r["step_seconds"] / 1e12)
        before = r["consumed_samples"] - r["global_batch_size"]
        assert r["learning_rate"] == pytest.approx(float(rate(before)), rel=1e-5)
        assert re.fullmatch("[0-9a-f]{16}", r["batch_fingerprint"])
        assert r["data_seconds"] >= 0 and r["compile_seconds"] >= 0


def test_it_learns_and_evaluates(uninterrupted):
    folder, _ = uninterrupted
    records = read_records(folder / "metrics.jsonl")
    losses = [r["loss"] for r in steps_of(folder)]
    assert losses[0] > 5.3 and np.mean(losses[-20:]) < 3.5
    evals = [r for r in records if "eval_loss" in r]
    assert [r["step"] for r in evals] == [24, 49, 74, 99, 114]
    assert all(r["eval_tokens"] == 2 * 8 * 16 for r in evals)
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"]


def test_the_output_folder(uninterrupted):
    folder, done = uninterrupted
    plan = json.loads((folder / "plan.json").read_text())
    stages = [(stage["steps"], stage["global_batch_size"]) for stage in plan["stages"]]
    assert stages == [(50, 2), (25, 4), (17, 6), (None, 8)]
    assert plan["stages"][3]["samples"] is None and plan["total_samples"] == 486
    config = yaml.safe_load((folder / "config.yml").read_text())
    assert config["steps"] == 115 and config["run_name"] == "a run"
    assert (folder / "ramp.png").read_bytes().startswith(b"\x89PNG")
    for path in (folder / "tensorboard").rglob("events*"):
        tags = {value.tag for event in events.read(path) for value in event.summary.value}
        assert tags and all(re.match("(learning|batch|speed)/", tag) for tag in tags), tags
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line[:6] == "stage "] == [
        f"stage {i} (of 0 to 3)" for i in range(4)
    ]
    assert not done.stderr, done.stderr


def test_a_finished_run_is_left_alone(uninterrupted, cache_dir):
    folder, _ = uninterrupted
    before = (folder / "metrics.jsonl").read_bytes()
    done = run(*arguments(folder.parent, cache_dir, "a run"))
    assert done.returncode == 0 and "finished" in done.stdout
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "more, parts",
    [
        ("enable_checkpointing=False", ("enable_checkpointing", "after 115 steps", "run_name")),
        ("text_files={tmp_path}/other.txt", ("allow_changed=[corpus]",)),
        ("base_mlp_dim=128", ("mlp", "[2, 32, 64]", "[2, 32, 128]")),
    ],
)
def test_a_start_that_would_train_another_run_leaves_this_one_alone(
    uninterrupted, cache_dir, tmp_path, more, parts
):
    folder, _ = uninterrupted
    (tmp_path / "other.txt").write_text("other text " * 10_000)
    apart = {".lock", "jobs.jsonl"}  # jobs.jsonl lists every start
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in apart]
    before = {path: path.read_bytes() for path in files}
    keys = (more.format(tmp_path=tmp_path), "steps=500")
    check_refusal(run(*arguments(folder.parent, cache_dir, "a run", *keys)), *parts, begun=True)
    assert {path: path.read_bytes() for path in files} == before


def assert_same_run(folder: pathlib.Path, expected: pathlib.Path):
    got, wanted = steps_of(folder), steps_of(expected)
    assert [r["step"] for r in got] == [r["step"] for r in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert {k: a[k] for k in EXACT} == {k: b[k] for k in EXACT}
    evals = [
        [(r["step"], r["eval_loss"]) for r in read_records(f / "metrics.jsonl") if "eval_loss" in r]
        for f in (folder, expected)
    ]
    assert evals[0] == evals[1]


def test_stopped_and_killed_it_is_the_same_run(uninterrupted, tmp_path, cache_dir):
    """SIGTERM loses nothing, kill -9 the steps since the last checkpoint."""
    rng = random.Random(2)
    line = arguments(tmp_path, cache_dir, "killed", "max_num_checkpoints_to_keep=2")
    folder = tmp_path / "killed"
    stopped = run_signalled(rng.randrange(30, 49), signal.SIGTERM, *line)
    assert stopped.returncode == EXIT_PREEMPTED and not stopped.stderr, stopped.stderr
    assert steps_in(folder / "checkpoints")[-1] == len(steps_of(folder))
    killed = run_signalled(rng.randrange(60, 114), signal.SIGKILL, *line)
    assert killed.returncode == -signal.SIGKILL
    complete(*line)
    assert_same_run(folder, uninterrupted[0])
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"100", "115"}


@pytest.mark.slow
def test_muon_and_half_lives_in_samples_through_a_kill(tmp_path, cache_dir):
    """In a ramp and onto another mesh: what is left of the means' first zeros is saved."""
    named = ",".join(half_lives("muon"))
    more = ("opt_type=muon", "muon_consistent_rms=0.2", "muon_weight_decay=0.1")
    more += ("learning_rate=3e-3", f"half_lives_in_samples=[{named}]", "batch_size_lr_scaling=sqrt")
    complete(*arguments(tmp_path, cache_dir, "whole", *more))
    line = arguments(tmp_path, cache_dir, "killed", *more)
    assert run_signalled(60, signal.SIGKILL, *line).returncode == -signal.SIGKILL
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    first = steps_in(tmp_path / "moved" / "checkpoints")[-1]
    complete(*line)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")

    mesh = ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "per_device_batch_size=2")
    mesh += ("per_device_batch_size_start=0.5", "per_device_batch_size_increment=0.5")
    complete(*arguments(tmp_path, cache_dir, "moved", *more, *mesh), devices=4)
    moved, whole = (steps_of(tmp_path / name) for name in ("moved", "whole"))
    assert [r["batch_fingerprint"] for r in moved] == [r["batch_fingerprint"] for r in whole]
    for ours, theirs in zip(moved[first : first + 10], whole[first:], strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.parametrize("rate", ["1e30", pytest.param("1e37", marks=pytest.mark.slow)])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path, cache_dir, rate):
    """One line, exit status 1, and no checkpoint of the spoilt state."""
    keys = ("enable_rampup_batch_size=False", "eval_interval=-1", "warmup_steps_fraction=0")
    keys += ("checkpoint_period=1", "opt_type=sgd", "gradient_clipping_threshold=0")
    line = arguments(tmp_path, cache_dir, "bad", f"learning_rate={rate}", *keys)
    done = run(*line)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    step = int(re.search(r"at step (\d+)", done.stderr)[1])
    saved = [int(p.name) for p in (tmp_path / "bad" / "checkpoints").iterdir()]
    assert max(saved, default=0) <= step


def test_two_processes_train_as_one(tmp_path, cache_dir):
    """Two real processes with one device each: the rows, batch sizes and losses of one with two."""
    more = ("steps=8", "per_device_batch_size=4", "per_device_batch_size_start=2")
    more += ("per_device_batch_size_increment=2", "global_rampup_samples=16", "eval_interval=-1")
    line = arguments(tmp_path, cache_dir, "one", *more)
    complete(*line, devices=2)
    line = command(*arguments(tmp_path, cache_dir, "two", *more))
    job = finish(start(line, 2, 1, [tmp_path] * 2))
    assert [status for *_, status in job] == [0, 0], job
    assert_same_run(tmp_path / "two", tmp_path / "one")
    printed = [line for line in job[1][0].splitlines() if not line.startswith("[Gloo]")]
    assert not printed, "only the first process speaks"


@pytest.mark.slow
@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_no_run_aborts_on_several_cpu_devices(tmp_path, cache_dir, attempt):
    """XLA on a CPU with several devices aborts most runs unless its dispatch is synchronous, and
    some where a collective could run beside the layers' loop (mesh.after)."""
    more = ("steps=30", "per_device_batch_size=4", "per_device_batch_size_start=1")
    more += ("per_device_batch_size_increment=3", "global_rampup_samples=60")
    more += ("base_emb_dim=128", "base_mlp_dim=384", "max_target_length=256", "eval_interval=-1")
    more += ("enable_checkpointing=False", f"ici_tensor_parallelism={(2, 1, 4)[attempt]}")
    line = arguments(tmp_path, cache_dir, f"attempt{attempt}", *more)
    done = run(*line, devices=4, timeout=580, optimized=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(steps_of(tmp_path / f"attempt{attempt}")) == 30
