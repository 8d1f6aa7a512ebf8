"""Weights that name their role and axes, and products with them on any mesh and in a pipeline.

Shapes: B rows, T tokens, N tokens of all rows, D model width, F MLP width, r rank of an adapter; in
front of a weight's own axes R repeats of a circular pipeline, L layers, S stages, E experts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.keys import ROLES_IN_PRODUCTS
from maxramp.model.parts.products import (
    Format,
    compute_gradient_once,
    product_in_8_bits,
    product_of,
)
from maxramp.parallel.axes import AROUND_STAGES, TOKEN_AXES
from maxramp.parallel.mesh import axis_size, platform
from maxramp.parallel.sharding import X_BTD, Spec, merge_spec, staged_rows_spec


class Weight(nnx.Param):
    """An array that training may change."""

    role: str  # one of `keys.ROLES`; decides on decay, cast, optimizer and noise scale
    # A letter for each axis: those of a stack, which a product uses one by one ("L", "RL"; "S" a
    # layer of each stage; "N" drafts) or all at once ("E": `grouped`), ...
    leading: str
    inputs: str  # ... those that a product sums over ("D"), ...
    outputs: str  # ... and those of its result ("Hh")
    # Sizes into which the last of its outputs is cut where a tensor of a folder has these one after
    # the other, each of all heads; () if they lie as here.
    blocks: tuple[int, ...]

    @property
    def own(self) -> str:
        """The axes of one matrix or vector, as in the name of the weight ("DHh")."""
        return self.inputs + self.outputs

    @property
    def axes(self) -> str:
        return self.leading + self.own

    @property
    def layers(self) -> tuple[int, ...]:
        """The sizes of the axes of layers: [L], [R, L / R], [N], or none. An optimizer's array for
        a weight may have other axes, and then none of these."""
        shapes = [x.shape for x in jax.tree.leaves(self)]
        if [len(shape) for shape in shapes] != [len(self.axes)]:
            return ()
        sizes = zip(self.leading, *shapes, strict=False)
        return tuple(size for axis, size in sizes if axis in "RLN")

    @property
    def is_in_products(self) -> bool:
        """Whether products use it, in the dtype of the arithmetic; others are float32."""
        return self.role in ROLES_IN_PRODUCTS


def new_weight(
    x: jax.Array, role: str, axes: str, leading: str = "", blocks: tuple[int, ...] = ()
) -> Weight:
    """Makes a weight of one layer; `axes` are "inputs outputs", or one for a vector."""
    *inputs, outputs = axes.split()
    axes = {"leading": leading, "inputs": "".join(inputs), "outputs": outputs}
    return Weight(x, role=role, blocks=blocks, **axes)


def normal(
    role: str,
    axes: str,
    key: jax.Array,
    shape: tuple[int, ...],
    spec: Spec,
    std: float,
    dtype: str,
    leading: str = "",
    blocks: tuple[int, ...] = (),
) -> Weight:
    """Draws a weight from a normal distribution with `std`, truncated at 2 sigma; `axes` and
    `leading` are as in `Weight`."""
    # 0.87962566 is the standard deviation of a unit normal truncated at +-2.
    x = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32, out_sharding=spec)
    return new_weight((x * (std / 0.87962566)).astype(dtype), role, axes, leading, blocks)


def zeros(
    role: str, axes: str, shape: tuple[int, ...], spec: Spec, dtype: str, leading: str = ""
) -> Weight:
    return new_weight(jnp.zeros(shape, dtype, out_sharding=spec), role, axes, leading)


# A field that programs are compiled for, in a dataclass whose other fields are arrays.
static = functools.partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight W that is used as W + scale * down @ up (LoRA, arXiv 2106.09685)."""

    weight: Weight
    down: Weight  # its inputs' axes, r
    up: Weight  # r, its outputs' axes
    scale: float = static()
    dropout: float = static()  # the share of inputs that `down` does not see, if there are seeds
    seeds_B: jax.Array | None = None  # uint32, one a row (`model.adapters.add_dropout`)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A weight of layers whose products are in 8 bits (`products.product_in_8_bits`)."""

    weight: Weight
    scales: Weight  # of rows, gradients and the weight
    counts: Weight  # zeros whose gradient are the exponents of this pass
    formats: Format | None = static()


def merge_adapter(adapted: Adapted) -> jax.Array:
    """Returns W + scale * down @ up, float32, with the sharding of W."""
    weight = adapted.weight[...]
    axes = f"{adapted.down.axes},{adapted.up.axes}->{adapted.weight.axes}"
    down, up = (factor[...].astype(jnp.float32) for factor in (adapted.down, adapted.up))
    spec = jax.typeof(weight).sharding.spec
    change = jnp.einsum(axes, down, up, precision="highest", out_sharding=spec)
    return weight.astype(jnp.float32) + adapted.scale * change


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def map_weights(change: Callable, tree: Any, *beside: Any) -> Any:
    """Maps `change` over the weights of a tree, with those of the trees beside it."""

    def change_leaf(x: Any, *others: Any) -> Any:
        return change(x, *others) if is_weight(x) else x

    return jax.tree.map(change_leaf, tree, *beside, is_leaf=is_weight)


def map_products(change: Callable, tree: Any) -> Any:
    """Maps `change` over the arrays of weights that products use; others stay as they are."""
    return map_weights(lambda w: jax.tree.map(change, w) if w.is_in_products else w, tree)


def relabel(tree: Any, old: str, new: str) -> Any:
    """Returns the tree whose weights begin with the axes `new` in place of `old`, with which they
    all must begin; arrays stay as they are."""

    def change(weight: Weight) -> Weight:
        assert weight.leading.startswith(old), f"{weight.axes} does not begin with {old}"
        return weight.copy(leading=new + weight.leading.removeprefix(old))

    return map_weights(change, tree)


def weights_of(tree: Any) -> list[Weight]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_weight) if is_weight(x)]


def part_of(tree: Any, is_in: Callable[[Weight], bool]) -> Any:
    """Returns the tree with None in place of weights that are not in the part."""
    return map_weights(lambda weight: weight if is_in(weight) else None, tree)


def join_parts(*parts: Any) -> Any:
    """Joins parts of one tree (`part_of`); where several have a weight, the first one's counts."""
    if not jax.tree.leaves(parts[:-1]):
        return parts[-1]

    def first(*held: Weight | None) -> Weight | None:
        return next((weight for weight in held if weight is not None), None)

    return jax.tree.map(first, *parts, is_leaf=lambda x: x is None or is_weight(x))


def apply_elementwise(change: Callable, x: jax.Array, weight: Any) -> jax.Array:
    """Computes `change(x, weight)` for float32 x [B, T, ...] and a Weight of a layer or of a
    layer on every stage, or a norm.RowScale; not an Adapted. `change` works by element,
    and broadcasts the weight, float32, to the last axes of x."""
    w = weight[...].astype(jnp.float32)
    if "S" not in weight.leading:
        return change(x, w)
    spec = jax.typeof(x).sharding.spec
    y = jax.lax.reshape(x, stages_of(x.shape), out_sharding=staged_rows_spec(spec))
    y = change(y, jnp.expand_dims(w, range(1, y.ndim - w.ndim)))
    return jax.lax.reshape(y, x.shape, out_sharding=spec)


STAGE_PRODUCTS = "products of a pipeline's stages"  # what remat_policy=minimal keeps


def dense(
    x: jax.Array,
    weight: Weight | Adapted | Quantized,
    out_sharding: Spec,
    precision: str | None = None,
) -> jax.Array:
    """Multiplies by a weight of a layer, or of a layer on every stage, in the dtype of x: [B, T,
    inputs] -> [B, T, outputs]; for experts see `grouped`. `out_sharding` makes a product with a
    weight on fsdp gather the weight, not the activations."""
    if isinstance(weight, Adapted):
        return _dense_adapted(x, weight, out_sharding)
    quantized = weight if isinstance(weight, Quantized) else None
    weight = quantized.weight if quantized else weight
    w = weight[...].astype(x.dtype)
    (B, T), letters = x.shape[:2], "BT"
    rows, spec, y_spec = (B, T), jax.typeof(x).sharding.spec, out_sharding
    if platform() == "cpu" and axis_size(*TOKEN_AXES) == 1:
        # Products of matrices, rows and tokens in one axis N, make a step on CPUs 1.2 to 1.3 times
        # as fast, and one on TPUs slower.
        rows, letters, spec, y_spec = (B * T,), "N", merge_spec(spec), merge_spec(y_spec)
    is_staged = "S" in weight.leading
    if is_staged:
        rows, letters = stages_of(rows), f"dS{letters}"
        spec, y_spec = staged_rows_spec(spec), staged_rows_spec(y_spec)
    axes = letters + weight.inputs, weight.axes, letters + weight.outputs
    x = jax.lax.reshape(x, (*rows, *x.shape[2:]), out_sharding=spec)
    if quantized:
        others = quantized.scales[...], quantized.counts[...]
        y = product_in_8_bits(quantized.formats, axes, y_spec, x, w, *others)
    else:
        y = product_of(w)(axes, y_spec, precision, x, w)
    y = compute_gradient_once(y)
    y = jax.lax.reshape(y, (B, T, *y.shape[len(rows) :]), out_sharding=out_sharding)
    # remat_policy=minimal recomputes products with batch dimensions, which these have among stages.
    return checkpoint_name(y, STAGE_PRODUCTS) if is_staged else y


def _dense_adapted(x: jax.Array, adapted: Adapted, out_sharding: Spec) -> jax.Array:
    y = dense(x, adapted.weight, out_sharding)
    if adapted.seeds_B is not None:
        x = _drop_inputs(x, adapted.seeds_B, adapted.dropout)
    x_BTr = dense(x, adapted.down, X_BTD)
    x_BTr = (x_BTr.astype(jnp.float32) * adapted.scale).astype(x.dtype)
    return y + dense(x_BTr, adapted.up, out_sharding)


def _drop_inputs(x: jax.Array, seeds_B: jax.Array, rate: float) -> jax.Array:
    """Applies dropout, with a rate below 1, to x [B, T, ...], with a uint32 seed for each row."""
    spec, index = jax.typeof(x).sharding.spec, jnp.uint32(0)
    for axis in range(1, x.ndim):
        along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=spec)
        index = index * jnp.uint32(x.shape[axis]) + along
    seeds = jnp.expand_dims(seeds_B, range(1, x.ndim))
    kept = hash_bits(hash_bits(index) ^ seeds) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), 0)


def hash_bits(x: jax.Array) -> jax.Array:
    """Scrambles 32 bits by a bijection (MurmurHash3's finalizer)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fingerprint_of_weights(weights: Any) -> str:
    """Returns a 64-bit hash of a tree of arrays of 2 or 4 bytes, in hex: the same on any mesh of
    devices. All processes call it together, and wait for it.

    A value with the bits b at index i of the n-th array adds mix(mix(i + n c) ^ b) to the word
    whose constant is c, modulo 2^32; n counts from 1.
    """
    high, low = (int(word) for word in _hash_words(jax.tree.leaves(weights)))
    return f"{high:08x}{low:08x}"


@jax.jit
def _hash_words(arrays: list[jax.Array]) -> jax.Array:
    words = jnp.zeros((2,), jnp.uint32)
    for number, x in enumerate(arrays, 1):
        sharding = jax.typeof(x).sharding  # with its mesh: none need be set here
        index = jnp.uint32(0)
        for axis, size in enumerate(x.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding)
            index = index * jnp.uint32(size) + along
        unsigned = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        for word, constant in enumerate((0x9E3779B9, 0x7F4A7C15)):
            hashed = hash_bits(hash_bits(index + jnp.uint32(number * constant % 2**32)) ^ bits)
            words = words.at[word].add(hashed.sum(dtype=jnp.uint32))
    return words


def stages_of(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Splits the shape of rows [B, ...] into copies, stages and others: [d, S, B, ...]."""
    S, d = axis_size("stage"), axis_size(*AROUND_STAGES)
    return d, S, rows[0] // (d * S), *rows[1:]
