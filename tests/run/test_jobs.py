"""jobs.jsonl holds every job of a run, and the times of a run never go back."""

import itertools
import json
import time

import pytest

from maxramp.run.jobs import Jobs, read_jobs
from maxramp.run.metrics import cut_records
from maxramp.run.writers import JsonlWriter

TORN = b'{"event": "end", "ti'


def begin_job(folder, first_step=0):
    job = Jobs(folder)
    job.begin(first_step, nodes=1, devices=2, origin="new")
    return job


@pytest.mark.parametrize("torn", [TORN, TORN + b"\n", b"\0" * 40, b"null\n", b""])
def test_a_line_that_a_power_loss_tore_swallows_no_start(tmp_path, torn):
    begin_job(tmp_path).end(0)
    with (tmp_path / "jobs.jsonl").open("ab") as file:
        file.write(torn)
    begin_job(tmp_path, 7).end(76)
    events = read_jobs(tmp_path)
    assert [event["event"] for event in events] == ["start", "end"] * 2
    assert events[2]["first_step"] == 7 and events[3]["status"] == 76


@pytest.mark.parametrize("torn", [TORN, b"\0\0\0"])
def test_every_file_of_records_ends_a_torn_line_first(tmp_path, torn):
    kept, dropped = tmp_path / "metrics.jsonl", tmp_path / "metrics.dropped.jsonl"
    dropped.write_bytes(torn)
    for step in range(4):
        JsonlWriter(kept)({"step": step, "loss": 1.0})
    with kept.open("ab") as file:
        file.write(torn)
    JsonlWriter(kept)({"step": 4, "loss": 1.0})
    assert [json.loads(x)["step"] for x in kept.read_bytes().splitlines()[5:]] == [4]
    assert cut_records(kept, 4) == 2  # with what was torn
    assert [json.loads(line)["step"] for line in kept.read_bytes().splitlines()] == [0, 1, 2, 3]
    older, cut, last = dropped.read_bytes().splitlines()
    assert (older, cut, json.loads(last)["step"]) == (torn, torn, 4)


@pytest.mark.parametrize("ahead", [-3600, 0, 15, 3600])
def test_a_clock_that_is_behind_moves_all_times_of_a_job(tmp_path, ahead):
    """Seconds that the files are ahead of this machine's clock."""
    now = round(time.time(), 3)
    lines = [
        ("jobs", {"event": "start", "time": now - 50, "first_step": 0, "nodes": 1, "devices": 2}),
        ("metrics", {"step": 0, "time": now + ahead, "goodput": 0.5}),
    ]
    for name, line in lines:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    job, records = begin_job(tmp_path, 1), []
    for step in (1, 2, 3):
        records.append({"step": step, "step_seconds": 1.0, "time": now + 20 + step})
        job(records[-1])
    job.end(0)
    events = read_jobs(tmp_path)
    times = [event["time"] for event in events]
    # Equal where this process is older than the start before it.
    assert times[1] >= now + ahead and times[0] <= times[1] <= times[2]
    steps = [times[1], *(record["time"] for record in records)]
    assert steps == sorted(steps)
    assert [b - a for a, b in itertools.pairwise(steps[1:])] == pytest.approx([1.0, 1.0])
    assert all(0 <= record["goodput"] <= 1 for record in records)
