"""Where the wall time of a run went, from what its jobs wrote.

It begins with the run's first job and ends with the last thing that the run wrote. The jobs of
jobs.jsonl lie on it one behind the other, and in each the records of its steps, each up to its
`time`: so the shares add up to it. Which job trained a step follows from the jobs' first steps and
not from a clock, which may jump; a job that began by its clock before the one before it had ended
is taken to begin at that end.
"""

import contextlib
import io
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from maxramp.commandline import count
from maxramp.errors import ConfigError
from maxramp.files.place import Place, is_near
from maxramp.processes.lifeline import ORDERLY
from maxramp.run.jobs import FILE, parse_event, read_jobs
from maxramp.run.metrics import is_count

# What the wall time went into. Of steps that count: `steps` is their work, and compiles, data and
# snapshots are what they waited for. `starts` reach to a job's first step, `ends` come after its
# last save, `waiting` lies between two jobs, `lost` was trained again or died with its job.
KINDS = (
    *("steps", "compiles", "data", "snapshots", "evaluations", "saves", "starts", "ends"),
    *("waiting", "lost", "other"),
)
_WAITS = {"compiles": "compile_seconds", "data": "data_seconds", "snapshots": "snapshot_seconds"}
# Of a record; NaN where it has none.
_COLUMNS = (
    *("step", "stage", "consumed_tokens", "step_seconds", "data_seconds", "compile_seconds"),
    *("time", "snapshot_seconds", "eval_seconds", "save_seconds", "restarted"),
)
_NEEDED = ("step", "time")
# Most steps as `train` writes them, without the last four columns: several times as fast as JSON,
# which reads all other records.
_STEP = re.compile(
    rb'\{"step": (\d{1,15}), "stage": (N), [^\n]*"consumed_tokens": (N), '
    rb'"step_seconds": (N), "data_seconds": (N), "compile_seconds": (N), '
    rb'"tokens_per_second": [^,]+, "target_tokens_per_second": [^,]+, "tflops_per_device": [^,]+, '
    rb'"batch_fingerprint": "\w+", "time": (N), "goodput": [^,]+\}\n'.replace(
        b"N", rb"\d{1,15}(?:\.\d+)?(?:e-\d+)?"
    )
)
_BLOCK = 1 << 16  # lines that are read at a time
_POINTS = 500  # of a curve

Columns = dict[str, np.ndarray]  # float64 [records], by name


def wall_time(run: Place, price: float | None) -> dict[str, Any]:
    """The wall time of a run in seconds by KINDS, of all and by stage and job; what it has cost at
    a `price` of a device for an hour, None where that is not known.

    Node-hours are those of jobs. A stage has the time of its records, and no ends and waiting.
    """
    jobs, warnings = _read_jobs(run)
    found, owner = _read_records(run, jobs, warnings)
    starts = np.array([job["start"] for job in jobs])
    spent, begin = _divide(found, owner, starts), jobs[0]["start"]
    for i, job in enumerate(jobs):
        mine = slice(*np.searchsorted(owner, [i, i + 1]))
        following = jobs[i + 1]["start"] if i + 1 < len(jobs) else math.inf
        _settle(job, _take(found, mine), _take(spent, mine), begin, following)
        begin = job["end"] + job["seconds"]["waiting"]
        hours = (job["end"] - job["start"]) / 3600
        job |= _cost(hours * job["nodes"], hours * job["devices"], price)
    first, wall = jobs[0]["start"], jobs[-1]["end"] - jobs[0]["start"]
    seconds = {kind: math.fsum(job["seconds"][kind] for job in jobs) for kind in KINDS}
    totals = {name: sum(job[name] for job in jobs) for name in ("steps", "lost_steps")}
    hours = (math.fsum(job[name] for job in jobs) for name in ("node_hours", "device_hours"))
    sizes = (np.array([job[name] for job in jobs])[owner] for name in ("nodes", "devices"))
    stages = _stages(found, spent, *sizes, price)
    tokens = [stage["tokens"] for stage in stages]
    moved = np.array([job["start"] for job in jobs]) - starts
    counted, times = np.cumsum(spent["steps"]), found["time"] + moved[owner] - first
    points = np.unique(np.linspace(0, len(times) - 1, _POINTS).astype(int)) if len(times) else []
    return {
        "run": str(run),
        "first_start": first,
        "wall_seconds": wall,
        "goodput": seconds["steps"] / wall if wall else 0.0,
        "seconds": seconds,
        **totals,
        "tokens": None if None in tokens else sum(tokens),
        **_cost(*hours, price),
        "stages": stages,
        "jobs": jobs,
        "goodput_by_hours": [[times[i] / 3600, counted[i] / max(times[i], 1e-3)] for i in points],
        "warnings": warnings,
    }


def _read_jobs(run: Place) -> tuple[list[dict[str, Any]], list[str]]:
    """The jobs, by their own clocks, and warnings."""
    jobs: list[dict[str, Any]] = []
    for event in read_jobs(run):
        if event["event"] == "start":
            origin = event.get("from", "")
            jobs.append({"from": f"{origin}", "start": event["time"], "end": None, "status": None})
            jobs[-1] |= {name: event[name] for name in ("first_step", "nodes", "devices")}
        else:
            jobs[-1] |= {"end": event["time"], "status": event.get("status")}
            saved = event.get("save_seconds")
            jobs[-1]["save_seconds"] = saved if is_count(saved) else 0.0
    if not jobs and not (run / FILE).is_file():
        raise ConfigError(
            f"{run} holds no {FILE}, which a run writes at its start; give the folder of a run"
        )
    if not jobs:
        raise ConfigError(
            f"{run / FILE}: no line is the start of a job as a run writes it; put the file back "
            "as it was"
        )
    with _open(run / FILE) as file:
        strange = sum(parse_event(line) is None and not _is_torn(line) for line in file)
    return jobs, [_left_out(strange, FILE)] if strange else []


def _left_out(lines: int, file: str) -> str:
    return f"{count(lines, 'line')} of {file} left out: not as a run writes them"


def _read_records(
    run: Place, jobs: Sequence[dict[str, Any]], warnings: list[str]
) -> tuple[Columns, np.ndarray]:
    """The records of both files, job by job in the order of their times, with which were `lost`:
    trained again. The second: each one's job.
    """
    tables = []
    for name in ("metrics.jsonl", "metrics.dropped.jsonl"):
        table, strange = _read(run / name)
        tables.append(table if tables else _drop_repeated(table))
        strange += len(table) - len(tables[-1])
        warnings += [_left_out(strange, name)] if strange else []
    table = np.concatenate(tables)
    found = dict(zip(_COLUMNS, table.T, strict=True))
    found["lost"] = np.arange(len(table)) >= len(tables[0])
    owner = _owners(found, jobs)
    if strange := int((owner < 0).sum()):
        warnings.append(
            f"{count(strange, 'record')} of steps before the first job of {FILE} do not count"
        )
    starts = np.array([job["start"] for job in jobs])
    found["time"] = np.maximum(found["time"], starts[owner])
    order = np.lexsort((found["time"], owner))[strange:]
    return {name: column[order] for name, column in found.items()}, owner[order]


def _drop_repeated(table: np.ndarray) -> np.ndarray:
    """Drops records of a step that an earlier one has; evaluations share a step."""
    step, seconds = (table[:, _COLUMNS.index(name)] for name in ("step", "step_seconds"))
    keys = np.where(np.isnan(seconds), -1.0 - np.arange(len(table)), step)
    return table[np.sort(np.unique(keys, return_index=True)[1])]


def _owners(found: Columns, jobs: Sequence[dict[str, Any]]) -> np.ndarray:
    """The job that wrote each record, -1 for one of a step that none trained."""
    first_steps = np.array([job["first_step"] for job in jobs])
    starts = np.maximum.accumulate([job["start"] for job in jobs])
    by_time = np.maximum(np.searchsorted(starts, found["time"], "right") - 1, 0)
    # A job evaluates the state that it begins with, if the one before it did not.
    until = found["step"] + np.isnan(found["step_seconds"])
    # A step that counts is of the last job that began with it or before it. The last job of all may
    # still hold the records of the one before it, which it drops before its first step.
    trained = first_steps if len(jobs) == 1 or _has_trained(found, jobs[-1]) else first_steps[:-1]
    lowest = np.minimum.accumulate(trained[::-1])[::-1]
    least, most = (np.searchsorted(lowest, x, "right") - 1 for x in (found["step"], until))
    owner = np.clip(by_time, least, most)
    # One that was dropped is of an earlier job, of which the clock tells.
    lost = np.flatnonzero(found["lost"])
    until, by_time = until[lost], np.minimum(by_time[lost], max(len(jobs) - 2, 0))
    owner[lost] = -1
    for i in reversed(range(len(jobs))):
        owner[lost[first_steps[i] <= until]] = i
    for i in range(len(jobs)):
        owner[lost[(first_steps[i] <= until) & (i <= by_time)]] = i
    return owner


def _has_trained(found: Columns, job: dict[str, Any]) -> bool:
    """Whether the records that count have one of the last job, by its mark or by its clock."""
    later = ~found["lost"] & (found["step"] >= job["first_step"])
    is_first = later & (found["step"] == job["first_step"]) & (found["restarted"] == 1)
    return not later.any() or is_first.any() or (found["time"][later] >= job["start"]).any()


def _read(path: Place) -> tuple[np.ndarray, int]:
    """Reads the records' numbers [records, len(_COLUMNS)], and counts the lines left out."""
    blocks, strange = [np.empty((0, len(_COLUMNS)))], 0
    with _open(path) as file:
        while lines := list(itertools.islice(file, _BLOCK)):
            quick, others = [], []
            for line in lines:
                match = _STEP.match(line) if b"snapshot_" not in line else None
                quick.append(match.groups()) if match else others.append(line)
            if quick:
                values = np.fromiter(map(float, itertools.chain(*quick)), float)
                values = values.reshape(len(quick), -1)
                missing = (0, len(_COLUMNS) - values.shape[1])
                blocks.append(np.pad(values, ((0, 0), missing), constant_values=np.nan))
            known = [_parse(line) for line in others]
            bad = itertools.compress(others, (numbers is None for numbers in known))
            strange += sum(not _is_torn(line) for line in bad)
            if known := list(filter(None, known)):
                blocks.append(np.array(known, float))
    return np.concatenate(blocks), strange


def _open(path: Place) -> IO[bytes]:
    if is_near(path) and path.is_file():
        return path.open("rb")
    return io.BytesIO(path.read_bytes() if path.is_file() else b"")


def _parse(line: bytes) -> list[float | None] | None:
    """The columns of a record, None where a number is missing; None for a line that is no record,
    as one with something else for a number.
    """
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and all(is_count(record.get(name)) for name in _NEEDED):
            record["restarted"] = int("restarted" in record)
            numbers = [record.get(name) for name in _COLUMNS]
            if type(record["step"]) is int and all(x is None or is_count(x) for x in numbers):
                return numbers
    return None


def _is_torn(line: bytes) -> bool:
    """Whether a line is no JSON, as a kill leaves it."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _divide(found: Columns, owner: np.ndarray, starts: np.ndarray) -> Columns:
    """What each record's time since the record or the start before went into, in seconds."""
    times, is_first = found["time"], np.diff(owner, prepend=-1) > 0
    span = times - np.where(is_first, starts[owner], np.roll(times, 1))
    worked = np.fmax(found["step_seconds"], found["eval_seconds"])
    left = np.minimum(np.nan_to_num(worked), span)
    before, spent = span - left, {}
    spent["starts"] = np.where(is_first, before, 0.0)
    spent["saves"] = np.minimum(np.nan_to_num(found["save_seconds"]), before - spent["starts"])
    spent["other"] = before - spent["starts"] - spent["saves"]
    for kind, name in _WAITS.items():
        spent[kind] = np.minimum(np.nan_to_num(found[name]), left)
        left = left - spent[kind]
    is_step = ~np.isnan(found["step_seconds"])
    spent["steps"], spent["evaluations"] = np.where(is_step, left, 0), np.where(is_step, 0, left)
    spent = {kind: np.where(found["lost"], 0.0, spent.get(kind, 0.0)) for kind in KINDS}
    spent["starts"] = np.where(is_first, before, 0.0)  # of a lost record, too
    spent["lost"] = np.where(found["lost"], span - spent["starts"], 0.0)
    return spent


def _settle(
    job: dict[str, Any], found: Columns, spent: Columns, begin: float, following: float
) -> None:
    """Adds to a job its end, its seconds and its steps. It begins at `begin`, whatever its clock
    says, and the next one, by its own clock, at `following`.
    """
    last, end = max([job["start"], *found["time"][-1:].tolist()]), job["end"]
    moved = begin - job["start"]
    job["start"], last = begin, last + moved
    if end is None:  # killed, nobody saw when: taken to have worked on one more step; or running
        step = sum(np.nan_to_num(found["step_seconds"][-1:])) * (following < math.inf)
        job["end"] = max(last, min(last + step, following))
    else:
        job["end"] = max(last, end + moved)
    end = job["end"]
    job["seconds"] = seconds = {kind: float(spent[kind].sum()) for kind in KINDS}
    saved = min(job.pop("save_seconds", 0.0), end - last)
    is_orderly, has_begun = job["status"] in ORDERLY, len(found["time"]) > 0
    seconds["saves"] += saved
    seconds["starts" if not has_begun else "ends" if is_orderly else "lost"] += end - last - saved
    seconds["waiting"] = max(0.0, following - end) if following < math.inf else 0.0
    is_step = ~np.isnan(found["step_seconds"])
    job["steps"] = int((is_step & ~found["lost"]).sum())
    job["lost_steps"] = int((is_step & found["lost"]).sum())


def _stages(
    found: Columns, spent: Columns, nodes: np.ndarray, devices: np.ndarray, price: float | None
) -> list[dict[str, Any]]:
    """What records say, by stage; `nodes` and `devices` are those of each record's job."""
    numbers = found["stage"]
    of_step = np.maximum.accumulate(np.where(np.isnan(numbers), 0, np.arange(len(numbers))))
    numbers = np.nan_to_num(numbers[of_step]).astype(int)  # an evaluation's: the step's before it
    hours = sum(spent.values()) / 3600
    is_kept = ~np.isnan(found["step_seconds"]) & ~found["lost"]
    tokens, stages = found["consumed_tokens"], []
    first = np.flatnonzero(is_kept)[np.argmin(found["step"][is_kept])] if is_kept.any() else None
    before = 0.0 if first is None or found["step"][first] == 0 else tokens[first]
    for number in np.unique(numbers):
        mine = numbers == number
        until = tokens[mine & is_kept].max(initial=before)
        stages.append(
            {
                "stage": int(number),
                "steps": int((mine & is_kept).sum()),
                "tokens": None if np.isnan(until - before) else int(until - before),
                "seconds": {kind: float(spent[kind][mine].sum()) for kind in KINDS},
                **_cost(hours[mine] @ nodes[mine], hours[mine] @ devices[mine], price),
            }
        )
        before = until
    return stages


def _take(columns: Columns, mine: slice) -> Columns:
    return {name: column[mine] for name, column in columns.items()}


def _cost(node_hours: float, device_hours: float, price: float | None) -> dict[str, float | None]:
    cost = None if price is None else float(device_hours) * price
    return {"node_hours": float(node_hours), "device_hours": float(device_hours), "cost": cost}
