"""What all layers of a pass share, and what every mixer offers.

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
    shares_BT: jax.Array | None = None  # what each counts in the sums of layers (`data.batch`)
    # int32, the position of the first of the tokens, where layers remember those before it
    first_B: jax.Array | None = None


class State(Protocol):
    """What a layer remembers of every row while text is generated: a pytree of arrays [B, ...],
    which the mixer replaces in place: it lives as long as the pass that is traced."""

    def resize(self, slots: int, mixing: Mixing, lengths_B: jax.Array) -> Self:
        """Returns the state for rows of up to `slots` tokens, which have these lengths now."""


class Mixer(Protocol):
    """A module of a layer's weights: `Attention`."""

    def __init__(self, keys: ModelKeys, key: jax.Array): ...

    def __call__(
        self, x_BTD: jax.Array, mixing: Mixing, shared: Pass, state: Any = None
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]; with a state, of tokens behind those that it remembers."""

    @staticmethod
    def empty_state(keys: ModelKeys, rows: int, slots: int) -> State:
        """Returns the state of rows without tokens."""
