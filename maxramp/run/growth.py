"""Grows the ramp of a run with rampup_policy=noise while the run trains."""

from collections.abc import Callable, Sequence

from maxramp.checkpoints.resume import Span
from maxramp.rampup import adaptive
from maxramp.rampup.adaptive import Decision, Policy
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import Record


class Growth:
    """Takes the rungs of a ladder, each when the run's own numbers say so; a writer of records.

    Every process has the same numbers and so decides the same, before the same step. Any other
    policy has no rungs, and this does nothing.
    """

    def __init__(
        self,
        span: Span,
        history: Sequence[Record],
        decided: Callable[[Decision, RampupBatchManager], None],
        grown: Callable[[RampupBatchManager], None],
    ):
        """`history`: records of the steps before this start, in order.

        A decision holds from when `decided` returns; `grown` takes the ramp that follows from it.
        """
        self._span, self._decided, self._grown = span, decided, grown
        self._policy = Policy(span.ramp.keys) if span.ramp.rungs else None
        self._periods: dict[int, list[Record]] = {}  # the last ones
        for record in history:
            self(record)

    def __call__(self, record: Record) -> None:
        if self._policy and "norms_noise_signal" in record:
            period = adaptive.period_of(record, self._policy.period)
            if period not in self._periods:
                self._periods.pop(period - 3, None)
            self._periods.setdefault(period, []).append(record)

    def decide_before(self, step: int) -> None:
        """Decides by the steps before the last one, and says how far the ramp is settled.

        Called in the loop before `step` is read: the numbers of step - 2 are there, and a period
        that ended with them is decided on.
        """
        ramp = self._span.ramp
        if not self._policy or (not ramp.rungs and ramp.settled_steps == ramp.total_steps):
            return
        if decision := self._policy.decide(ramp, step - 1, self._lower):
            self._decided(decision, ramp)  # before anything uses it
            self._span.grow(decision.first_step)
            self._grown(ramp)
        ahead = self._policy.settled_after(ramp, step - 1)
        ramp.settle(ahead if ramp.rungs else max(ahead, ramp.total_steps))

    def _lower(self, period: int) -> float:
        factor = self._span.ramp.keys.rampup_noise_factor
        return adaptive.lower_bound(self._periods.get(period, []), factor)


def recent(records: Sequence[Record], span: Span) -> list[Record]:
    """Those before a start that the next decisions may use."""
    ramp = span.ramp
    if not ramp.rungs:
        return []
    length = Policy(ramp.keys).period
    first = ramp.samples_before(span.first_step) // length - 2
    return [
        record
        for record in records
        if "norms_noise_signal" in record
        and record["step"] < span.first_step
        and adaptive.period_of(record, length) >= first
    ]
