"""Every scalar that a step shows is recorded, one step late, and reaches whatever shows numbers."""

import functools
import io
import json
import os
import pathlib
import time

import events
import numpy as np
import pytest
from conftest import make_config
from tensorboardX import SummaryWriter

from maxramp.commandline import show_wait
from maxramp.errors import TrainingError
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run import metrics
from maxramp.run.metrics import Dispatched, MetricsLog, loads_of, read_records, tag_of
from maxramp.run.picture import make_expert_figure, make_run_figure
from maxramp.run.writers import JsonlWriter, tensorboard_writers

BATCH = {"global_batch_size": 2, "max_target_length": 16, "devices_per_node": 1}
(STAGE,) = RampupBatchManager(BATCH).stages


def step_numbers(loss, **shown):
    numbers = {"loss": np.float32(loss), "grad_norm": np.float32(1), "pair": np.zeros(2), **shown}
    return Dispatched(numbers, lambda read, begin, end: {"step_seconds": end - begin, "word": "x"})


def logged(folder, config, numbers):
    """The records of steps with these numbers, which event files in tb hold, too."""
    writers = [JsonlWriter(folder / "metrics.jsonl"), *tensorboard_writers(folder / "tb", 0, 0)]
    log = MetricsLog(config.run, writers, print)
    for step, shown in enumerate(numbers):
        log.log_step(step, STAGE, 2 * step + 2, step_numbers(step, **shown))
    log.flush()
    log.close()
    for writer in writers:
        writer.close()
    return read_records(folder / "metrics.jsonl")


def test_a_new_scalar_reaches_all_that_shows_numbers(tmp_path):
    numbers = [{"balance": np.float32(step / 4)} for step in range(3)]
    records = logged(tmp_path, make_config(), numbers)
    assert [record["balance"] for record in records] == [0, 0.25, 0.5]
    assert all("pair" not in record and record["word"] == "x" for record in records)
    assert events.shown(tmp_path / "tb")["learning/balance"] == {0: 0, 1: 0.25, 2: 0.5}
    large, _, small = make_run_figure(records, "a run").axes
    assert large.get_title("left") == "a run: batch size and loss"
    assert small.get_title("left") == "balance"
    assert [*small.lines[0].get_ydata()] == [0, 0.25, 0.5]
    json.dumps(records)


def test_loads_of_experts(tmp_path):
    """Of every second step; histograms and the picture count experts without a token, too."""
    loads_LE = np.array([[0.123456, 0.376544, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]], np.float32)
    numbers = {"expert_load": loads_LE, "expert_load_max": loads_LE.max() * 4}
    records = logged(tmp_path, make_config("log_period=2"), [numbers] * 4)
    assert [record["step"] for record in records if "expert_load" in record] == [0, 2]
    assert records[2]["expert_load"] == [[0.1235, 0.3765, 0.5, 0.0], [0.25] * 4]
    assert all(record["expert_load_max"] == 2 for record in records)
    (path,) = (tmp_path / "tb").glob("events*")
    first, *_ = written = events.read(path)
    assert first.file_version == "brain.Event:2"
    values = [value for event in written for value in event.summary.value]
    histograms = {value.tag: value.histo for value in values if value.HasField("histo")}
    assert {*histograms} == {"experts/layer_00", "experts/layer_01"} == {*loads_of(records[0])}
    first = histograms["experts/layer_00"]
    assert (first.num, sum(first.bucket), first.max, first.min) == (4, 4, 2, 0)
    assert first.sum == pytest.approx(4)
    curves, table, _ = make_expert_figure(records, "a run").axes
    most, least, _ = curves.lines
    assert [*most.get_ydata()] == [1.5, 1.5] and [*least.get_ydata()] == [0.5 + 1 / 128] * 2
    assert np.allclose(2.0 ** table.images[0].get_array()[:, 1], [1.506, 1])
    assert make_expert_figure(records[1:2], "a run") is None
    for loads in ([0.25] * 4, [1, 0, 0, 0]):  # axes of no height, and of all
        alike = [record | {"expert_load": [loads] * 2} for record in records]
        make_expert_figure(alike, "a run").savefig(io.BytesIO())


@pytest.mark.parametrize(
    "name, tag",
    [
        *(("loss", "learning"), ("reward a:b", "learning"), ("per_device_batch_size", "batch")),
        *(("target_tokens", "batch"), ("rollout_tokens_per_second", "speed")),
        *(("eval_seconds", "speed"), ("tflops_per_device", "speed")),
        *(("adam_noise_signal", "noise"), ("expert_load_entropy", "experts")),
        *(("dropped_share", "experts"), ("router_z_loss", "learning")),
    ],
)
def test_numbers_have_groups(name, tag):
    assert tag_of(name) == f"{tag}/{name}"


class Slow:
    def __array__(self):
        time.sleep(0.1)
        return np.float32(1)


def test_a_long_first_step_and_evaluation_have_a_line(monkeypatch):
    monkeypatch.setattr(metrics, "show_wait", functools.partial(show_wait, first=0.03))
    lines = []
    log = MetricsLog(make_config().run, [], lines.append)
    for step in range(2):
        log.log_step(step, STAGE, 2, step_numbers(0, slow=Slow()))
    log.log_eval(1, 2, step_numbers(0, slow=Slow()))
    log.flush()
    log.close()
    starts = [line.partition(", for")[0] for line in lines]
    assert starts == [f"wait     {x}: still running" for x in ("the first step", "evaluation")]


def test_a_loss_that_ends_the_run_is_noticed_one_step_late():
    """And nothing is recorded from then on."""
    records = []
    log = MetricsLog(make_config().run, [records.append], print)
    log.log_step(0, STAGE, 2, step_numbers(0))
    log.log_step(1, STAGE, 4, step_numbers(np.nan))  # does not wait for its own numbers
    with pytest.raises(TrainingError, match="loss=nan at step 1"):
        log.log_step(2, STAGE, 6, step_numbers(2))
    log.close()
    assert [record["step"] for record in records] == [0]


def test_records_that_a_full_disk_loses():
    writer = JsonlWriter(pathlib.Path("/dev/full"))
    for step in range(3):
        writer({"step": step})
    with pytest.raises(OSError, match="No space left on device; lost: 3 records") as raised:
        writer.close()
    assert raised.value.filename == "/dev/full"


def record(step: int) -> dict:
    return {"step": step, "loss": step / 7, "consumed_samples": 8 * (step + 1)}


def test_tensorboard_shows_each_step_once(tmp_path):
    """Over three starts, the second killed in an event; what others write beside them stays."""
    others = SummaryWriter(str(tmp_path / "others"))
    others.add_scalar("accuracy", 0.5, 100)
    others.close()
    (other,) = (tmp_path / "others").glob("events*")
    content = other.read_bytes()
    (tmp_path / "run").mkdir()
    other = other.rename(tmp_path / "run" / other.name)
    for number, (first, last) in enumerate(((0, 10), (6, 14), (10, 20))):
        before = {path: path.stat().st_size for path in tmp_path.glob("run/events*")}
        for writer in tensorboard_writers(tmp_path / "run", first, 8 * first):
            for step in range(first, last):
                writer(record(step))
            writer.close()
        for path in {*tmp_path.glob("run/**/events*")} - {*before, other}:
            if number == 1:
                os.truncate(path, path.stat().st_size - 5)
            path.rename(path.with_name(f"{path.name}-{number}"))  # as in another second
    by_step = events.shown(tmp_path / "run")["learning/loss"]
    by_sample = events.shown(tmp_path / "run" / "over_samples")["learning/loss"]
    assert sorted(by_step) == list(range(20))
    assert sorted(by_sample) == list(range(8, 168, 8))
    for curve in (by_step, by_sample):
        assert np.allclose([curve[place] for place in sorted(curve)], [k / 7 for k in range(20)])
    assert other.read_bytes() == content
