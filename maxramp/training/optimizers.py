"""Optimizers, and which of them a weight takes: gradients -> directions of weights.

Clipping and the learning rate are in `step.py`: the first needs the norm that is logged, the second
the consumed samples.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxramp.model.keys import ROLES
from maxramp.model.parts.weights import Weight, joined, map_weights, part_of
from maxramp.training.keys import OptimizerKeys


class AdamW:
    """Means of gradients and of their squares, and weights that decay (arXiv 1711.05101)."""

    def __init__(self, keys: OptimizerKeys):
        self._adam = optax.scale_by_adam(
            keys.adam_b1, keys.adam_b2, keys.adam_eps, mu_dtype=jnp.dtype(keys.mu_dtype)
        )
        self._keys = keys

    def init(self, weights: Any) -> optax.ScaleByAdamState:
        """Before the first step."""
        return self._adam.init(weights)

    def update(
        self, gradients: Any, state: optax.ScaleByAdamState, weights: Any
    ) -> tuple[Any, optax.ScaleByAdamState]:
        """The direction in which each weight moves, and the next state."""
        direction, state = self._adam.update(gradients, state, weights)

        def decayed(direction: Weight, weight: Weight) -> Weight:
            if weight.role in self._keys.adamw_mask:
                return direction
            decay = self._keys.adam_weight_decay
            return jax.tree.map(lambda d, w: d + decay * w, direction, weight)

        return map_weights(decayed, direction, weights), state

    def second_moment(self, state: optax.ScaleByAdamState) -> tuple[Any, jax.Array]:
        """The mean of squares of each weight's gradients; and what its root is to be multiplied by,
        as it began at zero: no number before the first step."""
        return state.nu, jax.lax.rsqrt(1 - self._keys.adam_b2 ** state.count.astype(jnp.float32))


class SGD:
    """Stochastic gradient descent: weights move against their gradients."""

    def __init__(self, keys: OptimizerKeys):
        del keys

    def init(self, weights: Any) -> dict:
        """It keeps nothing."""
        return {}

    def update(self, gradients: Any, state: dict, weights: Any) -> tuple[Any, dict]:
        """The direction in which each weight moves, and the next state."""
        return gradients, state

    def second_moment(self, state: dict) -> None:
        """It has none."""


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}

# By opt_type, what weights of each role take.
TAKES = {"adamw": dict.fromkeys(ROLES, "adamw"), "sgd": dict.fromkeys(ROLES, "sgd")}


class Optimizer:
    """The optimizers of an `opt_type`, each for the weights of its roles. States are by name."""

    def __init__(self, keys: OptimizerKeys):
        self._takes = TAKES[keys.opt_type]
        self._parts = {name: OPTIMIZERS[name](keys) for name in {*self._takes.values()}}

    def init(self, weights: Any) -> dict[str, Any]:
        """The states before the first step."""
        return {name: part.init(self._of(name, weights)) for name, part in self._parts.items()}

    def update(
        self, gradients: Any, state: dict[str, Any], weights: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The direction in which each weight moves, before the learning rate; the next states."""
        found = {
            name: part.update(self._of(name, gradients), state[name], self._of(name, weights))
            for name, part in self._parts.items()
        }
        directions = joined(*(direction for direction, _ in found.values()))
        return directions, {name: state for name, (_, state) in found.items()}

    def second_moment(self, state: dict[str, Any]) -> tuple[Any, jax.Array] | None:
        """As `AdamW.second_moment`, of those weights that have one; None where none has."""
        found = (part.second_moment(state[name]) for name, part in self._parts.items())
        return next((moment for moment in found if moment), None)

    def _of(self, name: str, tree: Any) -> Any:
        return part_of(tree, lambda weight: self._takes[weight.role] == name)
