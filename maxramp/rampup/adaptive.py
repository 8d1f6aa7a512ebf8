"""A ramp that decides while it runs (`rampup_policy=noise`): as large as the gradients are noisy.

The samples of a run are cut into periods of `rampup_decision_samples`. A run climbs to the next
rung of the ladder when in the last whole period and in the one before

    factor * noise scale * exp(-1.64 * relative standard error) >= rung

in rows, where the noise scale is variance / signal of the norms' scales (`noise_scale` in
maxramp/training) over the targets of a row, all of them means over the period's steps. Its standard
error follows from their scatter (delta method): a lower bound that holds in 19 of 20 cases,
confirmed once. The estimate from the norms' scales is the only one that needs no accumulation and
that no split of the batch changes. A rung has an earliest and a latest sample (`ladder`). A run
climbs one rung at a time and never back, and each needs a period that ends with steps of the rung
below.

The numbers of a step come one step late, so the decision about a period comes one step after it.
All processes have these numbers, and every checkpoint holds the periods: a restart decides as the
run would have. Imports no JAX.
"""

import decimal
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxramp.rampup import ladder
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager

_Z = 1.64


class Decision(NamedTuple):
    """The rung that a run climbs to."""

    global_batch_size: int
    lower: float | None  # the smaller of the two lower bounds, in rows; None at its latest sample


class Period(NamedTuple):
    """Sums over the steps of a period; each step counts by its rows."""

    steps: int = 0
    rows: int = 0
    targets: int = 0
    signal: float = 0.0
    variance: float = 0.0
    # sums of products
    signal_signal: float = 0.0
    signal_variance: float = 0.0
    variance_variance: float = 0.0

    def add(self, rows: int, targets: int, signal: float, variance: float) -> "Period":
        """Returns the sums with those of one more step."""
        x, y = rows * signal, rows * variance
        step = Period(1, rows, targets, x, y, x * x, x * y, y * y)
        return Period(*(old + new for old, new in zip(self, step, strict=True)))

    def lower_bound(self, factor: float) -> float:
        """Returns the lower bound of `factor` times the noise scale, in rows; 0 where the period
        has too few steps or no signal."""
        if self.steps < ladder.FEWEST_STEPS or min(self.signal, self.variance) <= 0:
            return 0.0
        # The squared relative deviation of each step from the quotient, summed over the steps.
        x, y = self.signal, self.variance
        squares = self.variance_variance / y**2 - 2 * self.signal_variance / (x * y)
        squares = max(0.0, squares + self.signal_signal / x**2)
        error = math.sqrt(self.steps / (self.steps - 1) * squares)
        # The same to the last bit on every host, unlike the C library's.
        exp = float(decimal.Decimal(-_Z * error).exp())
        return factor * y / x * self.rows / self.targets * exp


class NoisePolicy:
    """Decides when a run climbs to its next rung; a writer of records.

    `periods` are those of the checkpoint that the run continues from.
    """

    def __init__(self, keys: BatchKeys, periods: Mapping[str, Any] | None = None):
        self._keys, self._length = keys, ladder.period(keys)
        self._periods: dict[int, Period] = {}  # the last ones, by their number
        # In rows, of the decision before the next step; None if none was measured there.
        self.lower_bound: float | None = (periods or {}).get("lower_bound")
        if periods and periods["samples"] == self._length:
            self._periods = {int(n): Period(*sums) for n, sums in periods["sums"].items()}

    def to_json(self) -> dict[str, Any]:
        sums = {str(n): p for n, p in self._periods.items()}
        return {"samples": self._length, "sums": sums, "lower_bound": self.lower_bound}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Adds a step to its period, unless it was skipped or its numbers are not finite; records
        come in the order of their steps."""
        names = "norms_noise_signal", "norms_noise_variance"
        values = [record.get(name) for name in names]
        if record.get("bad_steps") or None in values or not all(map(math.isfinite, values)):
            return
        rows = record["global_batch_size"]
        number = (record["consumed_samples"] - rows) // self._length
        period = self._periods.get(number, Period()).add(rows, record["target_tokens"], *values)
        last = {n: p for n, p in self._periods.items() if number - 3 < n < number}
        self._periods = last | {number: period}

    def decide(self, ramp: RampupBatchManager, step: int) -> Decision | None:
        """Returns the rung to climb to before `step`, None to stay, once the numbers of step - 2
        are known. `ramp` begins with the run's rung; sets `lower_bound`."""
        self.lower_bound = None
        batch, done = ramp.stages[0].global_batch_size, ramp.samples_before(step)
        rung = next(iter(ladder.rungs(self._keys, batch)), None)
        if rung is None or done >= self._keys.samples_of_run:
            return None
        size = rung.global_batch_size
        if done >= rung.latest:
            return Decision(size, None)
        # The last period with the numbers of all its steps.
        last = ramp.samples_before(step - 1) // self._length - 1
        begins = ramp.thresholds[-1].first_sample
        if done < rung.earliest or last < 1 or (last + 1) * self._length <= begins:
            return None
        periods = [self._periods.get(number, Period()) for number in (last - 1, last)]
        lower = min(period.lower_bound(self._keys.rampup_noise_factor) for period in periods)
        if lower < size:
            return None
        self.lower_bound = lower
        return Decision(size, lower)
