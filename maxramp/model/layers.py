"""Runs a model's layers in order, from stacks of their weights by kind.

Shapes: B rows, T tokens, D model width, L layers of a stack, l layers of this run.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.keys import Execution
from maxramp.model.parts.aux import Aux, join_layers
from maxramp.model.parts.positions import Angles, Pass, Positions, rotary_angles
from maxramp.model.parts.routing import CHOICES
from maxramp.model.parts.splash_attention import CONTEXT
from maxramp.model.parts.weights import STAGE_PRODUCTS, relabel
from maxramp.model.pattern import Layer, Pattern, Rope
from maxramp.parallel.sharding import X_BTD, stack_spec
from maxramp.stage import RopeKeys

Stacks = dict[str, Any]  # by kind, blocks whose weights have a leading axis of layers

_LAYER_INPUT = "input of a layer"
_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_named = jax.checkpoint_policies.save_only_these_names
_both = jax.checkpoint_policies.save_from_both_policies

# What a layer keeps for its backward pass. Names and meanings are MaxText's. The choice of experts
# is never recomputed, as the last bit of a score may decide it.
_SAVEABLE = {
    "full": _named(CHOICES),
    "minimal": _both(_PRODUCTS, _named(CHOICES, STAGE_PRODUCTS)),
    "minimal_with_context": _both(_PRODUCTS, _named(CHOICES, STAGE_PRODUCTS, CONTEXT)),
}

# What a tick of a pipeline keeps: by name, or it would keep its weights as well, once a tick.
KEPT = {
    "full": _named(_LAYER_INPUT, CHOICES),
    "minimal": _named(_LAYER_INPUT, CHOICES, STAGE_PRODUCTS),
    "minimal_with_context": _named(_LAYER_INPUT, CHOICES, STAGE_PRODUCTS, CONTEXT),
    "none": _named(_LAYER_INPUT, CHOICES, STAGE_PRODUCTS, CONTEXT),
}


def run(
    pattern: Pattern,
    stacks: Stacks,
    x_BTD: jax.Array,
    positions: Positions,
    *,
    execution: Execution,
    rotary_dim: int,
) -> tuple[jax.Array, Aux]:
    """Returns the residual stream [B, T, D] after all layers, and their sums by row: minimized and
    shown over all layers [B], counts of each layer that has them [l, B, ...], in the pattern's
    order. In a pipeline weights and tokens are those of a tick."""
    tokens = x_BTD.shape[1]
    angles = find_angles(pattern, execution, jnp.arange(tokens), rotary_dim)  # at every position
    if (positions_BT := positions.segment_positions(tokens)) is not None:
        angles = jax.tree.map(lambda x: x.at[positions_BT].get(out_sharding=X_BTD), angles)

    attended = dataclasses.replace(positions, token_weight_BT=None)
    shared = Pass(execution, attended, angles, positions.token_weight_BT)

    def run_layer(layer: Layer, in_loop: bool, x_BTD: jax.Array, block: Any) -> tuple:
        def call(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, Aux]:
            return block(x_BTD, layer.mixing(execution), shared)

        if execution.remat_policy != "none":
            # Outside a loop the compiler could merge the recomputation with the forward pass, and
            # must not, which costs copies. A loop's backward pass is another loop, but one of a
            # single layer does not count: the compiler unrolls it.
            policy = _SAVEABLE[execution.remat_policy]
            call = jax.checkpoint(call, policy=policy, prevent_cse=not in_loop)
        x_BTD, aux = call(checkpoint_name(x_BTD, _LAYER_INPUT), block)
        return x_BTD, dataclasses.replace(aux, counts=jax.tree.map(lambda x: x[None], aux.counts))

    def run_period(x_BTD: jax.Array, blocks: Stacks) -> tuple[jax.Array, Aux]:
        sums = []
        for layer, equal in itertools.groupby(period.stack_indices(), operator.itemgetter(0)):
            indices, block = [index for _, index in equal], relabel(blocks[layer.kind], "L", "")
            if period.count(layer.kind) > 1:
                block = _slice_layers(block, indices)
            if len(indices) > 1:
                # As a loop, so that their backward pass is one too. Otherwise its products for
                # weights would come last, and need the inputs of every layer at the same time.
                run_one = functools.partial(run_layer, layer, execution.scan_layers)
                x_BTD, aux = _loop(run_one, x_BTD, block, execution.scan_layers)
            else:
                x_BTD, aux = run_layer(layer, in_loop, x_BTD, block)
            sums.append(aux)
        return x_BTD, join_layers(sums)

    def run_outside(layers: Sequence[tuple[Layer, int]], x_BTD: jax.Array) -> jax.Array:
        for layer, index in layers:
            x_BTD, aux = run_layer(layer, False, x_BTD, layer_at(stacks[layer.kind], index))
            sums.append(aux)
        return x_BTD

    sums = []
    in_loop = pattern.repeats > 1 and execution.scan_layers
    prefix, period = Pattern(pattern.prefix, 1), Pattern(pattern.period, 1)
    layers = list(pattern.stack_indices())
    x_BTD = run_outside(layers[: len(pattern.prefix)], x_BTD)
    blocks = {
        kind: _split_by_repeat(
            stacks[kind], prefix.count(kind), pattern.repeats, period.count(kind)
        )
        for kind in period.kinds
    }
    x_BTD, aux = _loop(run_period, x_BTD, blocks, execution.scan_layers)
    sums.append(aux)
    x_BTD = run_outside(layers[len(layers) - len(pattern.remainder) :], x_BTD)
    return x_BTD, join_layers(sums)


def _loop(body: Callable, x_BTD: jax.Array, blocks: Any, is_compiled_once: bool) -> tuple:
    x_BTD, aux = jax.lax.scan(body, x_BTD, blocks, unroll=not is_compiled_once)
    minimized, shown = jax.tree.map(lambda x: x.sum(0), (aux.minimized, aux.shown))
    counts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux.counts)
    return x_BTD, Aux(minimized, shown, counts)


def find_angles(
    pattern: Pattern, keys: RopeKeys, positions_T: jax.Array, rotary_dim: int
) -> dict[Rope, Angles]:
    """Returns the angles of all layers with rotary positions, at positions [T] or [B, T]."""
    ropes = dict.fromkeys(layer.mixing(keys).rope for layer in pattern)
    return {rope: rotary_angles(rope, positions_T, rotary_dim) for rope in ropes if rope}


def one_by_one(pattern: Pattern, stacks: Stacks) -> tuple[Any, ...]:
    return tuple(layer_at(stacks[layer.kind], index) for layer, index in pattern.stack_indices())


def layer_at(stack: Any, index: int, axis: str = "L") -> Any:
    return relabel(jax.tree.map(lambda w_L: w_L[index], stack), axis, "")


def _slice_layers(stack: Any, indices: Sequence[int]) -> Any:
    """Returns consecutive layers [l, ...], or a single one without that axis."""
    first, end = indices[0], indices[-1] + 1
    return jax.tree.map(lambda w_L: w_L[first:end] if end - first > 1 else w_L[first], stack)


def _split_by_repeat(stack: Any, first: int, repeats: int, count: int) -> Any:
    """Returns repeats * count layers of a stack, from `first` on, as [repeats, count, ...], or if
    count is 1 as [repeats, ...]."""

    def cut(w_L: jax.Array) -> jax.Array:
        if repeats * count != w_L.shape[0]:
            w_L = w_L[first : first + repeats * count]
        if count == 1:
            return w_L
        spec = stack_spec(jax.typeof(w_L).sharding.spec)
        return jax.lax.reshape(w_L, (repeats, count, *w_L.shape[1:]), out_sharding=spec)

    return jax.tree.map(cut, stack)
