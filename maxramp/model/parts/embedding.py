"""The embedding's lookup. Shapes: B rows, T tokens, D model width, V vocabulary, N arrays of
tokens.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxramp.parallel.axes import BATCH_AXES, SHARD_AXES
from maxramp.parallel.collectives import all_gather, all_to_all, map_shards, psum, psum_scatter
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import (
    STREAM_BTD,
    STREAM_BTND,
    TOKENS_BT,
    X_BTD,
    gradient_spec,
    summed_at_once,
    without_axis,
)


def look_up_several(table_VD: jax.Array, tokens: Sequence[jax.Array]) -> list[jax.Array]:
    """Looks up the vectors [B, T, D] of each array [B, T], one or more of the same shape, as
    `look_up` does, in one go."""
    if len(tokens) == 1:
        return [look_up(table_VD, *tokens)]
    (B, T), N = tokens[0].shape, len(tokens)
    # Those of a place side by side, so that none moves to another device.
    tokens_BTN = jnp.stack([jax.reshard(x_BT, TOKENS_BT) for x_BT in tokens], axis=2)
    tokens_BT = jax.lax.reshape(tokens_BTN, (B, T * N), out_sharding=TOKENS_BT)
    x_BTD = look_up(table_VD, tokens_BT)
    shape = B, T, N, x_BTD.shape[-1]
    x_BTND = jax.lax.reshape(x_BTD, shape, out_sharding=STREAM_BTND)
    return [x_BTND[:, :, n] for n in range(N)]


@jax.custom_vjp
def look_up(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Looks up the tokens' vectors [B, T, D], zeros for one outside of [0, V). The gradient is
    summed in float32: in bfloat16 a frequent token's sum of thousands would stop growing, and
    depend on the tokens of a pass."""
    spec, tokens = jax.typeof(table_VD).sharding.spec, tokens_BT.size // axis_size(*BATCH_AXES)
    # Where a device has fewer tokens than its part of the table has rows, vectors travel and the
    # table does not: every device cuts its part of D for the rows of all who share the table, and
    # sends it. Where text is generated the table is whole already.
    rows = table_VD.shape[0] // axis_size("tensor")
    travel = SHARD_AXES in spec.partitions and tokens < rows
    if not travel:
        spec = without_axis(spec, "fsdp")

    def local(table_VD, tokens_BT):
        if travel:
            tokens_BT = all_gather(tokens_BT, SHARD_AXES)
        index_BT = _own_index(tokens_BT, table_VD.shape[0])
        x_BTD = table_VD.at[index_BT].get(mode="fill", fill_value=0)
        if travel:
            x_BTD = all_to_all(x_BTD, SHARD_AXES, split=0, join=2)
        return psum_scatter(x_BTD, "tensor", dimension=2)

    specs = spec, TOKENS_BT
    return map_shards(local, specs, STREAM_BTD)(*map(jax.reshard, (table_VD, tokens_BT), specs))


def _own_index(tokens_BT: jax.Array, V: int) -> jax.Array:
    """Returns the tokens' rows in this device's V rows of the table; V or more: in another part."""
    index_BT = tokens_BT - jax.lax.axis_index("tensor") * V
    return jnp.where(index_BT < 0, V, index_BT)


def _look_up_backward(residuals, dx_BTD):
    table_VD, tokens_BT = residuals
    spec = jax.typeof(table_VD).sharding.spec

    def local(dx_BTD, tokens_BT):
        V, D = table_VD.shape[0] // jax.lax.axis_size("tensor"), table_VD.shape[1]
        index_BT = _own_index(tokens_BT, V)
        dtable_VD = jnp.zeros((V, D), jnp.float32)
        dtable_VD = dtable_VD.at[index_BT].add(dx_BTD.astype(jnp.float32), mode="drop")
        dtable_VD = dtable_VD.astype(table_VD.dtype)
        dtable_VD = psum_scatter(dtable_VD, SHARD_AXES, dimension=1)
        dtable_VD = psum(dtable_VD, summed_at_once(spec))
        # XLA for TPUs would take the scattering out of the loop over passes, and fails at it.
        return jax.lax.optimization_barrier(dtable_VD)

    specs = X_BTD, TOKENS_BT
    arrays = map(jax.reshard, (dx_BTD, tokens_BT), specs)
    return map_shards(local, specs, gradient_spec(spec))(*arrays), None


look_up.defvjp(lambda *arrays: (look_up(*arrays), arrays), _look_up_backward)
