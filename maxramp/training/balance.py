"""What follows from how many tokens each expert took: biases, the last step's shares, metrics.

Shapes: B rows, T tokens, L layers of experts, E experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder
from maxramp.model.parts.positions import Positions
from maxramp.model.parts.routing import LOAD, Router
from maxramp.model.parts.weights import Weight, map_weights
from maxramp.parallel.sharding import axes_spec

Counts = dict[str, jax.Array]


def summing_positions(model: Decoder, batch: Batch, divisors_B: jax.Array) -> Positions:
    """Positions with which layers that have sums make them. `divisors_B` is what each row adds to
    the divisor of the step's sums: so these become means over all tokens that are no padding."""
    if not model.pattern.counts:
        return batch.token_positions
    is_token_BT = batch.tokens >= 0
    share_B = divisors_B.astype(jnp.float32) / jnp.maximum(is_token_BT.sum(1), 1)
    shares_BT = jnp.where(is_token_BT, share_B[:, None], 0)
    return dataclasses.replace(batch.token_positions, shares_BT=shares_BT)


def with_last_step(model: Decoder, counts: Counts) -> Decoder:
    """The model whose routers know the shares of the last step; before the first all are equal."""
    if LOAD not in counts:
        return model

    def attach(router: Router) -> Router:
        if router.scope != "step" or not router.balance_weight:
            return router
        loads_LE = counts[LOAD].astype(jnp.float32)
        total_L1 = loads_LE.sum(1, keepdims=True)
        shares_LE = jnp.where(total_L1 > 0, loads_LE / jnp.maximum(total_L1, 1), 1 / router.experts)
        router.last_shares_E = nnx.data(_place_by_layer(router, shares_LE))
        return router

    return _map_routers(attach, model)


def move_biases(frozen: Decoder, counts: Counts, rate: float) -> Decoder:
    """Up by the rate those of experts with less than the mean load of their layer, others down
    (DeepSeek-V3, arXiv 2408.15664, algorithm 1). Loads are integers, so any split gives the same.
    """

    def move(weight: Weight) -> Weight:
        if weight.role != "balance":
            return weight
        loads_LE = counts[LOAD]
        number = loads_LE.shape[1]
        mean_L1 = loads_LE.sum(1, keepdims=True).astype(jnp.float32) / number
        difference = jnp.sign(mean_L1 - loads_LE.astype(jnp.float32))
        spec = jax.typeof(weight[...]).sharding.spec
        step = jax.lax.reshape(rate * difference, weight.shape, out_sharding=spec)
        return weight.replace(weight[...] + step)

    return map_weights(move, frozen) if rate else frozen


def metrics(counts: Counts) -> dict[str, jax.Array]:
    """Of all experts of all layers: the largest share of a layer's tokens over an equal share, the
    mean entropy of the shares over that of equal ones, and all shares, [L, E]."""
    if LOAD not in counts:
        return {}
    loads_LE = counts[LOAD].astype(jnp.float32)
    shares_LE = loads_LE / jnp.maximum(loads_LE.sum(1, keepdims=True), 1)
    number = loads_LE.shape[1]
    entropy_L = -(shares_LE * jnp.log(jnp.maximum(shares_LE, 1e-30))).sum(1) / jnp.log(number)
    return {
        "expert_load_max": shares_LE.max() * number,
        "expert_load_entropy": entropy_L.mean(),
        "expert_load": shares_LE,
    }


def _map_routers(change: Callable[[Router], Router], model: Decoder) -> Decoder:
    def is_router(x: Any) -> bool:
        return isinstance(x, Router)

    def change_leaf(x: Any) -> Any:
        return change(jax.tree.map(lambda leaf: leaf, x)) if is_router(x) else x

    return jax.tree.map(change_leaf, model, is_leaf=is_router)


def _place_by_layer(router: Router, x_LE: jax.Array) -> Weight:
    """What is known of each layer as a weight beside the router's own."""
    matrix = router.matrix_DE
    spec = axes_spec(*jax.typeof(matrix[...]).sharding.spec.partitions[: len(matrix.layers)], None)
    x = jax.lax.reshape(x_LE, (*matrix.layers, x_LE.shape[1]), out_sharding=spec)
    return Weight(x, role="balance", leading=matrix.leading, inputs="", outputs="E")
