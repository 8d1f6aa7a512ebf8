"""Which optimizer a weight takes, by its role. An optimizer is a record in `training.keys` and the
module of its name here, which has `init` and `update`."""

import importlib
from typing import Any

from maxramp.model.parts.weights import join_parts, part_of
from maxramp.training.keys import OptimizerKeys, optimizer_names
from maxramp.training.optimizers.half_lives import Pace


class Optimizer:
    """The optimizers of an `opt_type`, each for the weights of its roles. States are by name."""

    def __init__(self, keys: OptimizerKeys):
        self._keys, self._takes = keys, optimizer_names(keys.opt_type)
        names = dict.fromkeys(self._takes.values())  # in one order on every process
        self._rules = {
            n: importlib.import_module(f"maxramp.training.optimizers.{n}") for n in names
        }

    def init(self, weights: Any) -> dict[str, Any]:
        return {n: x.init(self._keys, self._part(n, weights)) for n, x in self._rules.items()}

    def update(
        self, gradients: Any, state: dict[str, Any], weights: Any, pace: Pace
    ) -> tuple[Any, dict[str, Any]]:
        """The direction in which each weight moves, before the learning rate; the next states."""
        found = {}
        for name, rule in self._rules.items():
            g, w = self._part(name, gradients), self._part(name, weights)
            found[name] = rule.update(self._keys, g, state[name], w, pace)
        directions = join_parts(*(direction for direction, _ in found.values()))
        return directions, {name: state for name, (_, state) in found.items()}

    def _part(self, name: str, tree: Any) -> Any:
        return part_of(tree, lambda weight: self._takes[weight.role] == name)
