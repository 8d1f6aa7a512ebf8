"""Cross-entropy as a sum over tokens, so that any split of the rows adds up to the same.

Logits exist for one block of tokens at a time, and the gradient is taken with them in the forward
pass. Shapes: B rows, T tokens of a row, N tokens of a block, D model width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxramp.data.batch import Batch
from maxramp.data.rows import PADDING
from maxramp.model.decoder import Decoder, soft_cap, soft_cap_backward
from maxramp.model.keys import Execution
from maxramp.model.parts.aux import Aux, join_layers
from maxramp.model.pattern import ACCEPTANCE, DRAFT_LOSS, DRAFT_TOKENS
from maxramp.model.size import loss_blocks
from maxramp.objectives.text import TEXT
from maxramp.parallel.axes import BATCH_AXES, SHARD_AXES
from maxramp.parallel.collectives import all_gather, delay, map_shards, pmax, psum, psum_scatter
from maxramp.parallel.sharding import (
    REPLICATED,
    ROWS_BT,
    TOKENS_BT,
    X_BTD,
    factor_spec,
    gradient_spec,
    summed_at_once,
)
from maxramp.training.balance import summing_positions
from maxramp.training.drafts import look_ahead
from maxramp.training.keys import LossKeys
from maxramp.training.log_probs import likeliest_tokens

_Sums = tuple[jax.Array, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def cross_entropy_sums(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    z_loss_multiplier: float,
    block_tokens: int,
    statistics: bool = False,
    cap: float = 0.0,
) -> _Sums:
    """Sums over target tokens, those from 0 up, in float32.

    Args:
      head_DV: sharded as HEAD_DV; its gradient may stay apart.
      block_tokens: of a device; 0 = all.
      cap: the soft cap of the logits.

    Returns:
      The objective, which is cross-entropy plus the z-loss log(Z)^2 (PaLM, arXiv 2204.02311,
      section 5) and alone has a gradient, and the cross-entropy, both in nats; the number of
      targets; with `statistics` also the number of targets that no token is likelier than, and the
      entropy in nats.
    """
    keys = z_loss_multiplier, block_tokens, statistics, cap
    return _device_sums(x_BTD, head_DV, targets_BT, *keys, with_gradients=False)[0]


def _forward(x_BTD, head_DV, targets_BT, *keys):
    return _device_sums(x_BTD, head_DV, targets_BT, *keys, with_gradients=True)


def _backward(z_loss_multiplier, block_tokens, statistics, cap, gradients, cotangents):
    def scale(gradient):
        factor = cotangents[0].astype(gradient.dtype)
        return gradient * jax.reshard(factor, factor_spec(jax.typeof(gradient).sharding.spec))

    return *map(scale, gradients), None


cross_entropy_sums.defvjp(_forward, _backward)


_TILE = 8  # rows of a TPU's tiles


def _device_sums(x_BTD, head_DV, targets_BT, *keys, with_gradients):
    """Returns what `_sum_blocks` does for the tokens of all devices. Each computes its own; only
    sums and the gradients' sums travel."""
    head_spec = jax.typeof(head_DV).sharding.spec

    def local(x_BTD, head_DV, targets_BT):
        shard, shape = len(head_DV), x_BTD.shape
        # XLA for TPUs copies gathered parts that do not fill their tiles: zeros fill them.
        gap = -shard % _TILE if shard < shape[-1] else 0
        head_DV = jnp.pad(head_DV, ((0, gap), (0, 0)))
        head_DV = all_gather(head_DV, SHARD_AXES, behind=x_BTD)
        parts_BTsd = x_BTD.reshape(*shape[:2], -1, shard)
        x_BTD = jnp.pad(parts_BTsd, (*((0, 0),) * 3, (0, gap))).reshape(*shape[:2], -1)
        sums, gradients = _sum_blocks(x_BTD, head_DV, targets_BT, *keys, with_gradients)
        # Added in one order, as the norm of the gradients (`add_up`).
        sums = all_gather(jnp.stack(sums)[None], BATCH_AXES).sum(0)
        if with_gradients:
            # XLA for TPUs would keep logits' gradients until the layers' backward pass is done.
            dx_BTD, dhead_DV = jax.lax.optimization_barrier(gradients)
            # Rounded once and then sent, as the gradients of all products are.
            dhead_DV = dhead_DV.astype(head_DV.dtype)
            dhead_DV = psum_scatter(dhead_DV, SHARD_AXES, dimension=0)[:shard]
            dhead_DV = psum(dhead_DV, summed_at_once(head_spec))
            dx_BTD = dx_BTD.reshape(*shape[:2], -1, shard + gap)[..., :shard].reshape(shape)
            dx_BTD = psum(dx_BTD, "tensor", behind=sums.sum() + dhead_DV[0, 0])
            gradients = dx_BTD, dhead_DV
        return tuple(sums), gradients

    specs = (X_BTD, head_spec, TOKENS_BT)
    arrays = map(jax.reshard, (x_BTD, head_DV, targets_BT), specs)
    sum_specs = (REPLICATED,) * _count(keys[2])
    gradient_specs = (X_BTD, gradient_spec(head_spec)) if with_gradients else ()
    return map_shards(local, specs, (sum_specs, gradient_specs))(*arrays)


def _count(statistics):
    return 5 if statistics else 3


def _sum_blocks(
    x_BTD, head_DV, targets_BT, z_loss_multiplier, block_tokens, statistics, cap, with_gradients
):
    """Returns the sums, as `cross_entropy_sums`, of a device's own tokens (at least one), and the
    gradients of the objective by x and the head, or (). Called inside `map_shards`."""
    D, V = head_DV.shape
    tokens = targets_BT.size
    groups, blocks, size = loss_blocks(tokens, block_tokens, D, x_BTD.dtype.itemsize)
    padding = groups * blocks * size - tokens
    x = jnp.pad(x_BTD.reshape(tokens, D), ((0, padding), (0, 0)))
    targets = jnp.pad(targets_BT.reshape(tokens), (0, padding), constant_values=PADDING)
    first = jax.lax.axis_index("tensor") * V  # the device's part of the vocabulary

    def block(sums, arrays):
        x_ND, targets_N = arrays
        counts_N = targets_N >= 0
        logits_NV = jnp.einsum("ND,DV->NV", x_ND, head_DV, preferred_element_type=jnp.float32)
        logits_NV = soft_cap(logits_NV, cap)
        top_N = pmax(logits_NV.max(-1), "tensor")
        exp_NV = jnp.exp(logits_NV - top_N[:, None])
        z_N = psum(exp_NV.sum(-1), "tensor")
        log_z_N = top_N + jnp.log(z_N)
        is_target_NV = jnp.arange(V) == (targets_N - first)[:, None]
        target_logit_N = psum(jnp.where(is_target_NV, logits_NV, 0).sum(-1), "tensor")
        cross_entropy = jnp.where(counts_N, log_z_N - target_logit_N, 0).sum()
        z_loss = z_loss_multiplier * jnp.where(counts_N, log_z_N**2, 0).sum()
        new = (cross_entropy + z_loss, cross_entropy, counts_N.sum(dtype=jnp.float32))
        if statistics:
            is_right_N = counts_N & (target_logit_N >= top_N)
            mean_logit_N = psum((exp_NV * logits_NV).sum(-1), "tensor") / z_N
            entropy = jnp.where(counts_N, log_z_N - mean_logit_N, 0).sum()
            new = *new, is_right_N.sum(dtype=jnp.float32), entropy
        sums = jax.tree.map(jnp.add, sums, new)
        if not with_gradients:
            return sums, ()
        scale_N = jnp.where(counts_N, (1 + 2 * z_loss_multiplier * log_z_N) / z_N, 0)
        dlogits_NV = exp_NV * scale_N[:, None] - (is_target_NV & counts_N[:, None])
        # Transposed, as XLA for TPUs has them, or it would copy all of them.
        return sums, soft_cap_backward(dlogits_NV, logits_NV, cap).astype(x_ND.dtype).T

    def group(carry, arrays):
        sums, dhead_DV = carry
        x_GND, targets_GN = arrays
        sums, dlogits = jax.lax.scan(block, sums, arrays)
        if not with_gradients:
            return (sums, dhead_DV), ()
        # Two products read them: XLA for TPUs would compute them in both, anew for every tile.
        dlogits_GVN = jax.lax.optimization_barrier(dlogits)
        in_float32 = {"preferred_element_type": jnp.float32}
        dhead_DV += jnp.einsum("GND,GVN->DV", x_GND, dlogits_GVN, **in_float32)
        return (sums, dhead_DV), jnp.einsum("GVN,DV->GND", dlogits_GVN, head_DV)

    sums = (jnp.float32(0),) * _count(statistics)
    dhead_DV = jnp.zeros((D, V), jnp.float32) if with_gradients else ()
    arrays = x.reshape(groups, blocks, size, D), targets.reshape(groups, blocks, size)
    (sums, dhead_DV), dx = jax.lax.scan(group, (sums, dhead_DV), arrays)
    if not with_gradients:
        return sums, ()
    return sums, (dx.reshape(-1, D)[:tokens].reshape(x_BTD.shape), dhead_DV)


# (model, micro batch) -> (the objective, sums to show and counts), each a float32 sum over tokens,
# so the sums of any split of the rows add up to the same; first those of `sum_names`, in order. The
# drafts' terms are not in the objective, but in `Aux.minimized` (`drafts.add_drafts`).
Loss = Callable[[Decoder, Batch], tuple[jax.Array, Aux]]


def next_token_prediction(keys: LossKeys, execution: Execution, measures: bool = False) -> Loss:
    """Makes the loss of next tokens: cross-entropy with the z-loss, shown without it; and of tokens
    further ahead where the batch has what drafts read. It must not have `weights`.

    If it `measures`, all drafts of the model run, on a batch in order, and it also shows how many
    of their tokens are those that the model predicts once it has read all before them."""
    how = keys.z_loss_multiplier, keys.loss_block_tokens, keys.log_token_statistics
    shown = TEXT.shown(keys)

    def sums(model: Decoder, batch: Batch) -> tuple[jax.Array, Aux]:
        assert batch.weights is None, "next-token prediction weighs all tokens alike"
        positions = summing_positions(model, batch, (batch.targets >= 0).sum(1))
        if measures:
            batch = look_ahead(batch, len(model.pattern.drafts))
        tokens = batch.tokens, *(ahead_BT for ahead_BT, _ in batch.ahead)
        x_BTD, *ahead = model.embed(execution.dtype, *tokens)
        x_BTD, aux = model.run(x_BTD, execution, positions)
        with jax.named_scope("loss"):
            head_DV = model.head(execution.dtype)
            arrays = x_BTD, head_DV, batch.targets
            minimized, *values = cross_entropy_sums(*arrays, *how, model.logits_cap)
        total, aux = with_layers(minimized, dict(zip(shown, values, strict=True)), aux)
        if not ahead:
            return total, aux
        vectors, block_tokens = (x_BTD, *ahead), keys.loss_block_tokens
        wanted = _likeliest_ahead(model, x_BTD, batch, block_tokens) if measures else ()
        how_ahead = execution, minimized, block_tokens, wanted
        terms = _predict_ahead(model, vectors, batch, *how_ahead)
        return total, join_layers([aux, *terms])

    return sums


def _likeliest_ahead(
    model: Decoder, x_BTD: jax.Array, batch: Batch, block_tokens: int
) -> tuple[jax.Array, ...]:
    """Returns for each draft the tokens [B, T] that the model itself predicts where the draft has
    targets, PADDING elsewhere."""
    head_DV = model.head(x_BTD.dtype)
    best_BT = likeliest_tokens(x_BTD, head_DV, block_tokens, model.logits_cap)
    best_BT = jnp.where(batch.targets >= 0, jax.reshard(best_BT, ROWS_BT), PADDING)
    ahead = look_ahead(dataclasses.replace(batch, targets=best_BT), len(batch.ahead)).ahead
    return tuple(wanted_BT for _, wanted_BT in ahead)


def _predict_ahead(
    model: Decoder,
    vectors: Sequence[jax.Array],
    batch: Batch,
    execution: Execution,
    loss: jax.Array,
    block_tokens: int,
    wanted: Sequence[jax.Array] = (),
) -> list[Aux]:
    """Returns the terms of each draft: cross-entropy and the losses of its experts, sums over its
    own targets; its experts' loads; and how many of its tokens are the `wanted` ones, if given.
    `vectors` are those of `Decoder.run` and the embeddings of what drafts read, `loss` is that of
    the next tokens."""
    x_BTD, *ahead = vectors
    terms = []
    for number, (tokens_BT, targets_BT) in enumerate(batch.ahead):
        # After the sums before, or they could run beside the draft's layer.
        x_BTD, ahead_BTD = delay(x_BTD, loss), delay(ahead[number], loss)
        own = dataclasses.replace(batch, tokens=tokens_BT)
        positions = summing_positions(model, own, (targets_BT >= 0).sum(1))
        x_BTD, aux = model.draft(number, x_BTD, ahead_BTD, execution, positions)
        with jax.named_scope("loss"):
            arrays = x_BTD, model.head(execution.dtype), targets_BT
            loss, _, count = cross_entropy_sums(*arrays, 0.0, block_tokens, False, model.logits_cap)
            shown = {}
            if wanted:
                own_BT = likeliest_tokens(*arrays[:2], block_tokens, model.logits_cap)
                is_same_BT = own_BT == jax.reshard(wanted[number], TOKENS_BT)
                shown = {ACCEPTANCE: is_same_BT.sum(dtype=jnp.float32), DRAFT_TOKENS: count}
        counts = jax.tree.map(lambda x: x.astype(jnp.uint32), aux.counts)
        terms.append(Aux({DRAFT_LOSS: loss, **aux.minimized}, shown, counts))
    return terms


def with_layers(
    minimized: jax.Array, shown: dict[str, jax.Array], aux: Aux
) -> tuple[jax.Array, Aux]:
    """Adds the losses and sums of the layers to those of the objective."""
    minimized = sum(aux.minimized.values(), minimized)
    counts = jax.tree.map(lambda x: x.astype(jnp.uint32), aux.counts)
    return minimized, Aux({}, {**shown, **aux.minimized, **aux.shown}, counts)
