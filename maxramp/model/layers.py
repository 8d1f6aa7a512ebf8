"""Layers one after the other: in which order, what each is, and stacks of their weights by kind.

Shapes: B rows, T tokens, D model width, L layers of a stack, l layers that run here.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.keys import Execution
from maxramp.model.parts.attention import CONTEXT, Rule
from maxramp.model.parts.aux import Aux, join_layers
from maxramp.model.parts.positions import Positions
from maxramp.model.parts.rotary import Rope
from maxramp.model.parts.weights import STAGE_PRODUCTS, relabel
from maxramp.parallel.sharding import X_BTD
from maxramp.stage import SightKeys


class Sight(NamedTuple):
    """What the tokens of a layer see in a pass."""

    rope: Rope  # how queries and keys turn
    window: int = 0  # tokens that each token sees, itself included; 0 = all before it


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer is."""

    kind: str  # of its weights: layers of one kind are one stack
    sight: Callable[[SightKeys], Sight]  # by the keys of a pass, which a run may change
    sums: tuple[str, ...] = ()  # names of those that its block minimizes or shows (`Aux`)
    # names and shapes of what its block counts of a row
    counts: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Layers in the order in which a row meets them."""

    period: tuple[Layer, ...]  # layers that come again and again, as one loop
    repeats: int  # how often
    prefix: tuple[Layer, ...] = ()  # layers before them
    remainder: tuple[Layer, ...] = ()  # layers behind them

    def __iter__(self) -> Iterator[Layer]:
        yield from (*self.prefix, *self.period * self.repeats, *self.remainder)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the stacks, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.kind for layer in self))

    def count(self, kind: str) -> int:
        """How many layers are of a kind."""
        return sum(layer.kind == kind for layer in self)

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of all sums that are minimized or shown."""
        return tuple(dict.fromkeys(name for layer in self for name in layer.sums))

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """What layers count: names and shapes [L, ...], of those layers that count it."""
        shapes = [of_layer for layer in self for of_layer in layer.counts]
        return {name: (shapes.count((name, shape)), *shape) for name, shape in shapes}

    def stage_pattern(self, layers: int) -> "Pattern":
        """So many layers of a pipeline's stage: of all stages the same, and so all in the loop."""
        assert not (self.prefix or self.remainder), "layers outside of the loop, in a pipeline"
        return Pattern(self.period, layers // len(self.period))

    def stack_indices(self) -> Iterator[tuple[Layer, int]]:
        """Every layer, and its place in the stack of its kind."""
        counts = dict.fromkeys(self.kinds, 0)
        for layer in self:
            yield layer, counts[layer.kind]
            counts[layer.kind] += 1


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
    positions: Positions,
    *,
    execution: Execution,
    head_dim: int,
) -> tuple[jax.Array, Aux]:
    """Every row through the layers of a pattern, of each kind in the order of its stack.

    Returns:
      The stream [B, T, D] behind them, and their sums of each row: minimized and shown over all
      layers [B], counts of each layer [l, B, ...], in the pattern's order.
    """
    tokens = x_BTD.shape[1]
    turned = angles(pattern, execution, jnp.arange(tokens), head_dim)  # at every position
    if (positions_BT := positions.segment_positions(tokens)) is not None:
        turned = jax.tree.map(lambda x: x.at[positions_BT].get(out_sharding=X_BTD), turned)

    def run_layer(layer: Layer, x_BTD: jax.Array, block: Any, in_loop: bool) -> tuple:
        def call(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, Aux]:
            rope, window = layer.sight(execution)
            rule = Rule(positions, window)
            return block(x_BTD, turned[rope], rule, execution.attention)

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
        for layer, place in period.stack_indices():
            block, is_stack = blocks[layer.kind], period.count(layer.kind) > 1
            block = _layer_at(block, place) if is_stack else relabel(block, "L", "")
            x_BTD, aux = run_layer(layer, x_BTD, block, in_loop)
            found.append(aux)
        return x_BTD, join_layers(found)

    def run_alone(placed: Sequence[tuple[Layer, int]], x_BTD: jax.Array) -> jax.Array:
        for layer, place in placed:
            x_BTD, aux = run_layer(layer, x_BTD, _layer_at(stacks[layer.kind], place), False)
            found.append(aux)
        return x_BTD

    found = []
    in_loop = pattern.repeats > 1 and execution.scan_layers
    before, period = Pattern(pattern.prefix, 1), Pattern(pattern.period, 1)
    placed = list(pattern.stack_indices())
    x_BTD = run_alone(placed[: len(pattern.prefix)], x_BTD)
    blocks = {
        kind: _turns(stacks[kind], before.count(kind), pattern.repeats, period.count(kind))
        for kind in period.kinds
    }
    unroll = 1 if execution.scan_layers else pattern.repeats
    x_BTD, aux = jax.lax.scan(turn, x_BTD, blocks, unroll=unroll)
    minimized, shown = jax.tree.map(lambda x: x.sum(0), (aux.minimized, aux.shown))
    counts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux.counts)
    found.append(Aux(minimized, shown, counts))
    x_BTD = run_alone(placed[len(placed) - len(pattern.remainder) :], x_BTD)
    return x_BTD, join_layers(found)


def angles(
    pattern: Pattern, keys: SightKeys, positions_T: jax.Array, head_dim: int
) -> dict[Rope, tuple]:
    """Of every way in which queries and keys of these layers turn (`Rope.angles`)."""
    ropes = dict.fromkeys(layer.sight(keys).rope for layer in pattern)
    return {rope: rope.angles(positions_T, head_dim) for rope in ropes}


def one_by_one(pattern: Pattern, stacks: Stacks) -> tuple[Any, ...]:
    """The blocks of all layers, in the pattern's order."""
    return tuple(_layer_at(stacks[layer.kind], place) for layer, place in pattern.stack_indices())


def _layer_at(stack: Any, place: int) -> Any:
    return relabel(jax.tree.map(lambda w_L: w_L[place], stack), "L", "")


def _turns(stack: Any, first: int, turns: int, count: int) -> Any:
    """Of a stack the layers of a loop, `count` of which a turn runs: [turns, ...] for one."""

    def cut(w_L: jax.Array) -> jax.Array:
        if turns * count != w_L.shape[0]:
            w_L = w_L[first : first + turns * count]
        return w_L if count == 1 else w_L.reshape(turns, count, *w_L.shape[1:])

    return jax.tree.map(cut, stack)
