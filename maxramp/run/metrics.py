"""What happened, step by step: measured one step late, so that the loop never waits for the device.

A thread waits for the numbers of each step and writes them down. Handing over step k waits until
it has done so for step k-1, which by then the device has or is about to have finished, while step k
is already queued.
"""

import collections
import concurrent.futures
import contextlib
import json
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxramp.errors import TrainingError
from maxramp.folders.place import Place
from maxramp.rampup.numbers import plain_number
from maxramp.rampup.schedule import Stage
from maxramp.run.keys import RunKeys

Record = dict[str, Any]


class MetricsLog:
    """Turns what steps return into records and hands them to the writers, in order.

    `step_seconds` is the time from the end of the step before (or of an evaluation, a save or the
    start-up) to the end of this one, waiting for data and compiles included.
    """

    def __init__(
        self,
        keys: RunKeys,
        flops_per_token: float,
        max_target_length: int,
        writers: Sequence[Callable[[Record], None]],
    ):
        """
        Args:
          keys: which records end the run.
          flops_per_token: of a training step.
          max_target_length: tokens of a row.
          writers: what every record goes to.
        """
        self._keys, self._writers = keys, writers
        self._flops_per_token, self._row_tokens = flops_per_token, max_target_length
        self._pending: collections.deque[concurrent.futures.Future] = collections.deque()
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "metrics")
        self._last_end = time.perf_counter()
        self._ended = False  # closed, or by a record that ends the run: none is written after it
        self._writing = threading.Lock()

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
        """Takes over the metrics of a step just dispatched, and waits for those of the one before.

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
            skipped = {"bad_steps": int(read["bad_steps"])} if "bad_steps" in read else {}
            check_numbers(self._keys, step, read)
            high, low = (int(word) for word in read["batch_fingerprint"])
            tokens = stage.global_batch_size * self._row_tokens
            targets = int(read["target_tokens"])
            flops = tokens * self._flops_per_token / stage.devices
            return {
                **of_batch(step, stage, consumed_samples),
                "consumed_tokens": consumed_samples * self._row_tokens,
                "target_tokens": targets,
                "loss": float(read["loss"]),
                "grad_norm": float(read["grad_norm"]),
                "learning_rate": float(read["learning_rate"]),
                "step_seconds": seconds,
                "data_seconds": data_seconds,
                "compile_seconds": compile_seconds,
                "tokens_per_second": tokens / seconds,
                "target_tokens_per_second": targets / seconds,
                "tflops_per_device": flops / seconds / 1e12,
                "batch_fingerprint": f"{high:08x}{low:08x}",
                **{name: float(value) for name, value in read.items() if "noise_" in name},
            } | skipped

        self._push(metrics, finish)

    def log_eval(
        self,
        step: int,
        consumed_samples: int,
        sums: Sequence[tuple[jax.Array, jax.Array]],
        by_batch: bool,
    ) -> None:
        """Takes over an evaluation just dispatched, after step `step`.

        Args:
          step: the last before it.
          consumed_samples: before it.
          sums: cross-entropy and target tokens: of all batches, or one pair of each.
          by_batch: whether there is one of each, to be logged.
        """

        def finish(read: list[tuple[Any, Any]], seconds: float) -> Record:
            batches = {}
            if not by_batch:
                cross_entropy, tokens = read[0]
            else:  # added here, so that each batch keeps all digits
                of_batches = np.asarray(read, np.float64)
                cross_entropy, tokens = of_batches.sum(0)
                for name, column in zip(("cross_entropy", "tokens"), of_batches.T, strict=True):
                    batches[f"eval_batch_{name}"] = column.tolist()
            return {
                "step": step,
                "consumed_samples": consumed_samples,
                "eval_loss": float(cross_entropy / tokens),
                "eval_tokens": int(tokens),
                "eval_seconds": seconds,
            } | batches

        self._push(list(sums), finish)

    def flush(self) -> None:
        """Waits for everything that is pending: the device has then done all that was asked."""
        self._wait(keep=0)

    def close(self) -> None:
        """Waits for nothing more, and writes nothing more."""
        with self._writing:
            self._ended = True
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _push(self, arrays: Any, finish: Callable) -> None:
        self._pending.append(self._reader.submit(self._record, arrays, finish))
        self._wait(keep=1)

    def _wait(self, keep: int) -> None:
        while len(self._pending) > keep:
            self._pending.popleft().result()

    def _record(self, arrays: Any, finish: Callable) -> None:
        read = jax.device_get(arrays)
        now = time.perf_counter()  # the step's end, whatever the loop waits for meanwhile
        with self._writing:
            if self._ended:
                return
            try:
                record = finish(read, now - self._last_end)
            except TrainingError:
                self._ended = True
                raise
            self._last_end = now
            for write in self._writers:
                write(record)


def of_batch(step: int, stage: Stage, consumed_samples: int) -> Record:
    """What the record of a step says of its batch.

    Args:
      step: 0-based.
      stage: the step's.
      consumed_samples: after the step.
    """
    return {
        "step": step,
        "stage": stage.index,
        "per_device_batch_size": plain_number(stage.per_device_batch_size),
        "gradient_accumulation_steps": stage.gradient_accumulation_steps,
        "global_batch_size": stage.global_batch_size,
        "consumed_samples": consumed_samples,
    }


def check_numbers(keys: RunKeys, step: int, read: Mapping[str, Any]) -> None:
    """Checks that a step's loss and gradient norm are numbers, or that it was skipped.

    Args:
      keys: which numbers end the run.
      step: 0-based.
      read: the step's metrics, on the host.

    Raises:
      TrainingError: they end the run.
    """
    stands = ", the last checkpoint is from before" if keys.enable_checkpointing else ""
    if bad_steps := int(read.get("bad_steps", 0)):
        if bad_steps >= keys.skip_bad_steps:
            raise TrainingError(
                f"the gradients of steps {step - bad_steps + 1} to {step} were not finite; "
                f"skip_bad_steps={bad_steps} in a row end the run{stands}; lower "
                "learning_rate, or look at the data of these steps"
            )
        return
    for name in ("loss", "grad_norm"):
        value = float(read[name])
        for key, bad in (
            ("abort_on_nan_loss", math.isnan(value)),
            ("abort_on_inf_loss", math.isinf(value)),
        ):
            if bad and getattr(keys, key):
                raise TrainingError(
                    f"{name}={value} at step {step}; {key}=True ends the run{stands}; lower "
                    "learning_rate, or look at the data of this step"
                )


class JsonlWriter:
    """metrics.jsonl: one object per optimizer step, and one per evaluation.

    A disk that is full for a while loses nothing: what could not be written waits in memory.
    """

    def __init__(self, path: pathlib.Path):
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def __call__(self, record: Record) -> None:
        """Appends a record; a number that JSON lacks (NaN, infinity) is null."""
        self._unwritten += (json.dumps(as_json(record)) + "\n").encode()
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


def as_json(value: Any) -> Any:
    """A value whose numbers JSON has: null for NaN and infinity, in lists and objects too."""
    if isinstance(value, dict):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_records(path: pathlib.Path, first_step: int) -> int:
    """Moves the records of metrics.jsonl from step `first_step` on to metrics.dropped.jsonl.

    What a kill tore, and every line after it, goes there too.

    Returns:
      The steps that were moved.
    """
    if not path.exists():
        return 0
    end, dropped = 0, 0
    with path.open("r+b") as file:
        for line in file:
            record = _parse(line)
            if not dropped and record and record["step"] < first_step and line.endswith(b"\n"):
                end += len(line)
            else:
                dropped += record is None or "loss" in record
        file.seek(end)
        if rest := file.read():
            with path.with_name("metrics.dropped.jsonl").open("ab") as kept:
                kept.write(rest if rest.endswith(b"\n") else rest + b"\n")
        file.truncate(end)
    return dropped


def read_records(path: Place, steps: int | None = None) -> list[Record]:
    """The records of metrics.jsonl, of the first `steps` steps if given.

    A last line that was torn by a kill is left out.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [record for record in map(_parse, lines) if record is not None]
    return [r for r in records if steps is None or r["step"] < steps]


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
