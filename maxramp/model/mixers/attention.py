"""Attention as a layer's mixer.

Shapes: B rows, T tokens, D model width, S slots of the state, H query heads, K key/value heads, h
head width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.keys import ModelKeys, select_strategy
from maxramp.model.mixers.mixer import Pass
from maxramp.model.parts.attention import LANES, Rule, attend, attend_plainly, select
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.parts.rotary import rotate
from maxramp.model.parts.weights import Weight, apply_elementwise, dense, normal, zeros
from maxramp.model.pattern import Mixing
from maxramp.parallel.axes import TOKEN_AXES
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.mesh import axis_size, platform
from maxramp.parallel.sharding import (
    ROWS_B,
    STREAM_BTD,
    X_BTD,
    CACHE_BKSh,
    HEADS_Hh,
    HEADS_IN_DHh,
    HEADS_OUT_HhD,
    X_BTHh,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KeysAndValues:
    """The last S tokens of every row in S slots, the one at position p in slot p % S: all, or those
    of a window. Behind a shorter prompt stands padding; each slot is written before a token sees
    it."""

    keys_BKSh: jax.Array  # turned by their positions
    values_BKSh: jax.Array  # in the dtype of the arithmetic, as the keys are

    def attend(
        self,
        q_BTHh: jax.Array,
        k_BTKh: jax.Array,
        v_BTKh: jax.Array,
        first_B: jax.Array,
        rule: Rule,
        kernel: str,
    ) -> jax.Array:
        """`attend` of T more tokens of every row (one segment), from position first_B on, put into
        their slots, to all up to each."""
        tokens, slots = q_BTHh.shape[1], self.keys_BKSh.shape[2]
        if tokens == slots:
            self.keys_BKSh, self.values_BKSh = (
                jax.reshard(x.swapaxes(1, 2), CACHE_BKSh) for x in (k_BTKh, v_BTKh)
            )
            return attend(q_BTHh, k_BTKh, v_BTKh, rule, kernel)
        a_BTHh, self.keys_BKSh, self.values_BKSh = map_shards(
            functools.partial(_write_and_attend, rule=rule),
            (*(X_BTHh,) * 3, *(CACHE_BKSh,) * 2, ROWS_B),
            (X_BTHh, CACHE_BKSh, CACHE_BKSh),
        )(q_BTHh, k_BTKh, v_BTKh, self.keys_BKSh, self.values_BKSh, first_B)
        return a_BTHh

    def resize(self, slots: int, mixing: Mixing, lengths_B: jax.Array) -> "KeysAndValues":
        slots = min(mixing.window or slots, slots)

        def move(x_BKSh: jax.Array, lengths_B: jax.Array) -> jax.Array:
            at_BS = _positions(lengths_B, slots)  # below 0: not there yet
            return jax.vmap(lambda x_KSh, at_S: x_KSh.at[:, at_S].get(mode="clip"))(x_BKSh, at_BS)

        move = map_shards(move, (CACHE_BKSh, ROWS_B), CACHE_BKSh)
        return KeysAndValues(move(self.keys_BKSh, lengths_B), move(self.values_BKSh, lengths_B))


def _positions(lengths_B: jax.Array, slots: int) -> jax.Array:
    """Of the tokens in the slots of rows with these lengths: [B, S], below 0 for none."""
    last_B1 = lengths_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(slots)) % slots


def _write_and_attend(q_BTHh, k_BTKh, v_BTKh, keys_BKSh, values_BKSh, first_B, *, rule):
    S = keys_BKSh.shape[2]

    def write(slots_KSh, new_TKh, position):
        at = 0, position % S, 0
        return jax.lax.dynamic_update_slice(slots_KSh, new_TKh.swapaxes(0, 1), at)

    keys_BKSh = jax.vmap(write)(keys_BKSh, k_BTKh, first_B)
    values_BKSh = jax.vmap(write)(values_BKSh, v_BTKh, first_B)
    T, at_BS = q_BTHh.shape[1], _positions(first_B + q_BTHh.shape[1], S)
    seen_BTS = rule.sees(first_B[:, None] + jnp.arange(T), at_BS) & (at_BS >= 0)[:, None]
    out_BTHh = attend_plainly(q_BTHh, keys_BKSh, values_BKSh, "BKSh", rule, seen_BTS[:, None, None])
    return out_BTHh, keys_BKSh, values_BKSh


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; by the keys with biases (Qwen2.5, arXiv
    2412.15115) or with norms of queries and keys: of each head's (Qwen3, arXiv 2505.09388), or of
    all heads' together (OLMoE, arXiv 2409.02060)."""

    def __init__(
        self,
        keys: ModelKeys,
        key: jax.Array,
        heads_together: bool = False,
        norm: Callable[..., Any] = RMSNorm,
    ):
        D, h, dtype = keys.base_emb_dim, keys.head_dim, keys.weight_dtype
        H, K = keys.base_num_query_heads, keys.base_num_kv_heads
        q, k, v, o = jax.random.split(key, 4)
        matrix = functools.partial(normal, "matrix")
        self.query_DHh = matrix("D Hh", q, (D, H, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.key_DKh = matrix("D Kh", k, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.value_DKh = matrix("D Kh", v, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.out_HhD = matrix("Hh D", o, (H, h, D), HEADS_OUT_HhD, (H * h) ** -0.5, dtype)
        self.has_biases, self.has_norms = keys.attention_bias, keys.use_qk_norm
        self.scale, self.cap = keys.score_scale, keys.attn_logits_soft_cap
        if self.has_biases:
            self.query_bias_Hh = zeros("bias", "Hh", (H, h), HEADS_Hh, dtype)
            self.key_bias_Kh = zeros("bias", "Kh", (K, h), HEADS_Hh, dtype)
            self.value_bias_Kh = zeros("bias", "Kh", (K, h), HEADS_Hh, dtype)
        if self.has_norms:
            form = (keys.normalization_layer_epsilon, dtype)
            if heads_together:
                self.query_norm = norm((H, h), *form, "Hh", HEADS_Hh)
                self.key_norm = norm((K, h), *form, "Kh", HEADS_Hh)
            else:
                self.query_norm, self.key_norm = (norm((h,), *form, "h") for _ in "qk")

    def __call__(
        self, x_BTD: jax.Array, mixing: Mixing, shared: Pass, state: KeysAndValues | None = None
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]; with a state, of tokens behind those in it, which it then has."""
        angles, execution = shared.angles[mixing.rope], shared.execution
        x_BTD = jax.reshard(x_BTD, X_BTD)
        q_BTHh = dense(x_BTD, self.query_DHh, X_BTHh)
        k_BTKh = dense(x_BTD, self.key_DKh, X_BTHh)
        v_BTKh = dense(x_BTD, self.value_DKh, X_BTHh)
        if self.has_biases:
            q_BTHh = _plus(q_BTHh, self.query_bias_Hh)
            k_BTKh = _plus(k_BTKh, self.key_bias_Kh)
            v_BTKh = _plus(v_BTKh, self.value_bias_Kh)
        if self.has_norms:
            q_BTHh, k_BTKh = self.query_norm(q_BTHh), self.key_norm(k_BTKh)
        q_BTHh, k_BTKh = rotate(q_BTHh, angles), rotate(k_BTKh, angles)
        _, T, _, h = q_BTHh.shape
        kernel = execution.attention
        if state is not None and T % LANES:  # a prompt's length, which is not that of rows
            kernel = "dot_product"
        rule = Rule(shared.positions, mixing.window, self.scale, self.cap)
        devices, tensor = axis_size(*TOKEN_AXES), axis_size("tensor")
        heads = q_BTHh.shape[2] // tensor, k_BTKh.shape[2] // tensor
        strategy = select_strategy(execution.context_parallel_strategy, *heads, devices)
        seen_at_once = T // devices if strategy == "all_gather" else T
        has_places = rule.positions.has_places
        kernel = select(kernel, platform(), q_BTHh.dtype.name, h, seen_at_once, has_places)
        if state is None:
            a_BTHh = attend(q_BTHh, k_BTKh, v_BTKh, rule, kernel, strategy)
        else:
            a_BTHh = state.attend(q_BTHh, k_BTKh, v_BTKh, shared.first_B, rule, kernel)
        return dense(a_BTHh, self.out_HhD, STREAM_BTD)

    @staticmethod
    def empty_state(keys: ModelKeys, rows: int, slots: int) -> KeysAndValues:
        shape = (rows, keys.base_num_kv_heads, slots, keys.head_dim)
        zeros_BKSh = jax.reshard(jnp.zeros(shape, keys.dtype), CACHE_BKSh)
        return KeysAndValues(zeros_BKSh, zeros_BKSh)


def _plus(x: jax.Array, bias: Weight) -> jax.Array:
    return apply_elementwise(jnp.add, x.astype(jnp.float32), bias).astype(x.dtype)
