"""Multi-token prediction: what drafts read and predict, and what their loss counts.

Draft d = 1, 2, ... predicts at position t the token t + 1 + d from those up to t + d, all of one
document. The loss of all drafts is a mean over their own targets. But a step divides all sums by
its targets, so these are multiplied by that number over the drafts' before.

Shapes: B rows, T tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.data.batch import Batch
from maxramp.data.rows import PADDING
from maxramp.model.parts.aux import Aux
from maxramp.model.pattern import DRAFT_LOSS
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import TrainState, active_pattern


def look_ahead(batch: Batch, drafts: int) -> Batch:
    """Returns a batch [..., T] with what each draft reads and predicts: the token d further on, and
    its target, PADDING where that is another document's or behind the row. Tokens lie in order."""

    def shift(x_BT: jax.Array, d: int) -> jax.Array:
        return jnp.concatenate([x_BT[..., d:], jnp.full_like(x_BT[..., :d], PADDING)], axis=-1)

    def read(d: int) -> tuple[jax.Array, jax.Array]:
        ahead = shift(batch.tokens, d), shift(batch.targets, d)
        if batch.segments is None:
            return ahead
        is_same_BT = shift(batch.segments, d) == batch.segments
        return tuple(jnp.where(is_same_BT, x_BT, PADDING) for x_BT in ahead)

    return dataclasses.replace(batch, ahead=tuple(read(d) for d in range(1, drafts + 1)))


def prepare_drafts(
    state: TrainState, batch: Batch, recipe: Recipe, learning_rate: LearningRate
) -> tuple[Batch, tuple[Any, Any]]:
    """Returns the batch of a step with what drafts read, if they train; by what their sums are
    multiplied, to be means over their targets once they are divided by those of the next tokens;
    and the factor of their loss at the state's clock."""
    batch = look_ahead(batch, len(active_pattern(state.trained).drafts))
    if not batch.ahead:
        return batch, (1.0, 1.0)
    targets = (batch.targets >= 0).sum(dtype=jnp.float32)
    own = sum((x >= 0).sum(dtype=jnp.float32) for _, x in batch.ahead)
    name = "mtp_loss_scaling_factor"
    scale = learning_rate.phase_value(name, getattr(recipe.loss, name), state.samples)
    return batch, (targets / jnp.maximum(own, 1), scale)


def add_drafts(minimized: jax.Array, aux: Aux, weight: Any, scale: Any) -> tuple[jax.Array, Aux]:
    """Adds the drafts' terms, `aux.minimized`, to a loss, times what `prepare_drafts` returned.
    Shows their cross-entropy without the factor, the losses of their experts with it, as parts of
    those of all layers."""
    shown = dict(aux.shown)
    for name, x in aux.minimized.items():
        term = scale * weight * x
        minimized += term
        shown[name] = weight * x if name == DRAFT_LOSS else shown[name] + term
    return minimized, dataclasses.replace(aux, minimized={}, shown=shown)
