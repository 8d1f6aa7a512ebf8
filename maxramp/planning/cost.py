"""What a step and a restart cost, as a plan counts it.

This module imports no jax.
"""

import math
from fractions import Fraction

from maxramp.model.keys import ModelKeys
from maxramp.model.size import training_flops_per_token
from maxramp.planning.keys import PlanKeys
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.layout import pass_price, rows_per_device_limit

# As base.yml says at restart_minutes. The peak is 989, in bfloat16 (NVIDIA's data sheet).
_ASSUMED_TFLOPS = 400.0


def price(keys: PlanKeys, device_hours: float | None) -> float | None:
    """Of so many device-hours; None where they or price_per_device_hour are not known."""
    if device_hours is None or keys.price_per_device_hour == -1:
        return None
    return device_hours * keys.price_per_device_hour


class PassCost:
    """What a forward and backward pass takes, in passes of the largest micro batch.

    Attributes:
      restart: how long a change of nodes takes (restart_minutes), in such passes.
    """

    def __init__(self, batch: BatchKeys, plan: PlanKeys, model: ModelKeys):
        self._batch = batch
        self._limit = rows_per_device_limit(batch)
        tokens = batch.max_target_length
        flops = float(self._limit) * tokens * training_flops_per_token(model, tokens)
        known = plan.planned_tflops_per_device != -1
        tflops = plan.planned_tflops_per_device if known else _ASSUMED_TFLOPS
        hours = flops / (tflops * 1e12) / 3600
        self._full_hours = hours if known else None
        self.restart = plan.restart_minutes / 60 / hours

    def of(self, rows_per_device: float | Fraction) -> float:
        """A pass with so many rows per device."""
        return float(pass_price(self._batch, Fraction(rows_per_device)))

    def hours(self, passes: float) -> float | None:
        """Hours of so many passes; None where planned_tflops_per_device is not given."""
        return None if self._full_hours is None else passes * self._full_hours

    def of_step(self, rows_per_device: float) -> float:
        """A step of so many rows per device, in as few equal passes as the largest allows."""
        count = math.ceil(rows_per_device / self._limit)
        return count * self.of(rows_per_device / count)
