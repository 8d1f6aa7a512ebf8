"""TensorBoard's event files: each step once, over any number of starts."""

import os

import events
import numpy as np
from tensorboardX import SummaryWriter

from maxramp.run.writers import tensorboard_writers


def record(step: int) -> dict:
    return {"step": step, "loss": step / 7, "consumed_samples": 8 * (step + 1)}


def test_tensorboard_shows_each_step_once(tmp_path):
    """Over three starts, the second of which was killed in the middle of an event.

    What another program writes beside them stays as it is.
    """
    others = SummaryWriter(str(tmp_path / "others"))
    others.add_scalar("accuracy", 0.5, 100)
    others.close()
    (other,) = (tmp_path / "others").glob("events*")
    theirs = other.read_bytes()
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
    assert other.read_bytes() == theirs


def test_events_are_as_tensorboard_reads_them(tmp_path):
    """With the version first, and the tags in their groups."""
    writer, _ = tensorboard_writers(tmp_path, 0, 0)
    for step in range(6):
        writer(record(step))
    writer.close()
    (path,) = tmp_path.glob("events*")
    assert events.read(path)[0].file_version == "brain.Event:2"
    assert {*events.shown(tmp_path)} == {"learning/loss", "batch/consumed_samples"}
