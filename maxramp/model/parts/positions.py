"""Positions of tokens in their documents: they alone decide what attention sees.

A query sees an interval of keys, from `first` to its own index, and both rise along a row. So the
blocks of keys that a block of queries sees are an interval, and so are the blocks of queries that
see a block of keys.

Shapes: B rows, T tokens of a row, S the same tokens as keys, t queries of a row; q and k blocks of
queries and of keys.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxramp.model.keys import Execution
from maxramp.model.pattern import Rope

Angles = tuple[jax.Array, jax.Array]  # cosine and sine


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
        """Counts the runs that each run of tokens sees, for rows in order: int32 [n] or [B, n];
        `run` divides `tokens`."""
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
    # false for tokens that a recurrent state must pass over: padding, and one that is read again;
    # None for tokens that are written
    valid_BT: jax.Array | None = None


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
    """Returns the first block of `queries` (which divides t) that sees each block of `keys`, and
    the one after the last; the same twice if none does: int32 [B, k]. Queries see the tokens from
    first_Bt to index_Bt, which both rise along a row of `tokens`."""
    start_k1 = jnp.arange(0, tokens, keys)[:, None]
    first_Bq, last_Bq = first_Bt[:, ::queries], index_Bt[:, queries - 1 :: queries]
    begin_Bk = (last_Bq[:, None] < start_k1).sum(-1, dtype=jnp.int32)
    end_Bk = (first_Bq[:, None] < start_k1 + keys).sum(-1, dtype=jnp.int32)
    return jnp.minimum(begin_Bk, end_Bk), end_Bk


# Rotary positions: each pair of a head's numbers rotates by an angle that grows with the position.
# H heads, h head width.


def rotary_angles(rope: Rope, positions_T: jax.Array, width: int) -> Angles:
    """Returns the cosine and sine for every position and pair of `width` numbers: float32 [T,
    width/2], or [B, T, width/2]."""
    fraction = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    timescale = rope.max_timescale**fraction
    share = 0.0  # how much of a pair keeps the speed that it has without the factor
    if rope.kind == "llama3.1":  # arXiv 2407.21783; its reference code
        rotations = rope.length / (2 * math.pi * timescale)
        share = jnp.clip((rotations - rope.low) / (rope.high - rope.low), 0, 1)
    if rope.kind == "yarn":  # arXiv 2309.00071, section 3.2, in pairs, not in rotations
        first, last = _pair(rope, rope.high, width), _pair(rope, rope.low, width)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs = jnp.arange(width // 2, dtype=jnp.float32)
        share = 1 - jnp.clip((pairs - first) / (last - first or 0.001), 0, 1)
    if rope.factor != 1:
        timescale /= share + (1 - share) / rope.factor
    angle = positions_T.astype(jnp.float32)[..., None] / timescale
    return jnp.cos(angle) * rope.amplitude, jnp.sin(angle) * rope.amplitude


def _pair(rope: Rope, rotations: float, width: int) -> float:
    """Returns the pair, perhaps a fraction, that rotates this often in `length` tokens."""
    timescale = rope.length / (2 * math.pi * rotations)
    return width * math.log(timescale) / (2 * math.log(rope.max_timescale))


def rotate(x_BTHh: jax.Array, angles: Angles) -> jax.Array:
    """Rotates the pairs (x_i, x_{i + w/2}) of every head's first w numbers by `angles`."""
    cos_T1h, sin_T1h = (part[..., None, :] for part in angles)
    width = 2 * cos_T1h.shape[-1]
    first, second = jnp.split(x_BTHh[..., :width].astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h)
    rotated = jnp.concatenate(rotated, axis=-1).astype(x_BTHh.dtype)
    if width == x_BTHh.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BTHh[..., width:]], axis=-1)


def rotate_neighbours(x_BTHh: jax.Array, angles: Angles) -> jax.Array:
    """Rotates the pairs (x_2i, x_{2i + 1}) of every head, as wide as the angles are for; the result
    has the first numbers of all pairs before the second ones."""
    cos_T1h, sin_T1h = (part[..., None, :] for part in angles)
    pairs = x_BTHh.astype(jnp.float32).reshape(*x_BTHh.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h)
    # Queries and keys alike end with the second ones of all pairs behind the first.
    return jnp.concatenate(rotated, axis=-1).astype(x_BTHh.dtype)


# An order of a row's tokens that gives devices along `context` equal work in attention.
#
# Where tokens attend to keys gathered from all devices, a token costs as much as it sees. A row is
# cut into runs of tokens. Each device gets the same number of runs and nearly the same cost, which
# follows from what documents and windows let tokens see, not from positions. C devices, m runs of a
# device, n = C m runs.
_FEWEST_RUNS = 16  # of a device, for runs longer than a kernel's smallest blocks


def run_length(tokens: int) -> int:
    """Returns the tokens of a run, for a device's `tokens` of a row."""
    most = max(128, tokens // _FEWEST_RUNS)
    return next((n for n in (512, 256, 128) if tokens % n == 0 and n <= most), 1)


def balanced_order(costs_Bn: jax.Array, run: int, devices: int) -> jax.Array:
    """Assigns n runs of `run` tokens, n a multiple of `devices`, by their costs: each round gives
    every device one of the costliest left, the least busy device the costliest.

    Returns int32 [B, T]: indices in the row of the first device's tokens, then of the next one's,
    each rising.
    """
    n = costs_Bn.shape[1]

    def order(costs_n: jax.Array) -> jax.Array:
        costliest_mC = jnp.argsort(-costs_n).reshape(n // devices, devices)

        def assign(loads_C: jax.Array, runs_C: jax.Array) -> tuple[jax.Array, jax.Array]:
            devices_C = jnp.argsort(loads_C)
            return loads_C.at[devices_C].add(costs_n[runs_C]), devices_C

        _, devices_mC = jax.lax.scan(assign, jnp.zeros(devices), costliest_mC)
        device_n = jnp.zeros(n, jnp.int32).at[costliest_mC].set(devices_mC)
        runs_n = jnp.argsort(device_n, stable=True)
        return (runs_n[:, None] * run + jnp.arange(run)).reshape(n * run)

    return jax.vmap(order)(costs_Bn.astype(jnp.float32)).astype(jnp.int32)
