"""Writers of a run's records: metrics.jsonl, TensorBoard, Weights & Biases.

Every writer is called with a record, and has `close`. Those of files are `Appending`s
(`files.run_folder`).

tensorboard/ has the numbers of metrics.jsonl over steps, the losses over consumed samples, and a
histogram of the loads of each layer of experts.
Event files are TFRecords: length (uint64), its checksum (uint32), the event, its checksum (uint32).
The loop writes them, and not tensorboardX's thread: what is flushed is in the file.

Weights & Biases gets the numbers by the package wandb, under TensorBoard's tags. A file in a run's
folder keeps its id over restarts. The service accepts every step once and ignores those that a
restart trains again, which are the same on the same devices.
"""

import contextlib
import json
import os
import pathlib
import platform
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from maxramp.errors import ConfigError, install
from maxramp.files.place import keep_id
from maxramp.files.run_folder import Appending
from maxramp.run.metrics import OF_SET, TASK, Record, as_json, loads_of, numbers_of, tag_of

_BY_SAMPLE = "over_samples"
_OVER_SAMPLES = ("loss", "eval_loss", "reward", "eval_reward")
_ID = ".wandb_id"  # the file in a run's folder
_FINISH_SECONDS = 15.0  # that an end waits for what is still to be uploaded


class JsonlWriter(Appending):
    """metrics.jsonl: one object per optimizer step, and one per evaluation."""

    def __call__(self, record: Record) -> None:
        self.append((json.dumps(as_json(record)) + "\n").encode())


def tensorboard_writers(
    folder: pathlib.Path, first_step: int, first_sample: int
) -> "tuple[EventWriter, EventWriter]":
    """Opens writers of records over steps and over samples, of a start at a step and a sample; an
    OSError if it cannot.

    TensorBoard hides what earlier starts wrote past them, and shows the tags in groups:
    learning/loss, batch/stage, speed/tokens_per_second.
    """
    by_step = EventWriter(folder, "step", first_step)
    return by_step, EventWriter(folder / _BY_SAMPLE, "consumed_samples", first_sample + 1)


class EventWriter(Appending):
    """A new event file of a folder, whose numbers stand over steps or consumed samples."""

    def __init__(self, folder: pathlib.Path, over: str, first: int):
        """Opens a file for numbers `over` "step" or "consumed_samples", from `first` on; an OSError
        if it cannot."""
        import tensorboardX.proto.event_pb2  # noqa: F401  # takes seconds: no step waits for it

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}"
        super().__init__(folder / name)
        self._over, self._first = over, first
        self._begun = False

    def __call__(self, record: Record) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.summary import make_histogram

        if not self._begun:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(file_version="brain.Event:2"))
            self._add(event_pb2.Event(step=self._first, session_log=start))
            self._begun = True
        values = [
            summary_pb2.Summary.Value(tag=tag_of(name), simple_value=number)
            for name, number in numbers_of(record).items()
            if self._over == "step" or name in _OVER_SAMPLES or name.startswith((TASK, OF_SET))
        ]
        for tag, loads in loads_of(record).items() if self._over == "step" else ():
            values.append(summary_pb2.Summary.Value(tag=tag, histo=make_histogram(loads, 30)))
        summary = summary_pb2.Summary(value=values)
        self._add(event_pb2.Event(step=record[self._over], summary=summary))

    def _add(self, event: Any) -> None:
        """Appends an event in TFRecord's form: length, data, and a checksum of each."""
        from tensorboardX.record_writer import masked_crc32c

        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        self.append(length + next(checksums) + data + next(checksums))


class WandbWriter:
    """A writer of records. wandb's own variables configure it: WANDB_MODE, WANDB_API_KEY, ..."""

    def __init__(
        self,
        project: str,
        folder: pathlib.Path,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ):
        """Keeps the id and wandb's own files in the run's folder.

        `warn` takes a line about a fault that need not end the run. A ConfigError if the package is
        missing, or does not begin a run; an OSError if the id cannot be kept.
        """
        self._warn, self._failed = warn, False
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"wandb_project={project} needs the package wandb: {install('wandb')}; or leave "
                "it out"
            ) from None
        self._wandb = wandb
        folder = folder.absolute()
        run_id = keep_id(folder / _ID)
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=run_id,
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
        numbers = {tag_of(name): value for name, value in numbers_of(record).items()}
        try:
            numbers |= {tag: self._wandb.Histogram(x) for tag, x in loads_of(record).items()}
            self._run.log(numbers, step=record["step"])
        except Exception as error:  # a service that died does not end a run
            if not self._failed:
                self._failed = True
                self._warn(f"wandb takes no more numbers: {error}")

    def close(self) -> None:
        """Ends wandb's run; what it has not uploaded after 15 seconds stays in the run's folder."""

        def finish() -> None:
            with contextlib.suppress(Exception):
                self._run.finish()

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(_FINISH_SECONDS)
        if thread.is_alive():
            self._warn(f"wandb has not uploaded everything; wandb sync {self._run.dir}/.. does")
