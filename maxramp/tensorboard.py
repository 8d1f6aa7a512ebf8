"""tensorboard/: the numbers of metrics.jsonl over steps, and the losses over consumed samples.

Event files are TFRecords: length (uint64), its checksum (uint32), the event, its checksum (uint32).
They are written here and now, and not in tensorboardX's thread: what is flushed is in the file, and
a full disk is an error and not a queue that never empties.
"""

import pathlib
import struct
import time
from typing import Any

from maxramp.metrics import Record

_OURS = ".maxramp."  # in the names of event files: other programs may write beside them
_BY_SAMPLE = "over_samples"


class TensorBoardWriter:
    """A writer of records. What earlier starts wrote past the first step is cut off."""

    def __init__(self, folder: pathlib.Path, first_step: int, first_sample: int):
        """
        Args:
          folder: of the event files.
          first_step: of this start.
          first_sample: samples consumed before it.
        """
        self._by_step = _Events(folder, first_step)
        self._by_sample = _Events(folder / _BY_SAMPLE, first_sample + 1)

    def __call__(self, record: Record) -> None:
        """Writes the numbers of a record."""
        numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        self._by_step.write(record["step"], numbers)
        losses = {k: v for k, v in numbers.items() if k in ("loss", "eval_loss")}
        self._by_sample.write(record["consumed_samples"], losses)

    def flush(self) -> None:
        """Hands everything to the file system."""
        self._by_step.flush()
        self._by_sample.flush()

    def close(self) -> None:
        """Closes the files."""
        self._by_step.close()
        self._by_sample.close()


class _Events:
    """The event files of one folder."""

    def __init__(self, folder: pathlib.Path, first: int):
        self._folder, self._first, self._writer = folder, first, None

    def write(self, place: int, numbers: dict[str, Any]) -> None:
        if self._writer is None:  # when the first step is done: the import takes a while
            from tensorboardX.event_file_writer import EventsWriter

            _cut(self._folder, self._first)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"), f"{_OURS}{self._first}")
        from tensorboardX.proto import event_pb2, summary_pb2

        values = [summary_pb2.Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
        summary = summary_pb2.Summary(value=values)
        event = event_pb2.Event(wall_time=time.time(), step=place, summary=summary)
        self._writer.write_event(event)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_events(path: pathlib.Path) -> list[tuple[Any, int]]:
    """Every whole event of an event file and where it ends in the file, in order."""
    from tensorboardX.proto import event_pb2

    data, start, found = path.read_bytes(), 0, []
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length + 4
        if end > len(data):
            break
        found.append((event_pb2.Event.FromString(data[start + 12 : end - 4]), end))
        start = end
    return found


def _cut(folder: pathlib.Path, first: int) -> None:
    """Cuts the events from `first` on off the files of earlier starts."""
    for path in folder.glob("events.out.tfevents.*"):
        events = read_events(path)
        if not (_OURS in path.name or folder.name == _BY_SAMPLE or _is_ours(events)):
            continue
        kept = [end for event, end in events if event.step < first]
        with path.open("r+b") as file:
            file.truncate(max(kept, default=0))


def _is_ours(events: list[tuple[Any, int]]) -> bool:
    """Whether a run wrote these events; earlier versions did not mark the file's name."""
    return any(v.tag == "consumed_samples" for event, _ in events for v in event.summary.value)
