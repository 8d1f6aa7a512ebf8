"""What layers are made of: norms, attention, the MLP; and a layer of them.

Shapes: B rows, T tokens, D model width, F MLP width, H query heads, K key/value heads, h head
width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.keys import Execution, ModelKeys, select_strategy
from maxramp.model.parts.attention import LANES, Cache, Rule, attend, select
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.rotary import rotate
from maxramp.model.parts.weights import Weight, apply_elementwise, dense, new_weight, normal, zeros
from maxramp.parallel.axes import TOKEN_AXES
from maxramp.parallel.mesh import axis_size, platform
from maxramp.parallel.sharding import (
    MLP_IN_DF,
    MLP_OUT_FD,
    REPLICATED,
    ROWS_B,
    STREAM_BTD,
    X_BTD,
    X_BTF,
    CACHE_BKSh,
    HEADS_Hh,
    HEADS_IN_DHh,
    HEADS_OUT_HhD,
    Spec,
    X_BTHh,
)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(
        self,
        shape: tuple[int, ...],
        epsilon: float,
        dtype: str,
        axes: str = "D",
        spec: Spec = REPLICATED,
        offset: float = 0.0,
    ):
        """`axes` are the letters of what is normalized: the model's width, a head's, or all heads
        together. What is multiplied by is `offset` + the weight, at first 1."""
        self.epsilon, self.normalized = epsilon, tuple(range(-len(shape), 0))
        self.offset = offset
        first = jnp.full(shape, 1 - offset, dtype, out_sharding=spec)
        self.scale_D = new_weight(first, "scale", axes)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, ..., D], dtype kept."""
        x = x_BTD.astype(jnp.float32)
        mean = jnp.mean(x * x, axis=self.normalized, keepdims=True)
        x = x * jax.lax.rsqrt(mean + self.epsilon)
        y = apply_elementwise(lambda x, scale: x * (scale + self.offset), x, self.scale_D)
        if isinstance(self.scale_D, RowScale):
            y = _give_row_gradients(y, x, self.scale_D.rows_BD, len(self.normalized))
        return y.astype(x_BTD.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowScale:
    """A norm's scale with a gradient for each row too: that of `rows_BD`, zeros."""

    scale: Weight
    rows_BD: jax.Array

    def __getitem__(self, index):
        return self.scale[index]

    @property
    def leading(self) -> str:
        return self.scale.leading


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _give_row_gradients(
    y_BTD: jax.Array, x_BTD: jax.Array, rows_BD: jax.Array, axes: int
) -> jax.Array:
    """y = x * scale as it is; the gradient to `rows_BD` is what a scale of each row would have, of
    this many axes."""
    return y_BTD


_give_row_gradients.defvjp(
    lambda y_BTD, x_BTD, rows_BD, axes: (y_BTD, x_BTD),
    lambda axes, x_BTD, dy_BTD: (dy_BTD, None, (dy_BTD * x_BTD).sum(range(1, x_BTD.ndim - axes))),
)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "linear": lambda x: x}


class MLP(nnx.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202): out(f(gate(x)) * g(up(x)))."""

    def __init__(self, keys: ModelKeys, key: jax.Array, width: int = 0):
        D, F, dtype = keys.base_emb_dim, width or keys.base_mlp_dim, keys.weight_dtype
        gate, up, out = jax.random.split(key, 3)
        self.activations = tuple(keys.mlp_activations)
        self.gate_DF = normal("matrix", "D F", gate, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.up_DF = normal("matrix", "D F", up, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.out_FD = normal("matrix", "F D", out, (F, D), MLP_OUT_FD, F**-0.5, dtype)

    def __call__(self, x_BTD: jax.Array, shares_BT: jax.Array | None = None):
        x_BTD = jax.reshard(x_BTD, X_BTD)
        f, g = (ACTIVATIONS[name] for name in self.activations)
        gate_BTF = f(dense(x_BTD, self.gate_DF, X_BTF))
        up_BTF = g(dense(x_BTD, self.up_DF, X_BTF))
        return dense(gate_BTF * up_BTF, self.out_FD, STREAM_BTD), Aux()


Angles = tuple[jax.Array, jax.Array]


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
        self,
        x_BTD: jax.Array,
        angles: Angles,
        rule: Rule,
        execution: Execution,
        cache: Cache | None = None,
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]; with a cache, of tokens behind those in it, which it then has."""
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
        if cache is not None and T % LANES:  # a prompt's length, which is not that of rows
            kernel = "dot_product"
        rule = dataclasses.replace(rule, scale=self.scale, cap=self.cap)
        devices, tensor = axis_size(*TOKEN_AXES), axis_size("tensor")
        heads = q_BTHh.shape[2] // tensor, k_BTKh.shape[2] // tensor
        strategy = select_strategy(execution.context_parallel_strategy, *heads, devices)
        seen_at_once = T // devices if strategy == "all_gather" else T
        given = q_BTHh.dtype.name, h, seen_at_once, rule.positions.has_places
        kernel = select(kernel, platform(), *given)
        given = q_BTHh, k_BTKh, v_BTKh, rule, kernel
        a_BTHh = attend(*given, strategy) if cache is None else cache.attend(*given)
        return dense(a_BTHh, self.out_HhD, STREAM_BTD)


def _plus(x: jax.Array, bias: Weight) -> jax.Array:
    return apply_elementwise(jnp.add, x.astype(jnp.float32), bias).astype(x.dtype)


class Block(nnx.Module):
    """Attention, then an MLP, each added to the residual stream: with a norm before each, behind
    each (OLMo 2, arXiv 2501.00656), or both (Gemma 2, arXiv 2408.00118)."""

    def __init__(
        self,
        keys: ModelKeys,
        key: jax.Array,
        mlp: Callable[..., Any] = MLP,
        attention: Callable[..., Any] = Attention,
        norm: Callable[..., Any] = RMSNorm,
        places: str = "before",
    ):
        """`places` of the norms are "before", "behind" or "both"."""
        attention_key, mlp_key = jax.random.split(key)
        norm = functools.partial(
            norm, (keys.base_emb_dim,), keys.normalization_layer_epsilon, keys.weight_dtype
        )
        self.places = places
        if places != "behind":
            self.attention_norm, self.mlp_norm = norm(), norm()
        if places != "before":
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()
        self.attention = attention(keys, attention_key)
        self.mlp = mlp(keys, mlp_key)

    def empty_cache(self, rows: int, slots: int, keys: ModelKeys) -> Cache:
        shape = (rows, keys.base_num_kv_heads, slots, keys.head_dim)
        nothing = jax.reshard(jnp.zeros(shape, keys.dtype), CACHE_BKSh)
        return Cache(nothing, nothing, jnp.zeros(rows, jnp.int32, out_sharding=ROWS_B))

    def __call__(
        self, x_BTD: jax.Array, *given: Any, shares_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """The stream [B, T, D] behind the layer, and the MLP's sums, in which tokens have these
        shares; other arguments as in `Attention`."""
        before, behind = self.places != "behind", self.places != "before"
        with jax.named_scope("attention"):
            y_BTD = self.attention_norm(x_BTD) if before else x_BTD
            y_BTD = self.attention(y_BTD, *given)
            x_BTD = x_BTD + (self.attention_post_norm(y_BTD) if behind else y_BTD)
        with jax.named_scope("mlp"):
            y_BTD = self.mlp_norm(x_BTD) if before else x_BTD
            y_BTD, aux = self.mlp(y_BTD, shares_BT)
            return x_BTD + (self.mlp_post_norm(y_BTD) if behind else y_BTD), aux
