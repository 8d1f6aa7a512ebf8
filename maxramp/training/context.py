"""Which tokens of a row each device along `context` has. Shapes: B rows, T tokens."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp

from maxramp.data.batch import Batch
from maxramp.model.keys import ModelKeys
from maxramp.model.parts.balanced_order import balanced_order, run_length
from maxramp.model.pattern import Pattern
from maxramp.parallel.axes import TOKEN_AXES
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import ROWS_BT


def share_out(batch: Batch, pattern: Pattern, keys: ModelKeys) -> Batch:
    """Puts the tokens of a micro batch in the order of the devices that have them. Where tokens
    attend to gathered keys, this balances the number of keys that each device's tokens see."""
    devices, tensor, T = axis_size(*TOKEN_AXES), axis_size("tensor"), batch.tokens.shape[1]
    is_gathered = keys.context_strategy(tensor, devices) == "all_gather"
    if devices == 1 or not is_gathered or not keys.context_parallel_load_balance:
        return batch
    positions = batch.token_positions
    windows = Counter(layer.mixing(keys).window for layer in pattern)
    run = run_length(T // devices)
    costs_Bn = sum(n * positions.count_blocks(T, run, window) for window, n in windows.items())
    costs_Bn = jax.reshard(jnp.broadcast_to(costs_Bn, (len(batch.tokens), T // run)), ROWS_BT)
    order = functools.partial(balanced_order, run=run, devices=devices)
    index_BT = map_shards(order, ROWS_BT, ROWS_BT)(costs_Bn)
    at_BT = positions.segment_positions(T)
    at_BT = jnp.broadcast_to(positions.order(T), batch.tokens.shape) if at_BT is None else at_BT

    def move(x: jax.Array) -> jax.Array:
        if x.shape != index_BT.shape:
            return x
        return jnp.take_along_axis(jax.reshard(x, ROWS_BT), index_BT, 1)

    moved = jax.tree.map(move, dataclasses.replace(batch, positions=at_BT))
    return dataclasses.replace(moved, index=index_BT)
