"""tensorboard/: the numbers of metrics.jsonl over steps, and the losses over consumed samples.

Event files are TFRecords: length (uint64), its checksum (uint32), the event, its checksum (uint32).
They are written here and now, and not in tensorboardX's thread: what is flushed is in the file.
While a disk is full, what could not be written waits in memory, as that of metrics.jsonl does.
"""

import contextlib
import os
import pathlib
import platform
import struct
import time
from typing import Any, BinaryIO

from maxramp.run.metrics import Record, numbers_of, tag_of

_BY_SAMPLE = "over_samples"
_OVER_SAMPLES = ("loss", "eval_loss", "reward", "eval_reward")
_BUFFER_BYTES = 8192  # of events that are written together


class TensorBoardWriter:
    """A writer of records. TensorBoard hides what earlier starts wrote past the first step.

    TensorBoard shows the tags in groups: learning/loss, batch/stage, speed/tokens_per_second.
    """

    def __init__(self, folder: pathlib.Path, first_step: int, first_sample: int):
        """
        Args:
          folder: of the event files.
          first_step: of this start.
          first_sample: samples consumed before it.

        Raises:
          OSError: there cannot be such a folder.
        """
        self._by_step = _Events(folder, first_step)
        self._by_sample = _Events(folder / _BY_SAMPLE, first_sample + 1)

    def __call__(self, record: Record) -> None:
        """Writes the numbers of a record."""
        numbers = numbers_of(record)
        self._by_step.write(record["step"], numbers)
        results = {k: v for k, v in numbers.items() if k in _OVER_SAMPLES}
        self._by_sample.write(record["consumed_samples"], results)

    def flush(self) -> None:
        """Hands everything to the file system.

        Raises:
          OSError: it takes no more.
        """
        self._by_step.flush()
        self._by_sample.flush()

    def close(self) -> None:
        """Closes the files."""
        try:
            self._by_step.close()
        finally:
            self._by_sample.close()


class _Events:
    """The event files of one folder."""

    def __init__(self, folder: pathlib.Path, first: int):
        self._folder, self._first = folder, first
        self._file: BinaryIO | None = None
        self._unwritten = b""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, place: int, numbers: dict[str, Any]) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # takes a while

        values = [
            summary_pb2.Summary.Value(tag=tag_of(name), simple_value=number)
            for name, number in numbers.items()
        ]
        summary = summary_pb2.Summary(value=values)
        event = event_pb2.Event(wall_time=time.time(), step=place, summary=summary)
        self._unwritten += _framed(event)
        if len(self._unwritten) > _BUFFER_BYTES:
            with contextlib.suppress(OSError):  # `flush` says so
                self.flush()

    def flush(self) -> None:
        if self._unwritten and self._file is None:
            self._file = self._open()
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _open(self) -> BinaryIO:
        from tensorboardX.proto import event_pb2

        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{platform.node()}.{os.getpid()}"
        file = (self._folder / name).open("ab", buffering=0)
        version = event_pb2.Event(wall_time=now, file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        started = event_pb2.Event(wall_time=now, step=self._first, session_log=start)
        self._unwritten = _framed(version) + _framed(started) + self._unwritten
        return file

    def close(self) -> None:
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()


def _framed(event: Any) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + next(checksums) + data + next(checksums)
