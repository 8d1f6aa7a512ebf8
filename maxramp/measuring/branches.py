"""Which batch size still costs nothing: branches of a run, compared on the same held-out rows.

The critical batch size as Merrill et al. measure it (arXiv 2505.23971): from a checkpoint, each
size k times the run's trains on a window of tokens at sqrt(k) times the learning rate; sizes are
fine as long as no loss is more than a tolerance above that of any smaller size. Here all branches
train on the same rows and are evaluated on the same batches of held-out rows, so that their losses
are compared in pairs.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from maxramp.checkpoints import folder as folder_lib
from maxramp.commandline import Throttle, count
from maxramp.config.choices import CHOICES
from maxramp.config.keys import Config
from maxramp.config.load import dump_config, load, unset_batch
from maxramp.errors import EXIT_PREEMPTED, ConfigError
from maxramp.files.place import Place, place, write_whole
from maxramp.keys import base
from maxramp.keys.choices import find_unmade
from maxramp.keys.numbers import parse_count
from maxramp.measuring.noise import KINDS, noise_blocks, student
from maxramp.objectives.rewards import REWARDS
from maxramp.processes.bound import bind
from maxramp.rampup.phases import MIXTURE, Phase
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.job_schedule import resume_point
from maxramp.run.metrics import as_json, read_records
from maxramp.stage import ROPE_KEYS
from maxramp.training.learning_rate import LearningRate

# A branch has these as base.yml does: what a run measures or hands over beside its held-out loss,
# and what changed in its rows or weights before the checkpoint.
DEFAULTED = (
    *("export_huggingface", "evaluate_tasks", "checkpoint_best", "log_gradient_noise_scale"),
    *("log_token_statistics", "wandb_project", "profiler", "allow_changed"),
)

_KEPT_PHASES = MIXTURE, *ROPE_KEYS

_FEWEST_BATCHES = 8  # fewer say too little about their own spread


@dataclasses.dataclass(frozen=True)
class Branch:
    """A batch size that was trained."""

    rows: int  # global batch size
    steps: int  # of the window
    learning_rate: float  # throughout
    cross_entropy: np.ndarray  # sums over each batch of held-out rows, after the window
    tokens: np.ndarray  # of the same; of pairs, how many

    @property
    def loss(self) -> float:
        """Nats per token on held-out rows; infinite if it is not a number."""
        loss = float(self.cross_entropy.sum() / self.tokens.sum())
        return loss if math.isfinite(loss) else math.inf


def difference(branch: Branch, other: Branch) -> tuple[float, float | None, float | None]:
    """Returns how much a branch's loss is above another's, and the 90% interval of that. Both must
    have the same held-out batches.

    The interval says how far the held-out rows could mislead: what it would be on all text. It is
    a ratio's, linearized, with Student's t over the batches.

    Returns:
      The difference and the ends of its interval, nats per token; no ends with fewer than eight
      batches. All are infinite where a loss is.
    """
    tokens, count = branch.tokens, len(branch.tokens)
    if branch.loss == math.inf:
        mean, half = math.inf, 0.0
    elif other.loss == math.inf:
        mean, half = -math.inf, 0.0
    else:
        excess, freedom = branch.cross_entropy - other.cross_entropy, max(1, count - 1)
        mean = float(excess.sum() / tokens.sum())
        spread = math.sqrt(count / freedom * float(((excess - mean * tokens) ** 2).sum()))
        half = student(freedom) * spread / float(tokens.sum())
    return (mean, None, None) if count < _FEWEST_BATCHES else (mean, mean - half, mean + half)


def compare(branches: Sequence[Branch], tolerance: float) -> dict[str, Any]:
    """Compares every size with all smaller ones.

    Args:
      branches: of one window and the same held-out batches, the smallest size first, at least one;
        its loss must be finite.
      tolerance: nats per token, 0 or more.

    Returns:
      `sizes`, each with its loss, the largest of its differences to smaller sizes (`above`, and
      the largest ends of their intervals, `low` and `high`) and whether it and all smaller sizes
      are `within` the tolerance; `largest`, the largest size within; and its interval: `surely`,
      the largest size that is within by `high`, and `possibly`, by `low`. Where `difference` has
      no ends, these four are None.
    """
    sizes = []
    for index, branch in enumerate(branches):
        differences = [difference(branch, smaller) for smaller in branches[:index]]
        columns = zip(*(differences or [(0.0, 0.0, 0.0)]), strict=True)
        most = [None if None in column else max(column) for column in columns]
        size = {name: getattr(branch, name) for name in ("rows", "steps", "learning_rate", "loss")}
        sizes.append(size | dict(zip(("above", "low", "high"), most, strict=True)))
    largest = {
        name: _largest_within(sizes, key, tolerance)
        for name, key in (("largest", "above"), ("surely", "high"), ("possibly", "low"))
    }
    for size in sizes:
        size["within"] = size["rows"] <= largest["largest"]
    return {"sizes": sizes} | largest


def _largest_within(sizes: list[dict[str, Any]], key: str, tolerance: float) -> int | None:
    """Returns the last size before the first that is above the tolerance; None without ends."""
    if any(size[key] is None for size in sizes):
        return None
    within = itertools.takewhile(lambda size: size[key] <= tolerance, sizes)
    return [size["rows"] for size in within][-1]  # the smallest size always is


class Experiment:
    """The branches of one checkpoint over one window of rows."""

    def __init__(self, run: str, at: int, sizes: str, tokens: str, keys: Sequence[str]):
        """Plans branches, and trains nothing. A ConfigError if an argument does not fit the run.

        Args:
          run: a folder or an address, of a run that is evaluated by its loss.
          at: the step of a checkpoint, where the learning rate is above 0.
          sizes: global batch sizes, two or more, with commas between them.
          tokens: those of the window; "" = a tenth of the run's.
          keys: key=value for every branch, but none that a branch has for itself.
        """
        self._run, self._sizes, self._keys = place(run).absolute(), parse_sizes(sizes), list(keys)
        self._position = position = _checkpoint(self._run, at)
        self._config = config = Config.from_values(base.base() | position.config)
        if config.objective is REWARDS:
            raise ConfigError(
                f"{run}: program=grpo: branches are compared on held-out rows, and this run is "
                "evaluated by rewards; give a run of maxramp.train"
            )
        self._first_sample, self._batch = (
            position.consumed_samples,
            position.stage()["global_batch_size"],
        )
        batch, self._row = config.batch, config.batch.max_target_length
        ramp = RampupBatchManager(batch, batch.num_devices, resume_point(batch, position))
        self._rate = LearningRate.from_keys(config.learning_rate, ramp)
        if not (rate := float(self._rate(self._first_sample, self._batch))) > 0:
            raise ConfigError(
                f"--at {at}: the learning rate there is {rate:g}, so no branch would learn; "
                "give a checkpoint after the first step and before the run's last"
            )
        self._run_samples = ramp.total_samples
        wanted = parse_count(tokens) if tokens else ramp.total_samples * self._row // 10
        if not wanted:
            raise ConfigError(f"--tokens {tokens} must be a number of tokens, such as 20M")
        self._samples = window(self._sizes, -(-wanted // self._row), self._row)
        self._folder = self._run / "branches" / f"{at}-{self._samples}"
        for key in keys:
            if (name := key.partition("=")[0]) in self._own_keys(self._sizes[0]):
                raise ConfigError(f"{key}: a branch has its own {name}; leave it out")

    def train(self, out: IO[str]) -> int:
        """Trains the branches that are not done, and prints progress to `out`; in the main thread.
        Returns 0, or a failed branch's exit status; a ConfigError for what cannot be compared."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_keys()
        # Branches that are done are compared too, whichever sizes this command names.
        begun = [int(path.name) for path in folder_lib.step_folders(self._folder)]
        self._sizes = sorted({*self._sizes, *filter(self._evaluation, begun)})
        lines = {n: self._command_line(n) for n in self._sizes if not self._evaluation(n)}
        say = functools.partial(print, file=out, flush=True)
        fewest = count(self._samples // self._sizes[-1], "step")
        say(f"window   {self._samples:,} rows, {fewest} of the largest; give --tokens for more")
        tell = Throttle(say)
        for number, size in enumerate(self._sizes, 1):
            if size in lines:
                steps = count(self._samples // size, "step")
                say(
                    f"branch   {number} of {len(self._sizes)}: batch {size:,}, {steps} at "
                    f"{self._rate_of(size):.3g}"
                )
                status, log = _train(lines[size], functools.partial(self._show, tell, steps))
                write_whole(self._folder / f"{size}.log", log.encode())
                if status == EXIT_PREEMPTED:
                    checkpoints = self._folder / str(size) / "checkpoints"
                    step = (folder_lib.newest(checkpoints)[0] or self._position).step
                    say(f"stopped  at step {step:,}; run the same command again to continue")
                if status:
                    say(f"log      {self._folder / f'{size}.log'}")
                    return status
            self._branch(size)  # what cannot be compared is refused at once
        return 0

    def result(self, tolerance: float) -> dict[str, Any]:
        """Compares all sizes, after `train` returned 0; returns what it writes to branch.json. A
        ConfigError if a branch has no evaluation, or one of other rows."""
        result = compare([self._branch(size) for size in self._sizes], tolerance)
        trained = read_records(self._folder / str(self._sizes[0]) / "metrics.jsonl")
        result |= {
            "run": str(self._run),
            "share_of_run": self._samples / self._run_samples,
            "step": self._position.step,
            "first_sample": self._first_sample,
            "samples": self._samples,
            "row_tokens": self._row,
            "target_tokens": sum(record.get("target_tokens", 0) for record in trained),
            "batch": self._batch,
            "tolerance": tolerance,
            "noise": self._noise(result["largest"]),
            "file": str(self._folder / "branch.json"),
        }
        text = json.dumps(as_json(result), indent=2)
        write_whole(self._folder / "branch.json", f"{text}\n".encode())
        return result

    def _own_keys(self, size: int) -> dict[str, Any]:
        folder = {"base_output_directory": str(self._folder), "run_name": str(size)}
        own = branch_keys(self._config, self._position, self._rate, size, self._samples)
        return folder | own

    def _command_line(self, size: int) -> list[str]:
        """Writes SIZE.yml; returns the arguments for maxramp.train. A ConfigError as `load`."""
        path = self._folder / f"{size}.yml"
        keys = inherit_keys(self._config, self._first_sample, self._own_keys(size))
        write_whole(path, dump_config(Config.from_values(keys)).encode())
        line = [str(path), *self._keys]
        load(line, "train", note=lambda note: None)
        return line

    def _show(self, tell: Callable[[str], None], steps: str, line: str) -> None:
        """Tells how far a branch is, if a line of its log is that of a step."""
        if step := re.match(r"step +(\d+)/\d+ +stage .*?(loss [\d.]+)", line):
            done = int(step[1]) - self._position.step
            tell(f"         step {done:,} of {steps}, {step[2]}")

    def _rate_of(self, size: int) -> float:
        return self._own_keys(size)["learning_rate"]

    def _evaluation(self, size: int) -> dict[str, Any] | None:
        """Returns the record of the evaluation after the window; None before that is done."""
        records = read_records(self._folder / str(size) / "metrics.jsonl")
        end = self._first_sample + self._samples
        for record in reversed(records):
            if record["consumed_samples"] == end and "eval_batch_tokens" in record:
                return record
        return None

    def _branch(self, size: int) -> Branch:
        """Returns a branch that is done; a ConfigError if it cannot be compared with the first."""
        folder = self._folder / str(size)
        first, evaluation = (self._evaluation(n) for n in (self._sizes[0], size))
        if not evaluation:
            raise ConfigError(
                f"{folder}: the branch ended without an evaluation of its held-out rows; move the "
                "folder away and start again"
            )
        divisor = self._config.objective.divisor
        losses, tokens = (
            np.array(evaluation[f"eval_batch_{name}"], float) for name in ("loss", divisor)
        )
        branch = Branch(size, self._samples // size, self._rate_of(size), losses, tokens)
        if evaluation["eval_batch_tokens"] != first["eval_batch_tokens"]:
            raise ConfigError(
                f"{folder}: evaluated in other batches than size {self._sizes[0]} "
                f"({len(tokens)} and {len(first['eval_batch_tokens'])} of them), as on other "
                "devices; move it away and start again on the same devices"
            )
        if size == self._sizes[0] and branch.loss == math.inf:
            raise ConfigError(
                f"{folder}: the held-out loss is not a number, so there is nothing to compare "
                "with; take another checkpoint or other sizes"
            )
        return branch

    def _check_keys(self) -> None:
        """Refuses other keys than those of the branches that have begun; writes today's."""
        path, keys = self._folder / "keys.json", json.dumps(sorted(self._keys))
        before = path.read_bytes().decode() if path.exists() else keys
        if before != keys and any(self._folder.glob("*/checkpoints/[0-9]*")):
            raise ConfigError(
                f"{self._folder}: branches there ran with the keys {before}, not with {keys}; give "
                "the same ones, or move the folder away"
            )
        write_whole(path, keys.encode())

    def _noise(self, largest: int) -> dict[str, dict[str, Any]]:
        """Returns the run's noise scale in rows by kind, within a window's length of the
        checkpoint, and how many times that `largest` is."""
        first, last = self._first_sample - self._samples, self._first_sample + self._samples
        records = read_records(self._run / "metrics.jsonl")
        near = [r for r in records if first < r["consumed_samples"] <= last]
        return {
            f"{kind}noise_scale": {
                **{"noise_scale": scale, "low": low, "high": high},
                "factor": largest / scale,
            }
            for kind in KINDS
            for scale, low, high in (block.rows for block in noise_blocks(near, kind, 1))
            if scale
        }


def inherit_keys(config: Config, sample: int, own_keys: dict[str, Any]) -> dict[str, Any]:
    """Returns all keys of a branch: those that a resolved run has at a sample, and its own."""
    phase = dict(config.batch.phase_at(sample).values)
    phase |= {name: config.values[name] for name in _KEPT_PHASES}
    defaults = {name: base.base()[name] for name in DEFAULTED}
    keys = config.values | phase | defaults | own_keys
    return keys | find_unmade(CHOICES, keys, keys)  # those of a later phase, for example


def branch_keys(
    config: Config, position: folder_lib.Checkpoint, rate: LearningRate, size: int, samples: int
) -> dict[str, Any]:
    """Returns the keys that a branch of a resolved run has for itself, but for its folder.

    From the checkpoint on it trains batches of `size` on `samples`, at the run's learning rate
    there times sqrt(size / batch). Half-lives in samples stay: they count by the run's reference
    batch, which a threshold before the checkpoint gives.
    """
    first, keys = position.consumed_samples, config.optimizer
    batch = position.stage()["global_batch_size"]
    scale = math.sqrt(size / batch)
    pace = rate.pace(batch).rate * scale
    decays = {
        name: config.values[name] / pace
        for name in ("adam_weight_decay", "muon_weight_decay")
        if name in keys.half_lives_in_samples
    }
    has_base = config.model.lora_rank or config.objective.has_reference
    phases = {phase.name: _kept_changes(phase, first) for phase in config.batch.phase_list}
    return (
        decays
        | unset_batch()
        | {
            "step_batch_size_schedule": f"0:{rate.reference} {first}:{size}",
            "step_batch_size_unit": "samples",
            "phases": {name: changes for name, changes in phases.items() if changes},
            "total_samples": first + samples,
            "learning_rate": float(rate(first, batch)) * scale,
            "learning_rate_by": "samples",
            "lr_schedule_type": "wsd",  # constant: no warm-up, and no decay
            "warmup_steps_fraction": 0.0,
            "wsd_decay_steps_fraction": 0.0,
            "learning_rate_schedule_steps": -1,
            "batch_size_lr_scaling": "none",
            "batch_size_lr_reference": "initial",
            "program": "train",
            "load_full_state_path": str(position.path),
            "load_parameters_path": config.checkpoints.load_parameters_path if has_base else "",
            "eval_interval": 10**12,  # at the end alone
            "eval_samples": -1,
            "log_eval_batches": True,
            "enable_checkpointing": True,
            "max_num_checkpoints_to_keep": 1,
            "checkpoint_keep_period": -1,
            "stop_at_stage_end": False,
            "stop_at_node_change": False,
        }
    )


def _kept_changes(phase: Phase, sample: int) -> dict[str, Any]:
    """Returns what stays in a phase: a mixture's rows depend on where those before it begin, and
    released weights have the positions of their config.json until a phase before `sample` changes
    them."""
    names = _KEPT_PHASES if phase.first_sample <= sample else (MIXTURE,)
    return {name: phase.changes[name] for name in names if name in phase.changes}


def parse_sizes(text: str) -> list[int]:
    """Returns the sizes of --sizes, the smallest first; a ConfigError unless two or more differ."""
    parts = text.split(",")
    sizes = sorted({int(part) for part in parts if part.isascii() and part.strip().isdigit()})
    if len(sizes) != len(parts) or len(sizes) < 2 or sizes[0] < 1:
        raise ConfigError(
            f"--sizes {text} must be two or more different global batch sizes, such as 8,16,32"
        )
    return sizes


def window(sizes: Sequence[int], wanted: int, row_tokens: int) -> int:
    """Returns how many rows all branches train on, `wanted` or more: every size ends with the same
    row. A ConfigError, whose remedy is in tokens, if that takes more than twice as many."""
    unit = math.lcm(*sizes)
    rows = -(-wanted // unit) * unit
    if rows > 2 * wanted:
        raise ConfigError(
            f"--sizes {','.join(map(str, sizes))}: they end with the same row every {unit:,} rows "
            f"alone, more than twice the {wanted:,} that --tokens asks for (a tenth of the run by "
            f"default); give sizes that divide each other, or --tokens {unit * row_tokens}"
        )
    return rows


def _checkpoint(run: Place, at: int) -> folder_lib.Checkpoint:
    """Reads the checkpoint of a step; a ConfigError names the nearest if the step has none."""
    path, steps = run / "checkpoints" / str(at), folder_lib.steps_in(run / "checkpoints")
    if at not in steps:
        remedy = "train again with checkpoint_keep_period=N to keep one every N steps"
        if steps:
            nearest, shown = min(steps, key=lambda step: abs(step - at)), ", ".join(map(str, steps))
            remedy = (
                f"of the run's checkpoints {shown} give --at {nearest}, the nearest, or {remedy}"
            )
        raise ConfigError(f"--at {at}: {path} is not a checkpoint; {remedy}")
    return folder_lib.read(path)


def _train(arguments: Sequence[str], show: Callable[[str], None]) -> tuple[int, str]:
    """Trains in a process that ends with this one, and passes a signal to stop on to it; returns
    its exit status, and what it printed. `show` is called with every line. In the main thread."""
    command, signals = bind([sys.executable, "-m", "maxramp.train", *arguments]), []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def stop(number: int, frame: Any) -> None:
        signals.append(number)
        process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    lines = []
    for line in process.stdout:
        lines.append(line)
        show(line)
    status = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if status < 0:
        status = 128 - status
    elif status == 0 and signals:
        status = EXIT_PREEMPTED
    return status, "".join(lines)
