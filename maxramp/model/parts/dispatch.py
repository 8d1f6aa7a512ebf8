"""Tokens to the devices of their experts, sorted by expert, and what these make of them back.

Either the devices along `expert` send each other the rows that are to be computed there, or each
gathers all tokens and takes its own: then the results travel as sums.

Shapes: B rows, T tokens, D model width, k experts of a token, E experts of a device; of a device N
tokens, M rows for its experts, R rows that it sends.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.parallel.axes import TOKEN_AXES
from maxramp.parallel.collectives import all_gather, map_shards, psum, psum_scatter
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import SORTED_M, STREAM_BTD, X_BTD, CHOICES_BTk


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("order_R", "places_Nk", "sizes_E", "counts_PE"),
    meta_fields=("rows", "equal_rows", "way"),
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rows the experts of each device compute; every array is a device's own."""

    order_R: jax.Array  # of the choices of tokens, [N * k] in a line, those to be computed or sent
    places_Nk: jax.Array  # where in that order each choice is; R or more: nowhere
    sizes_E: jax.Array  # rows of each expert
    # how many rows each device along `expert` has for each expert of all, where they are sent
    counts_PE: jax.Array | None
    rows: int  # M
    equal_rows: int  # those of a device where all experts have the same load
    way: str


def select(asked: str, platform: str | None, per_token: int) -> str:
    """The way that was asked for; under autoselected the one that sends less: P devices gather the
    tokens of P - 1 others, or exchange k (P - 1) / P times their own. CPUs have no ragged exchange,
    and on GPUs nobody has seen one that is right."""
    if expert_devices() == 1:
        return "gather"
    if asked == "ragged" and platform == "cpu":
        raise ConfigError(
            "expert_dispatch=ragged needs TPUs or GPUs, not cpu devices; use "
            "expert_dispatch=autoselected or gather"
        )
    if asked == "autoselected":
        return "ragged" if platform == "tpu" and per_token < expert_devices() else "gather"
    return asked


def expert_devices() -> int:
    return jax.sharding.get_abstract_mesh().shape["expert"]


def plan(experts_BTk: jax.Array, num_experts: int, way: str) -> Plan:
    """`experts_BTk` are the choices of every token; `num_experts` or above: none."""

    def local(experts_BTk: jax.Array) -> Plan:
        own = num_experts // jax.lax.axis_size("expert")
        k = experts_BTk.shape[-1]
        if way == "gather":
            experts_BTk = all_gather(experts_BTk, "expert")
            first = jax.lax.axis_index("expert") * own
            experts_BTk = experts_BTk - first
            experts_BTk = jnp.where(
                (experts_BTk < 0) | (experts_BTk >= own), num_experts, experts_BTk
            )
        experts_R = experts_BTk.reshape(-1)
        order_R = jnp.argsort(experts_R, stable=True)
        places_R = jnp.where(experts_R < num_experts, jnp.argsort(order_R), len(order_R))
        places_Nk = places_R.reshape(-1, k)
        rows = len(places_Nk) * min(k, own)  # a token takes an expert once
        equal_rows = places_Nk.size * own // num_experts
        if way == "gather":
            sizes_E = (experts_R[:, None] == jnp.arange(own)).sum(0, dtype=jnp.int32)
            return Plan(order_R[:rows], places_Nk, sizes_E, None, rows, equal_rows, way)
        counts_E = (experts_R[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
        counts_PE = all_gather(counts_E[None], "expert")
        first = jax.lax.axis_index("expert") * own
        sizes_E = jax.lax.dynamic_slice_in_dim(counts_PE.sum(0), first, own)
        devices = len(counts_PE)
        sizes = rows * devices, equal_rows * devices
        return Plan(order_R, places_Nk, sizes_E, counts_PE, *sizes, way)

    return map_shards(local, CHOICES_BTk, SORTED_M)(jax.reshard(experts_BTk, CHOICES_BTk))


@jax.custom_vjp
def spread(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """Every token to its experts: [M, D] of each device."""

    def local(x_BTD: jax.Array, plan: Plan) -> jax.Array:
        x_ND = _tokens(x_BTD, plan)
        x_RD = x_ND[plan.order_R // plan.places_Nk.shape[1]]
        return _send(x_RD, plan)

    return map_shards(local, (X_BTD, SORTED_M), SORTED_M)(jax.reshard(x_BTD, X_BTD), plan)


def _spread_backward(kept, dx_MD):
    plan, tokens = kept

    def local(dx_MD: jax.Array, plan: Plan) -> jax.Array:
        dx_RD = _send_back(dx_MD, plan)
        dx_BTD = _cut_rows(_add_choices(dx_RD, None, plan).astype(dx_MD.dtype), tokens)
        return psum(_own_rows(dx_BTD, plan), "tensor")

    return map_shards(local, (SORTED_M, SORTED_M), X_BTD)(dx_MD, plan), None


spread.defvjp(lambda x_BTD, plan: (spread(x_BTD, plan), (plan, x_BTD.shape[1])), _spread_backward)


@jax.custom_vjp
def collect(y_MD: jax.Array, weights_BTk: jax.Array, plan: Plan) -> jax.Array:
    """Of every token the weighted sum of what its experts made, as STREAM_BTD; sums are float32."""
    T = weights_BTk.shape[1]

    def local(y_MD: jax.Array, weights_BTk: jax.Array, plan: Plan) -> jax.Array:
        y_RD = _send_back(y_MD, plan)
        y_ND = _add_choices(y_RD, _tokens(weights_BTk, plan), plan)
        y_BTD = _own_rows(_cut_rows(y_ND.astype(y_MD.dtype), T), plan)
        return psum_scatter(y_BTD, "tensor", dimension=2)

    specs = SORTED_M, CHOICES_BTk, SORTED_M
    return map_shards(local, specs, STREAM_BTD)(y_MD, jax.reshard(weights_BTk, CHOICES_BTk), plan)


def _collect_backward(kept, dy_BTD):
    def local(y_MD, weights_BTk, plan, dy_BTD):
        dy_ND = _tokens(all_gather(dy_BTD, "tensor", dimension=2), plan)
        weights_Nk = _tokens(weights_BTk, plan)
        dy_RD = dy_ND[plan.order_R // weights_Nk.shape[1]]
        weights_R = weights_Nk.reshape(-1)[plan.order_R]
        dy_MD = _send((dy_RD * weights_R[:, None]).astype(y_MD.dtype), plan)
        products_RD = _send_back(y_MD, plan).astype(jnp.float32) * dy_RD
        dweights_Nk = products_RD.sum(-1).at[plan.places_Nk].get(mode="fill", fill_value=0)
        dweights_BTk = _own_rows(dweights_Nk.reshape(-1, *weights_BTk.shape[1:]), plan)
        return dy_MD, psum(dweights_BTk, "tensor")

    specs = SORTED_M, CHOICES_BTk, SORTED_M, STREAM_BTD
    local = map_shards(local, specs, (SORTED_M, CHOICES_BTk))
    return *local(*kept, jax.reshard(dy_BTD, STREAM_BTD)), None


collect.defvjp(
    lambda y_MD, weights_BTk, plan: (
        collect(y_MD, weights_BTk, plan),
        (y_MD, jax.reshard(weights_BTk, CHOICES_BTk), plan),
    ),
    _collect_backward,
)


def _add_choices(x_RD: jax.Array, weights_Nk: jax.Array | None, plan: Plan) -> jax.Array:
    """float32 [N, D]: of every token the sum over its choices, one after the other."""
    total = jnp.zeros((len(plan.places_Nk), x_RD.shape[1]), jnp.float32)
    for j in range(plan.places_Nk.shape[1]):
        x_ND = x_RD.at[plan.places_Nk[:, j]].get(mode="fill", fill_value=0).astype(jnp.float32)
        total += x_ND if weights_Nk is None else x_ND * weights_Nk[:, j, None]
    return total


def _tokens(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """[N, ...] of the tokens that the device's plan is about."""
    if plan.way == "gather":
        x_BTD = all_gather(x_BTD, "expert")
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _cut_rows(x_ND: jax.Array, T: int) -> jax.Array:
    """[B, T, D], of rows of T tokens each device's part."""
    return x_ND.reshape(-1, T // axis_size(*TOKEN_AXES), x_ND.shape[1])


def _own_rows(x_BTD: jax.Array, plan: Plan) -> jax.Array:
    """What all devices along `expert` made of a device's rows, in one sum."""
    return psum_scatter(x_BTD, "expert", dimension=0) if plan.way == "gather" else x_BTD


def _send(x_RD: jax.Array, plan: Plan) -> jax.Array:
    """Rows in the order of experts to the devices of these: [M, D], in the order of experts."""
    if plan.way == "gather":
        return x_RD
    there, here = _offsets(plan.counts_PE)
    return _exchange(x_RD, plan.rows, there, here)


def _send_back(x_MD: jax.Array, plan: Plan) -> jax.Array:
    if plan.way == "gather":
        return x_MD
    there, here = _offsets(plan.counts_PE)
    return _exchange(x_MD, len(plan.order_R), here, there)


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


def _exchange(x: jax.Array, rows: int, sent: tuple, got: tuple) -> jax.Array:
    """This many rows, of which those that nobody sends hold anything."""
    begins, sizes, lands = sent
    out = jax.lax.empty((rows, x.shape[1]), x.dtype)
    return jax.lax.ragged_all_to_all(x, out, begins, sizes, lands, got[1], axis_name="expert")
