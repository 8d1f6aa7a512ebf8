"""The log of a run: a line for every log_period-th step, for evaluations, and at the end."""

import collections
import json
import statistics
import time
from typing import Any

from maxramp.commandline import count, duration
from maxramp.model.pattern import ACCEPTANCE
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import OF_SET, TASK, Record
from maxramp.stage import ROPE_KEYS

_LAST = 10  # the closing line averages this many steps
_SIGN_OF_LIFE = 30.0  # seconds after which the next step gets a line


def describe_stage(plan: dict[str, Any], number: int, last: int) -> str:
    """Describes stage `number` of a plan (`RampupBatchManager.to_json`) in one line, with the
    ROPE_KEYS that it changes; `last` is the number of the run's last stage.
    """
    steps = plan["total_steps"]
    *before, stage = [stage for stage in plan["stages"] if stage["index"] <= number]
    changed = []
    if before:
        changed = [name for name in ROPE_KEYS if stage[name] != before[-1][name]]
    if stage["steps"] is not None:
        steps = min(steps, stage["first_step"] + stage["steps"])
    cut = stage["row_length"] < stage["max_target_length"]
    return (
        f"stage {number}{f' (of 0 to {last})' if last else ''}: global batch "
        f"{stage['global_batch_size']} = {stage['per_device_batch_size']} per device x "
        f"{count(stage['devices'], 'device')} x {stage['gradient_accumulation_steps']} "
        f"accumulation, from step {stage['first_step']} for "
        f"{count(steps - stage['first_step'], 'step')}"
        + (f", in rows of {stage['row_length']} tokens" if cut else "")
        + "".join(f", {name}={stage[name]}" for name in changed)
    )


class Display:
    """The progress of a run; a writer of records.

    `follow` comes before the first record of a step. The time left is what the rows still to come
    take at the pace of the last steps.
    """

    def __init__(self, log_period: int, quiet: bool):
        self._log_period, self._quiet = log_period, quiet
        self._stage_index: int | None = None
        self._paces = collections.deque(maxlen=16)  # seconds per sample of the last steps
        self._started = time.perf_counter()
        # Of this start: steps, tokens and those of them that are targets, the seconds they took,
        # the first and the last loss.
        self._steps_done, self._tokens, self._targets, self._seconds = 0, 0, 0, 0.0
        self._result, self._first, self._shown = "loss", None, time.perf_counter()
        self._last = collections.deque(maxlen=_LAST)  # losses or rewards of the last steps
        self._held_out = ""  # the last evaluation

    def follow(self, ramp: RampupBatchManager) -> None:
        """Shows the steps to come as those of a ramp."""
        self._plan = ramp.to_json()
        reached = [x for x in self._plan["stages"] if x["first_step"] < self._plan["total_steps"]]
        self._last_stage = reached[-1]["index"]

    def say(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)

    def __call__(self, record: Record) -> None:
        step = f"step {record['step']:>6}"
        if "eval_seconds" in record:
            seconds = duration(record["eval_seconds"])
            self.say(f"{step}  {self._describe_evaluation(record, seconds)}")
            return
        if bad := record.get("bad_steps"):
            loss, norm = record["loss"], record["grad_norm"]
            self.say(f"{step}  skipped: loss {loss:.4f}, gradient norm {norm:.4g} ({bad} in a row)")
        plan, stage = self._plan, record["stage"]
        if stage != self._stage_index:
            self._stage_index = stage
            self.say(describe_stage(plan, stage, self._last_stage))
        self._add_step(record)
        left = plan["total_samples"] - record["consumed_samples"]
        eta = f"{duration(left * statistics.median(self._paces))} left" if self._paces else ""
        pairs = ""
        if "rewards/margins" in record:
            accuracy, margin = record["rewards/accuracies"], record["rewards/margins"]
            pairs = f"accuracy {accuracy:.2f}  margin {margin:.3f}  "
        tflops = record.get("tflops_per_device", 0.0)
        rate = f"{tflops:.1f} TFLOP/s/device  " if tflops >= 1 else ""  # CPUs have less
        line = (
            f"{step}/{plan['total_steps']}  stage {stage}  batch {record['global_batch_size']:>4}  "
            f"{self._result} {record[self._result]:.4f}  {pairs}"
            f"grad norm {record['grad_norm']:.3g}  "
            f"lr {record['learning_rate']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{rate}{eta}"
        )
        is_shown = record["step"] % self._log_period == 0
        is_shown |= record["step"] == plan["total_steps"] - 1
        is_shown |= time.perf_counter() - self._shown >= _SIGN_OF_LIFE
        if not is_shown:
            return
        self._shown = time.perf_counter()
        self.say(line.rstrip())
        for answer in record.get("answers", []):
            prompt, text = (
                json.dumps(answer[name], ensure_ascii=False) for name in ("prompt", "answer")
            )
            self.say(f"answer   reward {answer['reward']:.4g}: {prompt} -> {text}")

    def _describe_evaluation(self, record: Record, seconds: str) -> str:
        tasks = {n.removeprefix(TASK): x for n, x in record.items() if n.startswith(TASK)}
        if tasks:
            shown = ", ".join(f"{name} {number:.4g}" for name, number in tasks.items())
            return f"{shown} (tasks, in {seconds})"
        name = "reward" if "eval_reward" in record else "loss"
        what = "pairs" if "eval_pairs" in record else "text"
        if name == "reward":
            what = "prompts"
        number = f"{record[f'eval_{name}']:.4f}"
        sets = [
            f"{n.removeprefix(OF_SET)} {x:.4f}" for n, x in record.items() if n.startswith(OF_SET)
        ]
        named = f" ({', '.join(sets)})" if sets else ""
        self._held_out = f", {number} on held-out {what}{named}"
        drafts = f"eval_{ACCEPTANCE}"
        accepted = f", drafts' acceptance {record[drafts]:.1%}" if drafts in record else ""
        return (
            f"eval {name} {number} on held-out {what}{named}{accepted} "
            f"({record['eval_tokens']:,} tokens in {seconds})"
        )

    def _add_step(self, record: Record) -> None:
        self._result = "reward" if "reward" in record else "loss"
        if not record.get("bad_steps"):  # a skipped step's may be NaN
            self._last.append(record[self._result])
            self._first = self._last[0] if self._first is None else self._first
        if self._steps_done:  # the first step of a start holds its compile, and is no pace
            seconds = record["step_seconds"] - record["compile_seconds"]
            self._paces.append(seconds / record["global_batch_size"])
        self._steps_done, self._last_step = self._steps_done + 1, record["step"]
        tokens = round(record["tokens_per_second"] * record["step_seconds"])
        self._tokens += tokens
        self._targets += record.get("target_tokens", tokens)
        self._seconds += record["step_seconds"]

    def summary(self) -> str:
        """Returns the closing line: what this start of the run did, and whether the run is done.
        Its time is that since the start, its pace that of the steps, their compiles and waits for
        data included; losses of skipped steps do not count.
        """
        if not self._steps_done:
            return f"so far   no step in this start{self._held_out}"
        total = self._plan["total_steps"]
        begins, steps = "done     ", count(total, "step")
        if (done := self._last_step + 1) < total:
            begins = f"so far   {done:,} of {steps}; this start: "
        elif self._steps_done < done:  # an earlier start trained the others
            begins = f"done     {steps}; this start: "
        shown = "every step was skipped"
        if self._last:
            shown = f"{self._result} {self._first:.4f} -> {statistics.fmean(self._last):.4f}"
        if len(self._last) > 1:
            shown += f" (mean of {count(len(self._last), 'step')})"
        targets = "" if self._targets == self._tokens else f" ({self._targets:,} targets)"
        return (
            f"{begins}{count(self._steps_done, 'step')}, {self._tokens:,} tokens{targets} in "
            f"{duration(time.perf_counter() - self._started)}; {shown}{self._held_out}; "
            f"{self._tokens / self._seconds:,.0f} tokens/s"
        )
