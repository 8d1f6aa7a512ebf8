"""Log-probabilities of targets, with their gradients, and entropies. Logits exist for one block of
tokens at a time; the backward pass computes them again.

Shapes: B rows, T tokens, N tokens of a block, D model width, V vocabulary.
"""

import functools
import math

import jax
import jax.numpy as jnp

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder, soft_cap, soft_cap_backward
from maxramp.model.keys import Execution
from maxramp.model.parts.aux import Aux
from maxramp.parallel.axes import SHARD_AXES
from maxramp.parallel.collectives import all_gather, map_shards, pmax, psum, psum_scatter
from maxramp.parallel.sharding import TOKENS_BT, X_BTD, gradient_spec, summed_at_once
from maxramp.training.balance import summing_positions


def token_log_probs(
    model: Decoder,
    execution: Execution,
    batch: Batch,
    block_tokens: int,
    temperature: float = 1.0,
    divisors_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Aux]:
    """Computes log-probabilities of targets under softmax(logits / temperature), in float32. The
    head's gradient may stay apart.

    Args:
      batch: negative targets read as token 0.
      block_tokens: of a device; 0 = all.
      divisors_B: as in `summing_positions`.

    Returns:
      Each target's log-probability, which alone has a gradient, and the entropy, two arrays [B, T]
      in nats; and the layers' sums.
    """
    positions = batch.token_positions
    if divisors_B is not None:
        positions = summing_positions(model, batch, divisors_B)
    x_BTD, aux = model.hidden(batch.tokens, execution, positions)
    head_DV = model.head(execution.dtype)
    x_BTD, targets_BT = jax.reshard(x_BTD, X_BTD), jax.reshard(batch.targets, TOKENS_BT)
    how = temperature, block_tokens, model.logits_cap
    return *_log_probs(x_BTD, head_DV, targets_BT, *how), aux


def scores(
    x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, block_tokens: int, cap: float
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities, and whether no token is likelier, bool: two arrays [B, T], without
    gradients. Negative targets read as token 0. `block_tokens` are of a device (0 = all), `cap` is
    the soft cap of the logits."""

    def score(below_NV, chosen_NV, _):
        sums = jnp.stack([jnp.exp(below_NV).sum(-1), chosen_NV.sum(-1)])
        z_N, chosen_N = psum(sums, "tensor")
        return chosen_N - jnp.log(z_N), chosen_N == 0

    return _map_tokens(score, 2, (x_BTD, head_DV, targets_BT), 1.0, block_tokens, cap)


def likeliest_tokens(
    x_BTD: jax.Array, head_DV: jax.Array, block_tokens: int, cap: float
) -> jax.Array:
    """Returns the token with the largest logit, of equal ones the first, int32 [B, T]. Arguments
    are as in `scores`."""

    def choose(below_NV, *_):
        V = below_NV.shape[1]
        ids_V = jax.lax.axis_index("tensor") * V + jnp.arange(V)
        behind = jnp.iinfo(jnp.int32).max
        return (-pmax(-jnp.where(below_NV == 0, ids_V, behind).min(-1), "tensor"),)

    no_targets_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32)
    arrays = x_BTD, head_DV, no_targets_BT
    return _map_tokens(choose, 1, arrays, 1.0, block_tokens, cap)[0]


def _map_tokens(function, count, arrays, temperature, block_tokens, cap):
    """Calls a function for each block of tokens, with a device's part of the logits less each
    token's largest, the same of the target (0 where another device has it), and the largest.
    Returns its `count` results [N], which must be the same along `tensor`, as arrays [B, T].
    `arrays` are x_BTD, head_DV and targets_BT."""

    def local(x_BTD, head_DV, targets_BT):
        head_DV, is_target = _device_head(x_BTD, head_DV)

        def block(_, arrays):
            x_ND, targets_N = arrays
            logits_NV = _logits(x_ND, head_DV, cap) / temperature
            top_N = pmax(logits_NV.max(-1), "tensor")
            below_NV = logits_NV - top_N[:, None]
            return None, function(below_NV, jnp.where(is_target(targets_N), below_NV, 0), top_N)

        _, results = jax.lax.scan(block, None, _cut_blocks(block_tokens, x_BTD, targets_BT))
        B, T = targets_BT.shape
        return tuple(blocks.reshape(-1)[: B * T].reshape(B, T) for blocks in results)

    specs = X_BTD, jax.typeof(arrays[1]).sharding.spec, TOKENS_BT
    return map_shards(local, specs, (TOKENS_BT,) * count)(*map(jax.reshard, arrays, specs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _log_probs(x_BTD, head_DV, targets_BT, *how):
    return _forward(x_BTD, head_DV, targets_BT, *how)[0]


def _forward(x_BTD, head_DV, targets_BT, *how):
    def score(below_NV, chosen_NV, top_N):
        exp_NV = jnp.exp(below_NV)
        sums = jnp.stack([x.sum(-1) for x in (exp_NV, exp_NV * below_NV, chosen_NV)])
        z_N, product_N, chosen_N = psum(sums, "tensor")
        log_z_N = jnp.log(z_N)
        return chosen_N - log_z_N, log_z_N - product_N / z_N, top_N + log_z_N

    arrays = x_BTD, head_DV, targets_BT
    log_p_BT, entropy_BT, log_z_BT = _map_tokens(score, 3, arrays, *how)
    return (log_p_BT, entropy_BT), (*arrays, log_z_BT)


def _backward(temperature, block_tokens, cap, kept, cotangents):
    head_spec = jax.typeof(kept[1]).sharding.spec

    def local(x_BTD, head_DV, targets_BT, log_z_BT, dlog_p_BT):
        shape, dtype = x_BTD.shape, head_DV.dtype
        head_DV, is_target = _device_head(dlog_p_BT[..., None], head_DV)

        def block(dhead_DV, arrays):
            x_ND, targets_N, log_z_N, dlog_p_N = arrays
            logits_NV = _logits(x_ND, head_DV, cap)
            p_NV = jnp.exp(logits_NV / temperature - log_z_N[:, None])
            dlogits_NV = (is_target(targets_N) - p_NV) * (dlog_p_N / temperature)[:, None]
            dlogits_NV = soft_cap_backward(dlogits_NV, logits_NV, cap)
            dhead_DV += jnp.einsum("ND,NV->DV", x_ND.astype(jnp.float32), dlogits_NV)
            return dhead_DV, jnp.einsum("NV,DV->ND", dlogits_NV, head_DV)

        blocks = _cut_blocks(block_tokens, x_BTD, targets_BT, log_z_BT, dlog_p_BT)
        dhead_DV, dx = jax.lax.scan(block, jnp.zeros_like(head_DV), blocks)
        # Rounded once and then sent, as the gradients of all products are.
        # The barrier keeps XLA for TPUs from moving the sum behind the loop over micro batches: it
        # fails at it, for weights that are the embedding too.
        dhead_DV = psum_scatter(dhead_DV.astype(dtype), SHARD_AXES, dimension=0)
        dhead_DV = jax.lax.optimization_barrier(dhead_DV)
        dhead_DV = psum(dhead_DV, summed_at_once(head_spec))
        dx = dx.reshape(-1, shape[-1])[: math.prod(shape[:2])].reshape(shape)
        dx_BTD = psum(dx, "tensor", behind=dhead_DV)
        return dx_BTD.astype(x_BTD.dtype), dhead_DV

    specs = X_BTD, head_spec, *(TOKENS_BT,) * 3
    local = map_shards(local, specs, (X_BTD, gradient_spec(head_spec)))
    return *local(*kept, jax.reshard(cotangents[0], TOKENS_BT)), None


_log_probs.defvjp(_forward, _backward)


def _device_head(first_BTD, head_DV):
    """Returns a device's columns of the head, in float32 so that no logit is rounded, and a
    function that tells which of them are the targets'."""
    head_DV = all_gather(head_DV, SHARD_AXES, behind=first_BTD).astype(jnp.float32)
    V = head_DV.shape[1]
    ids_V = jax.lax.axis_index("tensor") * V + jnp.arange(V)
    return head_DV, lambda targets_N: ids_V == jnp.maximum(targets_N, 0)[:, None]


def _logits(x_ND, head_DV, cap):
    return soft_cap(jnp.einsum("ND,DV->NV", x_ND.astype(jnp.float32), head_DV), cap)


def _cut_blocks(block_tokens, *arrays):
    """Cuts arrays [B, T, ...] into [blocks, N, ...], N at most block_tokens (0 = all), the last
    block padded with zeros."""
    B, T = arrays[0].shape[:2]
    count = math.ceil(B * T / (block_tokens or B * T))
    size = math.ceil(B * T / count)

    def cut(array):
        rest = array.shape[2:]
        padding = ((0, count * size - B * T), *((0, 0),) * len(rest))
        return jnp.pad(array.reshape(B * T, *rest), padding).reshape(count, size, *rest)

    return tuple(map(cut, arrays))
