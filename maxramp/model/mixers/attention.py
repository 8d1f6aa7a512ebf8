"""Attention as a layer's mixer.

Shapes: B rows, T tokens, D model width, S slots of the state, H query heads, K key/value heads, h
head width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.parts.attention import LANES, AttentionMask, attend, attend_plainly
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.parts.positions import Pass, rotate
from maxramp.model.parts.weights import Weight, apply_elementwise, dense, normal, zeros
from maxramp.model.pattern import Mixing
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.sharding import (
    ROWS_B,
    SPLIT_D,
    STREAM_BTD,
    X_BTD,
    CACHE_BKSh,
    HEADS_Hh,
    HEADS_IN_DHh,
    HEADS_OUT_HhD,
    Spec,
    X_BTHh,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KeysAndValues:
    """A layer's cache: the last S tokens of every row, or all of a window, the token at position p
    in slot p % S. Slots after a shorter prompt hold padding, which no token sees before it is
    overwritten."""

    keys_BKSh: jax.Array  # rotated by their positions
    values_BKSh: jax.Array  # in the dtype of the arithmetic, as the keys are

    def attend(
        self,
        q_BTHh: jax.Array,
        k_BTKh: jax.Array,
        v_BTKh: jax.Array,
        first_B: jax.Array,
        mask: AttentionMask,
        kernel: str,
    ) -> jax.Array:
        """Writes T more tokens of every row (one segment), from position first_B on, into their
        slots, in place, and returns what they attend to: [B, T, H, h]. T is all slots from position
        0 on, or as many as `resize` has room for."""
        tokens, slots = q_BTHh.shape[1], self.keys_BKSh.shape[2]
        if tokens == slots:
            self.keys_BKSh, self.values_BKSh = (
                jax.reshard(x.swapaxes(1, 2), CACHE_BKSh) for x in (k_BTKh, v_BTKh)
            )
            # A prompt may have a length that kernels do not take, whatever that of rows is.
            kernel = "dot_product" if tokens % LANES else kernel
            return attend(q_BTHh, k_BTKh, v_BTKh, mask, kernel)
        a_BTHh, self.keys_BKSh, self.values_BKSh = map_shards(
            _write_and_attend,
            (*(X_BTHh,) * 3, *(CACHE_BKSh,) * 2, ROWS_B, mask.specs),
            (X_BTHh, CACHE_BKSh, CACHE_BKSh),
        )(q_BTHh, k_BTKh, v_BTKh, self.keys_BKSh, self.values_BKSh, first_B, mask)
        return a_BTHh

    def resize(
        self, slots: int, mixing: Mixing, lengths_B: jax.Array, ahead: int
    ) -> "KeysAndValues":
        """Returns the cache with `slots` slots, or as many as a window needs where 1 + `ahead`
        tokens are read at once."""
        slots = min(mixing.window + ahead, slots) if mixing.window else slots
        both = self.keys_BKSh, self.values_BKSh
        return KeysAndValues(*(move_slots(x, slots, lengths_B, CACHE_BKSh) for x in both))

    def keep(self, counts_B: jax.Array) -> "KeysAndValues":
        """Returns the state after the first `counts_B` tokens of the last pass, of several: the
        others are overwritten before a token sees them."""
        return self


def move_slots(x_BKSh: jax.Array, slots: int, lengths_B: jax.Array, spec: Spec) -> jax.Array:
    """Returns each row's tokens in the slots of a cache, [B, K, slots, h]; behind a row's first
    `lengths_B` tokens is padding."""

    def move(x_BKSh: jax.Array, lengths_B: jax.Array) -> jax.Array:
        position_BS = slot_positions(lengths_B, slots)
        get = jax.vmap(lambda x_KSh, index_S: x_KSh.at[:, index_S].get(mode="clip"))
        return get(x_BKSh, position_BS)

    return map_shards(move, (spec, ROWS_B), spec)(x_BKSh, lengths_B)


def slot_positions(lengths_B: jax.Array, slots: int) -> jax.Array:
    """Returns the positions of the tokens in slots [B, S], below 0 for empty slots."""
    last_B1 = lengths_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(slots)) % slots


def _write_and_attend(q_BTHh, k_BTKh, v_BTKh, keys_BKSh, values_BKSh, first_B, mask):
    keys_BKSh = write_slots(keys_BKSh, k_BTKh, first_B)
    values_BKSh = write_slots(values_BKSh, v_BTKh, first_B)
    visible = visible_slots(mask, first_B, q_BTHh.shape[1], keys_BKSh.shape[2])
    out_BTHh = attend_plainly(q_BTHh, keys_BKSh, values_BKSh, "BKSh", mask, visible)
    return out_BTHh, keys_BKSh, values_BKSh


def write_slots(slots_BKSh: jax.Array, new_BTKh: jax.Array, first_B: jax.Array) -> jax.Array:
    """Returns slots with T more tokens of every row from position `first_B` on, on one device; the
    first slot follows the last."""

    def write(slots_KSh, new_TKh, position):
        for t, new_Kh in enumerate(new_TKh):
            start = 0, (position + t) % slots_KSh.shape[1], 0
            slots_KSh = jax.lax.dynamic_update_slice(slots_KSh, new_Kh[:, None], start)
        return slots_KSh

    return jax.vmap(write)(slots_BKSh, new_BTKh, first_B)


def visible_slots(mask: AttentionMask, first_B: jax.Array, tokens: int, slots: int) -> jax.Array:
    """Returns which slots the tokens from position `first_B` on see: [B, 1, 1, T, S]."""
    position_BS = slot_positions(first_B + tokens, slots)
    sees_BTS = mask.sees(first_B[:, None] + jnp.arange(tokens), position_BS)
    sees_BTS &= (position_BS >= 0)[:, None]
    return sees_BTS[:, None, None]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. Keys add biases (Qwen2.5, arXiv 2412.15115) or
    norms of queries and keys, for each head (Qwen3, arXiv 2505.09388) or for all heads together
    (OLMoE, arXiv 2409.02060). The query of a gated head has its gate behind it: 2h numbers. A
    family may add a bias to the result, and sinks (`AttentionMask`)."""

    def __init__(self, keys: ModelKeys, key: jax.Array, family: Family):
        D, h, dtype = keys.base_emb_dim, keys.head_dim, keys.weight_dtype
        H, K = keys.base_num_query_heads, keys.base_num_kv_heads
        q, k, v, o = jax.random.split(key, 4)
        self.is_gated = family.gates_heads
        width = 2 * h if self.is_gated else h
        matrix = functools.partial(normal, "matrix")
        self.query_DHh = matrix("D Hh", q, (D, H, width), HEADS_IN_DHh, D**-0.5, dtype)
        self.key_DKh = matrix("D Kh", k, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.value_DKh = matrix("D Kh", v, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.out_HhD = matrix("Hh D", o, (H, h, D), HEADS_OUT_HhD, (H * h) ** -0.5, dtype)
        self.has_biases, self.has_norms = keys.attention_bias, keys.use_qk_norm
        self.scale, self.cap = keys.score_scale, keys.attn_logits_soft_cap
        if self.has_biases:
            self.query_bias_Hh = zeros("bias", "Hh", (H, width), HEADS_Hh, dtype)
            self.key_bias_Kh = zeros("bias", "Kh", (K, h), HEADS_Hh, dtype)
            self.value_bias_Kh = zeros("bias", "Kh", (K, h), HEADS_Hh, dtype)
        self.has_out_bias, self.has_sinks = family.has_out_bias, family.has_sinks
        if self.has_out_bias:
            self.out_bias_D = zeros("bias", "D", (D,), SPLIT_D, dtype)
        if self.has_sinks:
            self.sinks_H = zeros("sink", "H", (H,), SPLIT_D, dtype)
        if self.has_norms:
            form = (keys.normalization_layer_epsilon, dtype)
            norm = functools.partial(RMSNorm, offset=family.norm_offset)
            if family.heads_together:
                self.query_norm = norm((H, h), *form, "Hh", HEADS_Hh)
                self.key_norm = norm((K, h), *form, "Kh", HEADS_Hh)
            else:
                self.query_norm, self.key_norm = (norm((h,), *form, "h") for _ in "qk")

    def __call__(
        self, x_BTD: jax.Array, mixing: Mixing, shared: Pass, state: KeysAndValues | None = None
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; with a state, for tokens from `shared.first_B` on, which it
        adds to the state in place (`KeysAndValues.attend`)."""
        angles, execution = shared.angles[mixing.rope], shared.execution
        x_BTD = jax.reshard(x_BTD, X_BTD)
        q_BTHh = dense(x_BTD, self.query_DHh, X_BTHh)
        k_BTKh = dense(x_BTD, self.key_DKh, X_BTHh)
        v_BTKh = dense(x_BTD, self.value_DKh, X_BTHh)
        if self.has_biases:
            q_BTHh = _add_bias(q_BTHh, self.query_bias_Hh)
            k_BTKh = _add_bias(k_BTKh, self.key_bias_Kh)
            v_BTKh = _add_bias(v_BTKh, self.value_bias_Kh)
        if self.is_gated:
            q_BTHh, gate_BTHh = jnp.split(q_BTHh, 2, axis=-1)
        if self.has_norms:
            q_BTHh, k_BTKh = self.query_norm(q_BTHh), self.key_norm(k_BTKh)
        q_BTHh, k_BTKh = rotate(q_BTHh, angles), rotate(k_BTKh, angles)
        sinks_H = self.sinks_H[...].astype(jnp.float32) if self.has_sinks else None
        mask = AttentionMask(shared.positions, mixing.window, self.scale, self.cap, sinks_H)
        kernel, strategy = execution.attention, execution.context_parallel_strategy
        if state is None:
            a_BTHh = attend(q_BTHh, k_BTKh, v_BTKh, mask, kernel, strategy)
        else:
            a_BTHh = state.attend(q_BTHh, k_BTKh, v_BTKh, shared.first_B, mask, kernel)
        if self.is_gated:
            a_BTHh = a_BTHh * jax.nn.sigmoid(gate_BTHh)
        y_BTD = dense(a_BTHh, self.out_HhD, STREAM_BTD)
        return _add_bias(y_BTD, self.out_bias_D) if self.has_out_bias else y_BTD

    @staticmethod
    def empty_state(keys: ModelKeys, rows: int, slots: int) -> KeysAndValues:
        shape = (rows, keys.base_num_kv_heads, slots, keys.head_dim)
        zeros_BKSh = jax.reshard(jnp.zeros(shape, keys.dtype), CACHE_BKSh)
        return KeysAndValues(zeros_BKSh, zeros_BKSh)


def _add_bias(x: jax.Array, bias: Weight) -> jax.Array:
    return apply_elementwise(jnp.add, x.astype(jnp.float32), bias).astype(x.dtype)
