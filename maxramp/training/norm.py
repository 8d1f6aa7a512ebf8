"""The squared norm of a tree of sharded arrays. The devices' parts are added in one order, so that
the last bit of a clipped gradient does not depend on how devices lie on hosts."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.parallel.axes import AXES
from maxramp.parallel.collectives import all_gather, map_shards
from maxramp.parallel.sharding import BY_DEVICE, REPLICATED, stack_spec


def squares(tree: Any, *others: Any, function: Callable = lambda x: x) -> jax.Array:
    """Returns each device's part, float32 [devices], of the squared norm of `function` of a tree's
    arrays and those of other trees. For gradients that stay apart (`sharding.gradient_spec`) it is
    the sum of the copies' squared norms."""
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


def add_up(parts: jax.Array) -> jax.Array:
    """Adds the devices' parts, [..., devices] -> [...]."""
    spec = stack_spec(BY_DEVICE, parts.ndim - 1)

    def local(held: jax.Array) -> jax.Array:
        return all_gather(held, AXES, dimension=held.ndim - 1)

    return map_shards(local, spec, REPLICATED)(parts).sum(-1)
