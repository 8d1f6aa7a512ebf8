"""The optimizers of an `opt_type`, each for the weights of its roles; states are by name. One is a
record in `training.keys` and the module of its name here, with `init` and `update` as this one."""

import importlib
from typing import Any

from maxramp.model.parts.weights import join_parts, part_of
from maxramp.training.keys import OptimizerKeys, optimizer_names
from maxramp.training.optimizers.half_lives import Pace


def init(keys: OptimizerKeys, weights: Any) -> dict[str, Any]:
    return {name: rule.init(keys, _part(keys, name, weights)) for name, rule in _rules(keys)}


def update(
    keys: OptimizerKeys, gradients: Any, state: dict[str, Any], weights: Any, pace: Pace
) -> tuple[Any, dict[str, Any]]:
    """The direction in which each weight moves, before the learning rate; the next states."""
    found = {}
    for name, rule in _rules(keys):
        g, w = _part(keys, name, gradients), _part(keys, name, weights)
        found[name] = rule.update(keys, g, state[name], w, pace)
    directions = join_parts(*(direction for direction, _ in found.values()))
    return directions, {name: state for name, (_, state) in found.items()}


def _rules(keys: OptimizerKeys) -> list[tuple[str, Any]]:
    """In one order on every process."""
    names = dict.fromkeys(optimizer_names(keys.opt_type).values())
    return [(name, importlib.import_module(f"{__package__}.{name}")) for name in names]


def _part(keys: OptimizerKeys, name: str, tree: Any) -> Any:
    of_role = optimizer_names(keys.opt_type)
    return part_of(tree, lambda weight: of_role[weight.role] == name)
