"""The shares of a run's wall time add up to it, whatever happened to its jobs."""

import contextlib
import io
import itertools
import json
import math
import pathlib
import signal
import tempfile

import hypothesis
import jobs
import pytest
from conftest import BASE, TINY, complete
from hypothesis import strategies as st

from maxramp import report
from maxramp.errors import ConfigError
from maxramp.files.place import place
from maxramp.measuring import wall_time
from maxramp.run.metrics import read_records

RAMP = [
    *("per_device_batch_size_start=2", "per_device_batch_size_increment=2"),
    *("per_device_batch_size=4", "global_rampup_samples=600", "steps=400", "eval_interval=50"),
    *("eval_samples=8", "price_per_device_hour=3"),
    *("checkpoint_period=100", "async_checkpointing=False"),  # saved before it is killed
]


def adds_up(part, wall):
    assert all(seconds >= 0 for seconds in part["seconds"].values())
    assert sum(part["seconds"].values()) == pytest.approx(wall, abs=1e-6)


@pytest.fixture(scope="module")
def killed(tmp_path_factory, cache_dir):
    """A run that was killed, stopped and ended: its folder."""
    folder = tmp_path_factory.mktemp("runs")
    line = [BASE, *TINY, *RAMP, f"base_output_directory={folder}", f"jax_cache_dir={cache_dir}"]
    line.append("run_name=run")
    jobs.start_until(150, folder / "run", signal.SIGKILL, *line)
    before = wall_time.wall_time(folder / "run", None)
    assert before["jobs"][0]["status"] is None and before["lost_steps"] == 0 < before["goodput"]
    adds_up(before, before["wall_seconds"])
    jobs.start_until(250, folder / "run", signal.SIGTERM, *line)
    complete(*line)
    return folder / "run"


def test_shares_of_a_killed_and_stopped_run_add_up(killed):
    result = wall_time.wall_time(killed, None)
    adds_up(result, result["wall_seconds"])
    events = [json.loads(x) for x in (killed / "jobs.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["start", "start", "end", "start", "end"]
    assert result["wall_seconds"] == pytest.approx(events[-1]["time"] - events[0]["time"])
    first, second, third = result["jobs"]
    assert [job["status"] for job in result["jobs"]] == [None, 76, 0]
    assert [job["from"] for job in result["jobs"]] == ["new", "checkpoint", "checkpoint"]
    # How far it came before the kill depends on the machine.
    assert first["steps"] == second["first_step"] and first["steps"] % 100 == 0
    dropped = (killed / "metrics.dropped.jsonl").read_text().splitlines()
    assert first["lost_steps"] == sum("step_seconds" in line for line in dropped)
    assert third["first_step"] == first["steps"] + second["steps"] == events[2]["step"]
    assert result["steps"] == 400 and result["lost_steps"] == first["lost_steps"]
    for job, after in itertools.zip_longest(result["jobs"], result["jobs"][1:]):
        adds_up(job, (after["start"] if after else job["end"]) - job["start"])
        assert job["seconds"]["starts"] > 0
    seconds = result["seconds"]
    assert seconds["lost"] > 0 < seconds["evaluations"] and seconds["saves"] > 0
    assert seconds["other"] < 0.05 * result["wall_seconds"]
    by_stages = sum(sum(stage["seconds"].values()) for stage in result["stages"])
    beside = seconds["waiting"] + seconds["ends"]
    assert -0.01 < result["wall_seconds"] - by_stages - beside < 1 + seconds["saves"]
    result = wall_time.wall_time(killed, 3.0)
    assert [stage["steps"] for stage in result["stages"]] == [300, 100]
    assert [stage["tokens"] for stage in result["stages"]] == [300 * 2 * 16, 100 * 4 * 16]
    hours = sum(job["end"] - job["start"] for job in result["jobs"]) / 3600
    assert [result["node_hours"], result["cost"] / 3] == pytest.approx([hours, hours])


def test_goodput_in_the_metrics_is_that_of_the_report(killed):
    """At the last record, before what `ends` counts. Every record has its goodput and its time."""
    records = read_records(killed / "metrics.jsonl")
    assert all(0 <= r["goodput"] <= 1 for r in records)
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(records))
    assert all(r["nodes"] == 1 for r in records if "loss" in r)
    result = wall_time.wall_time(killed, None)
    wall = records[-1]["time"] - result["first_start"]
    assert records[-1]["goodput"] == pytest.approx(result["seconds"]["steps"] / wall, rel=0.01)


def test_a_run_in_a_storage_has_the_same_report(killed, storage):
    remote = place(f"{storage.address}/run")
    for path in killed.glob("*.jsonl"):
        (remote / path.name).write_bytes(path.read_bytes())
    local = wall_time.wall_time(killed, None)
    assert wall_time.wall_time(remote, None) == local | {"run": str(remote)}


def write_run(folder, events, kept, dropped=()):
    for name, lines in (("jobs", events), ("metrics", kept), ("metrics.dropped", dropped)):
        lines = (x if isinstance(x, str) else json.dumps(x) for x in lines)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return place(folder)


def step_of(step, time, **numbers):
    batch = {"step": step, "stage": step // 50, "consumed_tokens": (step + 1) * 16}
    return batch | {"time": time, "step_seconds": 1.0} | numbers


def start_of(time, step=0, **keys):
    return {"event": "start", "time": time, "first_step": step, "nodes": 2, "devices": 8} | keys


FIRST = [step_of(i, 1001.0 + i) for i in range(70)]  # to step 70, of which 50 are saved
SECOND = [step_of(i, 1101.0 + i - 50) for i in range(50, 100)]
STARTS = [start_of(1000.0), start_of(1100.0, 50)]


def test_a_job_that_has_not_trained_yet_owns_no_step(tmp_path):
    """The records of the job before it, which it has not dropped yet, are that one's."""
    for starts in (STARTS, [*STARTS[:1], start_of(1090.0, 60), *STARTS[1:]]):
        result = wall_time.wall_time(write_run(tmp_path, starts, FIRST), None)
        adds_up(result, result["wall_seconds"])
        assert [job["steps"] for job in result["jobs"]][-1] == 0 and result["steps"] == 70


def test_a_step_is_lost_where_it_was_trained_first(tmp_path):
    events = [STARTS[0], {"event": "end", "time": 1080.0, "status": 76}, STARTS[1]]
    run = write_run(tmp_path, events, [*FIRST[:50], *SECOND], FIRST[50:])
    report = wall_time.wall_time(run, None)
    adds_up(report, report["wall_seconds"])
    assert [(job["steps"], job["lost_steps"]) for job in report["jobs"]] == [(50, 20), (50, 0)]
    assert [(s["steps"], s["tokens"]) for s in report["stages"]] == [(50, 800), (50, 800)]
    assert report["wall_seconds"] == 150 and report["seconds"]["waiting"] == 20
    assert report["seconds"]["lost"] == 20 and report["seconds"]["ends"] == 10


@pytest.mark.parametrize(
    "events, records, warning",
    [
        (["null", *STARTS], SECOND, "1 line of jobs.jsonl"),
        ([*STARTS, "[3]", '"x"'], SECOND, "2 lines of jobs.jsonl"),
        ([{"event": "start", "time": 5, "first_step": 0}, *STARTS], SECOND, "1 line of jobs.jsonl"),
        (STARTS[1:], [*FIRST[:50], *SECOND], "50 records from before the first job"),
        (STARTS, [{"step": 3}, *SECOND], "1 line of metrics.jsonl"),
        (STARTS, [step_of(49, 1100.5, step_seconds="x"), *SECOND], "1 line of metrics.jsonl"),
        (STARTS, [*SECOND, step_of(50.5, 1160.0)], "1 line of metrics.jsonl"),
        (STARTS, [record | {"save_seconds": None} for record in SECOND], ""),
        (['{"event": "sta', *STARTS], ['{"step', *SECOND], ""),  # torn by a kill
        ([*STARTS, {"event": "end", "time": 1160, "save_seconds": None}], SECOND, ""),
    ],
)
def test_lines_that_are_no_events_are_left_out_and_counted(tmp_path, events, records, warning):
    result = wall_time.wall_time(write_run(tmp_path, events, records), None)
    adds_up(result, result["wall_seconds"])
    assert [job["steps"] for job in result["jobs"]][-1] == result["steps"] == 50
    assert len(result["warnings"]) == bool(warning) and warning in "".join(result["warnings"])


# Times around those of a run, and what JSON and a careless hand may put where a number belongs.
_times = st.floats(0, 2e4) | st.integers(0, 20_000)
_strange = st.sampled_from([None, "x", -1, math.inf, math.nan, 1e300, True, [], {}, 10**400])
_value = _times | _strange
_start = st.fixed_dictionaries(
    {"event": st.just("start"), "time": _times, "first_step": st.integers(0, 9)},
    optional={"nodes": st.integers(1, 4) | _strange, "devices": st.just(8), "from": _strange},
)
_end = st.fixed_dictionaries(
    {"event": st.just("end"), "time": _value},
    optional={"status": _strange | st.just(76), "save_seconds": _value},
)
_record = st.fixed_dictionaries(
    {"step": st.integers(0, 12), "time": _times},
    optional={name: _value for name in wall_time._COLUMNS if name not in ("step", "time")},
)
_LINES = ["", "null", "3", '{"step": 1', "[" * 9999, "{}", '{"event": []}', "\x00\x00"]
_junk = st.sampled_from(_LINES)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    st.lists(_start | _end | _junk, max_size=8),
    st.lists(_record | _junk, max_size=12),
    st.lists(_record | _junk, max_size=8),
)
def test_whatever_the_files_hold_the_shares_add_up_or_a_line_says_why(events, kept, dropped):
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(pathlib.Path(folder), events, kept, dropped)
        try:
            result = wall_time.wall_time(run, 2.0)
        except ConfigError as error:
            assert "jobs.jsonl: no line is the start of a job" in str(error)
            return
    adds_up(result, result["wall_seconds"])
    assert result["cost"] == pytest.approx(2 * result["device_hours"])
    for job in result["jobs"]:
        assert job["end"] >= job["start"]
    assert sum(stage["steps"] for stage in result["stages"]) == result["steps"]
    with contextlib.redirect_stdout(io.StringIO()):
        report.print_runs([result])
        report.print_parts(result["stages"], report._STAGE)
        report.print_parts(result["jobs"], report._JOB)


def test_the_command_prints_draws_and_refuses(killed, tmp_path, capsys):
    picture = tmp_path / "report.png"
    assert report.main([str(killed), str(killed), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    assert report.main([str(killed)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("goodput", "waiting", "lost", "cost", "stage", "from"))
    assert "last record" not in printed
    for number, price in (("6", 6), ("-1", 3)):  # -1: the config's
        assert report.main([str(killed), "--json", f"price_per_device_hour={number}"]) == 0
        dear = json.loads(capsys.readouterr().out)["runs"][0]
        assert dear["cost"] == pytest.approx(price * dear["device_hours"])
    for line, error in (
        (["8", "16", "32"], "error: 8 holds no jobs.jsonl"),
        ([str(killed), "steps=3"], "steps=3: a report reads price_per_device_hour alone"),
        ([str(killed), "--plot", str(tmp_path / "x.nonesuch")], "cannot write the picture"),
    ):
        assert report.main(line) == 2 and error in capsys.readouterr().err
    assert report.main([str(write_run(tmp_path, STARTS, FIRST))]) == 0
    assert "its time counts up to its last record" in capsys.readouterr().out
