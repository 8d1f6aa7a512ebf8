"""Stochastic gradient descent: weights move against their gradients, or against a decaying sum m =
momentum * m + g, as in PyTorch. With a half-life in samples, gradients are scaled up as they are
forgotten sooner, so a constant gradient has the same effect at any batch."""

from typing import Any

import optax

from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.half_lives import Pace, kept_share


def transform(keys: OptimizerKeys, rate: Any, pace: Pace) -> optax.GradientTransformation:
    """Makes SGD's update at one learning rate and pace; table.py loads it by name."""
    if not keys.sgd_momentum:
        return optax.sgd(rate)
    kept = kept_share(keys, "sgd_momentum", pace)
    gain = (1 - kept) / (1 - keys.sgd_momentum)
    return optax.chain(optax.scale(gain), optax.sgd(rate, momentum=kept))
