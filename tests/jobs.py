"""Jobs of several processes on this machine, and runs that are ended from outside."""

import pathlib
import re
import sys
import time
from collections.abc import Callable

from conftest import command, environment
from forked import Forked, run_forked
from object_stores import free_port

# Trains, and sends its process signal argv[2] before it dispatches step argv[1].
SIGNALLED = """
import os, sys, threading
from maxramp import train
from maxramp.processes.ending import end_process
of_step = train.Pretrainer.step
def step(self, number, *rest):
    if number == int(sys.argv[1]):
        [x.join() for x in threading.enumerate() if x.name == "snapshot"]
        os.kill(os.getpid(), int(sys.argv[2]))
    return of_step(self, number, *rest)
train.Pretrainer.step = step
end_process(train.main(sys.argv[3:]))
"""


def run_signalled(step: int, number: int, *arguments: str, devices: int = 1):
    """Runs a training that a signal meets at a step, the last snapshot written; returns its status
    and text output."""
    line = [sys.executable, "-c", SIGNALLED, str(step), str(int(number)), *arguments]
    return run_forked(line, environment(devices))


def member(port: int, processes: int, number: int, host: str = "127.0.0.1") -> dict[str, str]:
    """The variables of a process of a job."""
    names = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")
    values = (f"{host}:{port}", processes, number)
    return {f"MAXRAMP_{name}": str(value) for name, value in zip(names, values, strict=True)}


def start(command, processes, devices, folders, optimized=False, process=Forked):
    """Starts a job; process i stands in folders[i]."""
    port, variables = free_port(), environment(devices, optimized)
    return [
        process(command, env=variables | member(port, processes, i), cwd=folders[i])
        for i in range(processes)
    ]


def finish(job, timeout=300):
    """(exit status, stdout, stderr) of every process."""
    try:
        return [(*p.communicate(timeout=timeout), p.returncode) for p in job]
    finally:
        for p in job:
            p.kill()


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_until(step: int, folder: pathlib.Path, number: int, *command_line: str):
    """Starts a run, sends it a signal once its metrics have reached `step`; returns the process."""
    path = folder / "metrics.jsonl"

    def is_reached() -> bool:
        text = path.read_text() if path.exists() else ""
        match = re.match(r'\{"step": (\d+)', text[max(0, text.rfind('{"step": ')) :])
        return bool(match) and int(match[1]) >= step

    return start_till(is_reached, number, *command_line)


def start_till(is_reached: Callable[[], bool], number: int, *command_line: str):
    """Starts a run, and sends it a signal as soon as something is so; returns the process."""
    process = Forked(command(*command_line), environment())
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if is_reached():
            process.send_signal(number)
            break
        time.sleep(0.01)
    process.output = process.communicate(timeout=120)
    return process
