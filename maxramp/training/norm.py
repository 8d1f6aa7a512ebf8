"""The squared norm of a tree of sharded arrays, whose last bit does not depend on the hosts.

The devices' parts travel, and are added in one order: the order in which a reduction adds depends
on how the devices lie on processes, and with it the last bit of a clipped gradient.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxramp.parallel.sharding import REPLICATED


def squares(tree: Any) -> jax.Array:
    """Each device's part of the squared norm of all arrays of a tree, in float32: [devices]."""
    arrays, mesh = jax.tree.leaves(tree), jax.sharding.get_abstract_mesh()
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    shards = [math.prod(mesh.shape[a] for a in jax.tree.leaves(tuple(spec))) for spec in specs]

    def local(*arrays: jax.Array) -> jax.Array:
        own = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
        held = sum(s * (n / mesh.size) for s, n in zip(own, shards, strict=True))  # by one of many
        return held[None]

    parts = P(mesh.axis_names)
    return jax.shard_map(local, in_specs=specs, out_specs=parts, check_vma=False)(*arrays)


def add_up(parts: jax.Array) -> jax.Array:
    """The squared norms whose parts are [..., devices], on every device."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = P(*(None,) * (parts.ndim - 1), mesh.axis_names)

    def local(held: jax.Array) -> jax.Array:
        return jax.lax.all_gather(held, mesh.axis_names, axis=held.ndim - 1, tiled=True)

    gathered = jax.shard_map(local, in_specs=spec, out_specs=REPLICATED, check_vma=False)(parts)
    return gathered.sum(-1)
