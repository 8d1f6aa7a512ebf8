"""What follows from the number of tokens each expert received: biases, shares of the last step,
metrics.

Shapes: B rows, T tokens, L layers of experts, E experts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder, kind_at
from maxramp.model.parts.positions import Positions
from maxramp.model.parts.routing import LOAD, Router, load_shares
from maxramp.model.parts.weights import Weight, is_weight, join_parts, part_of
from maxramp.parallel.sharding import axes_spec
from maxramp.training.keys import OptimizerKeys
from maxramp.training.state import mask_layers

Counts = dict[str, jax.Array]


def summing_positions(model: Decoder, batch: Batch, divisors_B: jax.Array) -> Positions:
    """Returns positions with the weight of each token in the layers' sums. `divisors_B` is what
    each row adds to the divisor of the step's sums, so these become means over all tokens but
    padding. Models without experts need no weights."""
    if not model.pattern.counts:
        return batch.token_positions
    is_token_BT = batch.tokens >= 0
    share_B = divisors_B.astype(jnp.float32) / jnp.maximum(is_token_BT.sum(1), 1)
    token_weight_BT = jnp.where(is_token_BT, share_B[:, None], 0)
    return dataclasses.replace(batch.token_positions, token_weight_BT=token_weight_BT)


def with_last_step(model: Decoder, counts: Counts) -> Decoder:
    """Returns a model whose routers, where load_balance_loss_scope is step, know the shares of the
    last step, equal ones before the first; `counts` are `TrainState.buffers`."""

    def attach(path: Any, x: Any) -> Any:
        if not isinstance(x, Router) or x.scope != "step" or not x.balance_weight:
            return x
        router, matrix = jax.tree.map(lambda leaf: leaf, x), x.matrix_DE
        loads_LE = _own_loads(model, counts, path)
        if loads_LE is None:
            return x
        is_first_L1 = loads_LE.sum(1, keepdims=True) == 0
        shares_LE = jnp.where(is_first_L1, 1 / x.experts, load_shares(loads_LE))
        leading = jax.typeof(matrix[...]).sharding.spec.partitions[: len(matrix.layers)]
        shape, spec = (*matrix.layers, x.experts), axes_spec(*leading, None)
        shares = jax.lax.reshape(shares_LE, shape, out_sharding=spec)
        router.last_shares_E = nnx.data(
            Weight(shares, role="balance", leading=matrix.leading, inputs="", outputs="E")
        )
        return router

    return jax.tree_util.tree_map_with_path(attach, model, is_leaf=lambda x: isinstance(x, Router))


def _own_loads(model: Decoder, counts: Counts, path: Any) -> jax.Array | None:
    """Returns the loads [L, E] of the layers of experts whose stack is at this path; None for
    drafts that do not run."""
    kinds = [layer.kind for layer in model.pattern if layer.is_sparse]
    own = [i for i, kind in enumerate(kinds) if kind == kind_at(path)]
    if own[-1] >= len(counts[LOAD]):
        return None
    return counts[LOAD] if len(own) == len(kinds) else counts[LOAD][np.array(own)]


def move_biases(frozen: Decoder, counts: Counts, keys: OptimizerKeys) -> Decoder:
    """Raises the biases of experts with less than the mean load of their layer and lowers the
    others, by the update rate (DeepSeek-V3, arXiv 2408.15664, algorithm 1), in the layers that
    train. Loads are integers, so any split of the rows gives the same. An update rate of 0 changes
    nothing."""
    if not keys.routed_bias_update_rate:
        return frozen

    def move(path: Any, weight: Weight) -> Weight:
        loads_LE = _own_loads(frozen, counts, path)
        if loads_LE is None:
            return weight
        number = loads_LE.shape[1]
        mean_L1 = loads_LE.sum(1, keepdims=True).astype(jnp.float32) / number
        difference = jnp.sign(mean_L1 - loads_LE.astype(jnp.float32))
        spec = jax.typeof(weight[...]).sharding.spec
        step = jax.lax.reshape(
            keys.routed_bias_update_rate * difference, weight.shape, out_sharding=spec
        )
        return weight.replace(weight[...] + step)

    biases = part_of(frozen, lambda weight: weight.role == "balance")
    moved = jax.tree_util.tree_map_with_path(move, biases, is_leaf=is_weight)
    moved = mask_layers(moved, keys.trainable_layers, biases)
    return join_parts(moved, frozen)


def metrics(counts: Counts) -> dict[str, jax.Array]:
    """Returns, over all layers, the largest share of a layer's tokens relative to an equal share,
    the mean entropy of the shares relative to that of equal ones, and all shares, [L, E]; {}
    without experts."""
    if LOAD not in counts:
        return {}
    shares_LE = load_shares(counts[LOAD])
    number = shares_LE.shape[1]
    entropy_L = -(shares_LE * jnp.log(jnp.maximum(shares_LE, 1e-30))).sum(1) / jnp.log(number)
    return {
        "expert_load_max": shares_LE.max() * number,
        "expert_load_entropy": entropy_L.mean(),
        "expert_load": shares_LE,
    }
