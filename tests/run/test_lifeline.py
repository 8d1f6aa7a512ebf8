"""What happens to one process of a job ends all of them, soon and with its status."""

import os
import pathlib
import signal
import sys
import time

import numpy as np
import pytest
from conftest import run
from jobs import start
from test_faults import Job, arguments

from maxramp.data.files.megatron import MegatronWriter
from maxramp.errors import EXIT_LOST


def test_an_error_on_one_of_two_ends_both(tmp_path, cache_dir):
    """Soon, and with its status: a token out of range in a row that only the second reads."""
    tokens = np.ones(200 * 16 + 1, np.int32)
    tokens[(5 * 16 + 12) * 16 + 8] = 300  # of step 5, in the second half of its 16 rows
    writer = MegatronWriter(str(tmp_path / "text"), np.dtype(np.int32))
    writer.add([tokens])
    writer.finish()
    more = ("dataset_type=grain", f"grain_train_files={tmp_path}/text.bin", "eval_fraction=0")
    more += ("enable_data_shuffling=False", "steps=12")
    with Job(tmp_path, cache_dir, *more, processes=2) as job:
        assert job.statuses() == [2, 2]
        assert len(job.printed("stderr", 1).splitlines()) == 1
        assert "token id 300 is not below vocab_size=264" in job.printed("stderr", 1)
        assert "process of the job" in job.printed("stderr") or "process 1" in job.printed("stderr")
        assert job.steps() == list(range(len(job.steps()))) and len(job.steps()) <= 5


def test_a_wrong_key_on_one_of_two_ends_both(tmp_path, cache_dir):
    """Where the other waits inside JAX, before anything of ours runs on all."""
    with Job(tmp_path, cache_dir, processes=2, alone={1: ("hardware=gpu",)}) as job:
        assert job.statuses() == [2, 2]
        assert "hardware=gpu" in job.printed("stderr", 1)
        assert job.printed("stderr") == (
            "error: process 1 of the job ended with exit status 2; its own output says why\n"
        )


@pytest.fixture
def hanging(tmp_path) -> str:
    """A file that hangs whoever opens it, as storage sometimes does."""
    os.mkfifo(tmp_path / "hangs.txt")
    return f"grain_train_files={tmp_path}/hangs.txt"


def is_opened(fifo: pathlib.Path) -> bool:
    """Whether somebody waits for what it holds."""
    try:
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    return True


def test_a_peer_that_is_killed_ends_who_does_not_speak_to_it(tmp_path, cache_dir, hanging):
    """In seconds, where JAX would notice it after a hundred and abort."""
    with Job(tmp_path, cache_dir, "dataset_type=grain", hanging, processes=2) as job:
        job.wait_for(lambda: is_opened(tmp_path / "hangs.txt"))
        time.sleep(1)
        job.processes[1].kill()
        assert job.processes[0].wait(60) == EXIT_LOST
        assert "error: process 1 of the job was lost" in job.printed("stderr")


@pytest.mark.slow
def test_storage_that_hangs_when_the_data_is_opened(tmp_path, cache_dir, hanging):
    with Job(tmp_path, cache_dir, "dataset_type=grain", hanging, "hang_timeout_seconds=5") as job:
        assert job.statuses(60) == [EXIT_LOST]
        stderr = job.printed("stderr")
        assert "maxramp/files/storage.py" in stderr and "most recent call first" in stderr
        assert "hang_timeout_seconds=5" in stderr


# Trains and exports, and sends a signal to its process where that hands over its fourth tensor; a
# tensor takes as long as one of a real model, in which processes agree on where they end.
SIGNALLED = """
import os, sys, time
import jax
from maxramp import train
from maxramp.job.start import JobContext
from maxramp.processes.ending import Preemption, end_process
number, process, calls, pause = *map(int, sys.argv[1:3]), [], JobContext.pause
def signalled(self):
    calls.append(self)
    if len(calls) == 4 and jax.process_index() == process:
        os.kill(os.getpid(), number)
    time.sleep(0.1)
    pause(self)
JobContext.pause = signalled
end_process(train.main(sys.argv[3:], Preemption()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, statuses",
    [
        *((signal.SIGTERM, [76, 76]), (signal.SIGKILL, [77])),
        pytest.param(signal.SIGSTOP, [77], marks=pytest.mark.long),
    ],
)
def test_an_export_ends_as_a_step_does(tmp_path, cache_dir, number, statuses):
    """By a signal, a killed peer or one that hangs; the next start exports."""
    line = (*arguments(tmp_path, cache_dir, "steps=2", "export_huggingface=True"),)
    more = ("hang_timeout_seconds=40",) * (number == signal.SIGSTOP)
    signalled = (sys.executable, "-c", SIGNALLED, str(int(number)), "1", *line, *more)
    job = start(signalled, 2, 1, [tmp_path] * 2)
    try:
        stdout, stderr = job[0].communicate(timeout=200)
        if len(statuses) == 1:
            job[1].kill()
        ends = [peer.wait(60) for peer in job]
    finally:
        for peer in job:
            peer.kill()
    assert ends[: len(statuses)] == statuses, stderr
    assert not (tmp_path / "run/exported/2/config.json").exists()
    assert stderr.count("error: ") == (number != signal.SIGTERM), stderr
    assert "Traceback" not in stderr
    if number == signal.SIGTERM:
        assert "stopped by a signal; the next start continues" in stdout and "done     2" in stdout
    elif number == signal.SIGSTOP:
        assert "error: no progress for hang_timeout_seconds=40" in stderr, stderr
    again = run(*line)
    assert again.returncode == 0 and f"wrote {tmp_path}/run/exported/2" in again.stdout
    assert (tmp_path / "run/exported/2/config.json").exists()
