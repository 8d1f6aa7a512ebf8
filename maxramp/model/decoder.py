"""The decoder: Flax NNX modules used as plain pytrees.

Layers are one module whose weights have a leading axis L, made by vmap over keys and run by scan.

Shapes: B rows, T tokens, D model width, V vocabulary, L layers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxramp.model import pipeline
from maxramp.model.attention import CONTEXT, rotary_angles, starts
from maxramp.model.blocks import BLOCKS, Segments
from maxramp.model.cache import Cache
from maxramp.model.keys import ModelKeys
from maxramp.model.layers import STAGE_PRODUCTS, RMSNorm, Scale, look_up, normal
from maxramp.parallel.sharding import EMBEDDING_VD, HEAD_DV, LAYERS_L, X_BTD, X_BTF, of_weight

_LAYER_INPUT = "input of a layer"
_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_named = jax.checkpoint_policies.save_only_these_names
_both = jax.checkpoint_policies.save_from_both_policies

# What a layer keeps for its backward pass. Names and meanings are MaxText's.
_SAVEABLE = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "minimal": _both(_PRODUCTS, _named(STAGE_PRODUCTS)),
    "minimal_with_context": _both(_PRODUCTS, _named(STAGE_PRODUCTS, CONTEXT)),
}

# What a turn of a pipeline keeps: by name, for it would keep its weights as well, once a turn.
_KEPT = {
    "full": _named(_LAYER_INPUT),
    "minimal": _named(_LAYER_INPUT, STAGE_PRODUCTS),
    "minimal_with_context": _named(_LAYER_INPUT, STAGE_PRODUCTS, CONTEXT),
    "none": _named(_LAYER_INPUT, STAGE_PRODUCTS, CONTEXT),
}


class Decoder(nnx.Module):
    """Token ids -> logits. Build it under `jax.set_mesh` (or an abstract mesh)."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        V, D, L = keys.vocab_size, keys.base_emb_dim, keys.base_num_decoder_layers
        embedding, head, layers = jax.random.split(key, 3)
        dtype, block = keys.weight_dtype, BLOCKS[keys.decoder_block]
        # Static fields are compared at every call of a compiled step: a few, and small ones.
        self.dtype = keys.dtype
        self.head_dim = keys.head_dim
        self.rope_max_timescale = keys.rope_max_timescale
        self.remat_policy = keys.remat_policy
        self.unroll = 1 if keys.scan_layers else L
        self.embedding_VD = normal(embedding, (V, D), EMBEDDING_VD, D**-0.5, dtype)
        layer_keys, self.pipeline = jax.random.split(layers, L), None
        if (stages := pipeline.num_stages()) > 1:
            self.pipeline = pipeline.Pipeline(
                keys.num_pipeline_microbatches,
                keys.num_pipeline_repeats,
                keys.num_layers_per_pipeline_stage,
                keys.pipeline_fsdp_ag_once,
            )
            layer_keys = pipeline.by_stages(layer_keys, stages, self.pipeline.repeats)
            layer_keys = jax.reshard(layer_keys, LAYERS_L)
        self.layers = jax.vmap(lambda key: block(keys, key))(layer_keys)
        self.norm = RMSNorm(D, keys.normalization_layer_epsilon, dtype)
        self.tied = keys.logits_via_embedding
        if not self.tied:
            self.head_DV = normal(head, (D, V), HEAD_DV, D**-0.5, dtype)

    def __call__(self, tokens_BT: jax.Array, segments_BT: Segments = None) -> jax.Array:
        """float32 logits [B, T, V] of the token after each one; padding reads as token 0."""
        return self.logits(self.hidden(tokens_BT, segments_BT))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """float32 logits [B, T, V] of what `hidden` or `read` returned."""
        return jnp.einsum(
            "BTD,DV->BTV",
            x_BTD,
            self.head(),
            out_sharding=X_BTF,
            preferred_element_type=jnp.float32,
        )

    def hidden(self, tokens_BT: jax.Array, segments_BT: Segments = None) -> jax.Array:
        """The vectors [B, T, D] whose products with `head` are the logits.

        Args:
          tokens_BT: token ids; padding reads as token 0.
          segments_BT: integers, rising along a row; tokens of different segments do not see each
            other, and positions start anew in each.
        """
        with jax.named_scope("embedding"):
            table_VD = self.embedding_VD[...].astype(self.dtype)
            x_BTD = look_up(table_VD, jnp.maximum(tokens_BT, 0))
        with jax.named_scope("layers"):
            if self.pipeline:
                kept = _KEPT[self.remat_policy]
                x_BTD = pipeline.run(
                    self.pipeline, self._run, kept, self.layers, x_BTD, segments_BT
                )
            else:
                x_BTD = self._run(self.layers, x_BTD, segments_BT)
        return jax.reshard(self.norm(x_BTD), X_BTD)

    def _run(self, layers: Any, x_BTD: jax.Array, segments_BT: Segments) -> jax.Array:
        """x through layers [L, ...], one after the other."""
        positions_T = jnp.arange(x_BTD.shape[1])
        angles = rotary_angles(positions_T, self.head_dim, self.rope_max_timescale)
        if segments_BT is not None:
            positions_BT = positions_T - starts(segments_BT)
            angles = tuple(part.at[positions_BT].get(out_sharding=X_BTD) for part in angles)

        def layer(x_BTD: jax.Array, block: Any) -> jax.Array:
            return block(x_BTD, angles, segments_BT)

        if self.remat_policy != "none":
            # A loop's backward pass is another loop. Only outside of one could the compiler find
            # that it has computed a layer before, and must be prevented, which costs copies. A
            # single layer is none: the compiler takes loops of one turn apart.
            policy, count = _SAVEABLE[self.remat_policy], len(jax.tree.leaves(layers)[0])
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=count == 1 or self.unroll > 1)

        def named(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return layer(checkpoint_name(x_BTD, _LAYER_INPUT), block), None

        return jax.lax.scan(named, x_BTD, layers, unroll=self.unroll)[0]

    def read(
        self, tokens_BT: jax.Array, caches: Sequence[Cache]
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """`hidden` of T more tokens of every row, behind those that the caches hold.

        Args:
          tokens_BT: token ids; padding reads as token 0.
          caches: one a layer.

        Returns:
          [B, T, D], and the caches with these tokens in them.
        """
        rows, tokens = tokens_BT.shape
        positions_BT = caches[0].positions_B[:, None] + jnp.arange(tokens)
        angles = rotary_angles(positions_BT, self.head_dim, self.rope_max_timescale)
        caches = jax.tree.map(lambda x: x, tuple(caches))  # of this pass, which changes them
        with jax.named_scope("embedding"):
            table_VD = self.embedding_VD[...].astype(self.dtype)
            x_BTD = look_up(table_VD, jnp.maximum(tokens_BT, 0))
        for block, cache in zip(self.one_by_one().layers, caches, strict=True):
            x_BTD = block(x_BTD, angles, None, cache)
            cache.positions_B += tokens
        return jax.reshard(self.norm(x_BTD), X_BTD), caches

    def one_by_one(self) -> "Decoder":
        """The model with a tuple of layers in place of the stack that `hidden` takes.

        To cut a layer's weights out of the stack is to copy them, which takes as long as to read
        a token with them: for many tokens, do it once.
        """
        if isinstance(self.layers, tuple):
            return self
        assert not self.pipeline, "a pipeline's layers lie on several stages"
        count = jax.tree.leaves(self.layers)[0].shape[0]
        copy = jax.tree.map(lambda x: x, self)
        copy.layers = tuple(
            jax.tree.map(lambda x_L: x_L[i], self.layers)  # noqa: B023
            for i in range(count)
        )
        return copy

    def head(self) -> jax.Array:
        """Output weights [D, V] in the arithmetic's dtype, sharded as HEAD_DV."""
        weight_DV = self.embedding_VD[...].T if self.tied else self.head_DV[...]
        return weight_DV.astype(self.dtype)

    def in_layer_order(self) -> "Decoder":
        """The model with its layers in the order in which a row meets them, as it is stored."""
        return self._reordered(pipeline.by_layers)

    def in_stage_order(self) -> "Decoder":
        """The inverse of `in_layer_order`: the model as a pipeline holds it."""
        return self._reordered(pipeline.by_stages)

    @property
    def is_circular(self) -> bool:
        """Whether the order of layers in the arrays is not their own."""
        return bool(self.pipeline) and self.pipeline.repeats > 1

    def _reordered(self, order: Callable[[jax.Array, int, int], jax.Array]) -> "Decoder":
        if not self.is_circular:
            return self
        S, R = pipeline.num_stages(), self.pipeline.repeats
        copy = jax.tree.map(lambda x: x, self)
        copy.layers = jax.tree.map(lambda x_L: order(x_L, S, R), self.layers)
        return copy

    def cast(self, apart: Iterable[str] = ()) -> "Decoder":
        """The model with the weights of its products in the arithmetic's dtype.

        Args:
          apart: axes over which the gradients of these weights stay apart (`sharding.of_weight`).
        """

        def to_dtype(x: jax.Array) -> jax.Array:
            return jax.reshard(x.astype(self.dtype), of_weight(jax.typeof(x).sharding.spec, apart))

        def cast(weight: nnx.Param) -> nnx.Param:
            return weight if isinstance(weight, Scale) else jax.tree.map(to_dtype, weight)

        return jax.tree.map(cast, self, is_leaf=lambda x: isinstance(x, nnx.Param))


def num_parameters(model: Decoder) -> int:
    """Weights of a concrete or abstract model."""
    return sum(x.size for x in jax.tree.leaves(model))
