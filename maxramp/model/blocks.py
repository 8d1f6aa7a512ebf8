"""Transformer layers: a family is a composition of attention and MLP.

Shapes: B rows, T tokens, D model width, H query heads, K key/value heads, h head width.
"""

import functools

import jax
from flax import nnx

from maxramp.model.attention import causal_attention, rotate, select
from maxramp.model.cache import Cache
from maxramp.model.keys import ModelKeys
from maxramp.model.layers import MLP, RMSNorm, dense, normal
from maxramp.parallel.platform import platform
from maxramp.parallel.sharding import STREAM_BTD, X_BTD, HEADS_IN_DHh, HEADS_OUT_HhD, X_BTHh

Angles = tuple[jax.Array, jax.Array]
Segments = jax.Array | None


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, no biases."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        D, h, dtype = keys.base_emb_dim, keys.head_dim, keys.weight_dtype
        H, K = keys.base_num_query_heads, keys.base_num_kv_heads
        self.implementation = select(keys, platform())
        q, k, v, o = jax.random.split(key, 4)
        self.query_DHh = normal(q, (D, H, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.key_DKh = normal(k, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.value_DKh = normal(v, (D, K, h), HEADS_IN_DHh, D**-0.5, dtype)
        self.out_HhD = normal(o, (H, h, D), HEADS_OUT_HhD, (H * h) ** -0.5, dtype)

    def __call__(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        segments_BT: Segments,
        cache: Cache | None = None,
    ) -> jax.Array:
        """[B, T, D], the rotary angles of T positions and the segments -> [B, T, D].

        With a cache the tokens go on from those in it, and are added to it.
        """
        x_BTD = jax.reshard(x_BTD, X_BTD)
        q_BTHh = rotate(dense(x_BTD, "BTD,DHh->BTHh", self.query_DHh, X_BTHh), angles)
        k_BTKh = rotate(dense(x_BTD, "BTD,DKh->BTKh", self.key_DKh, X_BTHh), angles)
        v_BTKh = dense(x_BTD, "BTD,DKh->BTKh", self.value_DKh, X_BTHh)
        if cache is None:
            a_BTHh = causal_attention(q_BTHh, k_BTKh, v_BTKh, self.implementation, segments_BT)
        else:
            a_BTHh = cache.attend(q_BTHh, k_BTKh, v_BTKh, self.implementation)
        return dense(a_BTHh, "BTHh,HhD->BTD", self.out_HhD, STREAM_BTD)


class Llama2Block(nnx.Module):
    """A pre-norm transformer layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        norm = functools.partial(
            RMSNorm, keys.base_emb_dim, keys.normalization_layer_epsilon, keys.weight_dtype
        )
        self.attention_norm = norm()
        self.attention = Attention(keys, attention_key)
        self.mlp_norm = norm()
        self.mlp = MLP(keys, mlp_key)

    def __call__(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        segments_BT: Segments,
        cache: Cache | None = None,
    ) -> jax.Array:
        """[B, T, D], the rotary angles of T positions and the segments -> [B, T, D]."""
        with jax.named_scope("attention"):
            y_BTD = self.attention(self.attention_norm(x_BTD), angles, segments_BT, cache)
            x_BTD = x_BTD + y_BTD
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD))


BLOCKS = {"llama2": Llama2Block}  # by decoder_block
