"""The collectives of `jax.lax` for use inside `jax.shard_map`, left out along axes of one device.

XLA for CPUs keeps a collective of one device, and copies arrays to do nothing: up to 3% of a step.
"""

from collections.abc import Sequence

import jax


def psum(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """The sum over the devices along `axes`."""
    axes = _of_several(axes)
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """The largest of the devices along `axes`."""
    axes = _of_several(axes)
    return jax.lax.pmax(x, axes) if axes else x


def psum_scatter(x: jax.Array, axis: str, dimension: int) -> jax.Array:
    """The device's part of the sum along `axis`, cut at a dimension."""
    if not _of_several(axis):
        return x
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def all_gather(x: jax.Array, axes: str | Sequence[str], dimension: int = 0) -> jax.Array:
    """The parts of all devices along `axes`, joined at a dimension."""
    axes = _of_several(axes)
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x


def all_to_all(x: jax.Array, axis: str, split: int, join: int) -> jax.Array:
    """What the devices along `axis` cut for this one at dimension `split`, joined at `join`."""
    if not _of_several(axis):
        return x
    return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True)


def _of_several(axes: str | Sequence[str]) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
