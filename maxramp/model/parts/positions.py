"""Positions of tokens in their documents: they alone decide what attention sees.

A query sees an interval of keys, from `first` to its own index, and both rise along a row. So the
blocks of keys that a block of queries sees are an interval, and so are the blocks of queries that
see a block of keys.

Shapes: B rows, T tokens of a row, S the same tokens as keys, t queries of a row; q and k blocks of
queries and of keys.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxramp.model.keys import Execution
from maxramp.model.parts.rotary import Angles
from maxramp.model.pattern import Rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """Positions of the tokens of rows. With them, tokens may lie in any order in a row."""

    # integers; tokens of different segments do not see each other. None if a row is one text
    segments_BT: jax.Array | None = None
    # int32, of each token in its segment. None where tokens lie in order: segments rise along a row
    positions_BT: jax.Array | None = None
    # int32, of each in its row. None where tokens lie in order, or their order is unknown
    index_BT: jax.Array | None = None
    # float32, each token's weight in the layers' sums, 0 for padding: those of a row add up to what
    # the row adds to the divisor of the step's sums. None if nothing is summed
    token_weight_BT: jax.Array | None = None

    @property
    def has_order(self) -> bool:
        """Whether the order of tokens in their row is known."""
        return self.positions_BT is None or self.index_BT is not None

    def order(self, tokens: int) -> jax.Array:
        """Returns numbers that order the tokens of a segment: [T], or [B, T]."""
        in_order = self.positions_BT is None
        return jnp.arange(tokens, dtype=jnp.int32) if in_order else self.positions_BT

    def segment_positions(self, tokens: int) -> jax.Array | None:
        """Returns positions in segments, int32 [B, T]; None if all rows are 0 to T - 1."""
        if self.positions_BT is None and self.segments_BT is not None:
            return self.order(tokens) - starts(self.segments_BT)
        return self.positions_BT

    def first_seen(self, tokens: int, window: int) -> jax.Array:
        """Returns the first token that each token sees, for rows in order: int32 [T] or [B, T]."""
        index = self.order(tokens)
        first = jnp.zeros_like(index) if self.segments_BT is None else starts(self.segments_BT)
        return jnp.maximum(first, index - window + 1) if window else first

    def count_blocks(self, tokens: int, run: int, window: int) -> jax.Array:
        """Counts the runs that each run of tokens sees, for rows in order: int32 [n] or [B, n]."""
        first = self.first_seen(tokens, window)[..., ::run] // run
        return jnp.arange(tokens // run, dtype=jnp.int32) - first + 1


@dataclasses.dataclass(frozen=True)
class Pass:
    """What all layers of a pass share."""

    execution: Execution
    positions: Positions
    angles: Mapping[Rope, Angles]  # at the positions of the tokens
    token_weight_BT: jax.Array | None = None  # each token's weight in the layers' sums
    first_B: jax.Array | None = None  # int32, position of the first token, where layers have states


def starts(segments_BT: jax.Array) -> jax.Array:
    """Returns the index at which each token's segment starts, int32; segments rise along a row."""
    index_T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    return jax.lax.cummax(jnp.where(is_first_BT, index_T, 0), axis=1)


def key_blocks(
    first_Bt: jax.Array, index_Bt: jax.Array, queries: int, keys: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the first block of `keys` tokens that each block of `queries` sees, and the one after
    the last: int32 [B, q]."""
    return first_Bt[:, ::queries] // keys, index_Bt[:, queries - 1 :: queries] // keys + 1


def query_blocks(
    first_Bt: jax.Array, index_Bt: jax.Array, queries: int, keys: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the first block of `queries` that sees each block of `keys`, and the one after the
    last, or 0 and 0 if none does: int32 [B, k]."""
    start_k1 = jnp.arange(0, tokens, keys)[:, None]
    first_Bq, last_Bq = first_Bt[:, ::queries], index_Bt[:, queries - 1 :: queries]
    begin_Bk = (last_Bq[:, None] < start_k1).sum(-1, dtype=jnp.int32)
    end_Bk = (first_Bq[:, None] < start_k1 + keys).sum(-1, dtype=jnp.int32)
    return jnp.minimum(begin_Bk, end_Bk), end_Bk
