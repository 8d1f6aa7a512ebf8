"""Every scalar that a step shows is recorded, one step late, and reaches whatever shows numbers."""

import json
import pathlib
import types

import events
import numpy as np
import pytest
from conftest import make_config

from maxramp.errors import TrainingError
from maxramp.run.metrics import Dispatched, MetricsLog, read_records, tag_of
from maxramp.run.picture import figure_of
from maxramp.run.writers import JsonlWriter, tensorboard_writers

STAGE = types.SimpleNamespace(
    index=0,
    per_device_batch_size=2,
    gradient_accumulation_steps=1,
    global_batch_size=2,
    devices=1,
    spec=types.SimpleNamespace(row_length=16),
)


def taken(loss, **shown):
    numbers = {"loss": np.float32(loss), "grad_norm": np.float32(1), "pair": np.zeros(2), **shown}
    return Dispatched(numbers, lambda read, begin, end: {"step_seconds": end - begin, "word": "x"})


def test_a_new_scalar_reaches_all_that_shows_numbers(tmp_path):
    writers = [JsonlWriter(tmp_path / "metrics.jsonl"), *tensorboard_writers(tmp_path / "tb", 0, 0)]
    log = MetricsLog(make_config().run, writers)
    for step in range(3):
        log.log_step(step, STAGE, 2 * step + 2, taken(step, balance=np.float32(step / 4)))
    log.flush()
    log.close()
    for writer in writers:
        writer.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["balance"] for record in records] == [0, 0.25, 0.5]
    assert all("pair" not in record and record["word"] == "x" for record in records)
    assert events.shown(tmp_path / "tb")["learning/balance"] == {0: 0, 1: 0.25, 2: 0.5}
    large, _, small = figure_of(records, "a run").axes
    assert large.get_title("left") == "a run: batch size and loss"
    assert small.get_title("left") == "balance"
    assert [*small.lines[0].get_ydata()] == [0, 0.25, 0.5]
    json.dumps(records)


@pytest.mark.parametrize(
    "name, tag",
    [
        ("loss", "learning"),
        ("reward a:b", "learning"),
        ("per_device_batch_size", "batch"),
        ("target_tokens", "batch"),
        ("rollout_tokens_per_second", "speed"),
        ("eval_seconds", "speed"),
        ("tflops_per_device", "speed"),
        ("adam_noise_signal", "noise"),
    ],
)
def test_numbers_have_groups(name, tag):
    assert tag_of(name) == f"{tag}/{name}"


def test_a_loss_that_ends_the_run_is_noticed_one_step_late():
    """And nothing is recorded from then on."""
    records = []
    log = MetricsLog(make_config().run, [records.append])
    log.log_step(0, STAGE, 2, taken(0))
    log.log_step(1, STAGE, 4, taken(np.nan))  # does not wait for its own numbers
    with pytest.raises(TrainingError, match="loss=nan at step 1"):
        log.log_step(2, STAGE, 6, taken(2))
    log.close()
    assert [record["step"] for record in records] == [0]


def test_records_that_a_full_disk_loses():
    writer = JsonlWriter(pathlib.Path("/dev/full"))
    for step in range(3):
        writer({"step": step})
    with pytest.raises(OSError, match="No space left on device; lost: 3 records") as raised:
        writer.close()
    assert raised.value.filename == "/dev/full"
