"""Grouped products on TPUs, by the kernels of megablox. Shapes as in `grouped`."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

_ROW_TILE, _SIDE_BYTES = 512, 2048  # most rows, and bytes of inputs or outputs of a row, of a tile
_MOST_BYTES = 14 * 2**20  # of a tile's buffers; compilers allow 16 MiB with all else


def product(
    x_MK: jax.Array,
    w: jax.Array,
    sizes_E: jax.Array,
    is_transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    (M, K), N = x_MK.shape, w.shape[1 if is_transposed else 2]
    tile, itemsize = row_tile(M, len(sizes_E)), x_MK.dtype.itemsize
    side = _SIDE_BYTES // itemsize
    # Twice the inputs where they fit: where these are all, a group's tiles read its weights once.
    inputs, outputs = _side_tile(K, 2 * side), _side_tile(N, side)
    if _bytes(tile, inputs, outputs, itemsize) > _MOST_BYTES:
        inputs = _side_tile(K, side)
    tiling, x_MK = (tile, inputs, outputs), _pad_rows(x_MK, tile)
    y_MN = gmm(
        x_MK, w, sizes_E, x_MK.dtype, tiling, transpose_rhs=is_transposed, interpret=interpret
    )
    return y_MN[:M]


def gradient(
    x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array, interpret: bool = False
) -> jax.Array:
    tile = row_tile(len(x_MK), len(sizes_E))
    side = _SIDE_BYTES // x_MK.dtype.itemsize
    tiling = tile, *(_side_tile(x.shape[1], side) for x in (x_MK, dy_MN))
    x_KM, dy_MN = _pad_rows(x_MK, tile).T, _pad_rows(dy_MN, tile)
    return tgmm(x_KM, dy_MN, sizes_E, x_MK.dtype, tiling, interpret=interpret)


def row_tile(rows: int, experts: int) -> int:
    """Returns an eighth of a group, as two groups visit the tile in which one ends."""
    share = max(1, rows // experts // 8)
    return min(_ROW_TILE, max(128, 1 << (share.bit_length() - 1)))


def _bytes(rows: int, inputs: int, outputs: int, itemsize: int) -> int:
    """Returns the bytes of a product's buffers: two of each array, and sums in float32."""
    return 2 * itemsize * (rows * (inputs + outputs) + inputs * outputs) + 4 * rows * outputs


def _side_tile(size: int, most: int) -> int:
    """Returns the size of the fewest equal tiles of a side: 768 of 1,536 for at most 1,024."""
    tiles = -(-size // most)
    return -(-size // tiles // 128) * 128 if tiles > 1 else size


def _pad_rows(x: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
