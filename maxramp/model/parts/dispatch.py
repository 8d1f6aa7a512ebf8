"""Sends tokens to their experts' devices, sorted by expert, and returns the results.

Devices along `expert` either exchange the rows that each expert computes, or each gathers all
tokens and picks those of its experts; then the results travel as sums.

Shapes: B rows, T tokens, D model width, k experts of a token, E experts of a device; a device has M
rows for its experts and sends R rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.model.parts.weights import static
from maxramp.parallel.collectives import all_gather, map_shards, psum, psum_scatter
from maxramp.parallel.mesh import axis_size, platform
from maxramp.parallel.sharding import SORTED_M, STREAM_BTD, X_BTD, CHOICES_BTk

_BLOCK = 4096  # rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rows the experts of each device compute; every array is a device's own."""

    order_R: jax.Array  # which of the [B * T * k] choices are computed or sent, in this order
    slots_BTk: jax.Array  # each choice's index in that order; R or more: nowhere
    sizes_E: jax.Array  # rows of each expert
    # rows that each device along `expert` has for each expert of any device, with way "ragged"
    counts_PE: jax.Array | None
    rows: int = static()  # M
    equal_rows: int = static()  # rows of a device if all experts had the same load
    way: str = static()  # "ragged" or "gather"

    @property
    def is_full(self) -> bool:
        """Tells whether every device has exactly M rows."""
        return self.rows == self.equal_rows


def select(requested: str, platform: str | None, per_token: int) -> str:
    """Returns the requested value of expert_dispatch; for "autoselected" the one that sends less.

    P devices gather the tokens of P - 1 others, or exchange k (P - 1) / P times their own, with
    `per_token` = k; a single one "gathers". CPUs have no ragged exchange (a ConfigError), and
    nobody has seen a correct one on GPUs. `platform` is None if unknown."""
    devices = axis_size("expert")
    if devices == 1:
        return "gather"
    if requested == "ragged" and platform == "cpu":
        raise ConfigError(
            "expert_dispatch=ragged needs TPUs or GPUs, not cpu devices; use "
            "expert_dispatch=autoselected or gather"
        )
    if requested == "autoselected":
        return "ragged" if platform == "tpu" and per_token < devices else "gather"
    return requested


def plan(experts_BTk: jax.Array, num_experts: int, way: str) -> Plan:
    """Plans the dispatch of each token's experts [B, T, k], no expert twice; `num_experts` or above
    means none. `way` is what `select` returned."""

    def local(experts_BTk: jax.Array) -> Plan:
        own, k = num_experts // jax.lax.axis_size("expert"), experts_BTk.shape[-1]
        first, counted = jax.lax.axis_index("expert") * own, num_experts
        if way == "gather":
            experts_BTk, counted = all_gather(experts_BTk, "expert") - first, own
            is_own_BTk = (experts_BTk >= 0) & (experts_BTk < own)
            experts_BTk = jnp.where(is_own_BTk, experts_BTk, num_experts)
        experts_R = experts_BTk.reshape(-1)
        order_R = jnp.argsort(experts_R, stable=True)
        slots_R = jnp.where(experts_R < num_experts, jnp.argsort(order_R), len(order_R))
        slots_BTk = slots_R.reshape(experts_BTk.shape)
        rows = len(order_R) // k * min(k, own)  # no token has an expert twice
        equal_rows = len(order_R) * own // num_experts
        sizes_E = (experts_R[:, None] == jnp.arange(counted)).sum(0, dtype=jnp.int32)
        if way == "gather":
            return Plan(order_R[:rows], slots_BTk, sizes_E, None, rows, equal_rows, way)
        counts_PE = all_gather(sizes_E[None], "expert")
        sizes_E = jax.lax.dynamic_slice_in_dim(counts_PE.sum(0), first, own)
        sizes = rows * len(counts_PE), equal_rows * len(counts_PE)
        return Plan(order_R, slots_BTk, sizes_E, counts_PE, *sizes, way)

    return map_shards(local, CHOICES_BTk, SORTED_M)(jax.reshard(experts_BTk, CHOICES_BTk))


@jax.custom_vjp
def spread(x_BTD: jax.Array, weights_BTk: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Sends tokens to their experts; returns each device's rows [M, D], sorted by expert, and their
    weights [M]."""

    def local(x_BTD: jax.Array, weights_BTk: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
        weights_R = _tokens(weights_BTk, plan).reshape(-1)[plan.order_R]
        return _to_experts(x_BTD, plan), _send(weights_R, plan)

    arrays = jax.reshard(x_BTD, X_BTD), jax.reshard(weights_BTk, CHOICES_BTk)
    return map_shards(local, (X_BTD, CHOICES_BTk, SORTED_M), SORTED_M)(*arrays, plan)


def _spread_backward(plan, gradients):
    def local(dx_MD: jax.Array, dweights_M: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
        dweights_R = _send(dweights_M, plan, back=True)
        dweights_BTk = dweights_R.at[plan.slots_BTk].get(mode="fill", fill_value=0)
        parts = _from_experts(dx_MD, plan), _own_rows(dweights_BTk, plan)
        return tuple(psum(x, "tensor") for x in parts)

    specs = (SORTED_M, SORTED_M, SORTED_M), (X_BTD, CHOICES_BTk)
    return *map_shards(local, *specs)(*gradients, plan), None


spread.defvjp(lambda x_BTD, w_BTk, plan: (spread(x_BTD, w_BTk, plan), plan), _spread_backward)


@jax.custom_vjp
def collect(y_MD: jax.Array, plan: Plan) -> jax.Array:
    """Sums the outputs of every token's experts, in float32, as STREAM_BTD."""

    def local(y_MD: jax.Array, plan: Plan) -> jax.Array:
        return psum_scatter(_from_experts(y_MD, plan), "tensor", dimension=2)

    return map_shards(local, (SORTED_M, SORTED_M), STREAM_BTD)(y_MD, plan)


def _collect_backward(plan, dy_BTD):
    def local(dy_BTD: jax.Array, plan: Plan) -> jax.Array:
        return _to_experts(all_gather(dy_BTD, "tensor", dimension=2), plan)

    local = map_shards(local, (STREAM_BTD, SORTED_M), SORTED_M)
    return local(jax.reshard(dy_BTD, STREAM_BTD), plan), None


collect.defvjp(lambda y_MD, plan: (collect(y_MD, plan), plan), _collect_backward)


def map_rows(function: Callable, plan: Plan, *arrays: jax.Array) -> jax.Array:
    """Applies a function, which makes each row from the same rows of arrays, to the rows of each
    device's experts [M, ...]; those after them are undefined. It must not close over traced arrays.
    """
    return function(*arrays) if plan.is_full else _map_rows(function, plan, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_rows(function: Callable, plan: Plan, *arrays: jax.Array) -> Any:
    local = functools.partial(_map_blocks, function)
    return map_shards(local, SORTED_M, SORTED_M)(plan, *arrays)


def _map_rows_backward(function, residuals, gradient):
    def differentiate(gradient: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(function, *arrays)[1](gradient)

    plan, *arrays = residuals
    return None, *_map_rows(differentiate, plan, gradient, *arrays)


_map_rows.defvjp(lambda function, *args: (_map_rows(function, *args), args), _map_rows_backward)


def _map_blocks(function: Callable, plan: Plan, *arrays: jax.Array) -> Any:
    """Is `map_rows` of one device. Buffers have room in case its experts get all tokens; so blocks
    of rows are computed until those that it has are done. A GPU computes all rows: its host would
    wait to learn how often the loop runs."""
    if platform() in ("gpu", "cuda"):
        return function(*arrays)
    rows = len(arrays[0])
    block = min(rows, _BLOCK)

    def cut(first: jax.Array | int) -> list[jax.Array]:
        return [jax.lax.dynamic_slice_in_dim(x, first, block) for x in arrays]

    def compute(i: jax.Array, results: Any) -> Any:
        first = i * block  # the last block may begin earlier, and compute some rows again
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return jax.tree.map(update, results, function(*cut(first)))

    shapes = jax.eval_shape(lambda: function(*cut(0)))
    results = jax.tree.map(lambda x: _empty((rows, *x.shape[1:]), x.dtype, plan), shapes)
    blocks = -(-plan.sizes_E.sum() // block)
    with jax.named_scope(f"row_blocks_{-(-plan.equal_rows // block)}"):  # `planning.hlo` reads this
        return jax.lax.fori_loop(0, blocks, compute, results)


def _empty(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, plan: Plan) -> jax.Array:
    """Returns an undefined array. One that depends on nothing JAX would take out of the loop over
    layers, and XLA copy in each of them. On GPUs a host would wait for the branch."""

    def make() -> jax.Array:
        return jax.lax.empty(shape, dtype)

    if platform() in ("gpu", "cuda"):
        return make()
    return jax.lax.cond(plan.sizes_E[0] >= 0, make, make)


def _to_experts(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """Sends every token to each of its experts: [M, D]."""
    return _send(_tokens(x_BTD, plan)[plan.order_R // plan.slots_BTk.shape[2]], plan)


def _from_experts(y_MD: jax.Array, plan: Plan) -> jax.Array:
    """Adds up each token's outputs, in float32, in the order of its choices: [B, T, D]."""
    y_RD = _send(y_MD, plan, back=True)
    B, T, k = plan.slots_BTk.shape
    y_ND = jnp.zeros((B * T, y_RD.shape[1]), jnp.float32)
    for slots_N in plan.slots_BTk.reshape(-1, k).T:
        y_ND += y_RD.at[slots_N].get(mode="fill", fill_value=0).astype(jnp.float32)
    # As rows of tokens up to here: with T on its own, XLA for TPUs may lay it into the lanes.
    return _own_rows(y_ND.astype(y_MD.dtype), plan).reshape(-1, T, y_ND.shape[1])


def _tokens(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """Returns the tokens [B * T, ...] that the device's plan covers."""
    x_BTD = all_gather(x_BTD, "expert") if plan.way == "gather" else x_BTD
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _own_rows(x: jax.Array, plan: Plan) -> jax.Array:
    """Sums over devices along `expert`, and returns a device's own rows [B, ...], or tokens."""
    return psum_scatter(x, "expert", dimension=0) if plan.way == "gather" else x


def _send(x: jax.Array, plan: Plan, back: bool = False) -> jax.Array:
    """Sends rows sorted by expert to the experts' devices, [M, D] in that order; or `back`. Rows
    that nobody sends are undefined. Called inside `map_shards`, as `_offsets`."""
    if plan.way == "gather":
        return x
    to_experts, from_experts = _offsets(plan.counts_PE)
    sent, received = (from_experts, to_experts) if back else (to_experts, from_experts)
    # A row of 32-bit words of its own lies in one piece on TPUs, where XLA would else bring all of
    # the buffer into that form.
    words = x.ndim > 1 and 4 // x.dtype.itemsize
    pieces = functools.partial(_reshape_rows, shape=(words, -1) if words else ())
    whole = functools.partial(_reshape_rows, shape=x.shape[1:])
    x = _map_blocks(pieces, plan, x) if back else pieces(x)
    out = _empty((len(plan.order_R) if back else plan.rows, *x.shape[1:]), x.dtype, plan)
    out = jax.lax.ragged_all_to_all(x, out, *sent, received[1], axis_name="expert")
    return whole(out) if back else _map_blocks(whole, plan, out)


def _reshape_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(len(x), *shape)


def _offsets(counts_PE: jax.Array) -> tuple:
    """Returns the offsets of what a device sends, for each expert of each device P, and of what it
    receives, for each of its own experts from each device Q: where its rows begin here, how many
    they are, and where they begin on the other side."""
    devices, number = len(counts_PE), jax.lax.axis_index("expert")
    counts_QPE = counts_PE.reshape(devices, devices, -1)  # from Q for the experts E of P
    starts_QPE = (jnp.cumsum(counts_PE, 1) - counts_PE).reshape(counts_QPE.shape)  # on Q
    sizes_PE = counts_QPE.sum(0)
    lands_QPE = (jnp.cumsum(sizes_PE, 1) - sizes_PE) + jnp.cumsum(counts_QPE, 0) - counts_QPE
    sent = starts_QPE[number], counts_QPE[number], lands_QPE[number]
    received = lands_QPE[:, number], counts_QPE[:, number], starts_QPE[:, number]
    return tuple(x.reshape(-1) for x in sent), tuple(x.reshape(-1) for x in received)
