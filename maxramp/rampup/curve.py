"""The learning rate's curve as data, for `training.learning_rate` on arrays and `ladder`, which
asks where it reaches a height. Imports no JAX.
"""

import dataclasses
import math
from typing import Self

from maxramp.rampup.keys import CurveKeys


@dataclasses.dataclass(frozen=True)
class Curve:
    """From 0 up to the peak, on at the peak, and down to `final` of it where `total` ends.

    Lengths are all in samples, or all in steps: whole multiples of `quantum`, the length of one
    batch. A phase of n samples moves from its first to its last value over n - quantum of them, as
    a batch has one learning rate, that of its first sample.
    """

    total: float  # length of the curve; lengths are floats, as samples pass JAX's int32
    quantum: int  # length of one batch
    warmup: float  # length of the rise
    decay: float  # length of the fall, at the end
    style: str  # cosine or linear, the shape of the fall
    final: float  # the end of the fall, as a fraction of the peak

    @classmethod
    def from_keys(cls, keys: CurveKeys, total: int, quantum: int) -> Self:
        curve = cls(float(total), quantum, 0.0, 0.0, "cosine", keys.learning_rate_final_fraction)
        warmup = curve.part(keys.warmup_steps_fraction)
        decay, style = curve.total - warmup, curve.style
        if keys.lr_schedule_type == "wsd":
            decay, style = curve.part(keys.wsd_decay_steps_fraction), keys.wsd_decay_style
        return dataclasses.replace(curve, warmup=warmup, decay=decay, style=style)

    def part(self, fraction: float) -> float:
        return float(math.floor(self.total / self.quantum * fraction) * self.quantum)

    def falls_to(self, height: float) -> float:
        """Where the fall reaches a fraction of the peak above `final`; not a whole sample."""
        left = (height - self.final) / (1 - self.final)
        done = math.acos(2 * left - 1) / math.pi if self.style == "cosine" else 1 - left
        return self.total - self.decay + done * max(0.0, self.decay - self.quantum)
