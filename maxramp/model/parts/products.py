"""Products of rows with weights, on plain arrays: in the dtype of the rows, or in 8 bits.

Shapes: B rows, T tokens, N tokens of all rows, S stages of a pipeline.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxramp.parallel.axes import COPY_AXES, SHARD_AXES
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.mesh import axes_of_several, axis_size, platform
from maxramp.parallel.sharding import (
    Spec,
    factor_spec,
    gradient_spec,
    own_gradient_spec,
    unmarked_spec,
    weight_spec,
    without_axis,
)

Axes = tuple[str, str, str]  # the letters of rows, weight and result


@jax.custom_vjp
def compute_gradient_once(y: jax.Array) -> jax.Array:
    """Returns y, whose gradient XLA for TPUs would else compute in each product that reads it."""
    return y


compute_gradient_once.defvjp(lambda y: (y, None), lambda _, dy: (jax.lax.optimization_barrier(dy),))


def product_of(weight: jax.Array) -> Callable:
    """Returns the rule of products with an array of a weight: axes, sharding of the result,
    precision, rows and weight to the result."""
    spec = jax.typeof(weight).sharding.spec
    return _product_apart if spec.reduced or _confuses_rows(spec) else _product


def _product(
    axes: Axes, out_sharding: Spec, precision: str | None, x: jax.Array, weight: jax.Array
) -> jax.Array:
    """Multiplies x and the weight; `axes` are their letters and those of the result."""
    spec = jax.typeof(weight).sharding.spec
    if _confuses_rows(spec):
        weight = jax.reshard(weight, without_axis(spec, "fsdp"))
    return jnp.einsum(
        "{},{}->{}".format(*axes), x, weight, out_sharding=out_sharding, precision=precision
    )


def _confuses_rows(spec: Spec) -> bool:
    """Tells whether XLA would return few rows in the order of the weight's shards: it does if a
    weight is on fsdp and tensor, and rows on fsdp and another axis. Gather such weights first."""
    if platform() == "tpu":
        return False
    copies = axis_size(*(axis for axis in COPY_AXES if axis not in spec.partitions))
    return copies > 1 and axis_size(*SHARD_AXES) > 1 and axis_size("tensor") > 1


# The same with a weight whose gradient stays apart (`sharding.weight_spec`). It keeps only shards
# of the weight for the backward pass.
_product_apart = jax.custom_vjp(_product, nondiff_argnums=(0, 1, 2))


def _product_apart_backward(axes, out_sharding, precision, residuals, dy):
    (x, weight), (x_axes, weight_axes, y_axes) = residuals, axes
    spec = jax.typeof(weight).sharding.spec
    back = (y_axes, weight_axes, x_axes), jax.typeof(x).sharding.spec
    dx = _product(*back, precision, dy, weight)
    # JAX sums a product over all axes that its rows are sharded on, or over none. So this sums over
    # none, then over those on which the weight is a shard.
    subscripts = f"{x_axes},{y_axes}->{weight_axes}"
    dweight = jnp.einsum(
        subscripts, x, dy, out_sharding=own_gradient_spec(spec), precision=precision
    )
    return dx, jax.reshard(dweight, gradient_spec(spec))


_product_apart.defvjp(
    lambda *arguments: (_product(*arguments), arguments[3:]), _product_apart_backward
)


# Products in 8 bits. x, the weight and the gradient of the result are divided by a scale each, a
# power of two, clamped and cast; the scales multiply the result. Those of x and of the gradient
# come from the whole step before, that of the weight from the weight: no part of them depends on
# how a step is split. The backward pass counts exponents for the next step, as the "gradient" of
# the array `counts`: a one-hot of the largest one. A sum of such, over passes, layers' uses or
# devices in any order, still shows the largest. Rows whose result has no gradient, as padding and
# a pipeline's bubble, count nothing.


class Format(NamedTuple):
    """The types of 8 bits of one value of `quantization`."""

    values: Any  # of rows and weights
    gradients: Any


FORMATS = {"fp8_full": Format(jnp.float8_e4m3fn, jnp.float8_e5m2)}

BUCKETS = 64  # of exponents in `counts`
_FIRST_BUCKET = 87  # as in the bits of a float32: 2^-40


def top_exponents(counts: jax.Array) -> jax.Array:
    """Returns the largest exponent, as in the bits of a float32, of summed counts [..., BUCKETS]:
    uint32 [...], 0 for none."""
    highest = jnp.where(counts > 0, jnp.arange(BUCKETS) + _FIRST_BUCKET, 0).max(-1)
    return highest.astype(jnp.uint32)


def exponent_of(x: jax.Array) -> jax.Array:
    """Returns the exponents of numbers from 0 up, as in the bits of a float32: uint32."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) >> 23


def scale_of(exponent: jax.Array, dtype: Any) -> jax.Array:
    """Returns the power of two by which numbers up to this exponent stay below half of what the
    type can hold, float32; 1 for the exponent 0."""
    room = math.frexp(float(jnp.finfo(dtype).max))[1] - 2
    bits = jnp.maximum(exponent.astype(jnp.int32) - room, 1) << 23
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(exponent > 0, scale, 1.0)


class _Quantized(NamedTuple):
    """An array of 8 bits that stands for values * scale; of another type, without a scale, where
    exponents are only counted."""

    values: jax.Array
    scale: jax.Array | None  # [], or [S]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def product_in_8_bits(
    formats: Format | None,
    axes: Axes,
    out_sharding: Spec,
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Multiplies as `product_of`, in 8 bits.

    Args:
      formats: of 8 bits; None multiplies x and the weight as they are, and only counts.
      scales: of x, the result's gradient and the weight, float32 [3], or [S, 3] for a layer of each
        stage.
      counts: zeros [2, BUCKETS] or [S, 2, BUCKETS]; its gradient are the exponents of x and of the
        result's gradient.
    """
    return _forward(formats, axes, out_sharding, x, weight, scales, counts)[0]


def _forward(formats, axes, out_sharding, x, weight, scales, counts):
    x_axes, weight_axes, _ = axes
    spec = jax.typeof(x).sharding.spec
    widths = _widths(x_axes, weight_axes)
    maxima = map_shards(lambda x: jnp.abs(x).max(widths, keepdims=True), spec, spec)(x)
    x8 = _quantize(x, x_axes, scales[..., 0], formats and formats.values)
    weight8 = _quantize_weight(formats, weight_axes, weight, scales[..., 2])
    y = _multiply(axes, out_sharding, x8, weight8, x.dtype)
    return y, (x8, weight, scales, maxima)


def _backward(formats, axes, out_sharding, residuals, dy):
    (x8, weight, scales, maxima), (x_axes, weight_axes, y_axes) = residuals, axes
    spec = jax.typeof(weight).sharding.spec
    dy8 = _quantize(dy, y_axes, scales[..., 1], formats and formats.gradients)
    weight8 = _quantize_weight(formats, weight_axes, weight, scales[..., 2])
    back = (y_axes, weight_axes, x_axes), jax.typeof(x8.values).sharding.spec
    dx = _multiply(*back, dy8, weight8, dy.dtype)
    # As in `_product_apart_backward`.
    over_rows = (x_axes, y_axes, weight_axes), own_gradient_spec(spec)
    dweight = jax.reshard(_multiply(*over_rows, x8, dy8, dy.dtype), gradient_spec(spec))
    counts = _count_exponents(axes, maxima, dy, jax.typeof(scales).sharding.spec)
    return dx, dweight, jnp.zeros_like(scales), counts


product_in_8_bits.defvjp(_forward, _backward)


def _widths(letters: str, weight_axes: str) -> tuple[int, ...]:
    """Returns which axes of rows are the weight's own, so not those of rows and stages."""
    return tuple(i for i, x in enumerate(letters) if x in weight_axes and x != "S")


def _quantize(x: jax.Array, letters: str, scale: jax.Array, dtype: Any) -> _Quantized:
    if not dtype:
        return _Quantized(x, None)
    most = float(jnp.finfo(dtype).max)
    y = x.astype(jnp.float32) * (1 / _align(scale, letters, jax.typeof(x).sharding.spec))
    # Above the most that it holds, a type of 8 bits has no number.
    return _Quantized(jnp.clip(y, -most, most).astype(dtype), scale)


def _quantize_weight(
    formats: Format | None, letters: str, weight: jax.Array, scale: jax.Array
) -> _Quantized:
    """Returns the weight in 8 bits, whole along the axes that shard it: so it travels in 8 bits."""
    weight = jax.reshard(weight, unmarked_spec(jax.typeof(weight).sharding.spec))
    dtype = formats and formats.values
    quantized = _quantize(weight, letters, scale, dtype)
    spec = jax.typeof(weight).sharding.spec
    for axis in SHARD_AXES:
        spec = without_axis(spec, axis)
    return quantized._replace(values=jax.reshard(quantized.values, spec))


def _multiply(
    axes: Axes, out_sharding: Spec, a: _Quantized, b: _Quantized, dtype: Any
) -> jax.Array:
    product = functools.partial(jnp.einsum, "{},{}->{}".format(*axes), out_sharding=out_sharding)
    if a.scale is None:
        return product(a.values, b.values)
    if platform() == "tpu":
        y = product(a.values, b.values, preferred_element_type=jnp.float32)
        return (y * _align(a.scale * b.scale, axes[2], jax.typeof(y).sharding.spec)).astype(dtype)
    # XLA for GPUs hands the scales of operands in this form to a product of 8 bits, and would
    # multiply the result of another form in a pass of its own. Powers of two are exact. Without the
    # barrier XLA leaves out a rounding that only a wider type reads.
    operands = []
    for x, letters in zip((a, b), axes, strict=False):
        values = jax.lax.optimization_barrier(x.values)
        scale = _align(x.scale, letters, jax.typeof(values).sharding.spec)
        operands.append(values.astype(dtype) * scale.astype(dtype))
    return product(*operands)


def _align(scale: jax.Array, letters: str, spec: Spec) -> jax.Array:
    """Returns a scale that multiplies an array with these axes and this spec."""
    if scale.ndim:
        scale = jnp.expand_dims(scale, [i for i, letter in enumerate(letters) if letter != "S"])
    return jax.reshard(scale, factor_spec(spec, jax.typeof(scale).sharding.spec))


def _count_exponents(axes: Axes, maxima: jax.Array, dy: jax.Array, scales_spec: Spec) -> jax.Array:
    """Returns one-hot exponents, as `top_exponents` reads them: of rows' maxima, where dy is not
    zero, and of dy; each device its own."""
    x_axes, weight_axes, y_axes = axes
    rows = [x for x in y_axes if x not in weight_axes or x == "S"]

    def local(maxima: jax.Array, dy: jax.Array) -> jax.Array:
        dy = jnp.abs(dy).max(_widths(y_axes, weight_axes))
        x = jnp.where(dy > 0, maxima.max(_widths(x_axes, weight_axes)), 0)
        tops = jnp.stack([x, dy], -1).max([i for i, row in enumerate(rows) if row != "S"])
        bucket = jnp.clip(exponent_of(tops).astype(jnp.int32) - _FIRST_BUCKET, 0, BUCKETS - 1)
        is_top = (jnp.arange(BUCKETS) == bucket[..., None]) & (tops > 0)[..., None]
        return is_top.astype(jnp.float32)

    specs = jax.typeof(maxima).sharding.spec, jax.typeof(dy).sharding.spec
    own = gradient_spec(counts_spec(scales_spec))
    return map_shards(local, specs, own)(maxima, dy)


def counts_spec(spec: Spec) -> Spec:
    """Returns the spec of counts, with leading partitions as `spec`: each device has its own."""
    return weight_spec(spec, axes_of_several())
