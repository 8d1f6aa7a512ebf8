"""What every device computes of its parts of arrays, and the collectives for use inside it.

Along axes of one device they are left out: XLA for CPUs keeps a collective of one device, and
copies arrays to do nothing: up to 3% of a step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def map_shards(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` of every device's parts of arrays, to its parts of results, sharded so."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def psum(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """The sum over the devices along `axes`."""
    axes = _axes_of_several(axes)
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """The largest of the devices along `axes`."""
    axes = _axes_of_several(axes)
    return jax.lax.pmax(x, axes) if axes else x


def psum_scatter(x: jax.Array, axis: str, dimension: int) -> jax.Array:
    """The device's part of the sum along `axis`, cut at a dimension."""
    if not _axes_of_several(axis):
        return x
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def all_gather(x: jax.Array, axes: str | Sequence[str], dimension: int = 0) -> jax.Array:
    """The parts of all devices along `axes`, joined at a dimension."""
    axes = _axes_of_several(axes)
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x


def all_to_all(x: jax.Array, axis: str, split: int, join: int) -> jax.Array:
    """What the devices along `axis` cut for this one at dimension `split`, joined at `join`."""
    return jax.lax.all_to_all(x, axis, split, join, tiled=True) if _axes_of_several(axis) else x


def _axes_of_several(axes: str | Sequence[str]) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
