"""Layers one after the other: stacks of weights by kind, in the order of a pattern.

Shapes: B rows, T tokens, D model width, L layers of a stack, l layers that run here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.execution import Execution
from maxramp.model.parts.attention import CONTEXT, Rule, starts
from maxramp.model.parts.aux import Aux, joined
from maxramp.model.parts.products import STAGE_PRODUCTS
from maxramp.model.parts.rotary import Rope
from maxramp.model.pattern import Layer, Pattern
from maxramp.parallel.sharding import X_BTD

Stacks = dict[str, Any]  # by kind, blocks whose weights have an axis of layers in front

_LAYER_INPUT = "input of a layer"
_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_named = jax.checkpoint_policies.save_only_these_names
_both = jax.checkpoint_policies.save_from_both_policies

# What a layer keeps for its backward pass. Names and meanings are MaxText's.
_SAVEABLE = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "minimal": _both(_PRODUCTS, _named(STAGE_PRODUCTS)),
    "minimal_with_context": _both(_PRODUCTS, _named(STAGE_PRODUCTS, CONTEXT)),
}

# What a turn of a pipeline keeps: by name, for it would keep its weights as well, once a turn.
KEPT = {
    "full": _named(_LAYER_INPUT),
    "minimal": _named(_LAYER_INPUT, STAGE_PRODUCTS),
    "minimal_with_context": _named(_LAYER_INPUT, STAGE_PRODUCTS, CONTEXT),
    "none": _named(_LAYER_INPUT, STAGE_PRODUCTS, CONTEXT),
}


def run(
    pattern: Pattern,
    stacks: Stacks,
    x_BTD: jax.Array,
    segments_BT: jax.Array | None,
    *,
    execution: Execution,
    head_dim: int,
) -> tuple[jax.Array, Aux]:
    """Every row through the layers of a pattern.

    Args:
      pattern: the layers.
      stacks: their weights, each kind in the order in which a row meets its layers.
      x_BTD: the stream.
      segments_BT: integers, rising along a row; None where rows are one text.
      execution: how they are computed.
      head_dim: of attention.

    Returns:
      The stream behind them, and their sums of each row: minimized and shown over all layers
      [B], counts of each layer [l, B, ...], in the pattern's order.
    """
    positions_T = jnp.arange(x_BTD.shape[1])
    turned = angles(pattern, positions_T, head_dim)
    if segments_BT is not None:
        positions_BT = positions_T - starts(segments_BT)
        turned = jax.tree.map(lambda x: x.at[positions_BT].get(out_sharding=X_BTD), turned)

    def through(layer: Layer, x_BTD: jax.Array, block: Any, in_loop: bool) -> tuple:
        def call(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, Aux]:
            rule = Rule(segments_BT, window=layer.window)
            return block(x_BTD, turned[layer.rope], rule, execution.attention)

        if execution.remat_policy != "none":
            # A loop's backward pass is another loop. Only outside of one could the compiler find
            # that it has computed a layer before, and must be prevented, which costs copies. A
            # single layer is none: the compiler takes loops of one turn apart.
            policy = _SAVEABLE[execution.remat_policy]
            call = jax.checkpoint(call, policy=policy, prevent_cse=not in_loop)
        x_BTD, aux = call(checkpoint_name(x_BTD, _LAYER_INPUT), block)
        return x_BTD, dataclasses.replace(aux, counts=jax.tree.map(lambda x: x[None], aux.counts))

    def turn(x_BTD: jax.Array, blocks: Stacks) -> tuple[jax.Array, Aux]:
        found = []
        for layer, place in period.places():
            block = blocks[layer.kind]
            if period.count(layer.kind) > 1:
                block = _at(block, place)
            x_BTD, aux = through(layer, x_BTD, block, in_loop)
            found.append(aux)
        return x_BTD, joined(found)

    def outside(places: Sequence[tuple[Layer, int]], x_BTD: jax.Array) -> jax.Array:
        for layer, place in places:
            x_BTD, aux = through(layer, x_BTD, _at(stacks[layer.kind], place), False)
            found.append(aux)
        return x_BTD

    found = []
    in_loop = pattern.repeats > 1 and not execution.unroll
    before, period = Pattern(pattern.prefix, 1), Pattern(pattern.period, 1)
    places = list(pattern.places())
    x_BTD = outside(places[: len(pattern.prefix)], x_BTD)
    blocks = {
        kind: _turns(stacks[kind], before.count(kind), pattern.repeats, period.count(kind))
        for kind in period.kinds
    }
    unroll = pattern.repeats if execution.unroll else 1
    x_BTD, aux = jax.lax.scan(turn, x_BTD, blocks, unroll=unroll)
    minimized, shown = jax.tree.map(lambda x: x.sum(0), (aux.minimized, aux.shown))
    counts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux.counts)
    found.append(Aux(minimized, shown, counts))
    x_BTD = outside(places[len(places) - len(pattern.remainder) :], x_BTD)
    return x_BTD, joined(found)


def angles(pattern: Pattern, positions_T: jax.Array, head_dim: int) -> dict[Rope, tuple]:
    """Of every way in which queries and keys of these layers turn (`Rope.angles`)."""
    ropes = dict.fromkeys(layer.rope for layer in pattern)
    return {rope: rope.angles(positions_T, head_dim) for rope in ropes}


def one_by_one(pattern: Pattern, stacks: Stacks) -> tuple[Any, ...]:
    """The blocks of all layers, in the pattern's order."""
    return tuple(_at(stacks[layer.kind], place) for layer, place in pattern.places())


def _at(stack: Any, place: int) -> Any:
    return jax.tree.map(lambda w_L: w_L[place], stack)


def _turns(stack: Any, first: int, turns: int, count: int) -> Any:
    """Of a stack the layers of a loop, `count` of which a turn runs: [turns, ...] for one."""

    def cut(w_L: jax.Array) -> jax.Array:
        if turns * count != w_L.shape[0]:
            w_L = w_L[first : first + turns * count]
        return w_L if count == 1 else w_L.reshape(turns, count, *w_L.shape[1:])

    return jax.tree.map(cut, stack)
