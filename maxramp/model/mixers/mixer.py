"""The interface of mixers, and what all layers of a pass share.

Shapes: B rows, T tokens, D model width.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self

import jax

from maxramp.model.keys import Execution, ModelKeys
from maxramp.model.parts.positions import Positions
from maxramp.model.parts.rotary import Angles
from maxramp.model.pattern import Mixing, Rope


@dataclasses.dataclass(frozen=True)
class Pass:
    """What all layers of a pass share."""

    execution: Execution
    positions: Positions
    angles: Mapping[Rope, Angles]  # at the positions of the tokens
    token_weight_BT: jax.Array | None = None  # each token's weight in the layers' sums
    first_B: jax.Array | None = None  # int32, position of the first token, where layers have states


class State(Protocol):
    """What a layer keeps of every row while text is generated: a pytree of arrays [B, ...]. The
    mixer replaces them in place; the object lives for one traced pass."""

    def resize(self, slots: int, mixing: Mixing, lengths_B: jax.Array) -> Self:
        """Returns the state with room for rows of `slots` tokens, which now have these lengths."""


class Mixer(Protocol):
    """A module of a layer's weights: `Attention`."""

    def __init__(self, keys: ModelKeys, key: jax.Array): ...

    def __call__(
        self, x_BTD: jax.Array, mixing: Mixing, shared: Pass, state: Any = None
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; with a state, for tokens after its own, which it then
        has."""

    @staticmethod
    def empty_state(keys: ModelKeys, rows: int, slots: int) -> State:
        """Returns the state of rows without tokens."""
