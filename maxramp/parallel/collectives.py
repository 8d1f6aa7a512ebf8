"""`shard_map` over all axes, and the collectives for use inside it. Along axes of one device they
are left out: XLA for CPUs copies arrays there, up to 3% of a step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxramp.parallel.axes import AXES
from maxramp.parallel.mesh import platform
from maxramp.parallel.sharding import BY_DEVICE, REPLICATED, stack_spec

_UNUSED_BITS = 0x7FABCDEF  # a signaling NaN with a payload, which no arithmetic yields


def map_shards(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Runs a function on each device's shards, over all axes of the mesh that is set. Nothing
    checks that results are equal along the axes that `out_specs` leave out; they must be."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def psum(x: jax.Array, axes: str | Sequence[str], behind: jax.Array | None = None) -> jax.Array:
    """Sums over the devices along `axes`; on CPUs `behind` another array (`delay`)."""
    x, axes = _delay_until_first(x, behind), _axes_of_several(axes)
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    axes = _axes_of_several(axes)
    return jax.lax.pmax(x, axes) if axes else x


def psum_scatter(x: jax.Array, axes: str | Sequence[str], dimension: int) -> jax.Array:
    """Sums over the devices along `axes`, of which each keeps its part of a dimension that they
    divide."""
    axes = _axes_of_several(axes)
    if not axes:
        return x
    for groups in _scatter_groups(jax.lax.axis_size(axes)):
        x = jax.lax.psum_scatter(
            x, axes, scatter_dimension=dimension, axis_index_groups=groups, tiled=True
        )
    return x


def _scatter_groups(devices: int) -> list[list[list[int]] | None]:
    """Returns the groups of devices, by their numbers along the axes, that a sum is scattered over,
    one grouping after the other, so that device i ends with part i; None is one group of all.

    XLA for TPUs has no reduce-scatter over all three dimensions of a torus: it would add up
    everything everywhere and send twice as much. So the sum is scattered over two dimensions, then
    over the last, along which neighbours lie.
    """
    # Axes over a whole mesh of 4x4x4 or more lie in all three dimensions.
    mesh = jax.sharding.get_abstract_mesh()
    is_torus = platform() == "tpu" and "lite" not in mesh.abstract_device.device_kind
    if not is_torus or devices < max(64, mesh.size) or devices & (devices - 1):
        return [None]
    last = 1 << -(-(devices.bit_length() - 1) // 3)  # of 4x4x8, 8x8x16, ...
    numbers = np.arange(devices).reshape(-1, last)
    return [numbers.T.tolist(), numbers.tolist()]


def all_gather(
    x: jax.Array, axes: str | Sequence[str], dimension: int = 0, behind: jax.Array | None = None
) -> jax.Array:
    """Joins the parts of all devices along `axes` at a dimension; `behind` as in `psum`."""
    x, axes = _delay_until_first(x, behind), _axes_of_several(axes)
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x


def all_to_all(
    x: jax.Array,
    axes: str | Sequence[str],
    split: int,
    join: int,
    groups: list[list[int]] | None = None,
) -> jax.Array:
    """Sends each device along `axes`, or of its group, its part of the dimension `split`, which
    they divide; joins what comes at `join`. `groups` are of one size (None = all are one)."""
    axes = _axes_of_several(axes)
    if not axes:
        return x
    return jax.lax.all_to_all(x, axes, split, join, axis_index_groups=groups, tiled=True)


def permute(
    x: jax.Array,
    axis: str | Sequence[str],
    links: Sequence[tuple[int, int]],
    behind: jax.Array | None = None,
) -> jax.Array:
    """Sends x along the links (from, to); a device that none leads to gets zeros. `behind` as in
    `psum`."""
    return jax.lax.ppermute(_delay_until_first(x, behind), axis, links)


def own_index(index: jax.Array, size: int, axis: str | None) -> jax.Array:
    """Returns a device's own index of a global one, with `size` elements on each device along
    `axis` (None: all on each); `size` where another device has the element."""
    if axis is None or jax.lax.axis_size(axis) == 1:
        return index
    own = index - jax.lax.axis_index(axis) * size
    return jnp.where((own < 0) | (own >= size), size, own)


def _axes_of_several(axes: str | Sequence[str]) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)


def delay(value: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `value`, on several CPU devices not before `other` is computed. `other` must be
    float32, a scalar or of the shape of `value`.

    XLA on CPU does not order a loop that holds collectives and a collective beside it: devices that
    begin with different ones wait for ever. So whatever could run beside the layers' loop depends
    on its data: an optimization barrier is dropped before the order is chosen.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if platform() != "cpu" or mesh.size == 1:
        return value
    bits = jax.lax.bitcast_convert_type(other, jnp.uint32)
    return jnp.where(bits == _UNUSED_BITS, jnp.zeros_like(value), value)


def recompute_after(function: Callable) -> Callable:
    """Wraps a function whose first argument and first result have one shape (see `delay`). On
    CPUs its backward pass computes it again, once the first result's gradient is known; so it must
    not close over traced arrays."""
    if platform() != "cpu":
        return function

    def backward(arguments: tuple, gradients: tuple) -> tuple:
        first = delay(arguments[0], gradients[0].astype(jnp.float32))
        return jax.vjp(function, first, *arguments[1:])[1](gradients)

    waiting = jax.custom_vjp(function)
    waiting.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    return waiting


@jax.custom_vjp
def delay_gradient(value: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `value`, whose gradient waits for `other`, a float32 scalar: see `delay`."""
    return value


delay_gradient.defvjp(
    lambda value, other: (value, other), lambda other, gradient: (delay(gradient, other), None)
)


def _delay_until_first(x: jax.Array, other: jax.Array | None) -> jax.Array:
    """Makes x wait for one number of another array, of any shape."""
    if other is None:
        return x
    return delay(x, other[(0,) * other.ndim].astype(jnp.float32) if other.ndim else other)


def square_sums(tree: Any, *others: Any, function: Callable = lambda x: x) -> jax.Array:
    """Returns each device's part, float32 [devices] for `add_up`, of the squared norm of `function`
    of a tree's arrays (at least one) and those of other trees. For gradients that stay apart
    (`sharding.gradient_spec`) it is the sum of the copies' squared norms.

    `function` gets a device's shards, an array of each tree, and works element by element: the
    result has the shape of the first. Other trees have as many arrays, sharded as those of the
    first, or scalars.
    """
    trees, mesh = [jax.tree.leaves(x) for x in (tree, *others)], jax.sharding.get_abstract_mesh()
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, trees)
    axes = [{*jax.tree.leaves(tuple(spec.partitions)), *spec.unreduced} for spec in specs[0]]
    shards = [math.prod(mesh.shape[axis] for axis in array_axes) for array_axes in axes]

    def local(*trees: list[jax.Array]) -> jax.Array:
        values = (function(*arrays).astype(jnp.float32) for arrays in zip(*trees, strict=True))
        own = [jnp.sum(jnp.square(x)) for x in values]
        # An array that several devices hold counts once.
        return sum(s * (n / mesh.size) for s, n in zip(own, shards, strict=True))[None]

    return map_shards(local, tuple(specs), BY_DEVICE)(*trees)


# In one order, so that the last bit of a clipped gradient does not depend on how devices lie on
# hosts.
def add_up(parts: jax.Array) -> jax.Array:
    """Adds the devices' parts in one order on every device, [..., devices] -> [...]."""
    spec = stack_spec(BY_DEVICE, parts.ndim - 1)

    def local(held: jax.Array) -> jax.Array:
        return all_gather(held, AXES, dimension=held.ndim - 1)

    return map_shards(local, spec, REPLICATED)(parts).sum(-1)
