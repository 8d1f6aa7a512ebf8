"""What a run may write over in its folder; jobs.jsonl holds every job, in the order of time."""

import itertools
import json
import time

import pytest
import yaml
from conftest import make_config

from maxramp.config.load import dump_config, load
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.jobs import Jobs, read_jobs
from maxramp.run.metrics import cut_records, read_records
from maxramp.run.output import Output
from maxramp.run.writers import JsonlWriter

PERSONS = "# My run: a small ramp.\nsteps: 17   # as in the paper\n"


def start(folder, *keys, first_step=0, records=()):
    """A start of a run, as far as its folder is concerned; returns the resolved config."""
    config = make_config(f"base_output_directory={folder.parent}", f"run_name={folder.name}", *keys)
    with Output(config.run, config.learning_rate, dump_config(config)) as output:
        ramp = RampupBatchManager(config.batch, 8)
        for write in output.open_files(ramp, first_step)[:-1]:
            for record in records:
                write(record)
    return config


def resolved(path):
    return resolve(load([str(path)]), 8, 1, 1).values


def test_its_own_config_is_replaced(tmp_path, capsys):
    folder = tmp_path / "run"
    path = folder / "config.yml"
    for steps in (10, 20):
        config = start(folder, f"steps={steps}")
        assert resolved(path) == config.values
        assert yaml.safe_load(path.read_text())["steps"] == steps
    assert not (folder / "config.resolved.yml").exists()
    assert "config.yml, plan.json" in capsys.readouterr().out.splitlines()[-1]


def edited(path, change):
    text = change(path.read_text())
    path.write_text(text)
    return text


@pytest.mark.parametrize(
    "change",
    {
        "another file": lambda text: PERSONS,
        "a comment": lambda text: f"{text}# keep this\n",
        "a value": lambda text: text.replace("steps: 10\n", "steps: 11\n"),
        "not YAML": lambda text: "{",
        "empty": lambda text: "",
    }.items(),
    ids=lambda item: item[0],
)
def test_a_persons_config_stays(tmp_path, capsys, change):
    folder = tmp_path / "run"
    path = folder / "config.yml"
    start(folder, "steps=10")
    text = edited(path, change[1])
    for steps in (20, 30):
        config = start(folder, f"steps={steps}")
        assert path.read_text() == text
        assert resolved(folder / "config.resolved.yml") == config.values
    assert "config.resolved.yml, plan.json" in capsys.readouterr().out.splitlines()[-1]


def test_a_new_run_beside_its_config(tmp_path):
    """The file that the run is started with, in the folder that the run then writes to."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yml").write_text(PERSONS)
    (folder / "notes.txt").write_text("notes")
    start(folder)
    assert (folder / "config.yml").read_text() == PERSONS
    assert (folder / "config.resolved.yml").exists() and (folder / "notes.txt").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json", "next_stage.json", "ramp.png"])
def test_a_folder_that_is_no_runs(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"run_name=run: .*holds {name}, which"):
        start(folder)
    assert [p.name for p in folder.iterdir()] == [name] and (folder / name).read_text() == "mine"


def test_a_file_where_event_files_go(tmp_path):
    """At the start: each save would fail for it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").write_text("mine")
    with pytest.raises(ConfigError, match="cannot write to .*run/tensorboard: File exists"):
        start(folder, "enable_tensorboard=True")
    assert (folder / "tensorboard").read_text() == "mine"


def test_metrics_that_are_cut_are_kept(tmp_path, capsys):
    """Whatever stood there: steps after the checkpoint, another program's lines, a torn one."""
    folder = tmp_path / "run"
    record = {"loss": 1.0, "global_batch_size": 8}
    records = [record | {"step": k, "consumed_samples": 8 * k} for k in range(9)]
    start(folder, records=records)
    start(folder, first_step=6)
    assert read_records(folder / "metrics.jsonl") == records[:6]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1}\n7\n{"step": 6, "lo')
    start(folder)
    assert (folder / "metrics.jsonl").read_bytes() == b""
    assert read_records(folder / "metrics.dropped.jsonl") == records[6:] + records[:6]
    lines = (folder / "metrics.dropped.jsonl").read_text().splitlines()
    assert lines[9:] == ['{"epoch": 1}', "7", '{"step": 6, "lo']
    assert "resume   dropped 3 steps after the last checkpoint" in capsys.readouterr().out


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
