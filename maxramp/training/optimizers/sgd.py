"""Stochastic gradient descent: weights move against their gradients, or against a decaying sum m =
momentum * m + g, as in PyTorch and optax. With a half-life in samples, a gradient counts as much
more as it is forgotten sooner, so a constant gradient has the same effect at any batch."""

from typing import Any

import jax
import jax.numpy as jnp

from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.half_lives import Pace, kept_share


def init(keys: OptimizerKeys, weights: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, weights) if keys.sgd_momentum else {}


def update(
    keys: OptimizerKeys, gradients: Any, state: Any, weights: Any, pace: Pace
) -> tuple[Any, Any]:
    if not keys.sgd_momentum:
        return gradients, state
    now = kept_share(keys, "sgd_momentum", pace)
    gain = (1 - now) / (1 - keys.sgd_momentum)
    state = jax.tree.map(lambda m, g: (now * m + gain * g).astype(m.dtype), state, gradients)
    return state, state
