"""What happened, step by step: measured one step late, so that the loop never waits for the device.

A thread waits for the numbers of each step and writes them down. Handing over step k waits until
it has done so for step k-1, which by then the device has or is about to have finished, while step k
is already queued.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import mmap
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxramp.commandline import show_wait
from maxramp.data.keys import HELD_OUT, TASKS
from maxramp.errors import TrainingError
from maxramp.files.place import Place
from maxramp.files.run_folder import Appending
from maxramp.keys.numbers import plain_number
from maxramp.model.parts.routing import LOAD
from maxramp.rampup.schedule import Stage
from maxramp.run.keys import RunKeys

Record = dict[str, Any]

_MAX_RECORD_BYTES = 1 << 24
TASK = "task_"  # what the names of numbers of tasks begin with
OF_SET = "eval_loss_"  # and those of the losses on held-out sets that have names
_OF_BATCH = (
    *("stage", "per_device_batch_size", "gradient_accumulation_steps", "global_batch_size"),
    *("row_length", "devices", "nodes"),
)


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step or an evaluation that was handed to the devices; its numbers come when it is done."""

    numbers: Any  # its numbers, on the devices
    # called in another thread than the loop's, with these numbers on the host and with when the
    # work began and ended (`time.perf_counter`); returns what else to record, which replaces
    # numbers of the same names
    to_record: Callable[[Any, float, float], Record]


class MetricsLog:
    """Turns what steps return into records and hands them to the writers, in order; `time` is the
    unix seconds when the work of one ended.

    A step takes from the end of the step before (or of an evaluation, a save or the start-up) to
    its own end, waiting for data and compiles included.
    """

    def __init__(
        self,
        keys: RunKeys,
        writers: Sequence[Callable[[Record], None]],
        say: Callable[[str], None],
        continues: bool = False,
    ):
        """Hands records to `writers` in a thread of its own; the first step of a job that
        `continues` a run is recorded as restarted. `say` takes a line about a long first step or
        evaluation."""
        self._keys, self._writers, self._say = keys, writers, say
        self._slow = "the first step"  # no line comes before it, however long it takes
        self._begins = {"restarted": True} if continues else {}
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "metrics")
        self._pending = self._reader.submit(lambda: None)  # the last record's
        self._last_end = time.perf_counter()
        self._epoch = time.time() - self._last_end  # so that no step ends before the one before it
        self._ended = False  # closed, or by a record that ends the run: none is written after it
        self._writing = threading.Lock()

    def restart_clock(self) -> None:
        """Begins the next step now: what was done since the last record, such as a save, is not
        counted as part of it.
        """
        self._last_end = time.perf_counter()

    def add(self, **numbers: float) -> None:
        """Adds to the record of the next step; numbers of the step itself replace those of the same
        names."""
        self._begins |= numbers

    def log_step(
        self, step: int, stage: Stage, consumed_samples: int, dispatched: Dispatched
    ) -> None:
        """Takes over a step just dispatched, and waits for the record of the one before; raises
        what that raised, such as the TrainingError of `check_numbers`.

        Every scalar of it is recorded under its name; every log_period-th step has the loads of
        experts too. `consumed_samples` are those after the step.
        """

        begins, self._begins = self._begins, {}

        def record(read: dict[str, Any], begin: float, end: float) -> Record:
            check_numbers(self._keys, step, read)
            return {
                "step": step,
                **begins,
                **batch_record(stage, consumed_samples),
                **{name: value.item() for name, value in read.items() if not np.ndim(value)},
                **(_loads(read) if step % self._keys.log_period == 0 else {}),
                **dispatched.to_record(read, begin, end),
            }

        self._push(dispatched.numbers, record, self._slow)
        self._slow = ""

    def log_eval(self, step: int, consumed_samples: int, dispatched: Dispatched) -> None:
        """Queues the record of an evaluation after step `step`; raises what an earlier record
        raised."""

        def record(read: Any, begin: float, end: float) -> Record:
            position = {"step": step, "consumed_samples": consumed_samples}
            return {
                **position,
                **dispatched.to_record(read, begin, end),
                "eval_seconds": end - begin,
            }

        self._push(dispatched.numbers, record, "evaluation")

    def flush(self) -> None:
        """Waits for the records of all that the device was asked to do; raises as `log_step`."""
        self._pending.result()

    def close(self) -> None:
        """Writes no further record; `flush` before it keeps the last one."""
        with self._writing:
            self._ended = True
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _push(self, shown: Any, record: Callable[[Any, float, float], Record], slow: str) -> None:
        before, self._pending = self._pending, self._reader.submit(self._write, shown, record, slow)
        before.result()

    def _write(self, shown: Any, record: Callable[[Any, float, float], Record], slow: str) -> None:
        """Waits for the numbers of one step and gives its record to all writers, in the reading
        thread. A TrainingError ends the log."""
        wait = show_wait(self._say, f"wait     {slow}: still running")
        with wait if slow else contextlib.nullcontext():  # a wait takes a thread
            read = jax.device_get(shown)
        now = time.perf_counter()  # the step's end, whatever the loop waits for meanwhile
        with self._writing:
            if self._ended:
                return
            try:
                written = record(read, self._last_end, now)
            except TrainingError:
                self._ended = True
                raise
            self._last_end = now
            written["time"] = round(self._epoch + now, 6)
            for write in self._writers:
                write(written)


class LastEvaluation:
    """The numbers of the last step that was evaluated; a writer of records."""

    def __init__(self):
        self._step, self._numbers = -1, {}

    def __call__(self, record: Record) -> None:
        if "eval_seconds" in record:
            before = self._numbers if record["step"] == self._step else {}
            self._step, self._numbers = record["step"], before | numbers_of(record)

    def numbers_after(self, step: int) -> dict[str, float]:
        """Returns the numbers of the evaluations after a step, by name; none if it had none. Call
        it after `MetricsLog.flush`."""
        names = self._numbers if self._step == step else ()
        return {
            name: self._numbers[name]
            for name in names
            if name.startswith(("eval_", TASK)) and name != "eval_seconds"
        }


def _loads(read: Mapping[str, Any]) -> Record:
    """Returns each expert's share of its layer's tokens in four digits, a list for each layer."""
    if LOAD not in read:
        return {}
    return {LOAD: [[float(f"{share:.4g}") for share in layer] for layer in read[LOAD]]}


def batch_record(stage: Stage, consumed_samples: int) -> Record:
    """Returns what a record says of a step's batch; `consumed_samples` are those after the step."""
    return {
        "stage": stage.index,
        "per_device_batch_size": plain_number(stage.per_device_batch_size),
        "gradient_accumulation_steps": stage.gradient_accumulation_steps,
        "global_batch_size": stage.global_batch_size,
        "row_length": stage.spec.row_length,
        "devices": stage.devices,
        "nodes": stage.nodes,
        "consumed_samples": consumed_samples,
    }


_TEXT_SUMS = {"loss": "tokens", "tokens": "tokens"}


def evaluation_from_sums(
    sums: Mapping[str, Sequence[tuple[jax.Array, ...]]],
    by_batch: bool,
    shown: Mapping[str, str] = _TEXT_SUMS,
) -> Dispatched:
    """Makes an evaluation of `sums` that the devices were just asked for: by the name of each
    held-out set (at least one; "" of an only one) its tuples, of every batch if `by_batch`, else
    one of all. `shown` names what a tuple has, each with its divisor's name among them; divisors
    and tokens are counts. The numbers of a named set end with its name."""

    def averages(batches: np.ndarray, end: str) -> Record:
        total = dict(zip(shown, batches.sum(0), strict=True))
        counts = {"tokens", *shown.values()}
        numbers = {
            f"eval_{name}{end}": int(x) if name in counts else _divide(x, total[shown[name]])
            for name, x in total.items()
        }
        if by_batch:
            for name, column in zip(shown, batches.T, strict=True):
                numbers[f"eval_batch_{name}{end}"] = column.tolist()
        return numbers

    def to_record(read: dict[str, list[tuple[Any, ...]]], begin: float, end: float) -> Record:
        # Added here, so that each keeps all digits.
        sets = {name: np.asarray(batches, np.float64) for name, batches in read.items()}
        numbers = averages(np.concatenate(list(sets.values())), "")
        for name, batches in sets.items():
            numbers |= averages(batches, f"_{name}") if name else {}
        return numbers

    return Dispatched(dict(sums), to_record)


def _divide(total: float, count: float) -> float:
    return float(total / count) if count else math.nan


def names_of_sums(sets: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Names the numbers of an evaluation on held-out sets, as `evaluation_from_sums` does; "" is
    the name of an only set."""
    ends = ["", *(f"_{name}" for name in sets if name)]
    return [f"eval_{name}{end}" for end in ends for name in shown]


def numbers_of(record: Record) -> dict[str, int | float]:
    """Selects what can be drawn as a curve over steps. What steps and evaluations both have is the
    step's alone, or the curve would have two points there.
    """
    own = "step", "time", *(("goodput", "save_seconds") if "eval_seconds" in record else ())
    return {k: v for k, v in record.items() if k not in own and type(v) in (int, float)}


def loads_of(record: Record) -> dict[str, np.ndarray]:
    """Returns the loads of each layer of experts by a tag; 1 is the mean of the layer."""
    layers = record.get(LOAD, ())
    return {f"experts/layer_{i:02}": np.array(x) * len(x) for i, x in enumerate(layers)}


def tag_of(name: str) -> str:
    """Returns the name of a number behind its group: learning/loss, batch/stage, speed/...

    Numbers of preferences have groups of their own, rewards/ and logps/, as in TRL.
    """
    if "/" in name:
        return name
    if name.startswith("eval_") and name != "eval_seconds":  # it may end with a set's name
        is_count = name.startswith(("eval_tokens", "eval_mtp_tokens"))
        return f"{'batch' if is_count else 'learning'}/{name}"
    if name.startswith(TASK):
        return f"tasks/{name}"
    if name in _OF_BATCH or name.endswith(("_samples", "_tokens")):
        return f"batch/{name}"
    if name.endswith(("_seconds", "_per_second", "_per_device", "goodput")):
        return f"speed/{name}"
    if name.startswith(("expert_", "dropped_")):
        return f"experts/{name}"
    return f"noise/{name}" if "noise_" in name else f"learning/{name}"


def check_numbers(keys: RunKeys, step: int, read: Mapping[str, Any]) -> None:
    """Raises a TrainingError where a step's loss or gradient norm (in `read`, by name) ends the
    run, or too many skipped steps in a row do."""
    if bad_steps := int(read.get("bad_steps", 0)):
        if 0 < keys.skip_bad_steps <= bad_steps:
            loss, norm = float(read["loss"]), float(read["grad_norm"])
            raise TrainingError(
                f"steps {step - bad_steps + 1} to {step} were skipped, the last with loss="
                f"{loss:.4g} and grad_norm={norm:.4g}; skip_bad_steps={keys.skip_bad_steps} in a "
                "row end the run; lower learning_rate, or look at the data of these steps"
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
                    f"{name}={value} at step {step}; {key}=True ends the run, and the state after "
                    "that step is not saved; lower learning_rate, or look at the data of this step"
                )


def as_json(value: Any) -> Any:
    """Replaces NaN and infinity by None, in lists and objects too."""
    if isinstance(value, dict):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_records(path: pathlib.Path, first_step: int, pending: Sequence[str] = ()) -> int:
    """Moves the records of metrics.jsonl from step `first_step` on to metrics.dropped.jsonl.

    These are the lines after the last one to keep: what a kill tore at the end goes too, and the
    `pending` evaluations (HELD_OUT, TASKS) after the step before, which come again. Returns how
    many steps were moved; an OSError cuts nothing.
    """
    if not path.exists() or not path.stat().st_size:
        return 0

    def is_kept(line: bytes) -> bool:
        record = _parse(line)
        if not (record and record["step"] < first_step and line.endswith(b"\n")):
            return False
        return record["step"] < first_step - 1 or _kind_of_evaluation(record) not in pending

    with path.open("r+b") as file:
        moved = []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = len(content)
            while end:
                begin = content.rfind(b"\n", 0, end - 1) + 1
                if is_kept(line := content[begin:end]):
                    break
                moved.append(line)
                end = begin
        if moved:
            kept = Appending(path.with_name("metrics.dropped.jsonl"))
            kept.append(b"".join(reversed(moved)))
            kept.flush()  # an OSError: then nothing is cut
            kept.close()
        file.truncate(end)
    return sum(record is None or "loss" in record for record in map(_parse, moved))


def _kind_of_evaluation(record: Record) -> str | None:
    if "eval_seconds" not in record:
        return None
    return TASKS if any(name.startswith(TASK) for name in record) else HELD_OUT


def read_lines(path: Place) -> Iterator[Any]:
    """Yields the JSON values of a file's lines, none without the file; leaves out what is no JSON,
    such as a line that a kill tore.
    """
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            yield json.loads(line)


def read_records(path: Place) -> list[Record]:
    """Reads all records of metrics.jsonl, none without the file. Leaves out other lines, such as
    one that a kill tore.
    """
    return list(filter(_is_record, read_lines(path)))


def read_last(path: pathlib.Path) -> Record:
    """Reads the last whole record of metrics.jsonl; empty without one."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_RECORD_BYTES))
        lines = file.read().splitlines()
    return next(filter(None, map(_parse, reversed(lines))), {})


def is_count(value: Any) -> bool:
    """Tells whether a value of a record is a number as a run writes it: seconds, steps, tokens."""
    return type(value) in (int, float) and 0 <= value < 1 << 53


def _parse(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return record if _is_record(record) else None


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("step")) is int
