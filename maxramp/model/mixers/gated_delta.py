"""Gated DeltaNet as a layer's mixer (Yang et al., arXiv 2412.06464; Qwen3-Next).

Shapes: B rows, T tokens, D model width, K key heads, R value heads of a key head, H = K R value
heads, k width of a key, v of a value, x numbers of a key head, t taps of the convolution.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.gated_delta_facts import TAPS, GatedDeltaFacts
from maxramp.model.parts.gated_delta import (
    causal_conv,
    gated_delta,
    gated_delta_token,
    last_before,
    normalize,
)
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.parts.positions import Pass
from maxramp.model.parts.weights import Weight, dense, new_weight, normal
from maxramp.model.pattern import Mixing
from maxramp.parallel.axes import TOKEN_AXES
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import (
    ROWS_B,
    STREAM_BTD,
    TOKENS_BT,
    X_BTD,
    CACHE_BKSh,
    HEADS_Hh,
    HEADS_IN_DHh,
    HEADS_OUT_HhD,
    TAPS_1tHh,
    X_BTHh,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DeltaState:
    """What a layer knows of the tokens so far: as much for a long text as for a short one. After a
    pass of T > 1 written tokens it has the state after each, [B, H, T, k, v], and the inputs of all
    [B, t - 1 + T, K, x], until `keep`."""

    state_BHkv: jax.Array  # float32
    inputs_BtKx: jax.Array  # of the convolution, of the last t - 1 tokens

    def resize(self, slots: int, mixing: Mixing, lengths_B: jax.Array, ahead: int) -> Self:
        return self

    def keep(self, counts_B: jax.Array) -> Self:
        """Returns the state after the first `counts_B` tokens of the last pass, of several; 0
        counts as 1."""

        def pick(state_BHTkv, inputs_BtKx, index_B):
            at = functools.partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=TAPS - 1)
            return jax.vmap(at)(state_BHTkv, index_B), jax.vmap(cut)(inputs_BtKx, index_B + 1)

        states = CACHE_BKSh, X_BTHh
        pick = map_shards(pick, (*states, ROWS_B), states)
        return DeltaState(*pick(*vars(self).values(), jnp.maximum(counts_B - 1, 0)))


class GatedDelta(nnx.Module):
    """The gated delta rule between a short convolution and a gated norm. Its weights lie as in the
    family's tensors: queries, keys, values and output gates in one, or gates apart."""

    def __init__(self, keys: ModelKeys, key: jax.Array, family: Family):
        D, dtype = keys.base_emb_dim, keys.weight_dtype
        K, k, v = keys.gdn_num_key_heads, keys.gdn_key_head_dim, keys.gdn_value_head_dim
        R = keys.gdn_num_value_heads // K
        self.blocks = k, k, R * v
        drawn = iter(jax.random.split(key, 7))

        def read(role: str, width: int, blocks: tuple[int, ...] = ()) -> Weight:
            shape = D, K, width
            own = next(drawn), shape, HEADS_IN_DHh, D**-0.5, dtype
            return normal(role, "D Kx", *own, blocks=blocks)

        self.is_joined = GatedDeltaFacts.is_joined(family)
        if self.is_joined:
            self.qkvz_DKx, self.ba_DKx = read("matrix", 2 * (k + R * v)), read("gate", 2 * R)
        else:
            self.qkv_DKx = read("matrix", sum(self.blocks), self.blocks)
            self.z_DKx = read("matrix", R * v)
            self.b_DKx, self.a_DKx = read("gate", R), read("gate", R)
        uniform = functools.partial(jax.random.uniform, dtype=jnp.float32)
        shape = 1, TAPS, K, sum(self.blocks)
        taps = uniform(next(drawn), shape, minval=-0.5, maxval=0.5, out_sharding=TAPS_1tHh)
        self.taps_1tKx = new_weight(taps, "recurrence", "1 t Kx", blocks=self.blocks)
        rate = uniform(next(drawn), (K, R), minval=0.01, maxval=16, out_sharding=HEADS_Hh)
        self.log_rate_Kx = new_weight(jnp.log(rate), "recurrence", "Kx")
        bias = jnp.ones((K, R), jnp.float32, out_sharding=HEADS_Hh)
        self.step_bias_Kx = new_weight(bias, "recurrence", "Kx")
        self.norm = RMSNorm((v,), keys.normalization_layer_epsilon, dtype, "h")
        self.out_KxD = normal(
            *("matrix", "Kx D", next(drawn), (K, R * v, D), HEADS_OUT_HhD),
            *((K * R * v) ** -0.5, dtype),
        )

    def __call__(
        self, x_BTD: jax.Array, mixing: Mixing, shared: Pass, state: DeltaState | None = None
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; with a state, for tokens after its own, which it then
        has. Tokens lie in order."""
        x_BTD = jax.reshard(x_BTD, X_BTD)
        qkv_BTKx, z_BTKx, b_BTKR, a_BTKR = self._project(x_BTD)
        arrays = qkv_BTKx, b_BTKR, a_BTKR
        weights = [w[...] for w in (self.taps_1tKx, self.log_rate_Kx, self.step_bias_Kx)]
        specs = [jax.typeof(w).sharding.spec for w in weights]
        if state is None:
            segments_BT = shared.positions.segments_BT
            if segments_BT is None:
                segments_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32)
            axis = TOKEN_AXES[0] if axis_size(*TOKEN_AXES) > 1 else None
            mix = functools.partial(_mix, blocks=self.blocks, axis=axis)
            specs = (*(X_BTHh,) * 3, TOKENS_BT, *specs)
            segments_BT = jax.reshard(segments_BT, TOKENS_BT)
            o_BTHv = map_shards(mix, specs, X_BTHh)(*arrays, segments_BT, *weights)
        else:
            valid_BT, is_written = shared.valid_BT, shared.valid_BT is None
            if is_written:
                valid_BT = jnp.ones(x_BTD.shape[:2], bool)
            mix = functools.partial(_continue, blocks=self.blocks, is_written=is_written)
            states = CACHE_BKSh, X_BTHh
            specs = (*(X_BTHh,) * 3, TOKENS_BT, *states, *specs)
            o_BTHv, state.state_BHkv, state.inputs_BtKx = map_shards(mix, specs, (X_BTHh, *states))(
                *arrays,
                *(jax.reshard(valid_BT, TOKENS_BT), state.state_BHkv, state.inputs_BtKx, *weights),
            )
        spec = jax.typeof(z_BTKx).sharding.spec
        o_BTHv = self.norm(o_BTHv)
        o_BTKx = jax.lax.reshape(o_BTHv, z_BTKx.shape, out_sharding=spec)
        o_BTKx = (o_BTKx * jax.nn.silu(z_BTKx.astype(jnp.float32))).astype(x_BTD.dtype)
        return dense(o_BTKx, self.out_KxD, STREAM_BTD)

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the convolution's inputs, gates of the output, and those of the rule, b and a."""
        if self.is_joined:
            qkvz_BTKx, ba_BTKR = (dense(x_BTD, w, X_BTHh) for w in (self.qkvz_DKx, self.ba_DKx))
            end = sum(self.blocks)
            return qkvz_BTKx[..., :end], qkvz_BTKx[..., end:], *jnp.split(ba_BTKR, 2, -1)
        weights = self.qkv_DKx, self.z_DKx, self.b_DKx, self.a_DKx
        return tuple(dense(x_BTD, w, X_BTHh) for w in weights)

    @staticmethod
    def empty_state(keys: ModelKeys, rows: int, slots: int) -> DeltaState:
        H, K, k = keys.gdn_num_value_heads, keys.gdn_num_key_heads, keys.gdn_key_head_dim
        v = keys.gdn_value_head_dim
        inputs = jnp.zeros((rows, TAPS - 1, K, 2 * k + H // K * v), keys.dtype)
        return DeltaState(
            jax.reshard(jnp.zeros((rows, H, k, v), jnp.float32), CACHE_BKSh),
            jax.reshard(inputs, X_BTHh),
        )


# Computed again for the backward pass: it keeps many times the bytes of its arrays.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=9)
def _prepare(qkv, b, a, segments, before, segments_before, taps, log_rate, step_bias, blocks):
    """Returns queries, keys, values, g and beta for `gated_delta`, on one device. Weights may have
    the axis of a stage, of 1."""
    taps, log_rate, step_bias = taps.reshape(taps.shape[-3:]), log_rate.ravel(), step_bias.ravel()
    convolved = jax.nn.silu(causal_conv(qkv, taps, segments, before, segments_before))
    k, _, _ = blocks
    q, key, values = jnp.split(convolved, (k, 2 * k), -1)
    (B, T), H = b.shape[:2], log_rate.size
    a_BTH, b_BTH = (x.reshape(B, T, H).astype(jnp.float32) for x in (a, b))
    g_BTH = -jnp.exp(log_rate) * jax.nn.softplus(a_BTH + step_bias)
    values = values.reshape(B, T, H, -1).astype(qkv.dtype)
    return normalize(q) * k**-0.5, normalize(key), values, g_BTH, jax.nn.sigmoid(b_BTH)


def _mix(qkv, b, a, segments, *weights, blocks, axis):
    """Returns what tokens read, [B, T, H, v], on each device of an axis of tokens."""
    before = [last_before(x, TAPS - 1, axis) for x in (qkv, segments)]
    arrays = _prepare(qkv, b, a, segments, *before, *weights, blocks)
    return gated_delta(*arrays, segments, axis=axis)[0]


def _continue(qkv, b, a, valid, state, inputs, *weights, blocks, is_written):
    """Returns what tokens read after those in a state, and the next state and inputs. Tokens that
    are not valid come last in a row, and change neither. For several that are written these are of
    each (`DeltaState`), as if they were written one by one."""
    (B, T), t = valid.shape, TAPS - 1
    segments = jnp.zeros((B, t + T), jnp.int32)
    *arrays, g, beta = _prepare(
        qkv, b, a, segments[:, t:], inputs, segments[:, :t], *weights, blocks
    )
    arrays += [jnp.where(valid[..., None], x, 0) for x in (g, beta)]
    if T == 1:
        o, state = gated_delta_token(*(x[:, 0] for x in arrays), state)
        o = o[:, None]
    elif is_written:

        def step(state, arrays):
            o, state = gated_delta_token(*arrays, state)
            return state, (o, state)

        by_token = [x.swapaxes(0, 1) for x in arrays]
        _, (o, states) = jax.lax.scan(step, state, by_token, unroll=True)
        every = jnp.concatenate([inputs, qkv], 1)
        return o.swapaxes(0, 1), jnp.moveaxis(states, 0, 2), every
    else:
        o, state = gated_delta(*arrays, segments[:, t:], state)
    every = jnp.concatenate([inputs, qkv], 1)
    last = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=t, axis=0)
    return o, state, jax.vmap(last)(every, valid.sum(1))
