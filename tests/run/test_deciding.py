"""The ramp that decides, in a run: it is replaced where a rung is taken, as at a restart there."""

import json
import shutil
import signal
import sys

import numpy as np
import pytest
from conftest import BASE, TINY, complete, environment, make_config, steps_of
from forked import Forked
from jobs import SIGNALLED, finish, member
from object_stores import free_port

from maxramp.checkpoints.folder import Checkpoint
from maxramp.errors import ConfigError
from maxramp.run.job_schedule import JobSchedule, ramp_change

POLICY = [
    *("rampup_policy=noise", "rampup_ladder=[8,16,32]", "total_samples=2400"),
    *("warmup_steps_fraction=0", "rampup_latest=[600,1300]", "rampup_noise_factor=1e-9"),
]
EXACT = ("loss", "learning_rate", "batch_fingerprint", "stage", "consumed_samples")


def plan(config, position=None, **changes):
    keys = config.replace(**changes).checkpoints
    meshes = config.replace(ici_fsdp_parallelism=-1).batch.mesh_at  # as the run's keys leave it
    return JobSchedule(config.batch, keys, 1, meshes, 0.0, position)


def stand(config, job, step, folder):
    """The checkpoint of a job after some steps."""
    ramp, values = job.ramp, dict(config.values)
    stages = ramp.to_json()["stages"]
    return Checkpoint(folder, step, ramp.samples_before(step), stages, "", values, {})


def sizes(stages):
    return [stage.global_batch_size for stage in stages]


@pytest.mark.parametrize("ladder", ([16, 32], [8, 32]))
def test_a_run_begins_to_decide_in_its_middle(tmp_path, ladder):
    """After a constant batch of 8, with the first of its rungs."""
    before = make_config("global_batch_size=8", "total_samples=2400", devices=1)
    config = make_config(*POLICY, f"rampup_ladder={ladder}", "rampup_latest=[]", devices=1)
    job = plan(config, stand(before, plan(before), 103, tmp_path))
    assert sizes(job.ramp.stages) == ladder[:1] and sizes(job.stages) == ladder
    job.take_rung(120, 32)
    assert job.ramp.to_json()["stages"][-1]["first_step"] == 120
    assert job.ramp.samples_before(job.last_step) >= 2400


def test_a_restart_continues_on_the_rung_that_its_checkpoint_names(tmp_path):
    config = make_config(*POLICY, devices=1)
    job = plan(config)
    assert sizes(job.stages) == [8, 16, 32]
    job.take_rung(50, 16)
    assert sizes(job.ramp.stages) == [16] and job.ramp.samples_before(51) == 416
    for step in (50, 53):  # where it was decided, and later
        again = plan(config, stand(config, job, step, tmp_path))
        assert not ramp_change(config.batch, again.ramp, again.position)
        assert again.ramp.to_json() == job.ramp.to_json()
        assert sizes(again.stages) == [16, 32] and again.ramp.thresholds == job.ramp.thresholds
        # With a ladder of its own, above the first rung of that.
        for ladder, latest, rest in (
            ("[16,64]", "[900]", [16, 64]),
            ("[8,16,64]", "[700,900]", [16, 64]),
            ("[24,48]", "[900]", [24, 48]),
        ):
            keys = f"rampup_ladder={ladder}", f"rampup_latest={latest}"
            other = make_config(*POLICY, *keys, devices=1)
            assert sizes(plan(other, stand(config, job, step, tmp_path)).stages) == rest
        lacking = make_config(*POLICY, "rampup_ladder=[8,24,32]", devices=1)
        wrong = r"rampup_ladder=\[8, 24, 32\]: the run trains batches of 16 rows .*ladder with 16"
        with pytest.raises(ConfigError, match=wrong):
            plan(lacking, stand(config, job, step, tmp_path))


@pytest.mark.parametrize("key", ["stop_at_node_change", "stop_at_stage_end"])
def test_a_decision_that_needs_another_job_ends_this_one(tmp_path, key):
    ladder = [4, 8, 32]
    keys = [*POLICY, f"rampup_ladder={ladder}", "num_nodes=2", "devices_per_node=1", "min_nodes=1"]
    more = "per_device_batch_size=8", "node_time_tolerance=0.01"
    config = make_config(*keys, *more, devices=2)
    job = plan(config, **{key: True})
    nodes = [stage.nodes for stage in job.planned.stages]
    assert nodes == [1, 1, 2]
    ends = nodes.index(2) if key == "stop_at_node_change" else 1
    assert sizes(job.stages) == ladder[:ends]
    for rung, step in ((1, 100), (2, 180))[:ends]:
        assert job.last_step == job.ramp.total_steps
        job.take_rung(step, ladder[rung])
        assert job.ramp.stages[0].index == rung
    assert job.last_step == step < job.ramp.total_steps
    assert job.following.global_batch_size == ladder[ends]
    assert job.following.nodes == nodes[ends]
    again = plan(config, stand(config, job, step, tmp_path), **{key: True})
    missing = key == "stop_at_node_change"  # it has one device
    assert again.last_step == (step if missing else again.ramp.total_steps)


def arguments(tmp_path, cache_dir, name, *more):
    keys = [*TINY, "eval_interval=-1", "checkpoint_period=20", *POLICY, *more]
    keys += [f"jax_cache_dir={cache_dir}", f"base_output_directory={tmp_path}", f"run_name={name}"]
    return [BASE, *keys]


@pytest.mark.slow
def test_run_restart_and_replay(tmp_path, cache_dir):
    """The run, the same from an early checkpoint on other devices, and as a fixed ramp."""
    own = arguments(tmp_path, cache_dir, "run", "batch_size_lr_scaling=linear")
    done = complete(*own)
    assert "ramp     batch 16 from step" in done.stdout
    whole = steps_of(tmp_path / "run")
    batches = [r["global_batch_size"] for r in whole]
    assert sorted(set(batches)) == [8, 16, 32] and batches == sorted(batches)
    told = {r["step"]: r["noise_lower_bound"] for r in whole if "noise_lower_bound" in r}
    rungs = [batches.index(16), batches.index(32)]
    assert all(told.get(step, batches[step]) >= batches[step] for step in rungs)
    assert set(told) <= set(rungs)
    saved = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {step for step in rungs if step + 20 > len(whole)} <= saved

    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [s["global_batch_size"] for s in plan["stages"]] == [8, 16, 32]
    assert [s["first_step"] for s in plan["stages"]] == [0, *rungs]

    fixed = [f"{k}={v}" for k, v in plan["as_fixed_ramp"].items()]
    fixed.append("log_gradient_noise_scale=True")  # the same program, so to the last bit
    keys = [k for k in arguments(tmp_path, cache_dir, "fixed", *fixed) if "rampup_" not in k]
    done = complete(*keys)
    pairs = zip(whole, steps_of(tmp_path / "fixed"), strict=True)
    assert all(a[name] == b[name] for a, b in pairs for name in EXACT)

    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        if int(checkpoint.name) > 20:
            shutil.rmtree(checkpoint)
    done = complete(*own, devices=2)
    again = steps_of(tmp_path / "run")
    for name in EXACT[2:]:
        assert [r[name] for r in again] == [r[name] for r in whole]
    assert np.allclose([r["loss"] for r in again], [r["loss"] for r in whole], atol=0.05)


def exact(folder):
    names = *EXACT, "noise_lower_bound", "global_batch_size"
    return [[r.get(name) for name in names] for r in steps_of(folder)]


NOISY = [  # decided by what is measured
    *("rampup_latest=[]", "rampup_noise_factor=3", "rampup_decision_samples=128"),
    *("checkpoint_period=7", "max_num_checkpoints_to_keep=2"),
]


def train_two(line, *keys, step=-1, number=0):
    """Trains by two processes, of which the second gets a signal before a step; how they ended."""
    port, job = free_port(), []
    for index in range(2):
        at = str(step if index else -1)
        words = [sys.executable, "-c", SIGNALLED, at, str(int(number)), *line, *keys]
        job.append(Forked(words, environment() | member(port, 2, index)))
    return [status for *_, status in finish(job)]


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path, cache_dir):
    """Left alone, and killed, stopped and ended before rungs and where they begin: rungs, rows and
    losses to the last bit."""
    calm, disturbed = (arguments(tmp_path, cache_dir, x, *NOISY, "steps=-1") for x in "ab")
    assert train_two(calm) == [0, 0]
    steps = steps_of(tmp_path / "a")
    batches = [r["global_batch_size"] for r in steps]
    first, second = batches.index(16), batches.index(32)
    assert any("noise_lower_bound" in r for r in steps)
    assert -signal.SIGKILL in train_two(disturbed, step=first // 2, number=signal.SIGKILL)
    assert train_two(disturbed, "stop_at_stage_end=True") == [75, 75]
    assert -signal.SIGKILL in train_two(disturbed, step=second - 2, number=signal.SIGKILL)
    assert train_two(disturbed, step=second, number=signal.SIGTERM) == [76, 76]
    assert train_two(disturbed, "stop_at_stage_end=True") == [0, 0]
    assert exact(tmp_path / "b") == exact(tmp_path / "a")
    plans = [json.loads((tmp_path / run / "plan.json").read_text()) for run in "ab"]
    assert plans[0]["stages"] == plans[1]["stages"]
