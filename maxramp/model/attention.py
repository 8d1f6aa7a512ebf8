"""Causal grouped-query attention with rotary positions, by whatever the hardware does best.

Shapes: B rows, T tokens, S tokens attended to (= T), H query heads, K key/value heads, G query
heads per key/value head (H = K * G), h head width.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.model.keys import ModelKeys
from maxramp.parallel.sharding import TOKENS_BT, X_BTHh, X_BTKGh

_LANES = 128  # what a splash block is a multiple of
_LARGEST_BLOCK = 512
CONTEXT = "context"  # what remat_policy=minimal_with_context keeps: a kernel's result and sums


def select(keys: ModelKeys, platform: str | None) -> str:
    """What computes the attention: `attention`, or under autoselected the best that can.

    Args:
      config: a resolved keys.
      platform: of the devices, "cpu", "gpu", "cuda", "rocm" or "tpu"; None where it is not known.

    Raises:
      ConfigError: the implementation that was asked for cannot work here.
    """
    obstacles = {
        "dot_product": None,
        "cudnn_flash": _cudnn_obstacle(keys, platform),
        "splash": _splash_obstacle(keys, platform),
    }
    if keys.attention == "autoselected":
        return next(
            name for name in ("cudnn_flash", "splash", "dot_product") if not obstacles[name]
        )
    if obstacle := obstacles[keys.attention]:
        raise ConfigError(
            f"attention={keys.attention} {obstacle}; use attention=autoselected or dot_product"
        )
    return keys.attention


def _cudnn_obstacle(keys: ModelKeys, platform: str | None) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"needs NVIDIA GPUs, not {platform or 'unknown'} devices"
    if keys.dtype != "bfloat16":
        return f"needs dtype=bfloat16, not {keys.dtype}"
    if keys.head_dim % 8 or keys.head_dim > 256:
        return f"needs a head_dim that is a multiple of 8 up to 256, not {keys.head_dim}"
    return None


def _splash_obstacle(keys: ModelKeys, platform: str | None) -> str | None:
    if platform != "tpu":
        return f"needs TPUs, not {platform or 'unknown'} devices"
    if keys.max_target_length % _LANES:
        return f"needs a max_target_length that is a multiple of {_LANES}, not " + str(
            keys.max_target_length
        )
    return None


def for_length(implementation: str, length: int) -> str:
    """What computes the attention among so many tokens, where others than a row's are wanted."""
    return implementation if length % _LANES == 0 else "dot_product"


def cost_of_packing(implementation: str) -> str | None:
    """A line for the log on what packed rows cost an implementation; None if nothing."""
    if implementation != "cudnn_flash" or _has_packed_kernel():
        return None
    return (
        "packed rows take cuDNN a mask of T x T a row: this version of jax has no Pallas for "
        "Triton; use jax 0.10.2 to 0.12, or separate_documents=False"
    )


def _has_packed_kernel() -> bool:
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def rotary_angles(
    positions_T: jax.Array, head_dim: int, max_timescale: float
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angle of every position and pair: two arrays [T, h/2] in float32.

    Positions [B, T], each row's own, give [B, T, h/2]. Pair i turns by
    position / max_timescale^(2i/h) (Su et al., arXiv 2104.09864).
    """
    fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle = positions_T.astype(jnp.float32)[..., None] / max_timescale**fraction
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHh: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (x_i, x_{i + h/2}) of every head by the angles of their position.

    Args:
      x_BTHh: queries or keys.
      angles: cosine and sine, [T, h/2], or [B, T, h/2] where rows have positions of their own.
    """
    cos_T1h, sin_T1h = (part[..., None, :] for part in angles)
    first, second = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHh.dtype)


def causal_attention(
    q_BTHh: jax.Array,
    k_BSKh: jax.Array,
    v_BSKh: jax.Array,
    implementation: str = "dot_product",
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k / sqrt(h)) v over the tokens up to each token's own, of its own segment.

    Scores and softmax are float32 whatever the inputs are.

    Args:
      q_BTHh: queries, sharded as X_BTHh like keys and values.
      k_BSKh: keys.
      v_BSKh: values.
      implementation: from `select`; "splash_interpreted" runs splash where there is no TPU.
      segments_BT: integers; tokens of different segments do not see each other.

    Returns:
      [B, T, H, h], of the dtype of the inputs.
    """
    arrays, specs = (q_BTHh, k_BSKh, v_BSKh), (X_BTHh,) * 3
    if segments_BT is not None:
        arrays, specs = (*arrays, segments_BT), (*specs, TOKENS_BT)
    if implementation == "dot_product":
        return _dot_product(*arrays)
    # A kernel sees the rows and heads of one device; attention needs no others.
    return jax.shard_map(
        _KERNELS[implementation], in_specs=specs, out_specs=X_BTHh, check_vma=False
    )(*map(jax.reshard, arrays, specs))


def _dot_product(q_BTHh, k_BSKh, v_BSKh, segments_BT=None):
    """Plain products and a softmax: what the others are compared with."""
    B, T, H, h = q_BTHh.shape
    K = k_BSKh.shape[2]
    q_BTKGh = jax.lax.reshape(q_BTHh, (B, T, K, H // K, h), out_sharding=X_BTKGh)
    scores_BKGTS = jnp.einsum(
        "BTKGh,BSKh->BKGTS", q_BTKGh * h**-0.5, k_BSKh, preferred_element_type=jnp.float32
    )
    mask_TS = jnp.tril(jnp.ones((T, T), bool))
    if segments_BT is not None:
        mask_TS = mask_TS & _same_segment(segments_BT)[:, None, None]
    scores_BKGTS = jnp.where(mask_TS, scores_BKGTS, jnp.finfo(jnp.float32).min)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKh.dtype)
    out_BTKGh = jnp.einsum("BKGTS,BSKh->BTKGh", weights_BKGTS, v_BSKh)
    return jax.lax.reshape(out_BTKGh, (B, T, H, h), out_sharding=X_BTHh)


def _gpu_flash(q_BTHh, k_BSKh, v_BSKh, segments_BT=None, interpret=False):
    """cuDNN's flash attention, or our own for packed rows, which cost cuDNN a dense mask."""
    if segments_BT is not None and _has_packed_kernel():
        from maxramp.model.packed_attention import packed_attention  # only where it is used

        return packed_attention(q_BTHh, k_BSKh, v_BSKh, starts(segments_BT), interpret)
    mask = None if segments_BT is None else _same_segment(segments_BT)[:, None]
    return jax.nn.dot_product_attention(
        q_BTHh, k_BSKh, v_BSKh, mask=mask, is_causal=True, implementation="cudnn"
    )


def _splash(q_BTHh, k_BSKh, v_BSKh, segments_BT=None, interpret=False):
    """The splash attention kernel of TPUs, which skips the blocks above the diagonal."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # only where it is used

    _, T, H, h = q_BTHh.shape
    block = next(n for n in range(_LARGEST_BLOCK, 0, -_LANES) if T % n == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((T, T))] * H),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        residual_checkpoint_name=CONTEXT,
        interpret=interpret,
    )

    def row(q_THh, k_SKh, v_SKh, segments_T=None):
        segments = None if segments_T is None else splash.SegmentIds(segments_T, segments_T)
        q_HTh, k_KSh, v_KSh = (x.swapaxes(0, 1) for x in (q_THh * h**-0.5, k_SKh, v_SKh))
        return kernel(q_HTh, k_KSh, v_KSh, segment_ids=segments).swapaxes(0, 1)

    rows = (q_BTHh, k_BSKh, v_BSKh) + (() if segments_BT is None else (segments_BT,))
    return jax.vmap(row)(*rows)


def starts(segments_BT: jax.Array) -> jax.Array:
    """The place in the row, int32, where every token's segment starts; segments rise along it."""
    index_T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    return jax.lax.cummax(jnp.where(is_first_BT, index_T, 0), axis=1)


def _same_segment(segments_BT: jax.Array) -> jax.Array:
    return segments_BT[:, :, None] == segments_BT[:, None, :]  # [B, T, S]


_KERNELS = {
    "cudnn_flash": _gpu_flash,
    "packed_interpreted": functools.partial(_gpu_flash, interpret=True),
    "splash": _splash,
    "splash_interpreted": functools.partial(_splash, interpret=True),
}
