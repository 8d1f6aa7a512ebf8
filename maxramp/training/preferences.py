"""Direct preference optimization (Rafailov et al., arXiv 2305.18290) as an objective.

A row is a pair: its first segment is the chat with the chosen answer, its second that with the
rejected one. Only sums over an answer's tokens count, as in packed text.

Shapes: B pairs, T tokens of both chats of one.
"""

import jax
import jax.numpy as jnp

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder
from maxramp.model.keys import Execution
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.weights import hash_bits
from maxramp.objectives.pairs import PAIRS
from maxramp.parallel.axes import ROW_AXES
from maxramp.parallel.collectives import all_gather, delay_gradient, map_shards
from maxramp.parallel.sharding import REPLICATED, ROWS_B, stack_spec
from maxramp.training.keys import LossKeys
from maxramp.training.log_probs import token_log_probs
from maxramp.training.loss import Loss, with_layers

_ROUNDING = 2.0**-20  # of a sum of log-probabilities in float32, relative


def preference(keys: LossKeys, execution: Execution) -> Loss:
    """Makes the loss of pairs, which depends on how far the policy has moved from the reference.

    With the log-ratios c and r of the chosen and the rejected answer (log p - log p of the
    reference, sums over an answer's tokens) and the margin m = beta (c - r), a pair's loss is

      sigmoid  -(1 - e) log sigmoid(m) - e log sigmoid(-m), with the label smoothing e (cDPO)
      robust   (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e) (arXiv 2403.00409)
      ipo      (c / |c| - r / |r| - 1 / (2 beta))^2, by the tokens of each answer (arXiv 2310.12036)

    Shown under TRL's names: the rewards beta c and beta r, their difference, how often it is above
    0 by more than rounding, and the policy's own log-probabilities. A batch needs `segments` and
    `reference_log_probs`; a row without both answers counts as none.
    """
    beta, smoothing = keys.dpo_beta, keys.dpo_label_smoothing
    shown = PAIRS.shown(keys)

    def loss_of(ratio_B2: jax.Array, lengths_B2: jax.Array) -> jax.Array:
        if keys.dpo_loss_type == "ipo":
            mean_B2 = ratio_B2 / jnp.maximum(lengths_B2, 1)
            return (mean_B2[:, 0] - mean_B2[:, 1] - 1 / (2 * beta)) ** 2
        margin_B = beta * (ratio_B2[:, 0] - ratio_B2[:, 1])
        right_B, wrong_B = -jax.nn.log_sigmoid(margin_B), -jax.nn.log_sigmoid(-margin_B)
        if keys.dpo_loss_type == "robust":
            return ((1 - smoothing) * right_B - smoothing * wrong_B) / (1 - 2 * smoothing)
        return (1 - smoothing) * right_B + smoothing * wrong_B

    def sums(model: Decoder, batch: Batch) -> tuple[jax.Array, Aux]:
        log_p_B2, aux = answer_log_probs(keys, execution, model, batch)
        lengths_B2 = _sum_answers(batch, jnp.ones_like(batch.targets, jnp.float32))
        is_pair_B = (lengths_B2 > 0).all(1)  # and no padding
        ratio_B2 = jnp.where(is_pair_B[:, None], log_p_B2 - batch.reference_log_probs, 0)
        loss_B = jnp.where(is_pair_B, loss_of(ratio_B2, lengths_B2), 0)
        rewards_B2 = beta * ratio_B2
        margins_B = rewards_B2[:, 0] - rewards_B2[:, 1]
        rounding_B = beta * _ROUNDING * jnp.abs(log_p_B2).sum(1)
        right_B = ((margins_B > rounding_B) & ~_are_equal(batch)).astype(jnp.float32)
        counts = lengths_B2.sum(1), is_pair_B.astype(jnp.float32)
        columns = (loss_B, *counts, *rewards_B2.T, margins_B, right_B, *log_p_B2.T)
        totals = _sum_rows(jax.lax.stop_gradient(jnp.stack(columns)))
        # All sums come before the layers' backward pass, or they could run beside it.
        loss_B = delay_gradient(loss_B, totals.sum())
        return with_layers(loss_B.sum(), dict(zip(shown, totals, strict=True)), aux)

    return sums


def _are_equal(batch: Batch) -> jax.Array:
    """Tells whether both answers of a pair, and the tokens before them, are the same: bool [B]. It
    compares hashes, as equal answers at other places of the row round differently."""
    position_BT = batch.token_positions.segment_positions(batch.tokens.shape[1])
    hashes_BT = hash_bits(position_BT.astype(jnp.uint32))
    for ids_BT in (batch.tokens, batch.targets):
        hashes_BT = hash_bits(hashes_BT ^ ids_BT.astype(jnp.uint32))

    def chat_hash(number: int) -> jax.Array:
        is_in_chat_BT = batch.segments == number
        last_B = jnp.where(is_in_chat_BT & (batch.targets >= 0), position_BT, -1).max(1)
        is_read_BT = is_in_chat_BT & (position_BT <= last_B[:, None])
        return jnp.where(is_read_BT, hashes_BT, 0).sum(1, dtype=jnp.uint32)

    return chat_hash(0) == chat_hash(1)


def answer_log_probs(
    keys: LossKeys, execution: Execution, model: Decoder, batch: Batch
) -> tuple[jax.Array, Aux]:
    """Returns the log-probabilities of both answers (the targets in segments 0 and 1), sums over
    their tokens, float32 [B, 2], 0 without an answer; and the layers' sums."""
    is_pair_B = (batch.targets >= 0).any(1)
    log_p_BT, _, aux = token_log_probs(
        model, execution, batch, keys.loss_block_tokens, divisors_B=is_pair_B
    )
    return _sum_answers(batch, log_p_BT), aux


def _sum_rows(x_nB: jax.Array) -> jax.Array:
    """Sums over rows, [n, B] -> [n], in one order, as the norm of the gradients (`add_up`)."""

    def local(x_nB: jax.Array) -> jax.Array:
        return all_gather(x_nB.sum(1)[None], ROW_AXES).sum(0)

    return map_shards(local, stack_spec(ROWS_B), REPLICATED)(x_nB)


def _sum_answers(batch: Batch, x_BT: jax.Array) -> jax.Array:
    """Sums the values of targets over each answer, [B, T] -> [B, 2]."""
    values_BT = jnp.where(batch.targets >= 0, x_BT, 0)
    sums = [jnp.where(batch.segments == answer, values_BT, 0).sum(1) for answer in (0, 1)]
    return jnp.stack(sums, 1)
