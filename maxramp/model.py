"""The decoder: Flax NNX modules used as plain pytrees.

A weight's shape, sharding and initial scale stand on one line. Layers are one module whose weights
have a leading axis L, made by vmap over keys and run by scan.

Shapes: B rows, T tokens, D model width, H query heads, K key/value heads, h head width, F MLP
width, V vocabulary, L layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxramp.attention import RESIDUALS, causal_attention, rotary_angles, rotate, select
from maxramp.config import Config
from maxramp.mesh import BATCH_AXES, platform

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
}
_REMAT = {
    "full": jax.checkpoint,
    "minimal": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(RESIDUALS),
        ),
    ),
    "none": lambda function: function,
}
Angles = tuple[jax.Array, jax.Array]
Segments = jax.Array | None
X_BTD = P(BATCH_AXES, None, None)  # sharding of the residual stream
X_BTF = P(BATCH_AXES, None, "tensor")
X_BTHh = P(BATCH_AXES, None, "tensor", None)


def _normal(key: jax.Array, shape: tuple[int, ...], spec: P, std: float, dtype: str) -> nnx.Param:
    """A weight of truncated normal values (at 2 sigma) with standard deviation `std`."""
    # 0.87962566 is the standard deviation of a unit normal truncated at +-2.
    x = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32, out_sharding=spec)
    return nnx.Param((x * (std / 0.87962566)).astype(dtype))


def _dense(x: jax.Array, subscripts: str, weight: nnx.Param, out_sharding: P) -> jax.Array:
    """An einsum with a weight, computed in x's dtype.

    Naming the result's sharding is what makes a product with an fsdp-sharded weight gather the
    weight and not the activations.
    """
    weight = weight[...].astype(x.dtype)
    if platform() != "cpu":
        return jnp.einsum(subscripts, x, weight, out_sharding=out_sharding)
    # Products of matrices, rows and tokens in one axis N, make a step on CPUs 1.2 to 1.3 times as
    # fast, and one on TPUs slower.
    B, T = x.shape[:2]
    spec = P(BATCH_AXES, *jax.typeof(x).sharding.spec[2:])
    x = jax.lax.reshape(x, (B * T, *x.shape[2:]), out_sharding=spec)
    merged = P(BATCH_AXES, *out_sharding[2:])
    x = jnp.einsum(subscripts.replace("BT", "N"), x, weight, out_sharding=merged)
    return jax.lax.reshape(x, (B, T, *x.shape[1:]), out_sharding=out_sharding)


@jax.custom_vjp
def _look_up(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """The tokens' vectors [B, T, D], with a gradient that is summed in float32.

    A frequent token's gradient is a sum over thousands of tokens. In bfloat16 it stops growing when
    a token adds less than 1/256 of it, and so would depend on how many tokens a pass has.
    """
    # Gathering from a table that is sharded both ways would make XLA copy it whole.
    table_VD = jax.reshard(table_VD, P("tensor", None))
    return table_VD.at[tokens_BT].get(out_sharding=X_BTD)


def _look_up_forward(table_VD, tokens_BT):
    return _look_up(table_VD, tokens_BT), (table_VD, tokens_BT)


def _look_up_backward(residuals, dx_BTD):
    table_VD, tokens_BT = residuals

    def local(dx_BTD, tokens_BT):
        """Every device adds up its own tokens, and their sums travel as those of the head do."""
        V, D = table_VD.shape[0] // jax.lax.axis_size("tensor"), table_VD.shape[1]
        index_BT = tokens_BT - jax.lax.axis_index("tensor") * V
        index_BT = jnp.where(index_BT < 0, V, index_BT)  # V: of another device, and dropped
        dtable_VD = jnp.zeros((V, D), jnp.float32)
        dtable_VD = dtable_VD.at[index_BT].add(dx_BTD.astype(jnp.float32), mode="drop")
        dtable_VD = jax.lax.psum_scatter(dtable_VD, "fsdp", scatter_dimension=1, tiled=True)
        dtable_VD = jax.lax.psum(dtable_VD, "data")
        # XLA for TPUs would take the scattering out of the loop over passes, and fails at it.
        return jax.lax.optimization_barrier(dtable_VD).astype(table_VD.dtype)

    dtable_VD = jax.shard_map(
        local,
        in_specs=(X_BTD, P(BATCH_AXES, None)),
        out_specs=P("tensor", "fsdp"),
        check_vma=False,
    )(jax.reshard(dx_BTD, X_BTD), jax.reshard(tokens_BT, P(BATCH_AXES, None)))
    return dtable_VD, None


_look_up.defvjp(_look_up_forward, _look_up_backward)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, config: Config):
        self.epsilon = config.normalization_layer_epsilon
        self.scale_D = nnx.Param(jnp.ones((config.base_emb_dim,), config.weight_dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalizes every token's vector; [B, T, D], dtype kept."""
        x = x_BTD.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return (x * self.scale_D[...].astype(jnp.float32)).astype(x_BTD.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, no biases."""

    def __init__(self, config: Config, key: jax.Array):
        D, h, dtype = config.base_emb_dim, config.head_dim, config.weight_dtype
        H, K = config.base_num_query_heads, config.base_num_kv_heads
        self.implementation = select(config, platform())
        q, k, v, o = jax.random.split(key, 4)
        self.query_DHh = _normal(q, (D, H, h), P("fsdp", "tensor", None), D**-0.5, dtype)
        self.key_DKh = _normal(k, (D, K, h), P("fsdp", "tensor", None), D**-0.5, dtype)
        self.value_DKh = _normal(v, (D, K, h), P("fsdp", "tensor", None), D**-0.5, dtype)
        self.out_HhD = _normal(o, (H, h, D), P("tensor", None, "fsdp"), (H * h) ** -0.5, dtype)

    def __call__(self, x_BTD: jax.Array, angles: Angles, segments_BT: Segments) -> jax.Array:
        """[B, T, D], the rotary angles of T positions and the segments -> [B, T, D]."""
        q_BTHh = rotate(_dense(x_BTD, "BTD,DHh->BTHh", self.query_DHh, X_BTHh), angles)
        k_BTKh = rotate(_dense(x_BTD, "BTD,DKh->BTKh", self.key_DKh, X_BTHh), angles)
        v_BTKh = _dense(x_BTD, "BTD,DKh->BTKh", self.value_DKh, X_BTHh)
        a_BTHh = causal_attention(q_BTHh, k_BTKh, v_BTKh, self.implementation, segments_BT)
        return _dense(a_BTHh, "BTHh,HhD->BTD", self.out_HhD, X_BTD)


class MLP(nnx.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202): out(f(gate(x)) * g(up(x)))."""

    def __init__(self, config: Config, key: jax.Array):
        D, F, dtype = config.base_emb_dim, config.base_mlp_dim, config.weight_dtype
        gate, up, out = jax.random.split(key, 3)
        self.activations = tuple(config.mlp_activations)
        self.gate_DF = _normal(gate, (D, F), P("fsdp", "tensor"), D**-0.5, dtype)
        self.up_DF = _normal(up, (D, F), P("fsdp", "tensor"), D**-0.5, dtype)
        self.out_FD = _normal(out, (F, D), P("tensor", "fsdp"), F**-0.5, dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        f, g = (_ACTIVATIONS[name] for name in self.activations)
        gate_BTF = f(_dense(x_BTD, "BTD,DF->BTF", self.gate_DF, X_BTF))
        up_BTF = g(_dense(x_BTD, "BTD,DF->BTF", self.up_DF, X_BTF))
        return _dense(gate_BTF * up_BTF, "BTF,FD->BTD", self.out_FD, X_BTD)


class Llama2Block(nnx.Module):
    """A pre-norm transformer layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: Config, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, attention_key)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, mlp_key)

    def __call__(self, x_BTD: jax.Array, angles: Angles, segments_BT: Segments) -> jax.Array:
        """[B, T, D], the rotary angles of T positions and the segments -> [B, T, D]."""
        with jax.named_scope("attention"):
            y_BTD = self.attention(self.attention_norm(x_BTD), angles, segments_BT)
            x_BTD = x_BTD + y_BTD
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD))


_BLOCKS = {"llama2": Llama2Block}


class Decoder(nnx.Module):
    """Token ids -> logits. Build it under `jax.set_mesh` (or an abstract mesh)."""

    def __init__(self, config: Config, key: jax.Array):
        V, D, L = config.vocab_size, config.base_emb_dim, config.base_num_decoder_layers
        embedding, head, layers = jax.random.split(key, 3)
        dtype, block = config.weight_dtype, _BLOCKS[config.decoder_block]
        # Static fields are compared at every call of a compiled step: a few, and small ones.
        self.dtype = config.dtype
        self.rope_max_timescale = config.rope_max_timescale
        self.remat_policy = config.remat_policy
        self.unroll = 1 if config.scan_layers else L
        self.embedding_VD = _normal(embedding, (V, D), P("tensor", "fsdp"), D**-0.5, dtype)
        self.layers = jax.vmap(lambda key: block(config, key))(jax.random.split(layers, L))
        self.norm = RMSNorm(config)
        self.tied = config.logits_via_embedding
        if not self.tied:
            self.head_DV = _normal(head, (D, V), P("fsdp", "tensor"), D**-0.5, dtype)

    def __call__(self, tokens_BT: jax.Array, segments_BT: Segments = None) -> jax.Array:
        """float32 logits [B, T, V] of the token after each one; padding reads as token 0."""
        return jnp.einsum(
            *("BTD,DV->BTV", self.hidden(tokens_BT, segments_BT), self.head()),
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
            x_BTD = _look_up(table_VD, jnp.maximum(tokens_BT, 0))
        head_dim = self.layers.attention.query_DHh.shape[-1]
        angles = rotary_angles(tokens_BT.shape[1], head_dim, self.rope_max_timescale)
        if segments_BT is not None:
            positions_BT = _positions(segments_BT)
            angles = tuple(part.at[positions_BT].get(out_sharding=X_BTD) for part in angles)

        def layer(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return block(x_BTD, angles, segments_BT), None

        layer = _REMAT[self.remat_policy](layer)
        with jax.named_scope("layers"):
            x_BTD, _ = jax.lax.scan(layer, x_BTD, self.layers, unroll=self.unroll)
        return self.norm(x_BTD)

    def head(self) -> jax.Array:
        """Output weights [D, V] in the arithmetic's dtype, sharded as P("fsdp", "tensor")."""
        if self.tied:
            weight_DV = jax.reshard(self.embedding_VD[...].T, P("fsdp", "tensor"))
        else:
            weight_DV = self.head_DV[...]
        return weight_DV.astype(self.dtype)

    def cast(self) -> "Decoder":
        """The model with the weights of its products in the arithmetic's dtype."""

        def cast(path: Any, weight: jax.Array) -> jax.Array:  # norms are computed in float32
            return weight if "scale_D" in str(path) else weight.astype(self.dtype)

        return jax.tree_util.tree_map_with_path(cast, self)


def _positions(segments_BT: jax.Array) -> jax.Array:
    """The place of every token in its segment, from 0."""
    index_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1]), segments_BT.shape)
    index_BT = jax.reshard(index_BT, P(BATCH_AXES, None))
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    return index_BT - jax.lax.cummax(jnp.where(is_first_BT, index_BT, 0), axis=1)


def num_parameters(model: Decoder) -> int:
    """Weights of a concrete or abstract model."""
    return sum(x.size for x in jax.tree.leaves(model))


def training_flops_per_token(config: Config) -> float:
    """Floating-point operations of a training step per token: the model's, without remat.

    6 per weight of a matrix product (2 forward, 4 backward), and for attention 2 products of 2 T h
    operations a head, three times, of which causality needs half (PaLM, arXiv 2204.02311, appendix
    B, with the causal half as MaxText counts it). The embedding's lookup is no product.
    """
    D, h, H, K = (
        config.base_emb_dim,
        config.head_dim,
        config.base_num_query_heads,
        config.base_num_kv_heads,
    )
    layer = D * h * (2 * H + 2 * K) + 3 * D * config.base_mlp_dim
    products = config.base_num_decoder_layers * layer + D * config.vocab_size
    attention = config.base_num_decoder_layers * H * h * config.max_target_length
    return 6.0 * products + 6.0 * attention
