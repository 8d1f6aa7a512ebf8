"""Grouped products by blocks of rows in a loop, for CPUs, where XLA's own ragged product multiplies
every row by every expert. Shapes as in `grouped`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_BLOCK = 128  # rows


def _cut_blocks(sizes_E: jax.Array, rows: int) -> tuple[int, jax.Array, Callable]:
    """Returns the rows of a block, the number of blocks, and a function from a block's number to
    its expert, its first row and how many of its rows are the expert's."""
    block = row_tile(rows, len(sizes_E))
    starts_E, counts_E = jnp.cumsum(sizes_E) - sizes_E, -(-sizes_E // block)
    ends_E = jnp.cumsum(counts_E)

    def find(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        e = (ends_E <= i).sum()
        first = (i - (ends_E[e] - counts_E[e])) * block
        return e, starts_E[e] + first, jnp.minimum(sizes_E[e] - first, block)

    return block, ends_E[-1], find


def product(
    x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, is_transposed: bool = False
) -> jax.Array:
    block, count, find = _cut_blocks(sizes_E, len(x_MK))
    x_MK = jnp.pad(x_MK, ((0, block), (0, 0)))

    def body(i: jax.Array, y_MN: jax.Array) -> jax.Array:
        e, first, _ = find(i)
        # The next block overwrites the results for rows of the next expert.
        w_KN = w[e].T if is_transposed else w[e]
        y = jax.lax.dynamic_slice_in_dim(x_MK, first, block) @ w_KN
        return jax.lax.dynamic_update_slice_in_dim(y_MN, y, first, 0)

    zeros = jnp.zeros((len(x_MK), w.shape[1 if is_transposed else 2]), x_MK.dtype)
    return jax.lax.fori_loop(0, count, body, zeros)[:-block]


def gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    block, count, find = _cut_blocks(sizes_E, len(x_MK))
    x_MK, dy_MN = (jnp.pad(x, ((0, block), (0, 0))) for x in (x_MK, dy_MN))

    def body(i: jax.Array, dw_EKN: jax.Array) -> jax.Array:
        e, first, rows = find(i)
        x, dy = (jax.lax.dynamic_slice_in_dim(x, first, block) for x in (x_MK, dy_MN))
        is_own = jnp.arange(block)[:, None] < rows
        x, dy = (jnp.where(is_own, x, 0) for x in (x, dy))
        return dw_EKN.at[e].add(jnp.einsum("MK,MN->KN", x, dy, preferred_element_type=jnp.float32))

    zeros = jnp.zeros((len(sizes_E), x_MK.shape[1], dy_MN.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, count, body, zeros)


def row_tile(rows: int, experts: int) -> int:
    share = -(-rows // experts)
    return min(_BLOCK, max(8, 1 << (share - 1).bit_length()))
