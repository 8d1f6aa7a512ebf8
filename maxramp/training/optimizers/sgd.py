"""Stochastic gradient descent, with momentum if the key says so."""

from typing import Any

import jax
import jax.numpy as jnp

from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.half_lives import Pace, kept_share


class Rule:
    """Weights move against their gradients, or against a decaying sum m = momentum * m + g, as in
    PyTorch and optax. With a half-life in samples, a gradient counts as much more as it is
    forgotten sooner, so a constant gradient has the same effect at any batch."""

    def __init__(self, keys: OptimizerKeys):
        self._keys = keys

    def init(self, weights: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, weights) if self._keys.sgd_momentum else {}

    def update(self, gradients: Any, state: Any, weights: Any, pace: Pace) -> tuple[Any, Any]:
        momentum = self._keys.sgd_momentum
        if not momentum:
            return gradients, state
        now = kept_share(self._keys, "sgd_momentum", pace)
        gain = (1 - now) / (1 - momentum)
        state = jax.tree.map(lambda m, g: (now * m + gain * g).astype(m.dtype), state, gradients)
        return state, state

    def second_moment(self, state: Any) -> None: ...
