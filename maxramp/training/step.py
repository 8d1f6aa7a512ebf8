"""The train step: accumulate sums, divide once, update.

Shapes: A gradient accumulation steps, B rows of a micro batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxramp.data.batch import Batch
from maxramp.model.adapters import add_dropout, dropout_of
from maxramp.model.decoder import Decoder
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.weights import join_parts
from maxramp.objectives.chats import CHATS
from maxramp.objectives.pairs import PAIRS
from maxramp.objectives.rewards import REWARDS
from maxramp.objectives.text import TEXT
from maxramp.parallel.axes import COPY_AXES
from maxramp.parallel.collectives import wait_for
from maxramp.parallel.sharding import BATCH_ABT, gradient_spec
from maxramp.training import balance, noise_scale
from maxramp.training.context import share_out
from maxramp.training.keys import OptimizerKeys, Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.loss import Loss, next_token_prediction
from maxramp.training.norm import add_up, squares
from maxramp.training.optimizers.half_lives import STEADY
from maxramp.training.optimizers.table import make_optimizer
from maxramp.training.policy import policy_gradient
from maxramp.training.preferences import preference
from maxramp.training.skipping import skip_bad_step
from maxramp.training.state import Metrics, TrainState, mask_layers, no_counts

# The arithmetic of each objective, by its keys and how the model runs.
_LOSSES = {
    TEXT: next_token_prediction,
    CHATS: next_token_prediction,
    PAIRS: preference,
    REWARDS: policy_gradient,
}


def loss_of(recipe: Recipe) -> Loss:
    return _LOSSES[recipe.objective](recipe.loss, recipe.model)


def make_train_step(
    recipe: Recipe, learning_rate: LearningRate
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    return functools.partial(
        train_step, recipe=recipe, learning_rate=learning_rate, loss=loss_of(recipe)
    )


def cut(batch: Batch, length: int) -> Batch:
    """Cuts every row [A, B, ...] of a batch into k rows of `length` tokens: [A, B k, length].
    Targets stay, also over the border of a row. Hashes are the samples'."""
    A, B, T = batch.tokens.shape
    if length == T:
        return batch
    shape = A, B * (T // length), length

    def shorter(x: jax.Array) -> jax.Array:
        return jax.lax.reshape(x, shape, out_sharding=BATCH_ABT)

    return dataclasses.replace(jax.tree.map(shorter, batch), hashes=batch.hashes)


def train_step(
    state: TrainState, batch: Batch, *, recipe: Recipe, learning_rate: LearningRate, loss: Loss
) -> tuple[TrainState, Metrics]:
    """One optimizer step on A micro batches of B rows, [A, B, ...] as BATCH_ABT; donates `state`.

    Losses and gradients are sums, divided once by the number of target tokens (or pairs) in the
    whole batch: any split of the same rows into A x B gives the same update. The clock counts the
    batch's hashes, one for each sample, which may have several rows.

    Metrics are scalars: `loss` (nats per token or pair), `grad_norm` (before clipping),
    `learning_rate`, `target_tokens` (neither padding nor a document's first), `batch_fingerprint`
    (uint32[2]), those of `noise_scale` and `skipping`.
    """

    def add_micro_batch(sums: Any, micro_batch: tuple[Batch, Any]) -> tuple[Any, Any]:
        micro_batch, token_offset_B2 = micro_batch
        micro_batch = share_out(micro_batch, trained.pattern, recipe.model)

        def minimize(trained: Decoder) -> tuple[jax.Array, Aux]:
            model = join_parts(frozen, trained)
            model = balance.with_last_step(model, state.buffers)
            return loss(add_dropout(model, token_offset_B2) if drops else model, micro_batch)

        gradient, kept = jax.grad(minimize, has_aux=True), None
        if optimizer.log_gradient_noise_scale:
            found, kept = noise_scale.measure(gradient, trained, B, *before)
        else:
            found = gradient(trained)
        return jax.tree.map(jnp.add, sums, found), kept

    optimizer, batch = recipe.optimizer, cut(batch, recipe.model.max_target_length)
    (A, B, _), samples = batch.tokens.shape, math.prod(batch.hashes.shape[:-1])
    apart = _copies_apart(A)
    # Once, whatever the number of micro batches.
    trained = state.trained.cast(recipe.model.dtype, [*apart])
    frozen = state.frozen.cast(recipe.model.dtype)
    before = optimizer, state.opt_state
    zeros = zero_sums(trained, loss.shown)
    drops = dropout_of(trained) > 0
    places_AB2 = places_of_rows(state.consumed_samples, batch) if drops else None
    (gradients, found), kept = jax.lax.scan(add_micro_batch, zeros, (batch, places_AB2))
    shown, targets = found.shown, found.shown["tokens"]
    shown[loss.divisor] = jnp.maximum(shown[loss.divisor], 1)  # of 0, sums are 0
    gradients = jax.tree.map(
        lambda g, w: jax.reshard(g, jax.typeof(w).sharding.spec), gradients, state.trained
    )
    state, metrics = update(
        *(state, (gradients, found), samples),
        optimizer=optimizer,
        learning_rate=learning_rate,
        divisor=loss.divisor,
    )
    read = jax.tree.map(lambda x: wait_for(x, metrics["grad_norm"]), batch)
    metrics |= {"target_tokens": targets, "batch_fingerprint": read.hashes.sum((0, 1))}
    if kept:
        copies = math.prod(apart.values())
        metrics |= noise_scale.metrics(kept, read, copies, gradients, *before)
    return state, metrics


def _copies_apart(accumulation: int) -> dict[str, int]:
    """Axes, with sizes, whose copies add up their own gradients until several passes are over."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return {axis: sizes[axis] for axis in COPY_AXES if accumulation > 1 and sizes[axis] > 1}


def places_of_rows(consumed_samples: jax.Array, batch: Batch) -> jax.Array:
    """Tokens of the run before each row: uint32 [A, B, 2], low and high word."""
    (A, B, T), samples = batch.tokens.shape, math.prod(batch.hashes.shape[:-1])
    first_low, first_high = _product(*consumed_samples, A * B * T // samples)
    low_AB = first_low + jnp.arange(A * B, dtype=jnp.uint32).reshape(A, B) * jnp.uint32(T)
    places_AB2 = jnp.stack([low_AB, first_high + (low_AB < first_low).astype(jnp.uint32)], -1)
    return jax.reshard(places_AB2, BATCH_ABT)


def _product(low: jax.Array, high: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    below, above = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    of_low, one, other = (low & mask) * below, (low & mask) * above, (low >> half) * below
    middle = (of_low >> half) + (one & mask) + (other & mask)
    carried = (low >> half) * above + (one >> half) + (other >> half) + (middle >> half)
    return (of_low & mask) | (middle << half), carried + high * jnp.uint32(factor)


def zero_sums(trained: Decoder, shown: Iterable[str]) -> tuple[Decoder, Aux]:
    """Zeros for the sums of micro batches, float32 so that many passes add up to one."""

    def zeros(w: jax.Array) -> jax.Array:
        spec = gradient_spec(jax.typeof(w).sharding.spec)
        return jax.reshard(jnp.zeros_like(w, jnp.float32), spec)

    names = (*shown, *trained.pattern.sums)
    of_layers = Aux({}, {name: jnp.float32(0) for name in names}, no_counts(trained))
    return jax.tree.map(zeros, trained), of_layers


def update(
    state: TrainState,
    sums: tuple[Decoder, Aux],
    samples: int,
    *,
    optimizer: OptimizerKeys,
    learning_rate: LearningRate,
    divisor: str = "tokens",
    again: bool = False,
) -> tuple[TrainState, Metrics]:
    """The optimizer's part of a step, from the sums over a whole batch of `samples`. `divisor`
    names the shown sum, at least 1, that all are divided by. `again`: an earlier update of the same
    learning rate has counted the batch."""
    gradients, shown = mask_layers(sums[0], optimizer.trainable_layers), sums[1].shown
    count = shown[divisor]
    grad_norm = jnp.sqrt(add_up(squares(gradients))) / count
    scale = 1 / count
    if optimizer.gradient_clipping_threshold:
        limit = optimizer.gradient_clipping_threshold
        scale *= jnp.where(grad_norm > limit, limit / grad_norm, 1.0)
    gradients = jax.tree.map(lambda g, w: (g * scale).astype(w.dtype), gradients, state.trained)

    low, high = state.consumed_samples
    first = low, high  # sample of the batch, also when the clock has passed it
    if again:
        first = low - jnp.uint32(samples), high - (low < samples).astype(jnp.uint32)
    first_low, first_high = (word.astype(jnp.float32) for word in first)
    rate = learning_rate(first_high * 2.0**32 + first_low, samples)
    pace = learning_rate.pace(samples) if optimizer.half_lives_in_samples else STEADY
    with jax.named_scope("optimizer"):
        updates, opt_state = make_optimizer(optimizer).update(
            *(gradients, state.opt_state, state.trained), learning_rate=rate, pace=pace
        )
        trained = optax.apply_updates(state.trained, updates)
        # Others would decay.
        trained = mask_layers(trained, optimizer.trainable_layers, others=state.trained)
    new_low = low + jnp.uint32(0 if again else samples)
    consumed = jnp.stack([new_low, high + (new_low < low).astype(jnp.uint32)])
    metrics = {
        **{name: x / count for name, x in shown.items() if name not in ("tokens", divisor)},
        "grad_norm": grad_norm,
        "learning_rate": rate,
        **balance.metrics(sums[1].counts),
    }
    buffers = sums[1].counts
    frozen = balance.move_biases(state.frozen, buffers, optimizer)
    after = TrainState(
        *(consumed, trained, frozen, buffers, opt_state, state.bad_steps, state.recent)
    )
    return skip_bad_step(optimizer, state, after, metrics, count, again)


def eval_step(
    model: Decoder, sums: tuple[jax.Array, ...], batch: Batch, *, loss: Loss
) -> tuple[jax.Array, ...]:
    """Adds what a batch shows to `sums`: of the loss's names, the first or all of them."""

    def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
        shown = loss(model, micro_batch)[1].shown
        return tuple(x + shown[name] for name, x in zip(loss.shown, sums, strict=False)), None

    return jax.lax.scan(add_micro_batch, sums, batch)[0]
