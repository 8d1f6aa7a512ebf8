"""What happened, step by step: measured one step late, so that the loop never waits for the device.

Handing over step k reads the numbers of step k-1, which by then the device has or is about to have
finished, while step k is already queued.
"""

import collections
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax

from maxramp.config import Config
from maxramp.errors import TrainingError
from maxramp.model import training_flops_per_token
from maxramp.notations import plain_number
from maxramp.rampup import Stage

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step or an evaluation that was dispatched and not yet read."""

    arrays: dict[str, jax.Array]
    finish: Callable[[dict[str, Any], float], Record]


class MetricsLog:
    """Turns what steps return into records and hands them to the writers, in order.

    `step_seconds` is the time from the end of the step before (or of an evaluation, a save or the
    start-up) to the end of this one, waiting for data and compiles included.
    """

    def __init__(self, config: Config, writers: list[Callable[[Record], None]]):
        self._config, self._writers = config, writers
        self._pending: collections.deque[_Pending] = collections.deque()
        self._flops_per_token = training_flops_per_token(config)
        self._last_end = time.perf_counter()

    def restart_clock(self) -> None:
        """What was done since the last record (a save, say) does not count as part of a step."""
        self._last_end = time.perf_counter()

    def log_step(
        self,
        step: int,
        stage: Stage,
        consumed_samples: int,
        metrics: dict[str, jax.Array],
        data_seconds: float,
        compile_seconds: float,
    ) -> None:
        """Takes over the metrics of a step just dispatched and reads those of the one before.

        Args:
          step: 0-based.
          stage: the step's.
          consumed_samples: after the step.
          metrics: from `train_step`.
          data_seconds: what the loop waited for this step's rows.
          compile_seconds: what the loop waited for this step's program.

        Raises:
          TrainingError: the step before had a loss that ends the run.
        """

        def finish(read: dict[str, Any], seconds: float) -> Record:
            self._check_finite(step, read)
            high, low = (int(word) for word in read["batch_fingerprint"])
            tokens = stage.global_batch_size * self._config.max_target_length
            flops = tokens * self._flops_per_token / stage.devices
            return {
                "step": step,
                "stage": stage.index,
                "per_device_batch_size": plain_number(stage.per_device_batch_size),
                "gradient_accumulation_steps": stage.gradient_accumulation_steps,
                "global_batch_size": stage.global_batch_size,
                "consumed_samples": consumed_samples,
                "consumed_tokens": consumed_samples * self._config.max_target_length,
                "loss": float(read["loss"]),
                "grad_norm": float(read["grad_norm"]),
                "learning_rate": float(read["learning_rate"]),
                "step_seconds": seconds,
                "data_seconds": data_seconds,
                "compile_seconds": compile_seconds,
                "tokens_per_second": tokens / seconds,
                "tflops_per_device": flops / seconds / 1e12,
                "batch_fingerprint": f"{high:08x}{low:08x}",
            }

        self._push(_Pending(metrics, finish))

    def log_eval(self, step: int, consumed_samples: int, sums: tuple[jax.Array, jax.Array]) -> None:
        """Takes over the sums of an evaluation just dispatched, after step `step`."""

        def finish(read: dict[str, Any], seconds: float) -> Record:
            return {
                "step": step,
                "consumed_samples": consumed_samples,
                "eval_loss": float(read["cross_entropy"] / read["tokens"]),
                "eval_tokens": int(read["tokens"]),
                "eval_seconds": seconds,
            }

        self._push(_Pending({"cross_entropy": sums[0], "tokens": sums[1]}, finish))

    def flush(self) -> None:
        """Reads everything that is pending: after it the device has finished all that was asked."""
        self._read(keep=0)

    def _push(self, pending: _Pending) -> None:
        for array in pending.arrays.values():
            array.copy_to_host_async()
        self._pending.append(pending)
        self._read(keep=1)

    def _read(self, keep: int) -> None:
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            read = jax.device_get(pending.arrays)
            now = time.perf_counter()
            record = pending.finish(read, now - self._last_end)
            self._last_end = now
            for write in self._writers:
                write(record)

    def _check_finite(self, step: int, read: dict[str, Any]) -> None:
        for name in ("loss", "grad_norm"):
            value = float(read[name])
            for key, bad in (
                ("abort_on_nan_loss", math.isnan(value)),
                ("abort_on_inf_loss", math.isinf(value)),
            ):
                if bad and self._config[key]:
                    raise TrainingError(
                        f"{name}={value} at step {step}; {key}=True ends the run, the last "
                        "checkpoint stands before it; lower learning_rate, or look at the data "
                        "of this step"
                    )


class JsonlWriter:
    """metrics.jsonl: one object per optimizer step, and one per evaluation.

    A run that is started again drops the lines past the checkpoint that it goes on from, so that a
    step appears once.
    """

    def __init__(self, path: pathlib.Path, first_step: int):
        kept = [json.dumps(record) + "\n" for record in read_records(path, first_step)]
        shortened = path.with_suffix(".tmp")
        shortened.write_text("".join(kept))
        shortened.replace(path)  # at once: a kill leaves the old file or the new one
        self._file = path.open("a", buffering=1)

    def __call__(self, record: Record) -> None:
        """Appends a record; a number that JSON lacks (NaN, infinity) is null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_records(path: pathlib.Path, steps: int | None = None) -> list[Record]:
    """The records of metrics.jsonl, of the first `steps` steps if given.

    A last line that was torn by a kill is left out.
    """
    records = []
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if steps is None or record["step"] < steps:
            records.append(record)
    return records


class TensorBoardWriter:
    """tensorboard/: the same numbers over steps, and the loss over consumed samples."""

    def __init__(self, folder: pathlib.Path, first_step: int):
        self._folder, self._first_step, self._writer = folder, first_step, None

    def __call__(self, record: Record) -> None:
        """Writes the numbers of a record."""
        if self._writer is None:  # imported when the first step is done, not before it starts
            import tensorboardX

            self._writer = tensorboardX.SummaryWriter(
                str(self._folder), purge_step=self._first_step
            )
        for name, value in record.items():
            if name != "step" and not isinstance(value, str):
                self._writer.add_scalar(name, value, record["step"])
        for name in ("loss", "eval_loss"):
            if name in record:
                self._writer.add_scalar(
                    f"{name}_over_samples", record[name], record["consumed_samples"]
                )

    def close(self) -> None:
        """Writes out what is buffered."""
        if self._writer is not None:
            self._writer.close()
