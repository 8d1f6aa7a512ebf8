"""Tokens to the devices of their experts, sorted by expert, and what these make of them back.

Either the devices along `expert` send each other the rows that are to be computed there, or each
gathers all tokens and takes its own: then the results travel as sums.

Shapes: B rows, T tokens, D model width, k experts of a token, E experts of a device; of a device M
rows for its experts, R rows that it sends.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.model.parts.weights import static
from maxramp.parallel.collectives import all_gather, map_shards, psum, psum_scatter
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import SORTED_M, STREAM_BTD, X_BTD, CHOICES_BTk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rows the experts of each device compute; every array is a device's own."""

    order_R: jax.Array  # of the [B * T * k] choices those to be computed or sent
    places_BTk: jax.Array  # where in that order each choice is; R or more: nowhere
    sizes_E: jax.Array  # rows of each expert
    # how many rows each device along `expert` has for each expert of all, where they are sent
    counts_PE: jax.Array | None
    rows: int = static()  # M
    equal_rows: int = static()  # those of a device where all experts have the same load
    way: str = static()


def select(asked: str, platform: str | None, per_token: int) -> str:
    """The way that was asked for; under autoselected the one that sends less: P devices gather the
    tokens of P - 1 others, or exchange k (P - 1) / P times their own. CPUs have no ragged exchange,
    and on GPUs nobody has seen one that is right."""
    devices = axis_size("expert")
    if devices == 1:
        return "gather"
    if asked == "ragged" and platform == "cpu":
        raise ConfigError(
            "expert_dispatch=ragged needs TPUs or GPUs, not cpu devices; use "
            "expert_dispatch=autoselected or gather"
        )
    if asked == "autoselected":
        return "ragged" if platform == "tpu" and per_token < devices else "gather"
    return asked


def plan(experts_BTk: jax.Array, num_experts: int, way: str) -> Plan:
    """`experts_BTk` are the choices of every token; `num_experts` or above: none."""

    def local(experts_BTk: jax.Array) -> Plan:
        own, k = num_experts // jax.lax.axis_size("expert"), experts_BTk.shape[-1]
        first, seen = jax.lax.axis_index("expert") * own, num_experts
        if way == "gather":
            experts_BTk, seen = all_gather(experts_BTk, "expert") - first, own
            is_own_BTk = (experts_BTk >= 0) & (experts_BTk < own)
            experts_BTk = jnp.where(is_own_BTk, experts_BTk, num_experts)
        experts_R = experts_BTk.reshape(-1)
        order_R = jnp.argsort(experts_R, stable=True)
        places_R = jnp.where(experts_R < num_experts, jnp.argsort(order_R), len(order_R))
        places_BTk = places_R.reshape(experts_BTk.shape)
        rows = len(order_R) // k * min(k, own)  # a token takes an expert once
        equal_rows = len(order_R) * own // num_experts
        sizes_E = (experts_R[:, None] == jnp.arange(seen)).sum(0, dtype=jnp.int32)
        if way == "gather":
            return Plan(order_R[:rows], places_BTk, sizes_E, None, rows, equal_rows, way)
        counts_PE = all_gather(sizes_E[None], "expert")
        sizes_E = jax.lax.dynamic_slice_in_dim(counts_PE.sum(0), first, own)
        sizes = rows * len(counts_PE), equal_rows * len(counts_PE)
        return Plan(order_R, places_BTk, sizes_E, counts_PE, *sizes, way)

    return map_shards(local, CHOICES_BTk, SORTED_M)(jax.reshard(experts_BTk, CHOICES_BTk))


@jax.custom_vjp
def spread(x_BTD: jax.Array, weights_BTk: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Every token to its experts, and what each is weighed by: [M, D] and [M] of each device."""

    def local(x_BTD: jax.Array, weights_BTk: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
        weights_R = _tokens(weights_BTk, plan).reshape(-1)[plan.order_R]
        return _to_experts(x_BTD, plan), _send(weights_R, plan)

    given = jax.reshard(x_BTD, X_BTD), jax.reshard(weights_BTk, CHOICES_BTk)
    return map_shards(local, (X_BTD, CHOICES_BTk, SORTED_M), SORTED_M)(*given, plan)


def _spread_backward(plan, gradients):
    def local(dx_MD: jax.Array, dweights_M: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
        dweights_R = _send(dweights_M, plan, back=True)
        dweights_BTk = dweights_R.at[plan.places_BTk].get(mode="fill", fill_value=0)
        found = _from_experts(dx_MD, plan), _own_rows(dweights_BTk, plan)
        return tuple(psum(x, "tensor") for x in found)

    specs = (SORTED_M, SORTED_M, SORTED_M), (X_BTD, CHOICES_BTk)
    return *map_shards(local, *specs)(*gradients, plan), None


spread.defvjp(lambda x_BTD, w_BTk, plan: (spread(x_BTD, w_BTk, plan), plan), _spread_backward)


@jax.custom_vjp
def collect(y_MD: jax.Array, plan: Plan) -> jax.Array:
    """Of every token the sum of what its experts made, as STREAM_BTD; sums are float32."""

    def local(y_MD: jax.Array, plan: Plan) -> jax.Array:
        return psum_scatter(_from_experts(y_MD, plan), "tensor", dimension=2)

    return map_shards(local, (SORTED_M, SORTED_M), STREAM_BTD)(y_MD, plan)


def _collect_backward(plan, dy_BTD):
    def local(dy_BTD: jax.Array, plan: Plan) -> jax.Array:
        return _to_experts(all_gather(dy_BTD, "tensor", dimension=2), plan)

    local = map_shards(local, (STREAM_BTD, SORTED_M), SORTED_M)
    return local(jax.reshard(dy_BTD, STREAM_BTD), plan), None


collect.defvjp(lambda y_MD, plan: (collect(y_MD, plan), plan), _collect_backward)


def _to_experts(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """[M, D]: every token to each of its experts."""
    return _send(_tokens(x_BTD, plan)[plan.order_R // plan.places_BTk.shape[2]], plan)


def _from_experts(y_MD: jax.Array, plan: Plan) -> jax.Array:
    """[B, T, D]: of every token the float32 sum over its choices, one after the other."""
    y_RD = _send(y_MD, plan, back=True)
    y_BTD = jnp.zeros((*plan.places_BTk.shape[:2], y_RD.shape[1]), jnp.float32)
    for places_BT in jnp.unstack(plan.places_BTk, axis=2):
        y_BTD += y_RD.at[places_BT].get(mode="fill", fill_value=0).astype(jnp.float32)
    return _own_rows(y_BTD.astype(y_MD.dtype), plan)


def _tokens(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """[B * T, ...] of the tokens that the device's plan is about."""
    x_BTD = all_gather(x_BTD, "expert") if plan.way == "gather" else x_BTD
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _own_rows(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """What all devices along `expert` made of a device's rows, in one sum."""
    return psum_scatter(x_BTD, "expert", dimension=0) if plan.way == "gather" else x_BTD


def _send(x: jax.Array, plan: Plan, back: bool = False) -> jax.Array:
    """Rows in the order of experts to the devices of these, [M, D] in that order; or `back`. Rows
    that nobody sends hold anything."""
    if plan.way == "gather":
        return x
    to_experts, from_experts = _offsets(plan.counts_PE)
    sent, got = (from_experts, to_experts) if back else (to_experts, from_experts)
    rows = len(plan.order_R) if back else plan.rows
    out = jax.lax.empty((rows, *x.shape[1:]), x.dtype)
    return jax.lax.ragged_all_to_all(x, out, *sent, got[1], axis_name="expert")


def _offsets(counts_PE: jax.Array) -> tuple:
    """Of what a device sends, and of what it gets: where the rows for each expert of each device
    begin here, how many they are, and where they begin with the other."""
    devices, number = len(counts_PE), jax.lax.axis_index("expert")
    counts_QPE = counts_PE.reshape(devices, devices, -1)  # from Q for the experts E of P
    starts_QPE = (jnp.cumsum(counts_PE, 1) - counts_PE).reshape(counts_QPE.shape)  # on Q
    sizes_PE = counts_QPE.sum(0)
    lands_QPE = (jnp.cumsum(sizes_PE, 1) - sizes_PE) + jnp.cumsum(counts_QPE, 0) - counts_QPE
    sent = starts_QPE[number], counts_QPE[number], lands_QPE[number]
    got = lands_QPE[:, number], counts_QPE[:, number], starts_QPE[:, number]
    return tuple(x.reshape(-1) for x in sent), tuple(x.reshape(-1) for x in got)
