"""A pipeline: stages of layers on the mesh axis `stage`, and micro batches that pass through them.

Outside the layers `stage` is an axis of the batch. Inside, an array of a tick still has its rows
over all batch axes, but the rows on a stage are those of its micro batch, and every weight has one
more axis, S. So only products with weights see the stages (`weights.dense`).

Glossary
  micro batch  1/m of a pass's rows; on a device one of its k = m / S slots of rows
  tick         every stage runs its layers once, each on another micro batch
  repeat       one round of a micro batch through the stages; repeat r on stage s runs the block of
               layers r * S + s. Groups of S micro batches make R rounds, one group after the other
  ring         inputs move along it slot by slot to stage 0, and results of the last stage fill the
               free slots, so that every stage always holds B / S rows

Micro batch j meets repeat r on stage s in tick t = (j // S) * S * R + r * S + j % S + s; there are
m * R + S - 1 ticks. Before its first and after its last micro batch a stage computes results that
nobody reads or adds up.

Shapes: B rows of a tick, T tokens, D model width, L layers, S stages, R repeats, k slots, m micro
batches, l layers of a stage in a tick (L / S / R).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.model.keys import Execution
from maxramp.model.layers import KEPT
from maxramp.model.parts.aux import Aux, sum_by_stage
from maxramp.model.parts.positions import Positions
from maxramp.model.parts.weights import Weight, map_products, map_weights, relabel, weights_of
from maxramp.model.size import pipeline_ticks
from maxramp.parallel.axes import BATCH_AXES, COPY_AXES
from maxramp.parallel.collectives import delay, map_shards, permute, recompute_after
from maxramp.parallel.mesh import attach_mesh, axis_size, mesh_of
from maxramp.parallel.sharding import (
    REPLICATED,
    ROWS_BT,
    ROWS_mBT,
    gradient_spec,
    stack_spec,
    staged_layers_spec,
    unstack_spec,
    weight_spec,
    without_axis,
)

Run = Callable[[Any, jax.Array, Positions], tuple[jax.Array, Aux]]


def split_repeats(x_L: jax.Array, repeats: int) -> jax.Array:
    """Returns layers [L, ...], in the model's order, as [R, L / R, ...] on their stages."""
    if repeats == 1:
        return x_L
    spec = without_axis(jax.typeof(x_L).sharding.spec, "stage")
    x_RL = jax.reshard(x_L, spec).reshape(repeats, -1, *x_L.shape[1:])
    return jax.reshard(x_RL, stack_spec(staged_layers_spec(unstack_spec(spec))))


def merge_repeats(x_RL: jax.Array) -> jax.Array:
    """Inverts `split_repeats`, for arrays with an axis of repeats: [R, L / R, ...] -> [L, ...]."""
    spec = without_axis(jax.typeof(x_RL).sharding.spec, "stage")
    x_L = jax.reshard(x_RL, spec).reshape(-1, *x_RL.shape[2:])
    return jax.reshard(x_L, staged_layers_spec(unstack_spec(spec, 2)))


def order_by_layer(tree: Any) -> Any:
    """Returns the tree (of arrays, or their shapes) as checkpoints store it: layers on one axis,
    for any number of stages. All processes call it together."""
    if not any(map(_is_circular, weights_of(tree))):
        return tree
    mesh, is_abstract = mesh_of(tree), isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if is_abstract:
            return attach_mesh(jax.eval_shape(_order_by_layer, tree), mesh)
        return _order_by_layer(tree)


def order_by_stage(tree: Any, like: Any) -> Any:
    """Inverts `order_by_layer` for a pipeline that holds `like`; donates the arrays. All processes
    call it together."""
    repeats = {weight.shape[0] for weight in weights_of(like) if _is_circular(weight)}
    if not repeats:
        return tree
    with jax.set_mesh(mesh_of(tree)):
        return _order_by_stage(tree, *repeats)


def _is_circular(weight: Weight) -> bool:
    return len(weight.layers) > 1


# Compiled once for every mesh: a run saves often.
@jax.jit
def _order_by_layer(tree: Any) -> Any:
    def order(weight: Weight) -> Weight:
        if not _is_circular(weight):
            return weight
        return relabel(jax.tree.map(merge_repeats, weight), "R", "")

    return map_weights(order, tree)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _order_by_stage(tree: Any, repeats: int) -> Any:
    def order(weight: Weight) -> Weight:
        if not weight.layers or weight.leading.startswith("N"):
            return weight
        return relabel(jax.tree.map(lambda x_L: split_repeats(x_L, repeats), weight), "", "R")

    return map_weights(order, tree)


def run(
    execution: Execution, run_layers: Run, layers: Any, x_BTD: jax.Array, positions: Positions
) -> tuple[jax.Array, Aux]:
    """Runs all rows through all layers, tick by tick; returns x and the sums of all rows.

    Under a mesh whose stage axis has S > 1 devices. `rampup/keys.py` refuses other sizes.

    Args:
      run_layers: takes layers [l, S, ...], and x and positions of a tick.
      layers: [L, ...], or with R > 1 repeats [R, L / R, ...]; L is a multiple of S * R.
      x_BTD: a multiple of k = num_pipeline_microbatches / S rows on each device.
    """
    m, R = execution.num_pipeline_microbatches, execution.num_pipeline_repeats
    S, leading = axis_size("stage"), "LS" if R == 1 else "RLS"
    weights, sums = _split_layers(layers, S, R, execution.pipeline_fsdp_ag_once)
    slots_kBTD = _split_slots(x_BTD, m // S)
    positions_mBT = jax.tree.map(functools.partial(_gather_stages, k=m // S), positions)

    def tick(x_BTD, weights, sums, positions_mBT, t) -> tuple[jax.Array, Aux]:
        layers = jax.tree.map(functools.partial(_read, t=t, S=S, R=R), weights, sums)
        layers = relabel(layers, leading, "LS")
        positions = jax.tree.map(functools.partial(_micro_batch_at, t=t, S=S, R=R), positions_mBT)
        x_BTD, aux = run_layers(layers, x_BTD, positions)
        counts = jax.tree.map(jax.vmap(sum_by_stage), aux.counts)
        return x_BTD, Aux(*jax.tree.map(sum_by_stage, (aux.minimized, aux.shown)), counts)

    kept = KEPT[execution.remat_policy]
    tick = recompute_after(jax.checkpoint(tick, policy=kept, prevent_cse=False))

    def body(carry: tuple, t: jax.Array) -> tuple[tuple, Aux]:
        slots_kBTD, x_BTD = carry
        y_BTD, aux = tick(x_BTD, weights, sums, positions_mBT, t)
        return _exchange(slots_kBTD, y_BTD, t, S, R), aux

    # Every stage begins with real rows, so that results that nobody reads are finite as well.
    ticks = jnp.arange(pipeline_ticks(m, S, R))
    carry, aux = jax.lax.scan(body, (slots_kBTD, slots_kBTD[0]), ticks)
    return _join_slots(carry[0], S), _sum_ticks(aux, ticks, m, S, R)


def _sum_ticks(aux: Aux, ticks: jax.Array, m: int, S: int, R: int) -> Aux:
    """Adds up the sums of ticks [t, S] or [t, l, S, ...], without those of the bubble."""
    since_tS = ticks[:, None] - jnp.arange(S)
    is_busy_tS = (since_tS >= 0) & (since_tS < m * R)
    repeat_tS = since_tS % (S * R) // S

    def total(x_tS: jax.Array) -> jax.Array:
        return jnp.where(is_busy_tS, jax.reshard(x_tS, REPLICATED), 0).sum()

    def layer_totals(x_tlS: jax.Array) -> jax.Array:
        x_tSl = jnp.moveaxis(jax.reshard(x_tlS, REPLICATED), 2, 1)
        is_repeat_RtS = is_busy_tS & (repeat_tS == jnp.arange(R)[:, None, None])
        is_repeat = jnp.expand_dims(is_repeat_RtS, range(3, 1 + x_tSl.ndim))
        x_RSl = jnp.where(is_repeat, x_tSl, 0).sum(1)
        return x_RSl.reshape(-1, *x_RSl.shape[3:])

    totals = jax.tree.map(total, (aux.minimized, aux.shown))
    return Aux(*totals, jax.tree.map(layer_totals, aux.counts))


def _split_layers(layers: Any, S: int, R: int, gather_once: bool) -> tuple[Any, Any]:
    """Returns weights [R, l, S, ...] for the ticks, without R if it is 1, and float32 copies that
    only collect their gradients; these stay apart over copies until the pass is done. With
    `gather_once` the weights are whole along fsdp."""

    def split(weight: Weight) -> Weight:
        w = weight[...]
        if len(weight.layers) == 1:
            w = split_repeats(w, R)
        layer_axes = 1 if R == 1 else 2
        layer_spec = unstack_spec(jax.typeof(w).sharding.spec, layer_axes)
        spec = stack_spec(staged_layers_spec(stack_spec(layer_spec)))
        shape = R, S, w.shape[layer_axes - 1] // S, *w.shape[layer_axes:]
        w = jax.lax.reshape(w, shape, out_sharding=spec).swapaxes(1, 2)
        if R == 1:
            return relabel(weight.replace(w[0]), "L", "LS")
        return relabel(weight.replace(w), weight.leading[: len(weight.layers)], "RLS")

    def read(w: jax.Array) -> jax.Array:
        if not gather_once:
            return apart(w)
        whole = without_axis(jax.typeof(w).sharding.spec, "fsdp")
        return jax.reshard(w, weight_spec(whole, BATCH_AXES))

    def apart(w: jax.Array) -> jax.Array:
        return jax.reshard(w, weight_spec(jax.typeof(w).sharding.spec, COPY_AXES))

    layers = map_weights(split, layers)
    sums = jax.tree.map(lambda w: w.astype(jnp.float32), layers)
    return map_products(read, jax.lax.stop_gradient(layers)), map_products(apart, sums)


def _read(weight: jax.Array, sums: jax.Array, t: jax.Array, S: int, R: int) -> jax.Array:
    """Returns the layers of a weight [R, l, S, ...] that each stage runs in tick t: [l, S, ...].
    Their gradient goes to `sums`, in float32."""
    return _repeat_at(weight, sums, t, S, R, jax.typeof(sums).sharding.spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _repeat_at(weight, sums, t, S, R, spec):
    if R == 1:
        return weight

    def local(weight: jax.Array, t: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(weight, _repeat_of_stage(t, S, R), 0, keepdims=False)

    whole = jax.typeof(weight).sharding.spec
    return map_shards(local, (whole, REPLICATED), unstack_spec(whole))(weight, t)


def _repeat_at_backward(S, R, spec, t, gradient):
    whole = gradient_spec(spec)
    if R == 1:
        return None, jax.reshard(gradient, whole).astype(jnp.float32), None
    one = unstack_spec(whole)
    gradient = jax.reshard(gradient, one).astype(jnp.float32)

    def local(gradient: jax.Array, t: jax.Array) -> jax.Array:
        zeros = jnp.zeros((R, *gradient.shape), gradient.dtype)
        return jax.lax.dynamic_update_index_in_dim(zeros, gradient, _repeat_of_stage(t, S, R), 0)

    return None, map_shards(local, (one, REPLICATED), whole)(gradient, t), None


_repeat_at.defvjp(
    lambda weight, sums, t, *static: (_repeat_at(weight, sums, t, *static), t), _repeat_at_backward
)


def _repeat_of_stage(t: jax.Array, S: int, R: int) -> jax.Array:
    return (t - jax.lax.axis_index("stage")) % (S * R) // S


def _split_slots(x_BTD: jax.Array, k: int) -> jax.Array:
    """Splits every device's rows into k equal parts: slot i of [k, B, T, D] holds the i-th."""
    spec = jax.typeof(x_BTD).sharding.spec
    return map_shards(lambda x: x.reshape(k, -1, *x.shape[1:]), spec, stack_spec(spec))(x_BTD)


def _join_slots(slots_kBTD: jax.Array, S: int) -> jax.Array:
    """Joins slots to rows again. Results lie S - 1 slots after their inputs."""

    def local(slots_kBTD: jax.Array) -> jax.Array:
        return jnp.roll(slots_kBTD, 1 - S, axis=0).reshape(-1, *slots_kBTD.shape[2:])

    spec_kBTD = jax.typeof(slots_kBTD).sharding.spec
    return map_shards(local, spec_kBTD, unstack_spec(spec_kBTD))(slots_kBTD)


def _gather_stages(x_BT: jax.Array, k: int) -> jax.Array:
    """Gathers all micro batches' tokens on every stage, [m, B, T]: few bytes beside x."""

    def local(x_BT: jax.Array) -> jax.Array:
        every = jax.lax.all_gather(x_BT.reshape(k, -1, x_BT.shape[-1]), "stage")
        return every.reshape(-1, *every.shape[2:])

    return map_shards(local, ROWS_BT, ROWS_mBT)(x_BT)


def _micro_batch_at(x_mBT: jax.Array, t: jax.Array, S: int, R: int) -> jax.Array:
    """Returns the tokens [B, T] of the micro batch that each stage runs in tick t; any if none."""

    def local(x_mBT: jax.Array, t: jax.Array) -> jax.Array:
        since = t - jax.lax.axis_index("stage")
        micro_batch = since // (S * R) * S + since % S
        return jax.lax.dynamic_index_in_dim(x_mBT, micro_batch, 0, False)

    return map_shards(local, (ROWS_mBT, REPLICATED), ROWS_BT)(x_mBT, t)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _exchange(
    slots_kBTD: jax.Array, y_BTD: jax.Array, t: jax.Array, S: int, R: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the next slots (inputs to come, and results) and x; y is the output of tick t."""
    return _run_move(_move, S, R, slots_kBTD, y_BTD, t)


_exchange.defvjp(
    lambda slots_kBTD, y_BTD, t, S, R: (_exchange(slots_kBTD, y_BTD, t, S, R), t),
    lambda S, R, t, cotangents: (*_run_move(_move_back, S, R, *cotangents, t), None),
)


def _run_move(
    move: Callable, S: int, R: int, slots_kBTD: jax.Array, x_BTD: jax.Array, t: jax.Array
):
    specs = stack_spec(jax.typeof(x_BTD).sharding.spec), jax.typeof(x_BTD).sharding.spec
    move = map_shards(functools.partial(move, S=S, R=R), (*specs, REPLICATED), specs)
    return move(slots_kBTD, x_BTD, t)


def _move(slots_kBTD, y_BTD, t, *, S, R):
    """Moves inputs and results between the stages after tick `t`, inside `map_shards`: returns the
    slots, and what each stage computes on next."""
    k, stage = slots_kBTD.shape[0], jax.lax.axis_index("stage")
    # Where stage 0 has read its input from a slot, the slot's later inputs move up by a stage.
    is_read, slot = _input_slot(t, S, R, k)
    inputs = slots_kBTD[slot]
    # After the layers' collectives.
    moved = permute(inputs, "stage", [(s, s - 1) for s in range(1, S)], behind=y_BTD)
    # The last stage receives only zeros, on which no stage must compute.
    moved = jnp.where(stage == S - 1, inputs, moved)
    slots_kBTD = slots_kBTD.at[slot].set(jnp.where(is_read, moved, inputs))
    # The result of the last stage goes into the part that became free.
    is_result, slot = _result_slot(t, S, R, k)
    is_result &= stage == S - 1
    slots_kBTD = slots_kBTD.at[slot].set(jnp.where(is_result, y_BTD, slots_kBTD[slot]))
    # Results go on to the next stage, and stage 0 begins with the next input.
    links = [(s, (s + 1) % S) for s in range(S if R > 1 else S - 1)]
    y_BTD = permute(y_BTD, "stage", links)
    is_read, slot = _input_slot(t + 1, S, R, k)
    return slots_kBTD, jnp.where(is_read & (stage == 0), slots_kBTD[slot], y_BTD)


def _move_back(dslots_kBTD, dx_BTD, t, *, S, R):
    zeros = jnp.zeros_like(dslots_kBTD), jnp.zeros_like(dx_BTD)
    _, transpose = jax.vjp(lambda *arrays: _move(*arrays, t, S=S, R=R), *zeros)
    dslots_kBTD, dy_BTD = transpose((dslots_kBTD, dx_BTD))
    # On CPUs: before the layers' collectives.
    return dslots_kBTD, delay(dy_BTD, dslots_kBTD[:, 0, 0, 0].astype(jnp.float32).sum())


def _input_slot(t: jax.Array, S: int, R: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Tells whether stage 0 reads a new input in tick t, and from which slot."""
    group, tick = t // (S * R), t % (S * R)
    return tick < S, (group * S + tick % S) % k


def _result_slot(t: jax.Array, S: int, R: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Tells whether the last stage finishes a micro batch in tick t, and for which slot."""
    since = t - (S - 1)
    is_result = (since >= 0) & (since % (S * R) // S == R - 1)
    return is_result, (since // (S * R) * S + since % S + S - 1) % k
