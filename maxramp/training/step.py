"""The train step: accumulate sums, divide once, update.

Shapes: A gradient accumulation steps, B rows of a micro batch.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxramp.data.batch import Batch
from maxramp.model.adapters import add_dropout, dropout_of
from maxramp.model.decoder import Decoder
from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.table import balances_order
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.positions import balanced_order, run_length
from maxramp.model.parts.weights import join_parts
from maxramp.model.pattern import Pattern
from maxramp.objectives.chats import CHATS
from maxramp.objectives.pairs import PAIRS
from maxramp.objectives.rewards import REWARDS
from maxramp.objectives.text import TEXT
from maxramp.parallel.axes import COPY_AXES, TOKEN_AXES
from maxramp.parallel.collectives import add_up, delay, map_shards, square_sums
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import BATCH_ABT, ROWS_BT, gradient_spec
from maxramp.training import balance, eight_bits, noise_scale
from maxramp.training.drafts import add_drafts, prepare_drafts
from maxramp.training.keys import OptimizerKeys, Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.loss import Loss, next_token_prediction
from maxramp.training.optimizers.half_lives import STEADY
from maxramp.training.optimizers.table import make_optimizer
from maxramp.training.policy import policy_gradient
from maxramp.training.preferences import preference
from maxramp.training.skipping import skip_bad_step
from maxramp.training.state import Metrics, TrainState, active_pattern, mask_layers, no_counts

# What makes the loss of each objective, from its keys and those of the model's execution.
_LOSSES = {
    TEXT: next_token_prediction,
    CHATS: next_token_prediction,
    PAIRS: preference,
    REWARDS: policy_gradient,
}


def loss_of(recipe: Recipe) -> Loss:
    """Makes the loss of a recipe's objective."""
    return _LOSSES[recipe.objective](recipe.loss, recipe.model)


def eval_loss_of(recipe: Recipe) -> Loss:
    """Makes the loss of a recipe's evaluation, which shows the sums of `Recipe.eval_sums` alone."""
    loss = loss_of(recipe)
    if recipe.measures_drafts:
        loss = next_token_prediction(recipe.loss, recipe.model, measures=True)

    def sums(model: Decoder, batch: Batch) -> tuple[jax.Array, Aux]:
        minimized, aux = loss(model, batch)
        values = aux.shown | aux.minimized
        return minimized, Aux(shown={name: values[name] for name in recipe.eval_sums})

    return sums


def make_train_step(
    recipe: Recipe, learning_rate: LearningRate
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Makes the train step of a stage's recipe (`Recipe.with_spec`), a function of state and
    batch like `train_step`. It is not compiled: trace it under the stage's mesh.
    """
    return functools.partial(
        train_step, recipe=recipe, learning_rate=learning_rate, loss=loss_of(recipe)
    )


def make_exponent_count(
    recipe: Recipe, learning_rate: LearningRate
) -> Callable[[TrainState, Batch], TrainState]:
    """Makes `count_exponents` of a stage's recipe, as `make_train_step` makes the step."""
    return functools.partial(
        count_exponents, recipe=recipe, learning_rate=learning_rate, loss=loss_of(recipe)
    )


def cut(batch: Batch, length: int) -> Batch:
    """Cuts every row [A, B, ...] of a batch into k rows of `length` tokens: [A, B k, length].
    T must be a multiple of length, and all arrays but the hashes, which stay the samples', must be
    of tokens, unless length is T. Targets stay, also over the border of a row."""
    A, B, T = batch.tokens.shape
    if length == T:
        return batch
    shape = A, B * (T // length), length

    def shorter(x: jax.Array) -> jax.Array:
        return jax.lax.reshape(x, shape, out_sharding=BATCH_ABT)

    rows = dataclasses.replace(batch, hashes=None)
    return dataclasses.replace(jax.tree.map(shorter, rows), hashes=batch.hashes)


def share_out(batch: Batch, pattern: Pattern, keys: ModelKeys) -> Batch:
    """Puts the tokens of a micro batch in the order of the devices that have them. Where tokens
    attend to gathered keys, this balances the number of keys that each device's tokens see; else
    the batch stays as it is."""
    devices, tensor, T = axis_size(*TOKEN_AXES), axis_size("tensor"), batch.tokens.shape[1]
    if not balances_order(pattern, keys, tensor, devices):
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


def train_step(
    state: TrainState, batch: Batch, *, recipe: Recipe, learning_rate: LearningRate, loss: Loss
) -> tuple[TrainState, Metrics]:
    """Takes one optimizer step on A micro batches of B rows, [A, B, ...] as BATCH_ABT.

    Losses and gradients are sums, divided once by the number of target tokens (or pairs) in the
    whole batch: any split of the same rows into A x B gives the same update. The clock counts the
    batch's hashes, one for each sample, which may have several rows.

    Returns:
      The next state, and metrics, scalars: `loss` (nats per token or pair), `grad_norm` (before
      clipping), `learning_rate`, `target_tokens` (neither padding nor a document's first),
      `batch_fingerprint` (uint32[2]), and those of `noise_scale`, `skipping` and `balance`.
    """
    optimizer, batch = recipe.optimizer, cut(batch, recipe.model.max_target_length)
    samples, apart = math.prod(batch.hashes.shape[:-1]), _copies_apart(batch.tokens.shape[0])
    gradients, aux, squares_by_kind = _add_passes(state, batch, recipe, learning_rate, loss)
    shown, targets = aux.shown, aux.shown["tokens"]
    # In aux, which update() divides by; without targets all sums are 0.
    shown[recipe.objective.divisor] = jnp.maximum(shown[recipe.objective.divisor], 1)
    gradients = jax.tree.map(
        lambda g, w: jax.reshard(g, jax.typeof(w).sharding.spec), gradients, state.trained
    )
    after, metrics = update(
        state,
        (gradients, aux),
        samples,
        optimizer=optimizer,
        learning_rate=learning_rate,
        divisor=recipe.objective.divisor,
    )
    # What follows reads the batch only after the update, see `delay`.
    batch_after = jax.tree.map(lambda x: delay(x, metrics["grad_norm"]), batch)
    metrics |= {"target_tokens": targets, "batch_fingerprint": batch_after.hashes.sum((0, 1))}
    if squares_by_kind:
        metrics |= noise_scale.metrics(
            squares_by_kind,
            batch_after,
            copies=math.prod(apart.values()),
            gradients=gradients,
            keys=optimizer,
            opt_state=state.opt_state,
        )
    return after, metrics


def count_exponents(
    state: TrainState, batch: Batch, *, recipe: Recipe, learning_rate: LearningRate, loss: Loss
) -> TrainState:
    """Returns the state before its first step in 8 bits, on this batch as for `train_step`, with
    the exponents that the step meets (`eight_bits`), and nothing else changed."""
    batch = cut(batch, recipe.model.max_target_length)
    _, aux, _ = _add_passes(state, batch, recipe, learning_rate, loss, only_counts=True)
    exponents = {eight_bits.EXPONENTS: aux.counts[eight_bits.EXPONENTS]}
    return dataclasses.replace(state, buffers=state.buffers | exponents)


def _add_passes(
    state: TrainState,
    batch: Batch,
    recipe: Recipe,
    learning_rate: LearningRate,
    loss: Loss,
    only_counts: bool = False,
) -> tuple[Decoder, Aux, Any]:
    """Runs all passes; returns their sums, and the squares of `noise_scale` where it is measured.
    `only_counts` is as in `eight_bits.quantize`."""
    optimizer, model_keys, (A, B, _) = recipe.optimizer, recipe.model, batch.tokens.shape
    apart = _copies_apart(A)  # axis -> size; {} if gradients are added up in each pass
    # Weights are cast once for all micro batches.
    trained = state.trained.cast(model_keys.dtype, [*apart])
    trained = eight_bits.quantize(
        trained, state.trained, state.buffers, model_keys.quantization, only_counts
    )
    frozen = state.frozen.cast(model_keys.dtype)
    zeros = zero_sums(trained, recipe.sum_names)
    rows, weights = prepare_drafts(state, batch, recipe, learning_rate)
    ids_AB3 = row_ids(state.consumed_samples, batch) if dropout_of(trained) > 0 else None

    def add_micro_batch(sums: Any, micro_batch: tuple[Batch, Any]) -> tuple[Any, Any]:
        micro_batch, row_ids_B3 = micro_batch
        micro_batch = share_out(micro_batch, trained.pattern, model_keys)

        def minimize(candidate: Decoder) -> tuple[jax.Array, Aux]:
            model = balance.with_last_step(join_parts(frozen, candidate), state.buffers)
            model = model if row_ids_B3 is None else add_dropout(model, row_ids_B3)
            return add_drafts(*loss(model, micro_batch), *weights)

        gradient, squares_by_kind = jax.grad(minimize, has_aux=True), None
        if optimizer.log_gradient_noise_scale:
            new, squares_by_kind = noise_scale.measure(
                gradient, trained, B, optimizer, state.opt_state
            )
        else:
            new = gradient(trained)
        return jax.tree.map(jnp.add, sums, new), squares_by_kind

    (gradients, aux), squares_by_kind = jax.lax.scan(add_micro_batch, zeros, (rows, ids_AB3))
    gradients, exponents = eight_bits.split(gradients, state.buffers)
    return gradients, dataclasses.replace(aux, counts=aux.counts | exponents), squares_by_kind


def _copies_apart(accumulation: int) -> dict[str, int]:
    """Returns the axes, with sizes, whose copies of the weights add up their own gradients until
    the last of several passes."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return {axis: sizes[axis] for axis in COPY_AXES if accumulation > 1 and sizes[axis] > 1}


def row_ids(consumed_samples: jax.Array, batch: Batch) -> jax.Array:
    """Identifies each row of the run: its sample's number, low and high word, and its place in the
    sample; uint32 [A, B, 3]."""
    (A, B, _), samples = batch.tokens.shape, math.prod(batch.hashes.shape[:-1])
    rows_AB = jnp.arange(A * B, dtype=jnp.uint32).reshape(A, B)
    sample_AB, place_AB = jnp.divmod(rows_AB, jnp.uint32(A * B // samples))
    low, high = consumed_samples
    low_AB = low + sample_AB
    high_AB = high + (low_AB < low).astype(jnp.uint32)
    return jax.reshard(jnp.stack([low_AB, high_AB, place_AB], -1), BATCH_ABT)


def zero_sums(trained: Decoder, shown: Iterable[str]) -> tuple[Decoder, Aux]:
    """Makes zeros for the sums over micro batches, in float32 as many passes add to them; `shown`
    are the loss's names (`Recipe.sum_names`)."""

    def zeros(w: jax.Array) -> jax.Array:
        spec = gradient_spec(jax.typeof(w).sharding.spec)
        return jax.reshard(jnp.zeros_like(w, jnp.float32), spec)

    names = (*shown, *active_pattern(trained).sums)
    aux = Aux({}, {name: jnp.float32(0) for name in names}, no_counts(trained))
    return jax.tree.map(zeros, trained), aux


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
    """Updates the state from the sums over a whole batch of `samples`. `divisor` names the shown
    sum, at least 1, that all are divided by. `again`: an earlier update on this batch has moved the
    clock, and this one has the same learning rate. A bad step moves the clock alone (`skipping`).
    """
    gradients, shown = mask_layers(sums[0], optimizer.trainable_layers), sums[1].shown
    count = shown[divisor]
    grad_norm = jnp.sqrt(add_up(square_sums(gradients))) / count
    scale = 1 / count
    if optimizer.gradient_clipping_threshold:
        limit = optimizer.gradient_clipping_threshold
        scale *= jnp.where(grad_norm > limit, limit / grad_norm, 1.0)
    gradients = jax.tree.map(lambda g, w: (g * scale).astype(w.dtype), gradients, state.trained)

    low, high = state.consumed_samples
    first = low, high  # the batch's first sample, also when the clock has passed it
    if again:
        first = low - jnp.uint32(samples), high - (low < samples).astype(jnp.uint32)
    first_low, first_high = (word.astype(jnp.float32) for word in first)
    rate = learning_rate(first_high * 2.0**32 + first_low, samples)
    pace = learning_rate.pace(samples) if optimizer.half_lives_in_samples else STEADY
    with jax.named_scope("optimizer"):
        updates, opt_state = make_optimizer(optimizer).update(
            gradients, state.opt_state, state.trained, learning_rate=rate, pace=pace
        )
        trained = optax.apply_updates(state.trained, updates)
        # Weight decay would move the others.
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
    after = dataclasses.replace(
        state,
        consumed_samples=consumed,
        trained=trained,
        frozen=frozen,
        buffers=buffers,
        opt_state=opt_state,
    )
    return skip_bad_step(optimizer, state, after, metrics, count, again)


def eval_step(
    model: Decoder, sums: tuple[jax.Array, ...], batch: Batch, *, loss: Loss
) -> tuple[jax.Array, ...]:
    """Adds what the loss shows for a batch to `sums`, sums over tokens that are not divided. They
    are of the loss's names in order (`Recipe.eval_sums`); those of the layers may be left out."""

    def add_micro_batch(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
        shown = loss(model, micro_batch)[1].shown.values()
        return tuple(x + y for x, y in zip(sums, shown, strict=False)), None

    return jax.lax.scan(add_micro_batch, sums, batch)[0]
