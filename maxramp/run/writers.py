"""What the records of a run go to: metrics.jsonl, TensorBoard, Weights & Biases.

Every writer is called with a record, and has `flush` and `close`.

tensorboard/ has the numbers of metrics.jsonl over steps, and the losses over consumed samples.
Event files are TFRecords: length (uint64), its checksum (uint32), the event, its checksum (uint32).
They are written here and now, and not in tensorboardX's thread: what is flushed is in the file.

Weights & Biases gets them by the package wandb, under TensorBoard's tags. A file in a run's folder
keeps its id over restarts. The service takes every step once: what a restart trains again it leaves
out, and on the same devices that is the same.
"""

import contextlib
import json
import os
import pathlib
import platform
import secrets
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from maxramp.errors import ConfigError, install
from maxramp.files.storage import write_whole
from maxramp.run.metrics import Record, as_json, numbers_of, tag_of

_BY_SAMPLE = "over_samples"
_OVER_SAMPLES = ("loss", "eval_loss", "reward", "eval_reward")
_ID = ".wandb_id"  # the file in a run's folder
_FINISH_SECONDS = 15.0  # that an end waits for what is still to be uploaded


class Appending:
    """A file that grows; what a disk that is full for a while does not take waits in memory."""

    def __init__(self, path: pathlib.Path):
        """Opens or makes the file."""
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def append(self, data: bytes) -> None:
        """Hands bytes to the file system, or keeps them."""
        self._unwritten += data
        with contextlib.suppress(OSError):  # `flush` says so
            self.flush()

    def flush(self) -> None:
        """Hands everything to the file system.

        Raises:
          OSError: it takes no more.
        """
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Closes the file."""
        try:
            self.flush()
        finally:
            self._file.close()


class JsonlWriter(Appending):
    """metrics.jsonl: one object per optimizer step, and one per evaluation."""

    def __call__(self, record: Record) -> None:
        """Appends a record; a number that JSON lacks (NaN, infinity) is null."""
        self.append((json.dumps(as_json(record)) + "\n").encode())


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


class WandbWriter:
    """A writer of records. Where to and how is wandb's own: WANDB_MODE, WANDB_API_KEY, ..."""

    def __init__(
        self,
        project: str,
        folder: pathlib.Path,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ):
        """
        Args:
          project: the key wandb_project.
          folder: of the run, which keeps the id; wandb's own files come to lie in it.
          config: what to show of the configuration.
          warn: takes a line about what went wrong and is no reason to stop.

        Raises:
          ConfigError: the package is missing, or takes no run.
          OSError: the id cannot be written.
        """
        self._warn, self._failed = warn, False
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"wandb_project={project} needs the package wandb: {install('wandb')}; or leave "
                "it out"
            ) from None
        folder = folder.absolute()
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=_id_of(folder),
                resume="allow",
                dir=str(folder),
                config=config,
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # of the client or the network
            what = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"wandb_project={project}: wandb takes no run ({what}); set WANDB_API_KEY, or "
                "WANDB_MODE=offline to upload it later with wandb sync"
            ) from None

    def __call__(self, record: Record) -> None:
        """Hands the numbers of a record to wandb, which does not wait for the network."""
        numbers = {tag_of(name): value for name, value in numbers_of(record).items()}
        try:
            self._run.log(numbers, step=record["step"])
        except Exception as error:  # a service that died is no reason to end a run
            if not self._failed:
                self._failed = True
                self._warn(f"wandb takes no more numbers: {error}")

    def flush(self) -> None:
        """Does nothing: what was handed over is wandb's to keep."""

    def close(self) -> None:
        """Ends the run there; what cannot be uploaded in a while stays in the run's folder."""

        def finish() -> None:
            with contextlib.suppress(Exception):
                self._run.finish()

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(_FINISH_SECONDS)
        if thread.is_alive():
            self._warn(f"wandb has not uploaded everything; wandb sync {self._run.dir}/.. does")


def _id_of(folder: pathlib.Path) -> str:
    """The id of the run in a folder: another run gets another, at the same path or elsewhere."""
    path = folder / _ID
    if path.exists():
        return path.read_text().strip()
    made = secrets.token_hex(8)
    write_whole(path, f"{made}\n".encode())
    return made
