"""The growing ramp in a run: decisions are on disk before they are used, and bind every restart."""

import functools
import json
import pathlib
import shutil
import types

import numpy as np
import pytest
from conftest import BASE, TINY, make_config, run
from test_output import start

from maxramp.checkpoints import decisions
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.resume import take_up
from maxramp.errors import ConfigError
from maxramp.rampup.ladder import DELAY
from maxramp.run.growth import Growth, recent
from maxramp.run.metrics import read_records
from maxramp.run.output import Output

POLICY = [
    "rampup_policy=noise",
    "rampup_ladder=[8,16,32]",
    "total_samples=2400",
    "warmup_steps_fraction=0",
    "rampup_latest=[600,1300]",
    "rampup_noise_factor=1e-9",
]


def span_of(config, recorded=(), position=None, **changes):
    keys = config.replace(**changes).checkpoints
    meshes = config.replace(ici_fsdp_parallelism=-1).batch.mesh_at  # as the run's keys leave it
    return take_up(config.batch, keys, 1, meshes, 0.0, position, recorded)


def record(step, consumed, rows, scale):
    return {
        "step": step,
        "global_batch_size": rows,
        "consumed_samples": consumed,
        "target_tokens": 16 * rows,
        "norms_noise_signal": 1.0,
        "norms_noise_variance": 16.0 * scale,
    }


def drive(span, folder, scale_of, history=(), until=None):
    """The loop: what is decided before each step, from the records of all but the last."""
    ramp, pending, batches = span.ramp, None, {}

    def write(decision, ramp):
        written.append(decision.to_json())
        decisions.DecisionsFile(folder).write(written, 8)

    def grown(ramp):
        assert decisions.read(folder) == written

    written = decisions.read(folder)
    growth = Growth(span, history, write, grown)
    for step in span.steps():
        if step == until:
            break
        growth.decide_before(step)
        assert ramp.settled_steps > step
        rows = ramp.stage_at_step(step).global_batch_size
        batches[step] = rows
        if pending:
            growth(pending)
        consumed = ramp.samples_before(step + 1)
        pending = record(step, consumed, rows, scale_of(consumed))
    return batches


def test_a_restart_keeps_what_was_decided(tmp_path):
    """Killed at every 7th step: the rows that each step takes are those of the whole run."""
    config = make_config(*POLICY, "rampup_noise_factor=1.0", "rampup_latest=[]", devices=1)

    def scale_of(consumed):
        return 5.0 if consumed < 500 else 20.0 if consumed < 1200 else 50.0

    whole = tmp_path / "whole"
    whole.mkdir()
    expected = drive(span_of(config), whole, scale_of)
    assert sorted(set(expected.values())) == [8, 16, 32]
    for killed in range(1, len(expected), 7):
        folder = tmp_path / str(killed)
        folder.mkdir()
        got = drive(span_of(config), folder, scale_of, until=killed)
        again = span_of(config, decisions.read(folder))
        got |= drive(again, folder, lambda consumed: 0.0)  # whatever is measured now
        for decision in decisions.read(folder):
            step = decision["first_step"]
            assert got[step] == decision["global_batch_size"] == 2 * got[step - 1]
        assert all(got[step] == expected[step] for step in range(killed))


def test_history_goes_on(tmp_path):
    """A start in the middle decides as the whole run does, from what its metrics hold."""
    config = make_config(*POLICY, "rampup_noise_factor=1.0", "rampup_latest=[]", devices=1)
    expected = drive(span_of(config), tmp_path, lambda consumed: 20.0)
    first = next(step for step, rows in expected.items() if rows == 16)
    (tmp_path / decisions.FILE).unlink()

    step, config_there = first - DELAY - 3, {"rampup_policy": "noise", "rampup_ladder": [8, 16, 32]}
    stages = [span_of(make_config(*POLICY, devices=1)).ramp.stages[0].to_json()]
    position = Checkpoint(tmp_path, step, 8 * step, stages, "", config_there, {})
    span = span_of(config, position=position)
    records = [record(k, 8 * (k + 1), 8, 20.0) for k in range(len(expected))]
    history = recent(records, span)
    assert 0 < len(history) <= step == history[-1]["step"] + 1
    got = drive(span, tmp_path, lambda consumed: 20.0, history)
    assert got == {step: rows for step, rows in expected.items() if step >= position.step}


def position_of(config, step, folder):
    """A checkpoint of a run."""
    ramp = span_of(config, decisions.read(folder)).ramp

    stages = [stage.to_json() for stage in ramp.stages]
    names = ("rampup_policy", "rampup_ladder")
    there = {name: getattr(config.batch, name) for name in names}
    return Checkpoint(folder, step, ramp.samples_before(step), stages, "", there, {})


@pytest.mark.parametrize("ladder", ([16, 32], [8, 32]))
def test_a_run_begins_to_decide_in_its_middle(tmp_path, ladder):
    """A constant batch so far: the periods that decide are those of the new schedule."""
    before = make_config("global_batch_size=8", "total_samples=2400", devices=1)
    given = f"rampup_ladder={ladder}", "rampup_noise_factor=1.0", "rampup_latest=[]"
    config = make_config(*POLICY, *given, devices=1)
    span = span_of(config, position=position_of(before, 103, tmp_path))
    batches = drive(span, tmp_path, lambda consumed: 50.0)
    assert min(batches) == 103 and list(dict.fromkeys(batches.values())) == ladder
    assert span.ramp.samples_before(span.last_step) >= 2400


def test_another_run_goes_on_with_a_ladder_of_its_own(tmp_path):
    """What the first one had decided binds the second above its own first rung."""
    first = make_config(*POLICY, devices=1)
    drive(span_of(first), tmp_path, lambda consumed: 1.0)
    middle, last = (d["first_step"] for d in decisions.read(tmp_path))
    config = make_config(*POLICY, "rampup_ladder=[16,32,64]", "rampup_latest=[]", devices=1)
    begun = span_of(config, position=position_of(first, middle + 3, tmp_path)).ramp
    assert [s.global_batch_size for s in begun.stages] == [16, 32]
    late = span_of(config, position=position_of(first, last + 3, tmp_path)).ramp
    assert [s.global_batch_size for s in late.stages + late.rungs] == [32, 64]
    other = make_config(*POLICY, "rampup_ladder=[16,24]", "rampup_latest=[]", devices=1)
    taken = rf"taken the batches \[16, 32\].*checkpoint {tmp_path}"
    with pytest.raises(ConfigError, match=taken):
        span_of(other, position=position_of(first, last + 3, tmp_path))


def test_a_decision_that_needs_other_nodes_ends_the_job(tmp_path):
    keys = [*POLICY, "num_nodes=2", "devices_per_node=1", "node_time_tolerance=0.01"]
    config = make_config(*keys, "per_device_batch_size=8", "min_nodes=1", devices=2)
    span = span_of(config, stop_at_node_change=True)
    nodes = [s.nodes for s in span.planned.stages + span.planned.rungs]
    assert nodes[0] == 1 < nodes[-1]
    last = nodes.index(2)
    drive(span, tmp_path, lambda consumed: 1.0)
    end = span.ramp.stages[last].first_step
    assert span.last_step == end < span.ramp.total_steps
    assert span.planned.stage_at_step(end).nodes == 2
    assert [s.index for s in span.stages] == list(range(last))


def test_decisions_of_another_ladder_or_torn(tmp_path):
    config = make_config(*POLICY, devices=1)
    with pytest.raises(ConfigError, match=r"taken the batches \[8, 24\]"):
        span_of(config, [{"first_sample": 80, "global_batch_size": 24}])
    taken = {"first_sample": 80, "global_batch_size": 16, "previous_batch_size": 4}
    with pytest.raises(ConfigError, match=r"ladder=\[8, 16, 32\].*taken the batches \[4, 16\]"):
        span_of(config, [taken])  # the batch would fall before sample 80
    wrong = [(80, "16")], [("80", 16)], [(-8, 16)], [(80, 16), (80, 32)], [(80.0, 16)]
    found = [
        {"decisions": [{"first_sample": n, "global_batch_size": size} for n, size in pairs]}
        for pairs in wrong
    ]
    for text in ("{", *map(json.dumps, found)):
        (tmp_path / decisions.FILE).write_text(text)
        with pytest.raises(ConfigError, match="put it back"):
            decisions.read(tmp_path)


def test_the_fixed_ramp_that_repeats_a_run(tmp_path):
    """The ramp of a run that began otherwise repeats nothing."""
    decision = {"first_sample": 80, "global_batch_size": 16}
    file = decisions.DecisionsFile(tmp_path)
    file.write([decision], 8)
    found = json.loads((tmp_path / decisions.FILE).read_text())
    assert found["as_fixed_ramp"]["step_batch_size_schedule"] == "0:8 80:16"
    file.write([decision], None)
    assert json.loads((tmp_path / decisions.FILE).read_text()) == {"decisions": [decision]}


def test_a_decision_that_no_disk_takes_waits(tmp_path):
    """No checkpoint counts before it is written: `flush` is asked first."""
    file, decision = decisions.DecisionsFile(tmp_path / "run"), {"first_sample": 80}
    file.write([decision | {"global_batch_size": 16}], 8)
    with pytest.raises(OSError, match=decisions.FILE):
        file.flush()
    (tmp_path / "run").mkdir()
    file.flush()
    assert decisions.read(tmp_path / "run") == file.taken != []


@pytest.mark.parametrize("checkpoint", [True, False])
def test_decisions_without_a_checkpoint_bind_nobody(tmp_path, capsys, checkpoint):
    folder, decision = tmp_path / "run", {"first_sample": 80, "global_batch_size": 16}
    (folder / "checkpoints" / "20").mkdir(parents=True)
    if checkpoint:
        (folder / "checkpoints" / "20" / "checkpoint.json").touch()
    decisions.DecisionsFile(folder).write([decision], 8)
    start(folder, *POLICY, goes_on=checkpoint)
    assert decisions.read(folder) == [decision] * checkpoint
    assert ("again    1 decision about the batch" in capsys.readouterr().out) != checkpoint


def arguments(tmp_path, cache_dir, name, *more):
    given = [*TINY, "eval_interval=-1", "checkpoint_period=20", *POLICY, *more]
    given += [f"jax_cache_dir={cache_dir}", f"base_output_directory={tmp_path}", f"run_name={name}"]
    merged = dict(argument.split("=", 1) for argument in given)
    return [BASE, *(f"{name}={value}" for name, value in merged.items())]


def steps_of(folder: pathlib.Path) -> list[dict]:
    return [r for r in read_records(folder / "metrics.jsonl") if "loss" in r]


def test_metrics_that_cannot_be_read_end_every_process(tmp_path):
    """An error of the one process that reads them is one that `raise_everywhere` passes on."""
    output = types.SimpleNamespace(folder=tmp_path, here=tmp_path, _is_first=True)
    output._records = functools.partial(Output._records, output)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics.jsonl: Is a directory"):
        Output.history(output, span_of(make_config(*POLICY, devices=1)))


@pytest.mark.slow
def test_run_restart_and_replay(tmp_path, cache_dir):
    """The run, the same from an early checkpoint on other devices, and as a fixed ramp."""
    done = run(*arguments(tmp_path, cache_dir, "run"))
    assert done.returncode == 0, done.stderr
    assert "ramp     batch 16 from step" in done.stdout
    whole = steps_of(tmp_path / "run")
    sizes = [r["global_batch_size"] for r in whole]
    assert sorted(set(sizes)) == [8, 16, 32] and sizes == sorted(sizes)
    assert max(r["compile_seconds"] for r in whole[1:]) < 0.5

    found = json.loads((tmp_path / "run" / decisions.FILE).read_text())
    for decision in found["decisions"]:
        assert sizes.index(decision["global_batch_size"]) == decision["first_step"]
        assert decision["first_step"] == decision["after_step"] + DELAY
        assert float.fromhex(decision["lower"]) == decision["lower_rows"]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [s["global_batch_size"] for s in plan["stages"]] == [8, 16, 32]

    fixed = [f"{k}={v}" for k, v in found["as_fixed_ramp"].items()]
    fixed.append("log_gradient_noise_scale=True")  # the same program, so to the last bit
    keys = [k for k in arguments(tmp_path, cache_dir, "fixed", *fixed) if "rampup_" not in k]
    done = run(*keys)
    assert done.returncode == 0, done.stderr
    exact = ("loss", "learning_rate", "batch_fingerprint", "stage", "consumed_samples")
    pairs = zip(whole, steps_of(tmp_path / "fixed"), strict=True)
    assert all(a[name] == b[name] for a, b in pairs for name in exact)

    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        if int(checkpoint.name) > 20:
            shutil.rmtree(checkpoint)
    done = run(*arguments(tmp_path, cache_dir, "run"), devices=2)
    assert done.returncode == 0, done.stderr
    again = steps_of(tmp_path / "run")
    for name in exact[2:]:
        assert [r[name] for r in again] == [r[name] for r in whole]
    assert np.allclose([r["loss"] for r in again], [r["loss"] for r in whole], atol=0.05)
    assert json.loads((tmp_path / "run" / decisions.FILE).read_text()) == found

    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    later = "rampup_latest=[1500,2000]", "rampup_noise_factor=1e-30"
    done = run(*arguments(tmp_path, cache_dir, "run", *later))
    assert done.returncode == 0 and "again    2 decisions about the batch" in done.stdout
    batches = [r["global_batch_size"] for r in steps_of(tmp_path / "run")]
    first = json.loads((tmp_path / "run" / decisions.FILE).read_text())["decisions"][0]
    assert first["reason"] == "latest" and batches.index(16) == first["first_step"]
    assert first["first_sample"] >= 1500
