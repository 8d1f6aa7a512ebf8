"""The train state and the train step: accumulate sums, divide once, update.

Shapes: A gradient accumulation steps, B rows of a micro batch, S tokens of a row and the one after
it (max_target_length + 1).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxramp.config import Config
from maxramp.loss import cross_entropy_sums
from maxramp.mesh import BATCH_AXES, after
from maxramp.model import Decoder
from maxramp.optimizer import LearningRate, make_optimizer
from maxramp.rows import PADDING, START

BATCH_ABS = P(None, BATCH_AXES, None)  # sharding of a batch

Metrics = dict[str, jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("consumed_samples", "model", "opt_state", "bad_steps"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes.

    `consumed_samples` is the clock: uint32[2], low and high word, because a long run passes 2^32
    samples and JAX has no 64-bit integers by default. `bad_steps` counts the last steps in a row
    that were skipped (uint32).
    """

    consumed_samples: jax.Array
    model: Decoder
    opt_state: Any
    bad_steps: jax.Array


def init_state(config: Config) -> TrainState:
    """The state before the first step; under jit and a mesh weights are born sharded."""
    model = Decoder(config, jax.random.key(config.init_weights_seed))
    opt_state = make_optimizer(config).init(model)
    return TrainState(jnp.zeros((2,), jnp.uint32), model, opt_state, jnp.uint32(0))


def train_step(
    state: TrainState,
    batch_ABS: jax.Array,
    *,
    config: Config,
    learning_rate: LearningRate,
    packed: bool = False,
) -> tuple[TrainState, Metrics]:
    """One optimizer step on A micro batches of B rows.

    Losses and gradients are sums over tokens; they are divided once, by the number of target tokens
    in the whole batch, so any split of the same rows into A x B gives the same update.

    Under `skip_bad_steps` a step whose gradient is not finite changes nothing but the clock: its
    rows count as consumed, weights and optimizer stay as they were.

    Args:
      state: donated by the caller.
      batch_ABS: int32 token ids, sharded as BATCH_ABS; row r of the step is [r // B, r % B].
      config: a resolved config.
      learning_rate: of consumed samples.
      packed: whether rows hold several documents, marked (`rows.START`).

    Returns:
      The next state, and scalars: `loss` (nats per token), `grad_norm` (before clipping),
      `learning_rate`, `batch_fingerprint` (uint32[2]), and under `skip_bad_steps` `bad_steps`
      (uint32: skipped steps in a row, this one included).
    """

    def add_micro_batch(sums: Any, rows_BS: jax.Array) -> tuple[Any, None]:
        gradient = jax.grad(_objective, has_aux=True)
        return jax.tree.map(jnp.add, sums, gradient(model, rows_BS, config, packed)), None

    model = state.model.cast()  # once, whatever the number of micro batches

    # In float32 whatever the weights are, so that the sum of many passes is that of one.
    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), state.model)
    zeros = zeros, (jnp.float32(0), jnp.float32(0))
    (gradients, (cross_entropy, tokens)), _ = jax.lax.scan(add_micro_batch, zeros, batch_ABS)
    grad_norm = _norm(gradients) / tokens
    scale = 1 / tokens
    if config.gradient_clipping_threshold:
        limit = config.gradient_clipping_threshold
        scale *= jnp.where(grad_norm > limit, limit / grad_norm, 1.0)
    gradients = jax.tree.map(lambda g, w: (g * scale).astype(w.dtype), gradients, state.model)

    low, high = state.consumed_samples
    rows = batch_ABS.shape[0] * batch_ABS.shape[1]
    rate = learning_rate(high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32), rows)
    with jax.named_scope("optimizer"):
        update = make_optimizer(config).update
        direction, opt_state = update(gradients, state.opt_state, state.model)
        model = jax.tree.map(lambda w, d: (w - rate * d).astype(w.dtype), state.model, direction)
    new_low = low + jnp.uint32(rows)
    consumed = jnp.stack([new_low, high + (new_low < low).astype(jnp.uint32)])
    metrics = {
        "loss": cross_entropy / tokens,
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "batch_fingerprint": fingerprint(after(batch_ABS, grad_norm)),
    }
    bad_steps = state.bad_steps
    if config.skip_bad_steps:
        good = jnp.isfinite(grad_norm)
        model, opt_state = jax.tree.map(
            functools.partial(jnp.where, good), (model, opt_state), (state.model, state.opt_state)
        )
        bad_steps = jnp.where(good, jnp.uint32(0), bad_steps + jnp.uint32(1))
        metrics["bad_steps"] = bad_steps
    return TrainState(consumed, model, opt_state, bad_steps), metrics


def _norm(tree: Any) -> jax.Array:
    """The L2 norm of all arrays of a tree, float32.

    The devices' parts travel, and are added in one order: the order in which a reduction adds
    depends on how the devices lie on processes, and with it the last bit of a clipped gradient.
    """
    arrays, mesh = jax.tree.leaves(tree), jax.sharding.get_abstract_mesh()
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    shards = [math.prod(mesh.shape[a] for a in jax.tree.leaves(tuple(spec))) for spec in specs]

    def squares(*arrays: jax.Array) -> jax.Array:
        own = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
        held = sum(s * (n / mesh.size) for s, n in zip(own, shards, strict=True))  # by one of many
        return jax.lax.all_gather(held, mesh.axis_names)

    parts = jax.shard_map(squares, in_specs=specs, out_specs=P(), check_vma=False)(*arrays)
    return jnp.sqrt(parts.sum())


def _objective(
    model: Decoder, rows_BS: jax.Array, config: Config, packed: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What training minimizes on some rows, as a sum; with it the cross-entropy and the tokens."""
    tokens_BT, targets_BT, segments_BT = rows_BS[:, :-1], rows_BS[:, 1:], None
    if packed:
        tokens_BT, targets_BT, segments_BT = take_apart(rows_BS)
    x_BTD = model.hidden(tokens_BT, segments_BT)
    with jax.named_scope("loss"):
        objective, *sums = cross_entropy_sums(
            *(x_BTD, model.head(), targets_BT),
            *(config.z_loss_multiplier, config.loss_block_tokens),
        )
    return objective, tuple(sums)


def take_apart(rows_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of several documents -> tokens, targets and segment ids, all [B, T].

    The token that begins a document is no target of the document before it.
    """
    begins_BS = rows_BS >= START
    tokens_BS = jnp.where(begins_BS, rows_BS - START, rows_BS)
    targets_BT = jnp.where(begins_BS[:, 1:], PADDING, tokens_BS[:, 1:])
    segments_BS = jnp.cumsum(begins_BS, axis=1, dtype=jnp.int32)
    return tokens_BS[:, :-1], targets_BT, segments_BS[:, :-1]


def eval_step(
    model: Decoder,
    sums: tuple[jax.Array, jax.Array],
    batch_ABS: jax.Array,
    *,
    config: Config,
    packed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Adds the cross-entropy and the number of target tokens of a batch to `sums`."""

    def add_micro_batch(sums: Any, rows_BS: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, _objective(model, rows_BS, config, packed)[1]), None

    return jax.lax.scan(add_micro_batch, sums, batch_ABS)[0]


def fingerprint(batch_ABS: jax.Array) -> jax.Array:
    """An order-sensitive 64-bit hash of a step's rows: uint32[2], high and low word.

    Token t at position i of the step's rows, read in order, adds mix(mix(i + c) ^ t) to each word,
    modulo 2^32; mix is the finalizer of MurmurHash3 and c the word's constant. A sum, so that
    shards add up to the same whatever devices hold them; positions are those in the step, so that
    the split into micro batches does not show either.
    """
    A, B, S = batch_ABS.shape
    # Built from iotas on the batch's own shape, so that every device makes only its part.
    rows = jax.lax.broadcasted_iota(jnp.uint32, (A, B, S), 0, out_sharding=BATCH_ABS) * jnp.uint32(
        B
    )
    rows += jax.lax.broadcasted_iota(jnp.uint32, (A, B, S), 1, out_sharding=BATCH_ABS)
    column = jax.lax.broadcasted_iota(jnp.uint32, (A, B, S), 2, out_sharding=BATCH_ABS)
    index = rows * jnp.uint32(S) + column

    def word(constant: int) -> jax.Array:
        mixed = _mix(_mix(index + jnp.uint32(constant)) ^ batch_ABS.astype(jnp.uint32))
        return mixed.sum(dtype=jnp.uint32)

    return jnp.stack([word(0x9E3779B9), word(0x7F4A7C15)])


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
