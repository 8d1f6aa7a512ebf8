"""What the command makes of folders, by what stands beside a checkpoint's arrays."""

import asyncio
import gc
import sys

import pytest
import tensorstore
from conftest import check_refused_keys, make_config, table

from maxramp import checkpoint as command
from maxramp.checkpoints import arrays
from maxramp.checkpoints.folder import Checkpoint, commit
from maxramp.rampup.schedule import RampupBatchManager

# 8 rows to sample 80, then 16, then 24: stages end at steps 10 and 15.
RAMP = ("step_batch_size_schedule=0:8 80:16 160:24", "step_batch_size_unit=samples")


def write(path, step, *arguments):
    config = make_config(*RAMP, *arguments)
    ramp = RampupBatchManager(config.batch)
    stages = [stage.to_json() for stage in ramp.stages]
    path.mkdir(parents=True)
    commit(Checkpoint(path, step, ramp.samples_before(step), stages, "", dict(config.values), {}))


def test_what_is_gone_while_it_is_listed(tmp_path, monkeypatch, capsys):
    """A dangling link, or what a live run has just renamed, has no size and hides nothing."""
    write(tmp_path / "15", 15, "steps=15")
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
    write(tmp_path / "15", 15, length)
    assert command.main(["ls", str(tmp_path)]) == command.main(["show", str(tmp_path)]) == 0
    _, listed, *shown = capsys.readouterr().out.splitlines()
    assert " 1 of 0-1 " in listed
    assert "stage     1 (of 0 to 1): global batch 16, from step 10" in shown


def test_a_folder_of_runs_with_numbers_for_names(tmp_path, capsys):
    """It is no folder of checkpoints; each run's is."""
    for name in ("2024", "2025"):
        write(tmp_path / name / "checkpoints" / "100", 100, "steps=200")
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
