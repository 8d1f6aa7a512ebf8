"""What a step minimizes: a function of the model and a batch's rows to sums.

Shapes: B rows, T tokens, S tokens of a row and the one after it (T + 1).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxramp.data.marks import PADDING, START
from maxramp.model.decoder import Decoder
from maxramp.training.keys import ObjectiveKeys
from maxramp.training.loss import cross_entropy_sums

# (model, rows of a micro batch) -> (what is minimized, (what is shown as the loss, its tokens)),
# each a sum over tokens in float32: sums of any split of the rows add up to the same.
Sums = tuple[jax.Array, tuple[jax.Array, jax.Array]]
Objective = Callable[[Decoder, jax.Array], Sums]


def next_token_prediction(keys: ObjectiveKeys, packed: bool = False) -> Objective:
    """Cross-entropy of every next token, with the z-loss; what is shown is without it.

    Args:
      keys: the weight of the z-loss, and the block of tokens whose logits exist at a time.
      packed: whether rows hold several documents, marked (`marks.START`).
    """

    def objective(model: Decoder, rows_BS: jax.Array) -> Sums:
        tokens_BT, targets_BT, segments_BT = rows_BS[:, :-1], rows_BS[:, 1:], None
        if packed:
            tokens_BT, targets_BT, segments_BT = take_apart(rows_BS)
        x_BTD = model.hidden(tokens_BT, segments_BT)
        with jax.named_scope("loss"):
            minimized, *shown = cross_entropy_sums(
                x_BTD, model.head(), targets_BT, keys.z_loss_multiplier, keys.loss_block_tokens
            )
        return minimized, tuple(shown)

    return objective


def take_apart(rows_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of several documents -> tokens, targets and segment ids, all [B, T].

    The token that begins a document is no target of the document before it.
    """
    begins_BS = rows_BS >= START
    tokens_BS = jnp.where(begins_BS, rows_BS - START, rows_BS)
    targets_BT = jnp.where(begins_BS[:, 1:], PADDING, tokens_BS[:, 1:])
    segments_BS = jnp.cumsum(begins_BS, axis=1, dtype=jnp.int32)
    return tokens_BS[:, :-1], targets_BT, segments_BS[:, :-1]
