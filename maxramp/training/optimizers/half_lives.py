"""How long an optimizer remembers: in steps, or in samples whatever their batch.

A mean that keeps the share b of itself in a step has a half-life of log(1/2) / log(b) steps. With
b^(B / R) in a step of B samples it forgets by samples, as at the batch R that b was tuned for
(arXiv 2507.07101, for Adam's second moment); so does a weight with a decay d B / R, where the rate
does not follow the batch (arXiv 2405.13698, 2505.13738). Only the step's own batch is in it, so a
restart or a changed ramp changes nothing.
"""

import functools
from typing import Any, NamedTuple

import optax

from maxramp.model.parts.weights import map_weights
from maxramp.training.keys import OptimizerKeys


class Pace(NamedTuple):
    """How a step compares with one of the reference batch."""

    batch: Any = 1.0  # its samples over those of the reference: a float, or a float32 scalar
    rate: Any = 1.0  # the factor of the learning rate that follows from the batch


STEADY = Pace()  # a step of the reference batch


def kept_share(keys: OptimizerKeys, name: str, pace: Pace) -> Any:
    """Returns the share of itself that a mean keeps in a step. The key is for the reference
    batch."""
    share = getattr(keys, name)
    return share**pace.batch if name in keys.half_lives_in_samples else share


def decay_weights(keys: OptimizerKeys, name: str, pace: Pace) -> optax.GradientTransformation:
    """Adds weight decay, the value of the key `name`, to the update, before the learning rate;
    recurrences, sinks and roles in adamw_mask do not decay."""
    decay = getattr(keys, name)
    if name in keys.half_lives_in_samples:
        decay = decay * pace.batch / pace.rate
    exempt = {*keys.adamw_mask, "recurrence", "sink"}
    decays = functools.partial(map_weights, lambda weight: weight.role not in exempt)
    return optax.add_decayed_weights(decay, decays)
