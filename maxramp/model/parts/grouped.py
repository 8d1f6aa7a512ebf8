"""Products of tokens with the weights of their experts, by the best kernel of each platform.

Rows are sorted by expert, those of one behind those of another; a device's are of its own experts.
No row is dropped or added: kernels go by the sizes of the groups.

Shapes: M rows of a device, E experts of a device, K inputs, N outputs.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxramp.errors import ConfigError
from maxramp.model.keys import ModelKeys
from maxramp.model.parts.weights import STAGE_PRODUCTS, Weight
from maxramp.parallel.axes import BATCH_AXES
from maxramp.parallel.collectives import all_gather, map_shards, psum, psum_scatter
from maxramp.parallel.sharding import SORTED_M, Spec, gradient_spec

_BLOCK = 128  # rows of an expert that a CPU multiplies at once
_ROW_TILE, _SIDE_TILE = 512, 1024  # most rows, inputs and outputs of a tile on TPUs


def product(x_MK: jax.Array, weight: Weight, sizes_E: jax.Array, kernel: str) -> jax.Array:
    """[M, N]: every row times the matrix of its expert; rows behind all groups are undefined. Each
    device has its own rows and groups (`SORTED_M`), and what it has of the weights' K or N over
    tensor."""
    return checkpoint_name(
        _product(x_MK, weight[...].astype(x_MK.dtype), sizes_E, kernel), STAGE_PRODUCTS
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, kernel: str) -> jax.Array:
    spec = jax.typeof(w).sharding.spec

    def local(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array) -> jax.Array:
        w_EAB = _gather(w, spec)
        return _KERNELS[kernel].product(x_MK, w_EAB, sizes_E, is_transposed=_is_turned(spec))

    return map_shards(local, (SORTED_M, spec, SORTED_M), SORTED_M)(x_MK, w, sizes_E)


def _is_turned(spec: Spec) -> bool:
    """Whether the outputs of the weights lie over fsdp and not their inputs. Their shards are
    turned, so that they are gathered, and gradients scattered, at the side that is not in a
    device's lanes: XLA for TPUs would copy what it gathers there, and scatter nothing."""
    return spec.partitions[-1] == "fsdp"


def _gather(w: jax.Array, spec: Spec) -> jax.Array:
    """The weights of a device's experts, of a stage's one layer, whole over fsdp: [E, K, N], or
    turned [E, N, K]."""
    w_EKN = w.reshape(w.shape[-3:])
    if "fsdp" not in spec.partitions:  # gathered before
        return w_EKN
    return all_gather(w_EKN.swapaxes(1, 2) if _is_turned(spec) else w_EKN, "fsdp", dimension=1)


def _forward(x_MK, w, sizes_E, kernel):
    return _product(x_MK, w, sizes_E, kernel), (x_MK, w, sizes_E)


def _backward(kernel, residuals, dy_MN):
    spec = jax.typeof(residuals[1]).sharding.spec
    copies = [axis for axis in BATCH_AXES if axis not in (*spec.partitions, *spec.reduced)]

    def local(x_MK, w, sizes_E, dy_MN):
        way, is_turned = _KERNELS[kernel], _is_turned(spec)
        dx_MK = way.product(dy_MN, _gather(w, spec), sizes_E, is_transposed=not is_turned)
        # Each device holds the sum of its own shard alone, never that of all.
        sides = (dy_MN, x_MK) if is_turned else (x_MK, dy_MN)
        dw = way.gradient(*sides, sizes_E).astype(w.dtype)
        if "fsdp" in spec.partitions:
            dw = psum_scatter(dw, "fsdp", dimension=1)
        dw_EKN = dw.swapaxes(1, 2) if is_turned else dw
        return dx_MK, psum(dw_EKN, copies).reshape(w.shape)

    specs = SORTED_M, spec, SORTED_M, SORTED_M
    local = map_shards(local, specs, (SORTED_M, gradient_spec(spec)))
    return *local(*residuals, dy_MN), None


_product.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    product: Callable  # [M, K], [E, K, N], [E] -> [M, N]; is_transposed: of [E, N, K]
    gradient: Callable  # [M, K], [M, N], [E] -> [E, K, N]


def describe(rows: int, most_rows: int, experts: int) -> str:
    """A name that says how many rows a device's experts compute where loads are equal, and for how
    many megablox takes the time, in tiles of buffers of `most_rows`. `experts` are the device's."""
    padded = rows + (experts - 1) * _row_tile(most_rows, experts)
    return f"grouped_rows_{rows}_tiled_{padded}"


def select(asked: str, platform: str | None) -> str:
    """The kernel that was asked for; under autoselected the best that can. `platform` is None where
    unknown."""
    there = f"{platform or 'unknown'} devices"
    obstacles = {
        "megablox": {f"needs TPUs, not {there}": platform != "tpu"},
        "triton": {
            f"needs NVIDIA GPUs, not {there}": platform not in ("gpu", "cuda"),
            "needs Pallas for Triton, which jax 0.10.2 to 0.12 have": (
                importlib.util.find_spec("jax.experimental.pallas.triton") is None
            ),
        },
        "blocks": {},
        "ragged_dot": {},
    }
    if asked == "autoselected":
        return next(name for name, found in obstacles.items() if not any(found.values()))
    for obstacle, stands in obstacles[asked].items():
        if stands:
            raise ConfigError(
                f"grouped_matmul={asked} {obstacle}; use grouped_matmul=autoselected or blocks"
            )
    return asked


def select_for(keys: ModelKeys, platform: str | None) -> str | None:
    """None for a model without experts."""
    return select(keys.grouped_matmul, platform) if keys.num_experts > 1 else None


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


def _block_product(
    x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, is_transposed: bool = False
) -> jax.Array:
    block, count, find = _cut_blocks(sizes_E, len(x_MK))
    x_MK = jnp.pad(x_MK, ((0, block), (0, 0)))

    def body(i: jax.Array, y_MN: jax.Array) -> jax.Array:
        e, first, _ = find(i)
        # What it makes of the next expert's rows, the next block writes over.
        w_KN = w[e].T if is_transposed else w[e]
        y = jax.lax.dynamic_slice_in_dim(x_MK, first, block) @ w_KN
        return jax.lax.dynamic_update_slice_in_dim(y_MN, y, first, 0)

    zeros = jnp.zeros((len(x_MK), w.shape[1 if is_transposed else 2]), x_MK.dtype)
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


def _ragged_product(
    x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, is_transposed: bool = False
) -> jax.Array:
    return jax.lax.ragged_dot(x_MK, w.swapaxes(1, 2) if is_transposed else w, sizes_E)


def _ragged_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return jax.lax.ragged_dot_general(
        x_MK, dy_MN, sizes_E, numbers, preferred_element_type=jnp.float32
    )


# Kernels are imported only where they are used.


def _megablox_product(
    x_MK: jax.Array,
    w: jax.Array,
    sizes_E: jax.Array,
    is_transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    (M, K), N = x_MK.shape, w.shape[1 if is_transposed else 2]
    tile = _row_tile(M, len(sizes_E))
    tiling, x_MK = (tile, _input_tile(K), min(_SIDE_TILE, N)), _pad_rows(x_MK, tile)
    y_MN = gmm(
        x_MK, w, sizes_E, x_MK.dtype, tiling, transpose_rhs=is_transposed, interpret=interpret
    )
    return y_MN[:M]


def _megablox_gradient(
    x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array, interpret: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tile = _row_tile(len(x_MK), len(sizes_E))
    tiling = tile, *(min(_SIDE_TILE, x.shape[1]) for x in (x_MK, dy_MN))
    x_KM, dy_MN = _pad_rows(x_MK, tile).T, _pad_rows(dy_MN, tile)
    return tgmm(x_KM, dy_MN, sizes_E, x_MK.dtype, tiling, interpret=interpret)


def _row_tile(rows: int, experts: int) -> int:
    """An eighth of a group: it begins and ends within a tile, which two groups then go through."""
    share = max(1, rows // experts // 8)
    return min(_ROW_TILE, max(128, 1 << (share.bit_length() - 1)))


def _input_tile(inputs: int) -> int:
    """All where they fit: then the tiles of a group read its weights once."""
    return inputs if inputs <= 2 * _SIDE_TILE else _SIDE_TILE


def _pad_rows(x: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))


def _triton_product(*arrays: jax.Array, **options) -> jax.Array:
    from maxramp.model.parts import grouped_triton

    return grouped_triton.product(*arrays, **options)


def _triton_gradient(*arrays: jax.Array, **options) -> jax.Array:
    from maxramp.model.parts import grouped_triton

    return grouped_triton.gradient(*arrays, **options)


def _interpret(kernel: _Kernel) -> _Kernel:
    return _Kernel(
        *(functools.partial(run, interpret=True) for run in (kernel.product, kernel.gradient))
    )


_KERNELS = {
    "blocks": _Kernel(_block_product, _block_gradient),
    "ragged_dot": _Kernel(_ragged_product, _ragged_gradient),
    "megablox": _Kernel(_megablox_product, _megablox_gradient),
    "triton": _Kernel(_triton_product, _triton_gradient),
}
_KERNELS |= {f"{name}_interpreted": _interpret(_KERNELS[name]) for name in ("megablox", "triton")}
