"""When the jobs of a run began and ended (jobs.jsonl), and its goodput.

A job is a start of the run, which ends by itself or is killed. Goodput is the share of the wall
time since the first job began that went into steps that count: their `step_seconds` without those
that waited (`WAITS`). Steps that a restart trains again count once.
"""

import contextlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from maxramp.files.place import Place
from maxramp.files.run_folder import Appending, start_time
from maxramp.run.metrics import Record, is_count, read_last, read_lines

FILE = "jobs.jsonl"
# What an event needs.
_NUMBERS = {"start": ("time", "first_step", "nodes", "devices"), "end": ("time",)}
WAITS = ("compile_seconds", "data_seconds", "snapshot_seconds")  # of a step's seconds


class Jobs:
    """Writes down when this job begins and ends. A writer of records, before all others: it adds to
    each the `goodput` until its `time`, and the `save_seconds` that the loop has waited for saves
    since the record before. The times of a run never go back, whatever the clocks of its machines
    say: those of a job whose clock is behind what was written before it are all moved by as much.
    """

    def __init__(self, folder: pathlib.Path):
        """Writes nothing until `begin`, which the first process alone calls."""
        self._folder, self._file = folder, None
        self._saved, self._steps_done = 0.0, 0
        self._ahead = 0.0  # seconds that the job's times are ahead of its clock
        self._counted: float | None = None  # seconds in steps that count

    def begin(self, first_step: int, nodes: int, devices: int, origin: str) -> Appending:
        """Adds a job that trains from `first_step` on, with a state of `origin`: new, checkpoint or
        snapshot. Returns the file; an OSError if it cannot be opened."""
        before = read_jobs(self._folder)
        written = [read_last(self._folder / "metrics.jsonl"), *before]
        clock, times = _process_start(), [record.get("time") for record in written]
        began = round(max([clock, *filter(is_count, times)]), 6)
        self._ahead = max(0.0, began - clock)
        self._first_start = before[0]["time"] if before else began
        self._file, self._steps_done = Appending(self._folder / FILE), first_step
        job = {"first_step": first_step, "nodes": nodes, "devices": devices, "from": origin}
        self._append({"event": "start", "time": began, **job})
        return self._file

    def __call__(self, record: Record) -> None:
        """Adds time and goodput to a record, so it comes before other writers; only on the process
        that has the file."""
        if not self._file:
            return
        record["time"] = round(record["time"] + self._ahead, 6)
        if self._counted is None:  # the records of this job's steps come after those that it keeps
            last = read_last(self._folder / "metrics.jsonl")
            known = last.get("goodput"), last.get("time")
            share, until = known if all(map(is_count, known)) else (0.0, 0.0)
            self._counted = share * max(0.0, until - self._first_start)
        if "step_seconds" in record:
            waits = sum(record.get(name, 0.0) for name in WAITS)
            self._counted += max(0.0, record["step_seconds"] - waits)
            self._steps_done = record["step"] + 1
        record.update(self._pop_save_seconds())
        record["goodput"] = self._counted / max(record["time"] - self._first_start, 1e-3)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the seconds of a block that saves, for which steps wait; not if it raises."""
        began = time.perf_counter()
        yield
        self._saved += time.perf_counter() - began

    def end(self, status: int) -> None:
        """Adds the end of the job with its exit status; nothing if none was begun."""
        if self._file:
            job = {"status": status, "step": self._steps_done, **self._pop_save_seconds()}
            now = round(time.time() + self._ahead, 6)
            self._append({"event": "end", "time": now, **job})
            self._file.close()

    def _pop_save_seconds(self) -> dict[str, float]:
        saved, self._saved = self._saved, 0.0
        return {"save_seconds": saved} if saved else {}

    def _append(self, event: dict[str, Any]) -> None:
        self._file.append((json.dumps(event) + "\n").encode())


def read_jobs(run: Place) -> list[dict[str, Any]]:
    """Reads the events of jobs.jsonl, from the first start on; none without the file. Other lines,
    such as one that a kill tore, are left out.
    """
    events = filter(is_event, read_lines(run / FILE))
    return list(itertools.dropwhile(lambda event: event["event"] != "start", events))


def is_event(value: Any) -> bool:
    """Tells whether a value of jobs.jsonl is a whole event."""
    needed = _NUMBERS.get(str(value.get("event")), ()) if isinstance(value, dict) else ()
    return bool(needed) and all(is_count(value.get(name)) for name in needed)


def _process_start() -> float:
    """Returns when this process began, in unix seconds: its imports count. On a system that does
    not tell, it began now.
    """
    ticks = start_time(os.getpid())
    if ticks is None:
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
