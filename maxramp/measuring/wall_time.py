"""Where the wall time of a run went, from what its jobs wrote.

It begins with the run's first job and ends with the last thing that the run wrote. The records of
metrics.jsonl and metrics.dropped.jsonl lie on it one behind the other, each up to its `time`,
within the jobs of jobs.jsonl: so the shares add up to it.
"""

import io
import itertools
import json
import math
import re
from typing import IO, Any

import numpy as np

from maxramp.errors import ConfigError
from maxramp.files.place import Place, is_near
from maxramp.processes.lifeline import ORDERLY
from maxramp.run.jobs import FILE, read_jobs

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
    *("time", "snapshot_seconds", "eval_seconds", "save_seconds"),
)
# Most steps as `train` writes them, without the last three columns: several times as fast as JSON,
# which reads all other records.
_STEP = re.compile(
    rb'\{"step": (\d+), "stage": (\d+), [^\n]*"consumed_tokens": (\d+), '
    rb'"step_seconds": ([^,]+), "data_seconds": ([^,]+), "compile_seconds": ([^,]+), '
    rb'"tokens_per_second": [^,]+, "target_tokens_per_second": [^,]+, "tflops_per_device": [^,]+, '
    rb'"batch_fingerprint": "\w+", "time": ([^,]+), "goodput": [^,]+\}\n'
)
_BLOCK = 1 << 16  # lines that are read at a time
_POINTS = 500  # of a curve

Columns = dict[str, np.ndarray]  # float64 [records], by name


def wall_time(run: Place, price: float | None) -> dict[str, Any]:
    """The wall time of a run in seconds by KINDS, of all and by stage and job; what it has cost at
    a `price` of a device for an hour, None where that is not known.

    Node-hours are those of jobs. A stage has the time of its records, and no ends and waiting.
    """
    jobs = _read_jobs(run)
    found = _read_records(run, jobs[0]["start"])
    starts = np.array([job["start"] for job in jobs])
    owner = np.searchsorted(starts, found["time"], "right") - 1
    spent = _divide(found, owner, starts)
    for i, job in enumerate(jobs):
        mine = slice(*np.searchsorted(owner, [i, i + 1]))
        following = jobs[i + 1]["start"] if i + 1 < len(jobs) else math.inf
        _settle(job, _take(found, mine), _take(spent, mine), following)
        hours = (job["end"] - job["start"]) / 3600
        job |= _cost(hours * job["nodes"], hours * job["devices"], price)
    first, wall = jobs[0]["start"], jobs[-1]["end"] - jobs[0]["start"]
    seconds = {kind: math.fsum(job["seconds"][kind] for job in jobs) for kind in KINDS}
    totals = {name: sum(job[name] for job in jobs) for name in ("steps", "lost_steps")}
    hours = (math.fsum(job[name] for job in jobs) for name in ("node_hours", "device_hours"))
    sizes = (np.array([job[name] for job in jobs])[owner] for name in ("nodes", "devices"))
    stages = _stages(found, spent, *sizes, price)
    tokens = [stage["tokens"] for stage in stages]
    counted, times = np.cumsum(spent["steps"]), found["time"] - first
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
    }


def _read_jobs(run: Place) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    for event in read_jobs(run):
        if event["event"] == "start":
            jobs.append({"start": event["time"], "end": None, "status": None} | event)
        elif jobs:
            saved = {"save_seconds": event.get("save_seconds", 0.0)}
            jobs[-1] |= {"end": event["time"], "status": event["status"]} | saved
    if not jobs:
        raise ConfigError(
            f"{run} holds no {FILE}, which a run writes at its start; give the folder of a run"
        )
    return [{k: v for k, v in job.items() if k not in ("event", "time")} for job in jobs]


def _read_records(run: Place, since: float) -> Columns:
    """Of both files in the order of their times, and which were `lost`: trained again."""
    kept, dropped = map(_read, (run / "metrics.jsonl", run / "metrics.dropped.jsonl"))
    table = np.concatenate([kept, dropped])
    found = dict(zip(_COLUMNS, table.T, strict=True))
    found["lost"] = np.arange(len(table)) >= len(kept)
    order = np.argsort(found["time"], kind="stable")
    order = order[found["time"][order] >= since]  # those of an older maxramp have no time
    return {name: column[order] for name, column in found.items()}


def _read(path: Place) -> np.ndarray:
    """The numbers of records: [records, len(_COLUMNS)]."""
    blocks = [np.empty((0, len(_COLUMNS)))]
    with _open(path) as file:
        while lines := list(itertools.islice(file, _BLOCK)):
            quick, others = [], []
            for line in lines:
                match = _STEP.match(line) if b"snapshot_" not in line else None
                quick.append(match.groups()) if match else others.append(_parse(line))
            if quick:
                values = np.fromiter(map(float, itertools.chain(*quick)), float)
                values = values.reshape(len(quick), -1)
                missing = (0, len(_COLUMNS) - values.shape[1])
                blocks.append(np.pad(values, ((0, 0), missing), constant_values=np.nan))
            if known := list(filter(None, others)):
                blocks.append(np.array(known, float))
    return np.concatenate(blocks)


def _open(path: Place) -> IO[bytes]:
    if is_near(path) and path.is_file():
        return path.open("rb")
    return io.BytesIO(path.read_bytes() if path.is_file() else b"")


def _parse(line: bytes) -> list[float | None] | None:
    try:
        record = json.loads(line)
    except ValueError:  # torn by a kill
        return None
    return [record.get(name) for name in _COLUMNS] if isinstance(record, dict) else None


def _divide(found: Columns, owner: np.ndarray, starts: np.ndarray) -> Columns:
    """What each record's time since the record or the start before went into, in seconds."""
    times, is_first = found["time"], np.diff(owner, prepend=-1) > 0
    span = times - np.where(is_first, starts[owner], np.roll(times, 1))
    left = np.minimum(np.fmax(found["step_seconds"], found["eval_seconds"]), span)
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


def _settle(job: dict[str, Any], found: Columns, spent: Columns, following: float) -> None:
    """Adds to a job its end, its seconds and its steps, up to the start of the `following` job."""
    last, lengths = job["start"], found["step_seconds"][-1:]
    last = max([last, *found["time"][-1:].tolist()])
    end = job["end"]
    if end is None:  # killed, nobody saw when: taken to have worked on one more step; or running
        end = last + sum(np.nan_to_num(lengths)) * (following < math.inf)
    job["end"] = end = min(max(last, float(end)), following)
    job["seconds"] = seconds = {kind: float(spent[kind].sum()) for kind in KINDS}
    saved = min(job.pop("save_seconds", 0.0), end - last)
    is_orderly, has_begun = job["status"] in ORDERLY, len(found["time"]) > 0
    seconds["saves"] += saved
    seconds["starts" if not has_begun else "ends" if is_orderly else "lost"] += end - last - saved
    seconds["waiting"] = following - end if following < math.inf else 0.0
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
    kept = tokens[is_kept]
    before = kept[0] if len(kept) and found["step"][is_kept][0] else 0.0
    for number in np.unique(numbers):
        mine = numbers == number
        until = tokens[mine & is_kept][-1:].sum() if (mine & is_kept).any() else before
        stages.append(
            {
                "stage": int(number),
                "steps": int((mine & is_kept).sum()),
                "tokens": None if np.isnan(until) else int(until - before),
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
