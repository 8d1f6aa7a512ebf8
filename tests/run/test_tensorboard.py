"""TensorBoard's event files: each step once, over any number of starts."""

import os
import struct

import numpy as np
from tensorboardX import SummaryWriter
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from maxramp.run.tensorboard import TensorBoardWriter, read_events


def record(step: int) -> dict:
    return {"step": step, "loss": step / 7, "consumed_samples": 8 * (step + 1)}


def test_tensorboard_holds_each_step_once(tmp_path):
    """Over four starts, the second of which was killed in the middle of an event.

    What another program writes beside them stays as it is.
    """
    others = SummaryWriter(str(tmp_path))
    for step in range(50):
        others.add_scalar("accuracy", step / 50, step)
    others.close()
    (other,) = tmp_path.glob("events*")
    theirs = other.read_bytes()
    for first, last in ((0, 10), (6, 14), (10, 20)):
        writer = TensorBoardWriter(tmp_path, first, 8 * first)
        for step in range(first, last):
            writer(record(step))
        writer.flush()
        newest = max(tmp_path.glob("events*.maxramp.*"), key=lambda path: int(path.suffix[1:]))
        if first == 6:
            os.truncate(newest, newest.stat().st_size - 5)
        writer.close()
    writer = TensorBoardWriter(tmp_path, 20, 160)
    writer(record(20))
    writer.close()
    for folder, scale in ((tmp_path, 1), (tmp_path / "over_samples", 8)):
        found = {}
        for path in folder.glob("events*"):
            for event, _ in read_events(path):
                for value in event.summary.value:
                    if value.tag == "learning/loss":
                        assert event.step not in found
                        found[event.step] = value.simple_value
        places = [scale * step + (scale > 1) * 8 for step in range(21)]
        assert sorted(found) == places
        assert np.allclose([found[place] for place in places], [k / 7 for k in range(21)])
    assert other.read_bytes() == theirs


def test_an_event_that_a_crash_left_damaged(tmp_path):
    """What stands before it stays, and the run goes on."""
    writer = TensorBoardWriter(tmp_path, 0, 0)
    for step in range(4):
        writer(record(step))
    writer.close()
    (path,) = tmp_path.glob("events*")
    ends = [end for _, end in read_events(path)]
    data = path.read_bytes()
    path.write_bytes(data[: ends[2] + 12] + b"\xff" * (len(data) - ends[2] - 12))
    assert [end for _, end in read_events(path)] == ends[:3]
    writer = TensorBoardWriter(tmp_path, 3, 24)
    writer(record(3))
    writer.close()
    assert path.stat().st_size == ends[2] and len(list(tmp_path.glob("events*"))) == 2


def test_events_are_as_tensorboard_reads_them(tmp_path):
    """With the version first, the tags in their groups and the checksums of the format."""
    writer = TensorBoardWriter(tmp_path, 0, 0)
    for step in range(6):
        writer(record(step))
    writer.close()
    (path,) = tmp_path.glob("events*")
    version, *events = map(event_pb2.Event.FromString, record_reader(path))
    assert version.file_version == "brain.Event:2" and len(events) == 6
    tags = {value.tag for event in events for value in event.summary.value}
    assert tags == {"learning/loss", "batch/consumed_samples"}


def record_reader(path):
    """The records of an event file, their checksums compared: TensorBoard drops others."""
    data, start = path.read_bytes(), 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        (header_sum,) = struct.unpack_from("<I", data, start + 8)
        body = data[start + 12 : start + 12 + length]
        (body_sum,) = struct.unpack_from("<I", data, start + 12 + length)
        assert header_sum == masked_crc32c(data[start : start + 8])
        assert body_sum == masked_crc32c(body)
        start += 16 + length
        yield body
