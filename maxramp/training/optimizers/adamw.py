"""AdamW: means of gradients and of their squares, and weights that decay (arXiv 1711.05101)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxramp.model.parts.weights import Weight, map_weights
from maxramp.training.keys import OptimizerKeys

State = optax.ScaleByAdamState


class AdamW:
    """Directions of weights, before the learning rate."""

    def __init__(self, keys: OptimizerKeys):
        self._adam = optax.scale_by_adam(
            keys.adam_b1, keys.adam_b2, keys.adam_eps, mu_dtype=jnp.dtype(keys.mu_dtype)
        )
        self._keys = keys

    def init(self, weights: Any) -> State:
        """Before the first step."""
        return self._adam.init(weights)

    def update(self, gradients: Any, state: State, weights: Any) -> tuple[Any, State]:
        """The direction in which each weight moves, and the next state."""
        direction, state = self._adam.update(gradients, state, weights)

        def decayed(direction: Weight, weight: Weight) -> Weight:
            if weight.role in self._keys.adamw_mask:
                return direction
            decay = self._keys.adam_weight_decay
            return jax.tree.map(lambda d, w: d + decay * w, direction, weight)

        return map_weights(decayed, direction, weights), state

    def second_moment(self, state: State) -> tuple[Any, jax.Array]:
        """The mean of squares of each weight's gradients; and what its root is to be multiplied by,
        as it began at zero: no number before the first step."""
        return state.nu, jax.lax.rsqrt(1 - self._keys.adam_b2 ** state.count.astype(jnp.float32))
