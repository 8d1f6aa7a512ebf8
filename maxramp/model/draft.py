"""A draft of tokens further ahead: multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section
2.2). Shapes: B rows, T tokens, D model width, C twice that.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.block import Block
from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.parts.weights import dense, normal
from maxramp.model.pattern import Layer
from maxramp.parallel.collectives import delay
from maxramp.parallel.sharding import MLP_IN_DF, STREAM_BTD, X_BTD


class Draft(nnx.Module):
    """A layer that reads a token's vector and the embedding of a later token; embedding and head
    are the model's."""

    def __init__(self, family: Family, layer: Layer, keys: ModelKeys, key: jax.Array):
        D, dtype = keys.base_emb_dim, keys.weight_dtype
        form = (D,), keys.normalization_layer_epsilon, dtype
        norm = functools.partial(RMSNorm, *form, offset=family.norm_offset)
        join, block = jax.random.split(key)
        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.join_CD = normal("matrix", "C D", join, (2 * D, D), MLP_IN_DF, (2 * D) ** -0.5, dtype)
        self.block = Block(family, layer, keys, block)

    @property
    def mixer(self) -> nnx.Module:
        return self.block.mixer

    def join(self, x_BTD: jax.Array, ahead_BTD: jax.Array) -> jax.Array:
        """Returns the stream [B, T, D] for `block`, whose result `norm` makes a vector for logits
        and for the next draft."""
        x_BTD, ahead_BTD = _take_turns(x_BTD, ahead_BTD)
        x_BTD = jax.reshard(x_BTD, STREAM_BTD)  # as norms have it, whose gradients are by row
        parts = self.embedding_norm(ahead_BTD), self.hidden_norm(x_BTD)
        x_BTC = jnp.concatenate([jax.reshard(part, X_BTD) for part in parts], axis=-1)
        return dense(x_BTC, self.join_CD, STREAM_BTD)


@jax.custom_vjp
def _take_turns(x_BTD: jax.Array, ahead_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both; the gradient of x waits for the other's, which could else be sent beside the
    layers' backward pass (`delay`)."""
    return x_BTD, ahead_BTD


def _take_turns_backward(_, gradients):
    dx_BTD, dahead_BTD = gradients
    return delay(dx_BTD, dahead_BTD.astype(jnp.float32).sum()), dahead_BTD


_take_turns.defvjp(lambda *arrays: (arrays, None), _take_turns_backward)
