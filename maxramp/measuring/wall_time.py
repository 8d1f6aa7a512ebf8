"""Where the wall time of a run went, from what its jobs wrote.

It begins with the run's first job and ends with the last thing that the run wrote. The times that a
run writes never go back (`run/jobs.py`): a job has what was written between its start and the next
one's, and each record the time since the one before it. So the shares add up to the wall time.
"""

import math
from typing import Any

import numpy as np

from maxramp.commandline import count
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.processes.lifeline import ORDERLY
from maxramp.run.jobs import FILE, is_event, read_jobs
from maxramp.run.metrics import is_count, read_lines

# What the wall time went into. Of steps that count: `steps` is their work, and compiles, data and
# snapshots are what they waited for. `starts` reach to a job's first step, `ends` come after its
# last save, `waiting` lies between two jobs, `lost` was trained again or died with its job.
KINDS = (
    *("steps", "compiles", "data", "snapshots", "evaluations", "saves", "starts", "ends"),
    *("waiting", "lost", "other"),
)
_WAITS = {"compiles": "compile_seconds", "data": "data_seconds", "snapshots": "snapshot_seconds"}
# The numbers of a record; NaN where it has none.
_COLUMNS = (
    *("step", "stage", "consumed_tokens", "step_seconds", "data_seconds", "compile_seconds"),
    *("time", "snapshot_seconds", "eval_seconds", "save_seconds"),
)
_NEEDED = ("step", "time")
_POINTS = 500  # of a curve

Columns = dict[str, np.ndarray]  # float64 [records], by name


def wall_time(run: Place, price: float | None) -> dict[str, Any]:
    """Divides the wall time of a run by KINDS, in seconds, of all and by stage and job; adds what
    it has cost at a `price` of a device for an hour, None where that is not known.

    Node-hours are those of jobs. A stage has the time of its records, and no ends and waiting. A
    ConfigError if the folder tells of no job.
    """
    jobs, warnings = _read_jobs(run)
    starts = np.array([job["start"] for job in jobs])
    records, owner = _read_records(run, starts, warnings)
    spent = _divide(records, owner, starts)
    for i, (job, following) in enumerate(zip(jobs, [*starts[1:], math.inf], strict=True)):
        own = slice(*np.searchsorted(owner, [i, i + 1]))
        _close(job, _select(records, own), _select(spent, own), following)
        hours = (job["end"] - job["start"]) / 3600
        job |= _cost(hours * job["nodes"], hours * job["devices"], price)
    first, wall = jobs[0]["start"], jobs[-1]["end"] - jobs[0]["start"]
    seconds = {kind: math.fsum(job["seconds"][kind] for job in jobs) for kind in KINDS}
    totals = {name: sum(job[name] for job in jobs) for name in ("steps", "lost_steps")}
    hours = (math.fsum(job[name] for job in jobs) for name in ("node_hours", "device_hours"))
    sizes = (np.array([job[name] for job in jobs])[owner] for name in ("nodes", "devices"))
    stages = _stages(records, spent, *sizes, price)
    tokens = [stage["tokens"] for stage in stages]
    counted, times = np.cumsum(spent["steps"]), records["time"] - first
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
    """Reads the jobs in the order of their starts, and returns warnings, too; a ConfigError if
    there are none."""
    jobs: list[dict[str, Any]] = []
    for event in read_jobs(run):
        if event["event"] == "start":
            start = max([event["time"], *(job["start"] for job in jobs[-1:])])
            origin = str(event.get("from", ""))
            jobs.append({"from": origin, "start": start, "end": None, "status": None})
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
    odd = sum(not is_event(value) for value in read_lines(run / FILE))
    return jobs, [_left_out(odd, FILE)] if odd else []


def _left_out(lines: int, file: str) -> str:
    return f"{count(lines, 'line')} of {file} left out: not as a run writes them"


def _read_records(
    run: Place, starts: np.ndarray, warnings: list[str]
) -> tuple[Columns, np.ndarray]:
    """Reads the records of both files, in the order of their times; column `lost` says which were
    trained again. Returns also the index of each one's job; `warnings` get what was left out.
    """
    tables = []
    for name in ("metrics.jsonl", "metrics.dropped.jsonl"):
        table, odd = _read(run / name)
        tables.append(table)
        warnings += [_left_out(odd, name)] if odd else []
    table = np.concatenate(tables)
    records = dict(zip(_COLUMNS, table.T, strict=True))
    records["lost"] = np.arange(len(table)) >= len(tables[0])
    order = np.argsort(records["time"], kind="stable")
    owner = np.searchsorted(starts, records["time"][order], "right") - 1
    if early := int((owner < 0).sum()):
        warnings.append(f"{count(early, 'record')} from before the first job of {FILE} left out")
    return _select(records, order[early:]), owner[early:]


def _read(path: Place) -> tuple[np.ndarray, int]:
    """Reads the records' numbers [records, len(_COLUMNS)], and counts the lines left out."""
    rows = list(map(_numbers, read_lines(path)))
    records = list(filter(None, rows))
    return np.array(records, float).reshape(-1, len(_COLUMNS)), len(rows) - len(records)


def _numbers(value: Any) -> list[float | None] | None:
    """Returns the columns of a record; None for a value that is none, or that has something else
    for a number.
    """
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    numbers = [value.get(name) for name in _COLUMNS]
    is_whole = all(is_count(value.get(name)) for name in _NEEDED)
    return numbers if is_whole and all(x is None or is_count(x) for x in numbers) else None


def _divide(records: Columns, owner: np.ndarray, starts: np.ndarray) -> Columns:
    """Divides the seconds of each record, since the record or the start before it, by KINDS;
    `records` and `owner` are from `_read_records`."""
    times, is_first = records["time"], np.diff(owner, prepend=-1) > 0
    span = times - np.where(is_first, starts[owner], np.roll(times, 1))
    worked = np.fmax(records["step_seconds"], records["eval_seconds"])
    left = np.minimum(np.nan_to_num(worked), span)
    before, spent = span - left, {}
    spent["starts"] = np.where(is_first, before, 0.0)
    saved = np.nan_to_num(records["save_seconds"])
    spent["saves"] = np.minimum(saved, before - spent["starts"])
    spent["other"] = before - spent["starts"] - spent["saves"]
    for kind, name in _WAITS.items():
        spent[kind] = np.minimum(np.nan_to_num(records[name]), left)
        left = left - spent[kind]
    is_step = ~np.isnan(records["step_seconds"])
    spent["steps"], spent["evaluations"] = np.where(is_step, left, 0), np.where(is_step, 0, left)
    spent = {kind: np.where(records["lost"], 0.0, spent.get(kind, 0.0)) for kind in KINDS}
    spent["starts"] = np.where(is_first, before, 0.0)  # of a lost record, too
    spent["lost"] = np.where(records["lost"], span - spent["starts"], 0.0)
    return spent


def _close(job: dict[str, Any], records: Columns, spent: Columns, following: float) -> None:
    """Adds to a job its end, its seconds and its steps; the next job starts at `following`,
    infinity for the last job."""
    last, end = max([job["start"], *records["time"][-1:].tolist()]), job["end"]
    if end is None and following < math.inf:  # killed, nobody saw when: assumes one more step
        end = last + sum(np.nan_to_num(records["step_seconds"][-1:]))
    job["end"] = end = min(max(last, end or last), following)
    job["seconds"] = seconds = {kind: float(spent[kind].sum()) for kind in KINDS}
    saved = min(job.pop("save_seconds", 0.0), end - last)
    is_orderly, has_begun = job["status"] in ORDERLY, len(records["time"]) > 0
    seconds["saves"] += saved
    seconds["starts" if not has_begun else "ends" if is_orderly else "lost"] += end - last - saved
    seconds["waiting"] = following - end if following < math.inf else 0.0
    is_step = ~np.isnan(records["step_seconds"])
    job["steps"] = int((is_step & ~records["lost"]).sum())
    job["lost_steps"] = int((is_step & records["lost"]).sum())


def _stages(
    records: Columns, spent: Columns, nodes: np.ndarray, devices: np.ndarray, price: float | None
) -> list[dict[str, Any]]:
    """Sums the records by stage; `nodes` and `devices` are those of each record's job."""
    numbers = records["stage"]
    # An evaluation has the stage of the step before it.
    last_step = np.maximum.accumulate(np.where(np.isnan(numbers), 0, np.arange(len(numbers))))
    numbers = np.nan_to_num(numbers[last_step]).astype(int)
    hours = sum(spent.values()) / 3600
    is_kept = ~np.isnan(records["step_seconds"]) & ~records["lost"]
    tokens, stages = records["consumed_tokens"], []
    first = np.flatnonzero(is_kept)[np.argmin(records["step"][is_kept])] if is_kept.any() else None
    before = 0.0 if first is None or records["step"][first] == 0 else tokens[first]
    for number in np.unique(numbers):
        own = numbers == number
        until = tokens[own & is_kept].max(initial=before)
        stages.append(
            {
                "stage": int(number),
                "steps": int((own & is_kept).sum()),
                "tokens": None if np.isnan(until - before) else int(until - before),
                "seconds": {kind: float(spent[kind][own].sum()) for kind in KINDS},
                **_cost(hours[own] @ nodes[own], hours[own] @ devices[own], price),
            }
        )
        before = until
    return stages


def _select(columns: Columns, rows: slice | np.ndarray) -> Columns:
    return {name: column[rows] for name, column in columns.items()}


def _cost(node_hours: float, device_hours: float, price: float | None) -> dict[str, float | None]:
    cost = None if price is None else float(device_hours) * price
    return {"node_hours": float(node_hours), "device_hours": float(device_hours), "cost": cost}
