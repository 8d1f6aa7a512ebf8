"""Stochastic gradient descent: weights move against their gradients."""

from typing import Any

from maxramp.training.keys import OptimizerKeys


class SGD:
    """Gradients as they are."""

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
