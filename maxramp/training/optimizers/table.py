"""Which optimizer a weight takes, by its role. An optimizer is a record in `training.keys` and the
module of its name here, whose `Rule` has `init`, `update` and `second_moment`."""

import importlib
from typing import Any

import jax

from maxramp.model.parts.weights import join_parts, part_of
from maxramp.training.keys import OptimizerKeys, optimizer_names
from maxramp.training.optimizers.half_lives import Pace


class Optimizer:
    """The optimizers of an `opt_type`, each for the weights of its roles. States are by name."""

    def __init__(self, keys: OptimizerKeys):
        self._takes = optimizer_names(keys.opt_type)
        names = dict.fromkeys(self._takes.values())  # in one order on every process
        self._parts = {name: _module(name).Rule(keys) for name in names}

    def init(self, weights: Any) -> dict[str, Any]:
        return {name: part.init(self._part(name, weights)) for name, part in self._parts.items()}

    def update(
        self, gradients: Any, state: dict[str, Any], weights: Any, pace: Pace
    ) -> tuple[Any, dict[str, Any]]:
        """The direction in which each weight moves, before the learning rate; the next states."""
        found = {
            name: part.update(
                self._part(name, gradients), state[name], self._part(name, weights), pace
            )
            for name, part in self._parts.items()
        }
        directions = join_parts(*(direction for direction, _ in found.values()))
        return directions, {name: state for name, (_, state) in found.items()}

    def second_moment(self, state: dict[str, Any]) -> tuple[Any, jax.Array] | None:
        """As `adamw.Rule.second_moment`, of those weights that have one; None where none has."""
        found = (part.second_moment(state[name]) for name, part in self._parts.items())
        return next((moment for moment in found if moment), None)

    def _part(self, name: str, tree: Any) -> Any:
        return part_of(tree, lambda weight: self._takes[weight.role] == name)


def _module(name: str) -> Any:
    return importlib.import_module(f"maxramp.training.optimizers.{name}")
