"""Products of tokens with the weights of their experts, by the best kernel of each platform.

Rows are sorted by expert, those of one behind those of another; a device's are of its own experts.
No row is dropped or added: kernels go by the sizes of the groups.

Shapes: M rows of a device, E experts of a device, K inputs, N outputs.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxramp.errors import ConfigError
from maxramp.model.parts.weights import STAGE_PRODUCTS, Weight
from maxramp.parallel.axes import BATCH_AXES
from maxramp.parallel.collectives import all_gather, map_shards, psum, psum_scatter
from maxramp.parallel.sharding import SORTED_M, Spec, gradient_spec

_BLOCK = 128  # rows of an expert that a CPU multiplies at once
_TILE = 512  # rows of a tile on TPUs


def product(x_MK: jax.Array, weight: Weight, sizes_E: jax.Array, kernel: str) -> jax.Array:
    """[M, N]: every row times the matrix of its expert; rows behind all groups are undefined. Each
    device has its own rows and groups (`SORTED_M`), and what it has of the weights' K or N over
    tensor."""
    y_MN = _product(x_MK, weight[...].astype(x_MK.dtype), sizes_E, kernel)
    return checkpoint_name(y_MN, STAGE_PRODUCTS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, kernel: str) -> jax.Array:
    spec = jax.typeof(w).sharding.spec

    def local(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return _KERNELS[kernel].product(x_MK, _gather(w, spec), sizes_E)

    return map_shards(local, (SORTED_M, spec, SORTED_M), SORTED_M)(x_MK, w, sizes_E)


def _gather(w: jax.Array, spec: Spec) -> jax.Array:
    """The weights [E, K, N] of a device's experts, of a stage's one layer, whole over fsdp."""
    w_EKN = w.reshape(w.shape[-3:])
    return all_gather(w_EKN, "fsdp", dimension=_sharded_side(spec))


def _sharded_side(spec: Spec) -> int:
    return spec.partitions[-3:].index("fsdp")


def _forward(x_MK, w, sizes_E, kernel):
    return _product(x_MK, w, sizes_E, kernel), (x_MK, w, sizes_E)


def _backward(kernel, residuals, dy_MN):
    spec = jax.typeof(residuals[1]).sharding.spec
    copies = [axis for axis in BATCH_AXES if axis not in (*spec.partitions, *spec.reduced)]

    def local(x_MK, w, sizes_E, dy_MN):
        way = _KERNELS[kernel]
        dx_MK = way.transposed(dy_MN, _gather(w, spec), sizes_E)
        # Each device holds the sum of its own shard alone, never that of all.
        dw_EKN = way.gradient(x_MK, dy_MN, sizes_E).astype(w.dtype)
        dw_EKN = psum_scatter(dw_EKN, "fsdp", dimension=_sharded_side(spec))
        return dx_MK, psum(dw_EKN, copies).reshape(w.shape)

    specs = SORTED_M, spec, SORTED_M, SORTED_M
    local = map_shards(local, specs, (SORTED_M, gradient_spec(spec)))
    return *local(*residuals, dy_MN), None


_product.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    product: Callable  # [M, K], [E, K, N], [E] -> [M, N]
    transposed: Callable  # [M, N], [E, K, N], [E] -> [M, K]
    gradient: Callable  # [M, K], [M, N], [E] -> [E, K, N]


def select(asked: str, platform: str | None, dtype: str) -> str:
    """The kernel that was asked for; under autoselected the best that can."""
    obstacles = {
        "megablox": {f"needs TPUs, not {platform} devices": platform != "tpu"},
        "ragged_dot": {},
        "blocks": {},
    }
    if asked == "autoselected":
        return {"tpu": "megablox", "cpu": "blocks"}.get(platform or "cpu", "ragged_dot")
    for obstacle, stands in obstacles.get(asked, {}).items():
        if stands:
            raise ConfigError(
                f"grouped_matmul={asked} {obstacle}; use grouped_matmul=autoselected or ragged_dot"
            )
    return asked


# Blocks of rows in a loop: XLA for CPUs makes every expert multiply every row in its ragged_dot.


def _cut_blocks(sizes_E: jax.Array, rows: int) -> tuple[int, jax.Array, Callable]:
    """Rows of a block, how many blocks there are, and of each its expert, its first row and how
    many of its rows are the expert's."""
    share = -(-rows // len(sizes_E))
    block = min(_BLOCK, max(8, 1 << (share - 1).bit_length()))
    starts_E, counts_E = jnp.cumsum(sizes_E) - sizes_E, -(-sizes_E // block)
    ends_E = jnp.cumsum(counts_E)

    def find(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        e = (ends_E <= i).sum()
        first = (i - (ends_E[e] - counts_E[e])) * block
        return e, starts_E[e] + first, jnp.minimum(sizes_E[e] - first, block)

    return block, ends_E[-1], find


def _block_product(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    block, count, find = _cut_blocks(sizes_E, len(x_MK))
    x_MK = jnp.pad(x_MK, ((0, block), (0, 0)))

    def body(i: jax.Array, y_MN: jax.Array) -> jax.Array:
        e, first, _ = find(i)
        # What it makes of the next expert's rows, the next block writes over.
        y = jax.lax.dynamic_slice_in_dim(x_MK, first, block) @ w_EKN[e]
        return jax.lax.dynamic_update_slice_in_dim(y_MN, y, first, 0)

    zeros = jnp.zeros((len(x_MK), w_EKN.shape[2]), x_MK.dtype)
    return jax.lax.fori_loop(0, count, body, zeros)[:-block]


def _block_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
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


def _transpose(product: Callable) -> Callable:
    return lambda dy_MN, w_EKN, sizes_E: product(dy_MN, w_EKN.swapaxes(1, 2), sizes_E)


def _ragged_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return jax.lax.ragged_dot_general(
        x_MK, dy_MN, sizes_E, numbers, preferred_element_type=jnp.float32
    )


def _megablox(name: str, **options) -> Callable:
    def run(a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> jax.Array:
        module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

        M = len(a)
        tile = min(_TILE, -(-M // 128) * 128)
        short = -M % tile
        a = jnp.pad(a, ((0, short), (0, 0)))
        if name == "tgmm":
            a, b = a.T, jnp.pad(b, ((0, short), (0, 0)))
        tiling = tile, *(_tile_of(size) for size in _sides(name, a, b, options))
        y = getattr(module, name)(a, b, sizes_E, a.dtype, tiling, **options)
        return y if name == "tgmm" else y[:M]

    return run


def _sides(name: str, a: jax.Array, b: jax.Array, options: dict) -> tuple[int, int]:
    """The sizes of the contraction and of the outputs, as megablox tiles them."""
    if name == "tgmm":
        return a.shape[0], b.shape[1]
    return a.shape[1], b.shape[1] if options.get("transpose_rhs") else b.shape[2]


def _tile_of(size: int) -> int:
    return min(1024, size)


_KERNELS = {
    "blocks": _Kernel(_block_product, _transpose(_block_product), _block_gradient),
    "ragged_dot": _Kernel(jax.lax.ragged_dot, _transpose(jax.lax.ragged_dot), _ragged_gradient),
    "megablox": _Kernel(_megablox("gmm"), _megablox("gmm", transpose_rhs=True), _megablox("tgmm")),
    "megablox_interpreted": _Kernel(
        _megablox("gmm", interpret=True),
        _megablox("gmm", transpose_rhs=True, interpret=True),
        _megablox("tgmm", interpret=True),
    ),
}
