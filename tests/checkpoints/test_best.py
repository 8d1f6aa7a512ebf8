"""Which checkpoint is the best, what makes one whole, and what a folder of them gives."""

import asyncio
import gc
import json
import math
import shutil
import signal
import sys

import pytest
import tensorstore
from conftest import BASE, TINY, check_refused_keys, complete, make_config, run, table
from jobs import start_until

from maxramp import checkpoint as command
from maxramp.checkpoints import arrays
from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.folder import Best, Checkpoint, commit, find, read_whole
from maxramp.errors import ConfigError
from maxramp.files.place import place
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import read_records


def write(folder, how="lowest eval_loss", evaluated_on="data", **values):
    """Checkpoints without arrays: the step, and the loss on held-out text after it."""
    stages = [{"index": 0, "first_step": 0, "first_sample": 0, "global_batch_size": 8}]
    for step, loss in values.items():
        path = place(folder / "checkpoints" / step[1:])
        path.mkdir(parents=True)
        evaluation = {} if loss is None else {"eval_loss": loss}
        config = {"checkpoint_best": how}
        numbers = {"evaluation": evaluation, "evaluations": {"eval": evaluated_on}}
        commit(Checkpoint(path, int(step[1:]), 8, stages, "", config, {}, **numbers))
    return place(folder / "checkpoints")


def test_a_number_under_another_reference_does_not_compare():
    """Nor does one from before a run had a reference; tasks do not depend on it."""
    today = {"eval": "rows", "eval_reference": "b", "task": "t"}
    for name, expected in (("eval_loss", 3), ("task_sums_acc", 1)):
        best = Best(f"lowest {name}", today)
        for step, reference in enumerate(({}, {"eval_reference": "a"}, {"eval_reference": "b"}), 1):
            best.add(step, {name: step}, {"eval": "rows", "task": "t", **reference})
        assert best.step == expected


@pytest.mark.parametrize(
    "how, losses, expected",
    [
        ("lowest eval_loss", {"_1": 3.0, "_2": 2.0, "_3": 4.0}, 2),
        ("highest eval_loss", {"_1": 3.0, "_2": 2.0, "_3": 4.0}, 3),
        ("lowest eval_loss", {"_1": 2.0, "_20": 2.0, "_100": None}, 1),  # the first of equal ones
        ("lowest eval_loss", {"_1": None, "_2": 9.0}, 2),
    ],
)
def test_which_it_is(tmp_path, how, losses, expected):
    folder = write(tmp_path, how, **losses)
    assert find(folder / "best") == folder / str(expected)
    best = Best(how, {"eval": "data"})
    for checkpoint in read_whole(folder):
        best.add(checkpoint.step, checkpoint.evaluation, checkpoint.evaluations)
    value = losses[f"_{expected}"]
    assert best.step == expected
    assert str(best) == f"checkpoint {expected} has the {how}, {value:.4f}"
    better = -1 if how.startswith("lowest") else 1
    assert best.is_beaten({"eval_loss": value + better}) and not best.is_beaten({})
    for other in (value, value - better, math.nan, better * math.inf):
        assert not best.is_beaten({"eval_loss": other})


def test_what_does_not_count(tmp_path):
    """Numbers of other evaluations, and checkpoints that are torn."""
    folder = write(tmp_path, evaluated_on="other", _1=1.0)
    write(tmp_path, _2=2.0, _3=3.0)
    assert find(folder / "best") == folder / "2"
    (folder / "2" / folder_lib.FILE).write_text("{")
    assert find(folder / "best") == folder / "3"


def test_what_is_wrong_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="best: no checkpoint there; give a checkpoint by"):
        find(place(tmp_path / "checkpoints" / "best"))
    folder = write(tmp_path / "a", how="", _1=1.0)
    with pytest.raises(ConfigError, match="a/checkpoints/best: checkpoint_best not given"):
        find(folder / "best")
    folder = write(tmp_path / "b", how="highest task_sums_acc", _1=1.0)
    with pytest.raises(ConfigError, match="none has a number for checkpoint_best=highest task_s"):
        find(folder / "best")
    with pytest.raises(ConfigError, match="have no task_sums, but eval_loss, task_sums_acc"):
        Best("highest task_sums", {"eval": "data"}).check(["eval_loss", "task_sums_acc"])
    Best("highest task_sums_acc", {"eval": "data"}).check(["eval_loss", "task_sums_acc"])


@pytest.mark.slow
def test_a_run_whose_loss_rises_at_the_end(tmp_path, cache_dir):
    """A few lines are learnt by heart; killed and restarted, it keeps the same checkpoints."""
    lines = (BASE_TEXT[i : i + 60] for i in range(0, len(BASE_TEXT), 60))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    line = (
        *(BASE, *TINY, "dataset_type=grain", f"grain_train_files={tmp_path}/a.jsonl"),
        *("eval_fraction=0.3", "enable_rampup_batch_size=False", "per_device_batch_size=8"),
        *("num_epoch=1000", "steps=200", "eval_interval=10", "eval_samples=-1", "log_period=50"),
        *("checkpoint_period=70", "max_num_checkpoints_to_keep=1", f"jax_cache_dir={cache_dir}"),
        *("checkpoint_best=lowest eval_loss", f"base_output_directory={tmp_path}"),
    )
    done = complete(*line, "run_name=whole")
    records = read_records(tmp_path / "whole" / "metrics.jsonl")
    losses = {r["step"] + 1: r["eval_loss"] for r in records if "eval_loss" in r}
    best = min(losses, key=losses.get)
    assert best < 150 and losses[200] > losses[best] + 0.2, losses
    assert {p.name for p in (tmp_path / "whole/checkpoints").iterdir()} == {str(best), "200"}
    assert f"checkpoint {best} has the lowest eval_loss, {losses[best]:.4f}" in done.stdout

    folder = tmp_path / "killed"
    for step in (best - 5, best + 15):
        process = start_until(step, folder, signal.SIGKILL, *line, "run_name=killed")
        assert process.returncode == -signal.SIGKILL
    done = complete(*line, "run_name=killed")
    assert f"checkpoint {best} has the lowest eval_loss, {losses[best]:.4f}" in done.stdout
    for name in ("checkpoints", f"checkpoints/{best}/model"):
        names = {p.name for p in (tmp_path / "whole" / name).iterdir()}
        assert {p.name for p in (folder / name).iterdir()} == names

    shutil.rmtree(folder / "checkpoints" / "200")  # the best is then the newest
    write = ("--prompt", "a", "--max_new_tokens", "4", "--json")
    by_name = complete(str(folder / "checkpoints/best"), *write, module="generate")
    assert by_name.stdout == run(str(folder), *write, module="generate").stdout


BASE_TEXT = """The optimizer state is kept on the devices. Nobody knows why the parrot was blue, or
who had left the window open in the rain. Twelve ships went north before the ice came; one returned
with a cargo of salt and a story. To measure the noise of a gradient, take two batches and compare
them. A recipe for bread asks for patience, flour, water and some salt. The mayor opened the bridge
in spring, and by autumn it had carried forty thousand people across the river to work and home.
"""


# 8 rows to sample 80, then 16, then 24: stages end at steps 10 and 15.
RAMP = ("step_batch_size_schedule=0:8 80:16 160:24", "step_batch_size_unit=samples")


def commit_at(path, step, *arguments):
    config = make_config(*RAMP, *arguments)
    ramp = RampupBatchManager(config.batch)
    stages = [stage.to_json() for stage in ramp.stages]
    path.mkdir(parents=True)
    commit(Checkpoint(path, step, ramp.samples_before(step), stages, "", dict(config.values), {}))


def test_what_is_gone_while_it_is_listed(tmp_path, monkeypatch, capsys):
    """A dangling link, or what a live run has just renamed, has no size and hides nothing."""
    commit_at(tmp_path / "15", 15, "steps=15")
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    assert command.main(["ls", str(tmp_path)]) == 0
    _, listed, other = capsys.readouterr().out.splitlines()
    assert " complete" in listed and other.strip() == "latest: not a checkpoint, 0 B"
    monkeypatch.setattr(command, "_checkpoints", lambda path: [path / "10", path / "15"])
    assert command.main(["ls", str(tmp_path)]) == 0
    assert " 0 B  torn " in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize("length", ["steps=15", "total_samples=160", "total_tokens=2560"])
def test_stages_behind_the_end_are_not_counted(length, tmp_path, capsys):
    """As the log counts them: this run ends inside its ramp, where its second stage does."""
    commit_at(tmp_path / "15", 15, length)
    assert command.main(["ls", str(tmp_path)]) == command.main(["show", str(tmp_path)]) == 0
    _, listed, *shown = capsys.readouterr().out.splitlines()
    assert " 1 of 0-1 " in listed
    assert "stage     1 (of 0 to 1): global batch 16, from step 10" in shown


def test_a_folder_of_runs_with_numbers_for_names(tmp_path, capsys):
    """A folder of runs has no checkpoints of its own; each run has."""
    for name in ("2024", "2025"):
        commit_at(tmp_path / name / "checkpoints" / "100", 100, "steps=200")
        assert command.main(["ls", str(tmp_path / name)]) == 0
    assert "torn" not in capsys.readouterr().out
    assert command.main(["ls", str(tmp_path)]) == 2
    assert f"{tmp_path}: no checkpoint there" in capsys.readouterr().err


KEYS = table("""
allow_changed=[lerning_rate] | allow_changed | lerning_rate | corpus
allow_changed=corpus | allow_changed=corpus | a list
load_parameters_path=a load_full_state_path=b | load_parameters_path=a | =b
checkpoint_keep_period=100 | checkpoint_keep_period=100 | max_num_checkpoints
checkpoint_period=0 | checkpoint_period=0
checkpoint_period_samples=-2 | checkpoint_period_samples=-2
checkpoint_period_minutes=0 | checkpoint_period_minutes=0
hang_timeout_seconds=0 | hang_timeout_seconds=0
max_failed_saves=0 | max_failed_saves=0
skip_bad_steps=-1 | skip_bad_steps=-1
checkpoint_best=eval_loss | must be lowest or highest and a number
checkpoint_best=lowest loss | loss is not a number of evaluations
checkpoint_best=lowest eval_loss eval_interval=-1 | eval_interval=-1, which never
checkpoint_best=highest task_sums | without a task; give evaluate_tasks
checkpoint_best=lowest eval_loss_wiki | eval_sets has no wiki, but none
checkpoint_best=lowest eval_loss enable_checkpointing=False | only with enable
""")


@pytest.mark.parametrize("case", KEYS, ids=lambda case: case[0])
def test_keys_that_make_no_sense_are_refused_in_one_line(case):
    check_refused_keys(*case)


def test_what_comes_of_a_write_after_its_save_failed(monkeypatch, capfd):
    """Nobody waits for it any more; any other error that nobody hears of is reported."""
    reported = []
    monkeypatch.setattr(arrays, "_report", reported.append)
    monkeypatch.setattr(sys, "unraisablehook", arrays._report_unless_late)
    for is_late in (True, False):
        promise, write = tensorstore.Promise.new()
        loop = asyncio.new_event_loop()
        task = loop.create_task(_wait(write))
        loop.run_until_complete(asyncio.sleep(0))
        if is_late:
            loop.close()
        else:
            monkeypatch.setattr(loop, "call_soon_threadsafe", None)
        promise.set_exception(OSError("late"))
        assert bool(reported) != is_late
        loop.close()
    del task, loop
    gc.collect()
    assert not capfd.readouterr().err


async def _wait(write):
    await write
