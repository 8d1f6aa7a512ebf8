"""A pre-norm transformer layer of attention and MLP.

Shapes: B rows, T tokens, D model width, H query heads, K key/value heads, h head width.
"""

import functools
from typing import Any

import jax
from flax import nnx

from maxramp.model.keys import ModelKeys
from maxramp.model.parts.attention import Rule, attend, for_length, select
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.cache import Cache
from maxramp.model.parts.mlp import MLP
from maxramp.model.parts.norms import RMSNorm
from maxramp.model.parts.products import dense
from maxramp.model.parts.rotary import rotate
from maxramp.model.parts.weights import normal
from maxramp.parallel.platform import platform
from maxramp.parallel.sharding import STREAM_BTD, X_BTD, HEADS_IN_DHh, HEADS_OUT_HhD, X_BTHh

Angles = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, no biases."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        D, h, dtype = keys.base_emb_dim, keys.head_dim, keys.weight_dtype
        H, K = keys.base_num_query_heads, keys.base_num_kv_heads
        q, k, v, o = jax.random.split(key, 4)
        matrix = functools.partial(normal, "matrix")
        self.query_DHh = matrix("DHh", q, (D, H, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.key_DKh = matrix("DKh", k, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.value_DKh = matrix("DKh", v, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.out_HhD = matrix("HhD", o, (H, h, D), HEADS_OUT_HhD, (H * h) ** -0.5, dtype)

    def __call__(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        rule: Rule,
        kernel: str,
        cache: Cache | None = None,
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D].

        Args:
          x_BTD: of T tokens, which with a cache go on from those in it, and are added to it.
          angles: rotary, of their positions.
          rule: what each sees.
          kernel: the key `attention`.
          cache: of this layer.
        """
        x_BTD = jax.reshard(x_BTD, X_BTD)
        q_BTHh = rotate(dense(x_BTD, "BTD,DHh->BTHh", self.query_DHh, X_BTHh), angles)
        k_BTKh = rotate(dense(x_BTD, "BTD,DKh->BTKh", self.key_DKh, X_BTHh), angles)
        v_BTKh = dense(x_BTD, "BTD,DKh->BTKh", self.value_DKh, X_BTHh)
        _, T, _, h = q_BTHh.shape
        if cache is not None:
            kernel = for_length(kernel, T)
        kernel = select(kernel, platform(), q_BTHh.dtype.name, h, T, rule.window)
        if cache is None:
            a_BTHh = attend(q_BTHh, k_BTKh, v_BTKh, rule, kernel)
        else:
            a_BTHh = cache.attend(q_BTHh, k_BTKh, v_BTKh, rule, kernel)
        return dense(a_BTHh, "BTHh,HhD->BTD", self.out_HhD, STREAM_BTD)


class PreNormBlock(nnx.Module):
    """Attention, then MLP, each of a norm and added to the residual stream."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        norm = functools.partial(
            RMSNorm, keys.base_emb_dim, keys.normalization_layer_epsilon, keys.weight_dtype
        )
        self.attention_norm = norm()
        self.attention = Attention(keys, attention_key)
        self.mlp_norm = norm()
        self.mlp = MLP(keys, mlp_key)

    def __call__(self, x_BTD: jax.Array, *given: Any) -> tuple[jax.Array, Aux]:
        """The stream [B, T, D] behind the layer, and no sums; arguments as of `Attention`."""
        with jax.named_scope("attention"):
            x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), *given)
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD)), Aux()
