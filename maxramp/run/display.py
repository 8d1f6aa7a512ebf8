"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

import json
import sys
import time

from maxramp.commandline import count
from maxramp.rampup.numbers import plain_number
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.run.metrics import OF_SET, TASK, Record

# What an evaluation gives, and what it is on.
_HELD_OUT = {"eval_loss": "held-out text", "eval_reward": "held-out prompts"}
_TEXTS = ("prompt", "answer")


def describe_stage(stage: Stage, before: Stage, last: int, steps: int) -> str:
    """A stage in one line, with what its tokens see otherwise than those of the stage before.

    Args:
      stage, before: itself, where it is the first.
      last: the number of the run's last.
      steps: its own in the run.
    """
    per_device = plain_number(stage.per_device_batch_size)
    cut, sight = stage.spec.rows_of_sample > 1, vars(before.spec.sight)
    changed = [f"{n}={x}" for n, x in vars(stage.spec.sight).items() if x != sight[n]]
    return (
        f"stage {stage.index}{f' (of 0 to {last})' if last else ''}: global batch "
        f"{stage.global_batch_size} = "
        f"{per_device} per device x {count(stage.devices, 'device')} x "
        f"{stage.gradient_accumulation_steps} accumulation, from step {stage.first_step} for "
        f"{count(steps, 'step')}"
        + (f", in rows of {stage.spec.row_length} tokens" if cut else "")
        + "".join(f", {key}" for key in changed)
    )


def duration(seconds: float) -> str:
    """45s, 3m20s, 2h05m, 3d04h."""
    s = round(seconds)
    for big, small, unit, part in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "m"),
        (60, 1, "m", "s"),
    ):
        if s >= big:
            return f"{s // big}{unit}{s % big // small:02d}{part}"
    return f"{s}s"


def _describe_pairs(record: Record) -> str:
    if "rewards/margins" not in record:
        return ""
    accuracy, margin = record["rewards/accuracies"], record["rewards/margins"]
    return f"accuracy {accuracy:.2f}  margin {margin:.3f}  "


class Display:
    """The progress of a run; a writer of records.

    The time left is what the rows still to come take at the pace of the last steps.
    """

    def __init__(self, log_period: int, quiet: bool):
        self._log_period, self._quiet = log_period, quiet
        self._stage_index: int | None = None
        self._pace: float | None = None  # seconds per sample, averaged over the last steps
        self._progress = None
        self._started = time.perf_counter()
        # Of this start: steps, tokens and those of them that are targets, the seconds they took,
        # the first and the last loss.
        self._steps_done, self._tokens, self._targets, self._seconds = 0, 0, 0, 0.0
        self._result, self._first, self._last = "loss", 0.0, 0.0
        self._held_out = ""  # the last evaluation

    def start(self, ramp: RampupBatchManager) -> None:
        """Shows the live line, on a terminal; records of steps of `ramp` follow."""
        self._ramp = ramp
        if sys.stdout.isatty() and not self._quiet:
            from rich import progress

            self._progress = progress.Progress(
                progress.BarColumn(30),
                progress.TextColumn("{task.description}"),
                transient=True,
                redirect_stdout=False,
            )
            self._task = self._progress.add_task("compiling", total=ramp.total_samples)
            self._progress.start()

    @property
    def _last_stage(self) -> int:
        return self._ramp.stage_at_step(self._ramp.total_steps - 1).index  # a ramp may grow

    def say(self, line: str) -> None:
        """Prints a line above the progress."""
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            print(line, flush=True)

    def __call__(self, record: Record) -> None:
        """Shows a record."""
        if any(name.startswith(TASK) for name in record):
            shown = (
                f"{n.removeprefix(TASK)} {x:.4g}" for n, x in record.items() if n.startswith(TASK)
            )
            seconds = duration(record["eval_seconds"])
            self.say(f"step {record['step']:>6}  {', '.join(shown)} (tasks, in {seconds})")
            return
        if "eval_seconds" in record:
            name, what = next((k, v) for k, v in _HELD_OUT.items() if k in record)
            what = "held-out pairs" if "eval_pairs" in record else what
            of_sets = {n.removeprefix(OF_SET): x for n, x in record.items() if n.startswith(OF_SET)}
            sets = ", ".join(f"{of_set} {loss:.4f}" for of_set, loss in of_sets.items())
            sets = f" ({sets})" if sets else ""
            self._held_out = f", {record[name]:.4f} on {what}{sets}"
            self.say(
                f"step {record['step']:>6}  {name.removeprefix('eval_')} on {what} "
                f"{record[name]:.4f}{sets} ({record['eval_tokens']} tokens in "
                f"{duration(record['eval_seconds'])})"
            )
            return
        if record.get("bad_steps"):
            self.say(
                f"step {record['step']:>6}  skipped: its gradient is not finite "
                f"({record['bad_steps']} in a row)"
            )
        stage = self._ramp.stage_at_step(record["step"])
        if stage.index != self._stage_index:
            self._stage_index = stage.index
            ramp = self._ramp
            before = ramp.stage_at_step(max(stage.first_step - 1, ramp.stages[0].first_step))
            self.say(describe_stage(stage, before, self._last_stage, ramp.run_steps(stage)))
        tokens = round(record["tokens_per_second"] * record["step_seconds"])
        name = "reward" if "reward" in record else "loss"
        self._last = record[name]
        if not self._steps_done:
            self._result, self._first = name, self._last
        else:  # the first step of a start holds its compile: it says nothing about the pace
            pace = record["step_seconds"] / record["global_batch_size"]
            self._pace = pace if self._pace is None else 0.9 * self._pace + 0.1 * pace
        self._steps_done, self._last_step = self._steps_done + 1, record["step"]
        self._tokens += tokens
        self._targets += record.get("target_tokens", tokens)
        self._seconds += record["step_seconds"]
        left = self._ramp.total_samples - record["consumed_samples"]
        eta = f"{duration(left * self._pace)} left" if self._pace else ""
        line = (
            f"step {record['step']:>6}  stage {stage.index} of 0-{self._last_stage}  batch "
            f"{record['global_batch_size']:>4}  {name} {self._last:.4f}  {_describe_pairs(record)}"
            f"{record['tokens_per_second']:,.0f} tokens/s  {eta}"
        )
        if self._progress is not None:
            self._progress.update(
                self._task, completed=record["consumed_samples"], description=line
            )
        is_shown = record["step"] % self._log_period == 0
        is_shown |= record["step"] == self._ramp.total_steps - 1
        if self._progress is None and is_shown:
            self.say(line.rstrip())
        for answer in record.get("answers", []) if is_shown else []:
            shown = {name: json.dumps(answer[name], ensure_ascii=False) for name in _TEXTS}
            self.say(
                f"answer   reward {answer['reward']:.4g}: {shown['prompt']} -> {shown['answer']}"
            )

    def close(self) -> None:
        """Takes the live line away."""
        if self._progress is not None:
            self._progress.stop()

    def summary(self) -> str:
        """The closing line: what this start of the run did, and whether the run is done."""
        if not self._steps_done:
            return "so far   no step was done"
        end, steps = "done     ", count(self._ramp.total_steps, "step")
        if (done := self._last_step + 1) < self._ramp.total_steps:
            end = f"so far   {done:,} of {steps}; this start: "
        elif self._steps_done < done:
            end = f"done     {steps}; this start: "
        targets = "" if self._targets == self._tokens else f" ({self._targets:,} targets)"
        return (
            f"{end}{count(self._steps_done, 'step')}, {self._tokens:,} tokens{targets} in "
            f"{duration(time.perf_counter() - self._started)}; {self._result} {self._first:.4f} -> "
            f"{self._last:.4f}{self._held_out}; {self._tokens / self._seconds:,.0f} tokens/s"
        )
