"""What a start says before it trains: where it begins, what changed, and what is not there."""

import dataclasses
import re

import pytest
from conftest import BASE, TINY, complete, make_config, run

from maxramp.checkpoints.folder import Checkpoint, commit, read
from maxramp.errors import ConfigError
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.job_schedule import length_by_epochs, ramp_change, rate_change, resume_point
from maxramp.run.metrics import read_records


def arguments(tmp_path, cache_dir, name, *more):
    keys = [*TINY, "enable_rampup_batch_size=False", "per_device_batch_size=2"]  # one program
    keys += ["checkpoint_period=10", "eval_interval=-1", f"jax_cache_dir={cache_dir}"]
    return [BASE, *keys, f"base_output_directory={tmp_path}", f"run_name={name}", *more]


def test_a_longer_run_says_how_the_learning_rate_jumps(tmp_path, cache_dir):
    """A curve that is stretched begins where it would be, not where the short one ended."""
    complete(*arguments(tmp_path, cache_dir, "r", "steps=20"))
    done = complete(*arguments(tmp_path, cache_dir, "r", "steps=30"))
    records = read_records(tmp_path / "r" / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("restarted")] == [20]
    rates = [record["learning_rate"] for record in records]
    (line,) = re.findall("^rate .*", done.stdout, re.M)
    message = re.search(r"is (\S+) from step 20 on, after (\S+) in step 19: .* in step 19$", line)
    assert [float(text) for text in message.groups()] == pytest.approx(
        [rates[20], rates[19]], rel=5e-3
    )
    assert rates[20] > 1.5 * rates[19]
    assert "from step 0 for 30 steps" in done.stdout
    assert "done     30 steps; this start: 10 steps, " in done.stdout


@pytest.mark.slow
def test_a_finished_run_is_evaluated_once_when_a_start_asks_for_it(tmp_path, cache_dir):
    line = arguments(tmp_path, cache_dir, "r", "steps=4", "eval_samples=8")
    for interval in (-1, 2, 2):
        complete(*line, f"eval_interval={interval}")
    evaluations = [r for r in read_records(tmp_path / "r" / "metrics.jsonl") if "eval_loss" in r]
    assert [record["step"] for record in evaluations] == [3]
    saved = read(tmp_path / "r" / "checkpoints" / "4")
    assert saved.evaluation["eval_loss"] == evaluations[0]["eval_loss"]


def test_the_same_curve_is_not_mentioned(tmp_path, cache_dir):
    """Also where a job ends before its run does, which is not done then."""
    ramp = ["step_batch_size_schedule=0:2 20:4", "step_batch_size_unit=samples", "steps=14"]
    line = arguments(tmp_path, cache_dir, "r", "stop_at_stage_end=True", *ramp)
    line.remove("enable_rampup_batch_size=False")
    first, second = run(*line), run(*line)
    assert (first.returncode, second.returncode) == (75, 0), first.stderr + second.stderr
    assert "so far   10 of 14 steps; this start: 10 steps, " in first.stdout
    assert "rate " not in second.stdout
    assert "done     14 steps; this start: 4 steps, " in second.stdout


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_another_batch_is_no_other_curve_over_steps(batch):
    """Of a constant run that continues at step 30 with another batch."""
    keys = ["steps=40", "learning_rate_by=steps"]
    position = standing(30, 240, *keys, "global_batch_size=8")
    now = make_config(*keys, f"global_batch_size={batch}", devices=1)
    ramp = RampupBatchManager(now.batch, 1, resume_point(now.batch, position))
    assert rate_change(now.learning_rate, ramp, position) == ""
    other = make_config(*keys, "learning_rate=1", devices=1)
    assert "after 0.00" in rate_change(other.learning_rate, ramp, position)
    # Curves that meet in the next step.
    wsd = [*keys, "lr_schedule_type=wsd", "wsd_decay_steps_fraction=0.1"]
    before = standing(30, 240, *wsd, "global_batch_size=8", "warmup_steps_fraction=0.75")
    assert rate_change(make_config(*wsd, devices=1).learning_rate, ramp, before) == ""


def standing(step, consumed, *keys):
    """A checkpoint of a run with some keys, and what a start with others takes up."""
    before = make_config(*keys, devices=1)
    stages = [stage.to_json() for stage in RampupBatchManager(before.batch, 1).stages]
    return Checkpoint("", step, consumed, stages, "", dict(before.values), {})


@pytest.mark.parametrize(
    "devices, batch, step, consumed, samples, left",
    [
        (1, 4, 0, 0, 100, 0),
        (1, 4, 3, 12, 100, 0),
        (4, 16, 3, 12, 92, 8),  # counted from step 0 it would be 96, which 7 steps more exceed
        (1, 12, 10, 40, 100, 0),
        (1, 64, 10, 40, 40, 60),
        (1, 8, 25, 100, 100, 0),
    ],
)
def test_a_run_by_epochs_ends_with_whole_steps_of_its_rows(
    devices, batch, step, consumed, samples, left
):
    open_length = ("steps=-1", "enable_rampup_batch_size=False", "dataset_type=text")
    position = standing(step, consumed, *open_length, "per_device_batch_size=4") if step else None
    size = f"per_device_batch_size={batch / devices}"
    keys = make_config(*open_length, size, devices=devices).batch
    length, line = length_by_epochs(keys, devices, position, 100, 1)
    assert length == samples
    assert line.startswith("num_epoch=1 over the data is 100 rows") if left else not line
    assert f"{left} row" in line and f" no step of {batch}" in line or not left
    closed = dataclasses.replace(keys, total_samples=length)
    point = resume_point(closed, position)
    assert RampupBatchManager(closed, devices, point).total_samples == samples


PHASED = ("phases_unit=samples", "global_batch_size=4", "total_samples=400")


def restart(position, *keys, devices=1):
    """The schedule of a start with these keys, and what it says of their change."""
    batch = make_config(*keys, devices=devices).batch
    ramp = RampupBatchManager(batch, devices, resume_point(batch, position))
    return ramp, ramp_change(batch, ramp, position)


def test_what_was_trained_stays_whatever_phases_say_of_it(tmp_path):
    """Thresholds before the samples consumed change: at the next restart too it is as trained."""
    before = ("phases.40.row_length=4", "phases.80.row_length=8", "phases.200.global_batch_size=8")
    position = standing(30, 120, *PHASED, *before)
    ramp, line = restart(position, *PHASED, *before)
    stages = ramp.to_json()["stages"]
    assert not line and stages == position.stages and ramp.stages[0].first_step == 30
    # The phase at 80 comes at 60, and the batch is as it was.
    now = ("phases.60.row_length=8", "phases.200.global_batch_size=8")
    ramp, line = restart(position, *PHASED, *now)
    assert "before 120 (step 30) is not what was trained there, and is ignored" in line
    lengths = [(s["index"], s["first_sample"], s["samples"], s["row_length"]) for s in ramp.trained]
    assert lengths == [(0, 0, 40, 16), (1, 40, 40, 4), (2, 80, 40, 8)]
    batches = [(s.index, s.first_sample, s.global_batch_size) for s in ramp.stages]
    assert batches == [(2, 120, 4), (3, 200, 8)]
    plan = ramp.to_json()
    path = tmp_path / "45"
    path.mkdir()
    keys = dict(make_config(*PHASED, *now, devices=1).values)
    commit(Checkpoint(path, 45, 180, plan["stages"], "", keys, {}))
    again, line = restart(read(path), *PHASED, *now)
    assert not line and again.to_json() == plan


def test_tokens_are_those_that_were_trained():
    """At another length of samples: 80 of 32 tokens, then 80 of 64 to the end of 7,680."""
    keys = ("global_batch_size=8", "total_tokens=7680", "steps=-1", "eval_interval=-1")
    position = standing(10, 80, *keys, "max_target_length=32")
    ramp, _ = restart(position, *keys, "max_target_length=64")
    assert ramp.tokens(80) == 80 * 32 and ramp.tokens(88) == 80 * 32 + 8 * 64
    assert (ramp.total_samples, ramp.to_json()["total_tokens"]) == (160, 7680)
    assert ramp.shown_length == "total_tokens=7680"


@pytest.mark.parametrize(
    "key, thresholds",
    [
        ("phases_unit", ["global_batch_size=8", "phases.4096.global_batch_size=16"]),
        ("step_batch_size_unit", ["step_batch_size_schedule=0:8 4096:16"]),
    ],
)
def test_thresholds_in_tokens_are_of_rows_of_one_length(key, thresholds):
    """In samples they say where they lie."""
    keys = ("total_samples=800", "steps=-1", "eval_interval=-1")
    position = standing(10, 80, *keys, *thresholds, "max_target_length=32")
    with pytest.raises(ConfigError, match=f"{key}=tokens: .* rows of 32 tokens.*{key}=samples"):
        restart(position, *keys, *thresholds, "max_target_length=64")
    now = [text.replace("4096", "128") for text in thresholds]
    ramp, _ = restart(position, *keys, *now, f"{key}=samples", "max_target_length=64")
    stages = [(stage.first_sample, stage.global_batch_size) for stage in ramp.stages]
    assert stages == [(80, 8), (128, 16)]


def test_weights_of_another_model(tmp_path, cache_dir):
    """Before anything is compiled."""
    complete(*arguments(tmp_path, cache_dir, "small", "steps=2"))
    keys = (f"load_parameters_path={tmp_path / 'small'}", "base_mlp_dim=128", "steps=2")
    done = run(*arguments(tmp_path, str(tmp_path / "cache"), "other", *keys))
    assert done.returncode == 2 and "[2, 32, 128]" in done.stderr, done.stderr
    assert not list((tmp_path / "cache").glob("jit_step*"))


def test_other_devices_say_what_keeps_the_batch():
    """Where a notation counts rows per device; one of the whole batch needs nothing."""
    rows = ("enable_rampup_batch_size=False", "per_device_batch_size=4", "steps=100")
    position = standing(10, 40, *rows)
    _, line = restart(position, *rows, devices=2)
    assert line.endswith(
        " (rows per device, on 1 device: global_batch_size=4 has the same sizes on others)"
    )
    whole = ("global_batch_size=4", "steps=100")
    assert not restart(position, *whole, devices=2)[1]
    assert "same sizes" not in restart(position, "global_batch_size=8", "steps=100", devices=2)[1]
