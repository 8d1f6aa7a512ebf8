"""Named sums that a pass returns beside its output.

Shapes: B rows, L layers, S stages of a pipeline, d copies of the weights.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxramp.model.parts.weights import stages_of
from maxramp.parallel.collectives import delay
from maxramp.parallel.sharding import staged_rows_spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
    """Sums over a row's tokens by name, float32 except counts: [B, ...] from a block. A pass adds
    them up, so any split of the rows gives the same."""

    # terms of the loss, which the metrics show too; over all layers
    minimized: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    # for the metrics, divided by the number of target tokens; over all layers
    shown: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    # integers of each layer [L, ...], which the train state holds until the next step
    counts: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


def join_layers(layers: Sequence[Aux]) -> Aux:
    """Joins the sums of consecutive layers: concatenates counts and adds up the others."""

    def join_kind(kind: str, join: Callable) -> dict[str, jax.Array]:
        parts = [getattr(aux, kind) for aux in layers]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: join([part[name] for part in parts if name in part]) for name in names}

    return Aux(
        join_kind("minimized", sum), join_kind("shown", sum), join_kind("counts", jnp.concatenate)
    )


def sum_by_stage(x_B: jax.Array) -> jax.Array:
    """Adds up rows [B, ...] on each stage of a pipeline: [S, ...], on every copy."""
    shape, spec = stages_of(x_B.shape), jax.typeof(x_B).sharding.spec
    return jax.lax.reshape(x_B, shape, out_sharding=staged_rows_spec(spec)).sum((0, 2))


def await_sums(x: jax.Array, aux: Aux) -> jax.Array:
    """Returns `x`; on several CPU devices not before the sums are computed (`delay`)."""
    sums = jax.tree.leaves(aux)
    return delay(x, sum(value.sum() for value in sums)) if sums else x


def sum_rows(aux: Aux) -> Aux:
    """Adds up each sum [B, ...] over the rows; counts [L, B, ...] over theirs."""
    each = jax.tree.map(lambda x_B: x_B.sum(0), (aux.minimized, aux.shown))
    return Aux(*each, jax.tree.map(lambda x_LB: x_LB.sum(1), aux.counts))
