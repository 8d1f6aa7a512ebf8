"""The optimizer of an `opt_type`. Each file of an optimizer has `transform(keys, rate, pace)`: the
optax transformation of a step with this learning rate and pace; its state does not depend on
them."""

import functools
import importlib
from typing import Any

import jax
import optax

from maxramp.model.parts.weights import map_weights
from maxramp.training.keys import OptimizerKeys, optimizer_names
from maxramp.training.optimizers.adamw import AdamState
from maxramp.training.optimizers.half_lives import STEADY, Pace


def make_optimizer(keys: OptimizerKeys) -> optax.GradientTransformationExtraArgs:
    """Makes the transformation from gradients to updates of the weights, by their roles. Its
    `update` also takes a step's `learning_rate` and its `pace`."""
    names = optimizer_names(keys.opt_type)
    parts = {name: _stepwise(name, keys) for name in dict.fromkeys(names.values())}
    label = functools.partial(map_weights, lambda weight: names[weight.role])
    return optax.partition(parts, label)


def _stepwise(name: str, keys: OptimizerKeys) -> optax.GradientTransformationExtraArgs:
    """Makes the transformation of one optimizer's file, for the weights that it updates. `update`
    needs a `learning_rate`; the new state keeps the dtypes of the state.
    """
    transform = importlib.import_module(f"{__package__}.{name}").transform

    def update(
        gradients: Any,
        state: optax.OptState,
        weights: Any = None,
        *,
        learning_rate: Any,
        pace: Pace = STEADY,
    ) -> tuple[Any, optax.OptState]:
        updates, new = transform(keys, learning_rate, pace).update(gradients, state, weights)
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

    init = transform(keys, 0.0, STEADY).init
    return optax.GradientTransformationExtraArgs(init, update)


def adam_state(state: optax.PartitionState) -> AdamState | None:
    """Returns the state of AdamW, or None if it updates no weight."""
    part = state.inner_states.get("adamw")
    return part and part.inner_state[0]
