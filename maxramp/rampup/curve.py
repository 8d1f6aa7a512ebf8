"""The learning rate's curve as data, which `training.learning_rate` computes on arrays. `ladder`
asks where it falls to a height. Imports no JAX.
"""

import dataclasses
import math
from typing import Self

from maxramp.rampup.keys import CurveKeys


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve that rises from 0 to the peak, stays there, and falls to `final` of it at the end.

    Lengths are all in samples, or all in steps: whole multiples of `quantum`, the length of one
    batch. A rise or fall over n samples reaches its last value after n - quantum of them, as a
    batch has one learning rate, that of its first sample.
    """

    total: float  # length of the curve; lengths are floats, as samples exceed JAX's int32
    quantum: int  # length of one batch
    warmup: float  # length of the rise
    decay: float  # length of the fall
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
        """Returns where the fall reaches a fraction of the peak; not a whole sample."""
        left = (height - self.final) / (1 - self.final)
        done = math.acos(2 * left - 1) / math.pi if self.style == "cosine" else 1 - left
        return self.total - self.decay + done * max(0.0, self.decay - self.quantum)
