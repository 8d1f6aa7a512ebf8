"""Grouped products on NVIDIA GPUs: a program multiplies one tile of rows of one expert.

Tiles begin and end with an expert's rows, so no two programs write to the same rows; a tile after
all groups does nothing. Sums are float32.

Shapes: M rows, E experts, K inputs, N outputs; m, k and n in names of blocks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes are powers of two, at least 16."""

    rows: int
    columns: int
    inner: int
    warps: int = 8
    stages: int = 3


# The fastest of twelve on an H100 for Mixtral's and Qwen3's sizes, or within a few percent: 76 to
# 92% and 61 to 79% of the speed of a dense product. Three stages also fit into an A100's memory.
_HALF = Tiling(128, 256, 64)
_FLOAT32 = Tiling(128, 128, 32)
_NEIGHBORS = 8  # tiles of rows that share the weights in a GPU's cache


def product(
    x_MK: jax.Array,
    w: jax.Array,
    sizes_E: jax.Array,
    is_transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies rows, of which each expert has its `sizes_E`, expert after expert, by the experts'
    matrices [E, K, N], or transposed [E, N, K]: [M, N]; rows after all groups are undefined."""
    tiling = _choose(x_MK)
    M, E, N = len(x_MK), len(sizes_E), w.shape[1 if is_transposed else 2]
    rows = row_tile(M, E, tiling)
    tiles = min(M, M // rows + E)
    kernel = functools.partial(
        _product_kernel,
        grid=(tiles, pl.cdiv(N, tiling.columns)),
        rows=rows,
        tiling=tiling,
        is_transposed=is_transposed,
    )
    whole = [pl.no_block_spec] * 5
    return pl.pallas_call(
        kernel,
        grid=(tiles * pl.cdiv(N, tiling.columns),),
        in_specs=whole,
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
        compiler_params=_params(tiling),
        interpret=interpret,
        name="grouped_product",
    )(*_cut(sizes_E, tiles, rows), x_MK, w)


def gradient(
    x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array, interpret: bool = False
) -> jax.Array:
    """Multiplies, for every expert, its rows' inputs by their outputs' gradients: [E, K, N], zeros
    for one without rows; `sizes_E` as in `product`."""
    tiling = _choose(x_MK)
    K, N, E = x_MK.shape[1], dy_MN.shape[1], len(sizes_E)
    grid = pl.cdiv(K, tiling.rows), pl.cdiv(N, tiling.columns)
    return pl.pallas_call(
        functools.partial(_gradient_kernel, grid=grid, tiling=tiling),
        grid=(grid[0] * grid[1], E),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.BlockSpec((None, K, N), lambda _, e: (e, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((E, K, N), x_MK.dtype),
        compiler_params=_params(tiling),
        interpret=interpret,
        name="grouped_gradient",
    )(jnp.cumsum(sizes_E) - sizes_E, jnp.cumsum(sizes_E), x_MK, dy_MN)


def _cut(sizes_E: jax.Array, tiles: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each tile's expert, its first row, and where its expert's rows end."""
    i = jnp.arange(tiles, dtype=jnp.int32)
    ends_E, counts_E = jnp.cumsum(sizes_E), pl.cdiv(sizes_E, rows)
    last_E = jnp.cumsum(counts_E)
    e = jnp.minimum((last_E <= i[:, None]).sum(1, dtype=jnp.int32), len(sizes_E) - 1)
    return e, ends_E[e] - sizes_E[e] + (i - last_E[e] + counts_E[e]) * rows, ends_E[e]


def _product_kernel(
    expert_ref, first_ref, end_ref, x_ref, w_ref, y_ref, *, grid, rows, tiling, is_transposed
):
    i, j = _tile_of_program(grid)
    e, first, end = expert_ref[i], first_ref[i], end_ref[i]
    K, N = x_ref.shape[1], y_ref.shape[1]
    tile, columns = (first, rows, end), (j * tiling.columns, tiling.columns, N)

    @pl.when(first < end)
    def _():
        def add(k, y_mn):
            inner = k * tiling.inner, tiling.inner, K
            x_mk = _load(x_ref, tile, inner)
            if is_transposed:
                w_kn = _load(w_ref, columns, inner, e).T
            else:
                w_kn = _load(w_ref, inner, columns, e)
            return y_mn + triton.dot(x_mk, w_kn)

        zeros = jnp.zeros((rows, tiling.columns), jnp.float32)
        y_mn = jax.lax.fori_loop(0, pl.cdiv(K, tiling.inner), add, zeros)
        _store(y_ref, tile, columns, y_mn)


def _gradient_kernel(start_ref, end_ref, x_ref, dy_ref, dw_ref, *, grid, tiling):
    i, j = _tile_of_program(grid)
    e = pl.program_id(1)
    start, end = start_ref[e], end_ref[e]
    K, N = dw_ref.shape
    inputs, outputs = (i * tiling.rows, tiling.rows, K), (j * tiling.columns, tiling.columns, N)

    def add(m, dw_kn):
        rows = start + m * tiling.inner, tiling.inner, end
        return dw_kn + triton.dot(_load(x_ref, rows, inputs).T, _load(dy_ref, rows, outputs))

    zeros = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    dw_kn = jax.lax.fori_loop(0, pl.cdiv(end - start, tiling.inner), add, zeros)
    _store(dw_ref, inputs, outputs, dw_kn)


def _tile_of_program(grid: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Returns a program's tile of rows and of columns; programs that run together share both."""
    number, (tiles, columns) = pl.program_id(0), grid
    first = jax.lax.div(number, _NEIGHBORS * columns) * _NEIGHBORS
    beside = jnp.minimum(tiles - first, _NEIGHBORS)
    number = jax.lax.rem(number, _NEIGHBORS * columns)
    return first + jax.lax.rem(number, beside), jax.lax.div(number, beside)


def _load(ref, rows, columns, *expert):
    where, mask = _clip(rows, columns)
    return triton.load(ref.at[*expert, *where], mask=mask, other=0.0)


def _store(ref, rows, columns, value):
    where, mask = _clip(rows, columns)
    triton.store(ref.at[where], value.astype(ref.dtype), mask=mask)


def _clip(*sides: tuple[jax.Array, int, int]):
    """Returns the slices of a block, and which of its elements lie before the ends. Each side is
    its start, its size, and where the array ends."""
    (a, m, end_m), (b, n, end_n) = sides
    is_row, is_column = a + jnp.arange(m) < end_m, b + jnp.arange(n) < end_n
    return (pl.ds(a, m), pl.ds(b, n)), is_row[:, None] & is_column[None, :]


def row_tile(rows: int, experts: int, tiling: Tiling = _HALF) -> int:
    return min(tiling.rows, max(16, pl.next_power_of_2(pl.cdiv(rows, experts))))


def _choose(x: jax.Array) -> Tiling:
    return _FLOAT32 if x.dtype == jnp.float32 else _HALF


def _params(tiling: Tiling) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages)
