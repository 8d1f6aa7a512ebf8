"""Seesaw: the batch grows where the learning rate would fall (Meterez et al., arXiv 2510.14717).

Where the base curve cuts the learning rate by a factor a, Seesaw cuts it by sqrt(a) and multiplies
the batch by a. That keeps rate / sqrt(batch), and with it the loss over samples of normalized SGD
(a model of Adam) as long as noise dominates the gradient, in fewer steps. With x the height of the
base curve (1 at its peak) and B the first batch, the batch is B / x and the rate peak * sqrt(x).

The batch takes only the sizes of `rampup_ladder`. Of two rungs m < n, `nearest` takes n from their
geometric mean on, x = B / sqrt(m * n), and `below` from x = B / n on, so that the batch is never
above B / x. The base curve is that of a run of constant batch B over the same samples, so all
thresholds are known before the run begins.

This module imports no jax.
"""

import itertools
import math

from maxramp.keys.section import Relations
from maxramp.rampup import ladder
from maxramp.rampup.curve import Curve
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.numbers import show

# A threshold that is a whole number stays it, whatever a cosine's last bits are.
_ROUNDING = 1e-3


def sizes(keys: BatchKeys) -> list[tuple[int, int]]:
    """(from which sample on, global batch size), the first at sample 0."""
    first = keys.rampup_ladder[0]
    curve = Curve.of(keys, keys.samples_in_batches_of(first), first)
    return [(0, first)] + [
        (math.ceil(curve.falls_to(first / size) - _ROUNDING), rung)
        for rung, size in _rungs_above_first(keys)
    ]


def relations(keys: BatchKeys) -> Relations:
    """What Seesaw needs, once each key is known to be in its range."""
    yield from ladder.policy(keys)
    sizes, lowest = list(keys.rampup_ladder), keys.learning_rate_final_fraction
    for rung, size in _rungs_above_first(keys):
        ends = f"({sizes[0]} / {show(lowest)} = {sizes[0] / lowest:g} rows)" if lowest else ""
        yield (
            sizes[0] / size <= lowest,
            f"rampup_ladder={sizes}: the batch never grows to {rung}, as the learning rate falls "
            f"to learning_rate_final_fraction={show(lowest)} of its peak and no further {ends}; "
            f"leave {rung} out, or lower learning_rate_final_fraction",
        )


def _rungs_above_first(keys: BatchKeys) -> list[tuple[int, float]]:
    """(rung, size that B / x has where the rung begins) of every rung but the first."""
    nearest = keys.rampup_rounding == "nearest"
    return [
        (rung, math.sqrt(below * rung) if nearest else rung)
        for below, rung in itertools.pairwise(keys.rampup_ladder)
    ]
