"""What a pass makes beside its output: named sums.

Shapes: B rows, L layers, S stages of a pipeline, d copies of the weights.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxramp.model.parts.weights import stages_of
from maxramp.parallel.cpu import after
from maxramp.parallel.sharding import staged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
    """Sums by name, in float32. A block gives those of every row, [B, ...]; a pass adds them up.

    A sum is over a row's tokens, so that any split of the rows adds up to the same, and the turns
    in which a stage of a pipeline has no rows are left out. The names are those that the layers
    announce (`layers.Layer`).
    """

    # added to what training minimizes, and shown; over all layers
    minimized: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    # in the metrics, divided by the number of target tokens; over all layers
    shown: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    # of each layer [L, ...], added to the train state's buffers
    counts: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


def joined(found: Sequence[Aux]) -> Aux:
    """Of layers behind each other: counts stand side by side, other sums are added."""

    def by_name(kind: str, join: Callable) -> dict[str, jax.Array]:
        parts = [getattr(aux, kind) for aux in found]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: join([part[name] for part in parts if name in part]) for name in names}

    return Aux(by_name("minimized", sum), by_name("shown", sum), by_name("counts", jnp.concatenate))


def of_stages(x_B: jax.Array) -> jax.Array:
    """Rows [B, ...] added up on each stage of a pipeline: [S, ...], on every copy."""
    shape, spec = stages_of(x_B.shape), jax.typeof(x_B).sharding.spec
    return jax.lax.reshape(x_B, shape, out_sharding=staged(spec)).sum((0, 2))


def awaited(x: jax.Array, aux: Aux) -> jax.Array:
    """`x`, which on several CPU devices is not there before the sums are (`cpu.after`)."""
    sums = jax.tree.leaves(aux)
    return after(x, sum(value.sum() for value in sums)) if sums else x


def of_rows(aux: Aux) -> Aux:
    """Sums of each row, added up."""
    each = jax.tree.map(lambda x_B: x_B.sum(0), (aux.minimized, aux.shown))
    return Aux(*each, jax.tree.map(lambda x_LB: x_LB.sum(1), aux.counts))
