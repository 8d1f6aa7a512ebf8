"""tensorboard/: the numbers of metrics.jsonl over steps, and the losses over consumed samples.

Event files are TFRecords: length (uint64), its checksum (uint32), the event, its checksum (uint32).
They are written here and now, and not in tensorboardX's thread: what is flushed is in the file.
"""

import os
import pathlib
import platform
import struct
import time
from typing import Any

from maxramp.run.metrics import Appending, Record, numbers_of, tag_of

_BY_SAMPLE = "over_samples"
_OVER_SAMPLES = ("loss", "eval_loss", "reward", "eval_reward")


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


class _Events(Appending):
    """A new event file of a folder."""

    def __init__(self, folder: pathlib.Path, first: int):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}"
        super().__init__(folder / name)
        self._first: int | None = first

    def write(self, place: int, numbers: dict[str, Any]) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # takes a while

        if self._first is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(file_version="brain.Event:2"))
            self._add(event_pb2.Event(step=self._first, session_log=start))
            self._first = None
        values = [
            summary_pb2.Summary.Value(tag=tag_of(name), simple_value=number)
            for name, number in numbers.items()
        ]
        self._add(event_pb2.Event(step=place, summary=summary_pb2.Summary(value=values)))

    def _add(self, event: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        self.append(length + next(checksums) + data + next(checksums))
