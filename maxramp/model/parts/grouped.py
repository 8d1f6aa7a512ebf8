"""Products of tokens with the weights of their experts, by the best kernel of each platform.

Rows are sorted by expert, and a device has those of its own experts. No row is dropped or padded:
kernels follow the sizes of the groups.

Shapes: M rows of a device, E experts of a device, K inputs, N outputs.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.keys import ModelKeys
from maxramp.model.parts.attention import choose, has_triton
from maxramp.model.parts.weights import STAGE_PRODUCTS, Weight
from maxramp.parallel.axes import BATCH_AXES, SHARDS_OF_EXPERT
from maxramp.parallel.collectives import (
    all_gather,
    all_to_all,
    map_shards,
    permute,
    psum,
    psum_scatter,
)
from maxramp.parallel.sharding import SORTED_M, Spec, gradient_spec

_INTERPRETED = "_interpreted"
_TILE_ROWS = 8  # of an array on TPUs


def product(
    x_MK: jax.Array, weights: Sequence[Weight], sizes_E: jax.Array, kernel: str
) -> jax.Array:
    """Multiplies every row by the matrices of its expert, of equal shapes and specs: [M, N], device
    by device the results of one after those of the other; rows after all groups are undefined. Each
    device has its own rows and groups (`SORTED_M`), and its shards of K or N over tensor."""
    arrays = tuple(weight[...].astype(x_MK.dtype) for weight in weights)
    return checkpoint_name(_product(x_MK, arrays, sizes_E, kernel), STAGE_PRODUCTS)


# One kernel for several matrices reads the rows once, and adds up their gradients by itself.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(
    x_MK: jax.Array, weights: tuple[jax.Array, ...], sizes_E: jax.Array, kernel: str
) -> jax.Array:
    spec = jax.typeof(weights[0]).sharding.spec

    def local(x_MK: jax.Array, weights: tuple[jax.Array, ...], sizes_E: jax.Array) -> jax.Array:
        multiply, _ = load_kernel(kernel)
        return multiply(x_MK, _gather(weights, spec), sizes_E, is_transposed=_is_transposed(spec))

    return map_shards(local, (SORTED_M, spec, SORTED_M), SORTED_M)(x_MK, weights, sizes_E)


def _is_transposed(spec: Spec) -> bool:
    """Tells whether the weights' outputs are sharded, not their inputs. Such shards are transposed,
    so that gathers and scatters use the side that is not in a device's lanes: there XLA for TPUs
    would copy what it gathers, and scatter nothing."""
    return spec.partitions[-1] == SHARDS_OF_EXPERT


def _gather(weights: tuple[jax.Array, ...], spec: Spec) -> jax.Array:
    """Joins and gathers a layer's weights of a device's experts: [E, K, N], or transposed
    [E, N, K]."""
    w_EKN = jnp.concatenate([w.reshape(w.shape[-3:]) for w in weights], axis=2)
    if SHARDS_OF_EXPERT not in spec.partitions:  # gathered before
        return w_EKN
    w_EKN = w_EKN.swapaxes(1, 2) if _is_transposed(spec) else w_EKN
    if not _is_exchanged(w_EKN.shape):
        return all_gather(w_EKN, SHARDS_OF_EXPERT, dimension=1)
    E, _, N = w_EKN.shape
    return all_gather(_exchange(w_EKN), SHARDS_OF_EXPERT).reshape(E, -1, N)


def _scatter(dw_EKN: jax.Array) -> jax.Array:
    """Adds up all devices' gradients of what `_gather` returns, each shard's on its device."""
    E, K, N = dw_EKN.shape
    form = (E, K // jax.lax.axis_size(SHARDS_OF_EXPERT), N)
    if not _is_exchanged(form):
        return psum_scatter(dw_EKN, SHARDS_OF_EXPERT, dimension=1)
    return _exchange_back(psum_scatter(dw_EKN.reshape(-1, N), SHARDS_OF_EXPERT, 0), form)


def _is_exchanged(form: tuple[int, ...]) -> bool:
    """Tells whether devices exchange shards [E, R, N], R rows of every expert, for whole experts or
    large parts of them before they gather. They do where R is no multiple of a tile: XLA for TPUs
    would lay out the whole gathered weight anew."""
    devices, experts = jax.lax.axis_size(SHARDS_OF_EXPERT), form[0]
    is_possible = max(devices, experts) % min(devices, experts) == 0
    return devices > 1 and form[1] % _TILE_ROWS > 0 and is_possible


def _exchange(w_ERN: jax.Array) -> jax.Array:
    """Returns a device's part of all experts' rows, [E * R, N], one expert after the other, for its
    shard of a form that `_is_exchanged`; inside `map_shards`."""
    groups, links = _exchange_groups(len(w_ERN))
    w_ERN = permute(w_ERN, SHARDS_OF_EXPERT, links) if links else w_ERN
    w_ERN = all_to_all(w_ERN, SHARDS_OF_EXPERT, split=0, join=1, groups=groups)
    return w_ERN.reshape(-1, w_ERN.shape[2])


def _exchange_back(w_RN: jax.Array, form: tuple[int, ...]) -> jax.Array:
    """Undoes `_exchange`; `form` is that of its argument."""
    groups, links = _exchange_groups(form[0])
    w_ERN = w_RN.reshape(form[0] // len(groups[0]), -1, form[2])
    w_ERN = all_to_all(w_ERN, SHARDS_OF_EXPERT, split=1, join=0, groups=groups)
    links = [(target, source) for source, target in links]
    return permute(w_ERN, SHARDS_OF_EXPERT, links) if links else w_ERN


def _exchange_groups(experts: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Returns the groups of devices that exchange rows. Of more devices than experts, n of them
    share an expert, and the first nth of all have the first nth of its rows: each must come to its
    group by a link before."""
    devices = jax.lax.axis_size(SHARDS_OF_EXPERT)
    groups = np.arange(devices).reshape(min(experts, devices), -1).T
    links = list(enumerate(groups.reshape(-1).tolist()))
    return groups.tolist(), links if len(groups) > 1 else []


def _backward(kernel, residuals, dy_MN):
    spec = jax.typeof(residuals[1][0]).sharding.spec
    divided = {*jax.tree.leaves((*spec.partitions, *spec.reduced))}
    copies = [axis for axis in BATCH_AXES if axis not in divided]

    def local(x_MK, weights, sizes_E, dy_MN):
        (multiply, find_gradient), is_transposed = load_kernel(kernel), _is_transposed(spec)
        dx_MK = multiply(dy_MN, _gather(weights, spec), sizes_E, is_transposed=not is_transposed)
        # Each device holds the sum of its own shard alone, never that of all.
        sides = (dy_MN, x_MK) if is_transposed else (x_MK, dy_MN)
        dw = find_gradient(*sides, sizes_E).astype(weights[0].dtype)
        if SHARDS_OF_EXPERT in spec.partitions:
            dw = _scatter(dw)
        dw_EKN = dw.swapaxes(1, 2) if is_transposed else dw
        parts = jnp.split(psum(dw_EKN, copies), len(weights), axis=2)
        return dx_MK, tuple(part.reshape(weights[0].shape) for part in parts)

    specs = SORTED_M, spec, SORTED_M, SORTED_M
    local = map_shards(local, specs, (SORTED_M, gradient_spec(spec)))
    return *local(*residuals, dy_MN), None


_product.defvjp(lambda *arguments: (_product(*arguments), arguments[:3]), _backward)


def add_biases(y_MN: jax.Array, biases: Sequence[Weight], sizes_E: jax.Array) -> jax.Array:
    """Adds to every row of a `product` the biases of its expert, [E, N], which are sharded as the
    outputs of its weights are."""
    return _add_biases(y_MN, tuple(bias[...] for bias in biases), sizes_E)


@jax.custom_vjp
def _add_biases(y_MN: jax.Array, biases: tuple[jax.Array, ...], sizes_E: jax.Array) -> jax.Array:
    spec = jax.typeof(biases[0]).sharding.spec

    def local(y_MN: jax.Array, biases: tuple[jax.Array, ...], sizes_E: jax.Array) -> jax.Array:
        own_ME = _experts_of_rows(y_MN, sizes_E)
        b_EN = jnp.concatenate([b.reshape(b.shape[-2:]) for b in biases], axis=1)
        return y_MN + jnp.matmul(own_ME, b_EN.astype(y_MN.dtype), precision="highest")

    return map_shards(local, (SORTED_M, spec, SORTED_M), SORTED_M)(y_MN, biases, sizes_E)


def _experts_of_rows(y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns 1 for the expert of each row, else 0: a product with it is faster than a lookup."""
    row_M1, end_E = jnp.arange(len(y_MN))[:, None], jnp.cumsum(sizes_E)
    return ((row_M1 >= end_E - sizes_E) & (row_M1 < end_E)).astype(y_MN.dtype)


def _biases_backward(residuals, dy_MN):
    biases, sizes_E = residuals
    spec = jax.typeof(biases[0]).sharding.spec
    copies = [axis for axis in BATCH_AXES if axis not in jax.tree.leaves((*spec.partitions,))]

    def local(sizes_E: jax.Array, dy_MN: jax.Array) -> jax.Array:
        own_ME = _experts_of_rows(dy_MN, sizes_E)
        dy_MN = jnp.where(own_ME.any(1, keepdims=True), dy_MN, 0)  # undefined after all groups
        options = {"precision": "highest", "preferred_element_type": jnp.float32}
        db_EN = psum(jnp.einsum("ME,MN->EN", own_ME, dy_MN, **options), copies)
        parts = zip(jnp.split(db_EN, len(biases), axis=1), biases, strict=True)
        return tuple(
            db.astype(b.dtype).reshape([1] * (b.ndim - 2) + [*db.shape]) for db, b in parts
        )

    return dy_MN, map_shards(local, (SORTED_M, SORTED_M), spec)(sizes_E, dy_MN), None


_add_biases.defvjp(
    lambda y_MN, biases, sizes_E: (_add_biases(y_MN, biases, sizes_E), (biases, sizes_E)),
    _biases_backward,
)


def describe(kernel: str, rows: int, most_rows: int, experts: int) -> str:
    """Names a kernel's work for `planning.hlo`: a device's rows if loads are equal, and the rows
    that its tiles take the time of. Tiles fit buffers of `most_rows` for the device's `experts`."""
    tile = _module(kernel).row_tile(most_rows, experts)
    return f"grouped_rows_{rows}_tiled_{rows + (experts - 1) * tile}"


def load_kernel(name: str) -> tuple[Callable, Callable]:
    """Loads a kernel's two functions: the product of [M, K], [E, K, N] (`is_transposed`: [E, N, K])
    and sizes; the weights' gradient of [M, K], [M, N] and sizes. "NAME_interpreted" needs no
    accelerator."""
    options = {"interpret": True} if name.endswith(_INTERPRETED) else {}
    module = _module(name)
    return tuple(functools.partial(run, **options) for run in (module.product, module.gradient))


def _module(kernel: str) -> Any:
    return importlib.import_module(f"{__package__}.grouped_{kernel.removesuffix(_INTERPRETED)}")


def select(requested: str, platform: str | None) -> str:
    """Returns the requested kernel, a ConfigError if it does not work on the platform (None:
    unknown); for "autoselected" the platform's best."""
    devices = f"{platform or 'unknown'} devices"
    obstacles = {
        "megablox": {f"needs TPUs, not {devices}": platform != "tpu"},
        "triton": {
            f"needs NVIDIA GPUs, not {devices}": platform not in ("gpu", "cuda"),
            "needs Pallas for Triton, which jax 0.10.2 to 0.12 have": not has_triton(),
        },
        "blocks": {},
    }
    return choose("grouped_matmul", requested, obstacles)


def select_for(keys: ModelKeys, platform: str | None) -> str | None:
    """Selects the kernel for a model; None for a model without experts."""
    return select(keys.grouped_matmul, platform) if keys.num_experts > 1 else None
