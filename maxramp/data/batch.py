"""The batch of a step: tokens, what each predicts, hashes. Shapes: A gradient accumulation steps, B
rows of a micro batch, N rows, T tokens of a row, S = T + 1 with the one after them.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxramp.data.rows import PADDING, Row
from maxramp.model.parts.positions import Positions
from maxramp.stage import Field

_Array = jax.Array | np.ndarray
_START = 1 << 30  # what the hash of a row adds to the id of a document's first token
_BLOCK = 1 << 16  # tokens that are hashed together: they stay in a core's cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Arrays [A, B, ...] of a step, [B, ...] of a micro batch; None is in no program. Most have T
    numbers a row; the number at a token is about the token that it predicts.
    """

    tokens: _Array  # int32 ids; PADDING (-1) is not a token
    targets: _Array  # int32, the id that each token predicts; PADDING where that is nothing
    segments: _Array | None = None  # int32, each token's document in its row; None: rows are texts
    hashes: _Array | None = None  # uint32 [..., 2], of each row by its number in the step
    weights: _Array | None = None  # float32, what multiplies a target's term; None = 1
    shares: _Array | None = None  # float32, what a target adds to the divisor of terms; None = 1
    sampled_log_probs: _Array | None = None  # float32, of the target when it was sampled
    # float32, under a policy to stay near: of a target, or of the answers of a pair, [..., 2]
    reference_log_probs: _Array | None = None
    # int32, of each token in its document, where the tokens of a row lie in another order than that
    positions: _Array | None = None
    index: _Array | None = None  # and its index in the row, by which kernels attend
    # for each draft the tokens that it reads and its targets (`training.drafts`); () = none runs
    ahead: tuple[tuple[_Array, _Array], ...] = ()

    @property
    def token_positions(self) -> Positions:
        return Positions(self.segments, self.positions, self.index)


def abstract_batch(
    fields: Sequence[Field], leading: tuple[int, ...], sharding: NamedSharding
) -> Batch:
    """Returns the shapes of a batch whose arrays begin with `leading` axes; others than `fields`
    are None."""
    make = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return Batch(**{name: make((*leading, *suffix), dtype) for name, dtype, suffix in fields})


def stack(
    rows: Sequence[Row], fields: Sequence[Field], numbers: Sequence[int] | None = None
) -> Batch:
    """Makes the batch [N, ...] of one or more rows of the same length with their `numbers` in the
    step (None: from 0 on): tokens, targets, hashes and, if in `fields`, segments and reference log
    probabilities. A token that begins a document is not a target of the one before it.
    """
    tokens_NS, segments_NT = np.stack([row.tokens for row in rows]), None
    N, S = tokens_NS.shape
    begins = (n * S + row.begins for n, row in enumerate(rows) if row.begins is not None)
    starts = np.concatenate([np.empty(0, np.int64), *begins])  # of documents, in all rows
    marked = tokens_NS.ravel()
    marked[starts] += _START
    hashes_N2 = hash_rows(tokens_NS, tuple(numbers or range(N)))
    marked[starts] -= _START
    targets_NS = tokens_NS.copy()
    targets_NS.ravel()[starts] = PADDING
    for targets_S, row in zip(targets_NS, rows, strict=True):
        if row.is_target is not None:
            targets_S[~row.is_target] = PADDING
    if any(field.name == "segments" for field in fields):
        segments = np.arange(len(starts) + 1, dtype=np.int32)
        lengths = np.diff(starts, prepend=0, append=N * S)
        segments_NS = np.repeat(segments, lengths).reshape(N, S)
        segments_NT = segments_NS[:, :-1] - segments_NS[:, :1]
    batch = Batch(tokens_NS[:, :-1], targets_NS[:, 1:], segments_NT, hashes_N2)
    if all(field.name != "reference_log_probs" for field in fields):
        return batch
    none_2 = np.zeros(2, np.float32)  # of padding
    known = (row.reference_log_probs for row in rows)
    references_N2 = np.stack([none_2 if x is None else x for x in known])
    return dataclasses.replace(batch, reference_log_probs=references_N2)


def count_targets(rows: Iterable[Row], enough: int) -> int:
    """Counts the tokens that rows predict, up to the row at which they are more than `enough`."""
    count = 0
    for row in rows:
        count += int((stack([row], ()).targets != PADDING).sum())
        if count > enough:
            break
    return count


def hash_rows(tokens_NS: np.ndarray, numbers: tuple[int, ...]) -> np.ndarray:
    """Returns each row's part of the step's fingerprint: uint32 [N, 2], high and low word. Tokens
    are int32; `numbers`, N of them, are those of the rows in the step.

    The fingerprint is an order-sensitive 64-bit hash. Token t at position i of the step's rows,
    read in order, adds mix(mix(i + c) ^ t) to each word, modulo 2^32; mix is the finalizer of
    MurmurHash3, c the word's constant. A sum of positions in the step depends neither on the
    devices nor on micro batches. `stack` adds 2^30 to the first id of each document that is apart.
    """
    N, S = tokens_NS.shape
    mixed_N2S, hashes_N2 = _mixed_positions(numbers, S), np.empty((N, 2), np.uint32)
    size = max(1, _BLOCK // S)
    scratch = np.empty((2, min(size, N), 2, S), np.uint32)
    for first in range(0, N, size):
        block = slice(first, first + size)
        x_n2S, shifted_n2S = scratch[:, : N - first]
        tokens_n1S = tokens_NS[block, None].view(np.uint32)
        np.bitwise_xor(mixed_N2S[block], tokens_n1S, out=x_n2S)
        _mix(x_n2S, shifted_n2S).sum(2, dtype=np.uint32, out=hashes_N2[block])
    return hashes_N2


@functools.lru_cache(2)  # all steps of a stage ask for the same; those of two are read at once
def _mixed_positions(numbers: tuple[int, ...], length: int) -> np.ndarray:
    constants_21 = np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)[:, None]
    positions_NS = np.array(numbers)[:, None] * length + np.arange(length)
    mixed_N2S = positions_NS.astype(np.uint32)[:, None] + constants_21
    return _mix(mixed_N2S, np.empty_like(mixed_N2S))


def _mix(x: np.ndarray, shifted: np.ndarray) -> np.ndarray:
    """Applies the finalizer of MurmurHash3, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= np.right_shift(x, np.uint32(shift), out=shifted)
        x *= np.uint32(factor)
    x ^= np.right_shift(x, np.uint32(16), out=shifted)
    return x
