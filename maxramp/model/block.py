"""A layer: a mixer and an MLP.

Shapes: B rows, T tokens, D model width.
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.attention import Attention
from maxramp.model.mixers.gated_delta import GatedDelta
from maxramp.model.mixers.latent_attention import LatentAttention
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.experts import Experts
from maxramp.model.parts.mlp import MLP
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.parts.positions import Pass
from maxramp.model.pattern import Layer, Mixing

# By `Layer.mixer`.
MIXERS = {"attention": Attention, "gated_delta": GatedDelta, "latent_attention": LatentAttention}


class Block(nnx.Module):
    """A mixer, then an MLP, each added to the residual stream: with a norm before each, after each
    (OLMo 2, arXiv 2501.00656), or both (Gemma 2, arXiv 2408.00118)."""

    def __init__(self, family: Family, layer: Layer, keys: ModelKeys, key: jax.Array):
        mixer_key, mlp_key = jax.random.split(key)
        norm = functools.partial(
            *(RMSNorm, (keys.base_emb_dim,), keys.normalization_layer_epsilon, keys.weight_dtype),
            offset=family.norm_offset,
        )
        self.norms = family.norms
        if self.norms != "after":
            self.mixer_norm, self.mlp_norm = norm(), norm()
        if self.norms != "before":
            self.mixer_post_norm, self.mlp_post_norm = norm(), norm()
        self.mixer = MIXERS[layer.mixer](keys, mixer_key, family)
        if layer.is_sparse:
            own = dataclasses.replace(keys, **family.expert_keys)
            self.mlp = Experts(own, mlp_key, family)
        else:
            self.mlp = MLP(keys, mlp_key)

    def __call__(
        self, x_BTD: jax.Array, mixing: Mixing, shared: Pass, state: Any = None
    ) -> tuple[jax.Array, Aux]:
        """Returns the stream [B, T, D] after the layer, and its MLP's sums; `state` is the mixer's,
        which it changes in place, None in training."""
        before, after = self.norms != "after", self.norms != "before"
        with jax.named_scope(type(self.mixer).__name__.lower()):  # as profiles show it
            y_BTD = self.mixer_norm(x_BTD) if before else x_BTD
            y_BTD = self.mixer(y_BTD, mixing, shared, state)
            x_BTD = x_BTD + (self.mixer_post_norm(y_BTD) if after else y_BTD)
        with jax.named_scope("mlp"):
            y_BTD = self.mlp_norm(x_BTD) if before else x_BTD
            y_BTD, aux = self.mlp(y_BTD, shared.token_weight_BT)
            return x_BTD + (self.mlp_post_norm(y_BTD) if after else y_BTD), aux
