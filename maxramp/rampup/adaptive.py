"""A ramp that decides while it runs (`rampup_policy=noise`): as large as the gradients are noisy.

The samples of a run are cut into periods of `rampup_decision_samples`. After the last step of each,
the next rung of the ladder is taken if in this period and in the one before

    factor * noise scale * exp(-1.64 * relative standard error) >= rung

in rows, where the noise scale is variance / signal of the norms' scales (`noise_scale` in
maxramp/training) over the targets of a row, all of them means over the period's steps. Its standard
error follows from their scatter (delta method): a lower bound that holds in 19 of 20 cases,
confirmed once. The norms' is the one estimate that exists without accumulation and that no split of
the batch changes. A rung has an earliest and a latest sample (`ladder`). One rung is taken at a
time, none is given back.

A decision holds from the step `ladder.DELAY` after its period on, as the rows until then are being
read already. All processes have these numbers, so they need not speak. Imports no JAX.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.rampup import ladder
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager

_Z = 1.64
_NAMES = "norms_noise_signal", "norms_noise_variance"


@dataclasses.dataclass(frozen=True)
class Decision:
    """A rung that was taken."""

    first_step: int  # from which on
    first_sample: int  # from which on
    global_batch_size: int  # rows of the rung
    previous_batch_size: int  # rows of the rung below it
    after_step: int  # steps done when it was taken
    reason: str  # noise, or latest where the rung's latest sample was reached
    lower: float  # the smaller of the two lower bounds, in rows

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"lower": self.lower.hex(), "lower_rows": self.lower}


class Policy:
    """The rule of a run: which rung is taken when."""

    def __init__(self, keys: BatchKeys):
        self._keys = keys
        self._rungs = {rung.global_batch_size: rung for rung in ladder.rungs(keys)}
        self.period = ladder.period(keys)

    def decide(
        self, ramp: RampupBatchManager, step: int, lower: Callable[[int], float]
    ) -> Decision | None:
        """`ramp` has all decisions so far; `lower` gives a period's lower bound, in rows."""
        if step <= ramp.stages[0].first_step:
            return None  # nothing is done by this schedule
        if not ramp.rungs or ramp.stages[-1].first_step > step:
            return None  # the end of the ladder, or a decision on its way
        done = ramp.samples_before(step)
        period = done // self.period - 1
        if ramp.samples_before(step - 1) // self.period > period:
            return None  # inside a period
        size = ramp.rungs[0].global_batch_size
        rung, first = self._rungs[size], step + ladder.DELAY
        begins = ramp.samples_before(first)
        if begins >= self._keys.samples_of_run:
            return None
        taken = first, begins, size, ramp.stages[-1].global_batch_size, step
        if rung.latest is not None and done >= rung.latest:
            return Decision(*taken, "latest", 0.0)
        if done < rung.earliest or period < 1:
            return None
        bound = min(lower(period - 1), lower(period))
        return Decision(*taken, "noise", bound) if bound >= size else None

    def settled_after(self, ramp: RampupBatchManager, step: int) -> int:
        """How many steps no later decision changes than the one after `step` steps: those up to the
        next decision and its delay.
        """
        done = ramp.samples_before(max(ramp.stages[0].first_step, step))
        following = (done // self.period + 1) * self.period
        return ramp.step_at_sample(following - 1) + 1 + ladder.DELAY


def simulate(keys: BatchKeys, noise: float) -> list[tuple[int, int]]:
    """The decisions of a run whose lower bound is always this many rows."""
    ramp, policy = RampupBatchManager(keys, 1), Policy(keys)
    for end in range(policy.period, keys.samples_of_run, policy.period):
        decision = policy.decide(ramp, ramp.step_at_sample(end - 1) + 1, lambda period: noise)
        if decision:
            ramp.grow(decision.first_step)
    return [(stage.first_sample, stage.global_batch_size) for stage in ramp.stages[1:]]


def period_of(record: dict[str, Any], length: int) -> int:
    return (record["consumed_samples"] - record["global_batch_size"]) // length


def lower_bound(records: Iterable[dict[str, Any]], factor: float) -> float:
    """In rows; 0 where the period's steps say too little. Skipped steps say nothing."""
    rows, pairs, targets = [], [], 0
    for record in (r for r in records if not r.get("bad_steps")):
        values = [record[name] for name in _NAMES]
        if all(isinstance(value, float) and math.isfinite(value) for value in values):
            rows.append(record["global_batch_size"])
            pairs.append(values)
            targets += record["target_tokens"]
    count, weight = len(rows), math.fsum(rows)
    if count < ladder.FEWEST_STEPS:
        return 0.0
    shares = [r / weight for r in rows]
    signal, variance = (
        math.fsum(share * value for share, value in zip(shares, column, strict=True))
        for column in zip(*pairs, strict=True)
    )
    if signal <= 0 or variance <= 0:
        return 0.0
    # Of the quotient, relative: each step's share of what it is off by in both parts.
    residuals = [w * (v / variance - s / signal) for w, (s, v) in zip(shares, pairs, strict=True)]
    error = math.sqrt(count / (count - 1) * math.fsum(r * r for r in residuals))
    return factor * variance / signal * weight / targets * math.exp(-_Z * error)


def check_decisions(
    keys: BatchKeys,
    recorded: Sequence[tuple[int, int]],
    first: int | None = None,
    source: str = "decisions.json",
) -> list[tuple[int, int]]:
    sizes = [first or keys.rampup_ladder[0], *(size for _, size in recorded)]
    if recorded and sizes != list(keys.rampup_ladder[: len(sizes)]):
        raise ConfigError(
            f"rampup_ladder={list(keys.rampup_ladder)}: this run has taken the batches {sizes} "
            f"({source}), and they bind it; give a ladder that begins with them, or another "
            "run_name"
        )
    return list(recorded)
