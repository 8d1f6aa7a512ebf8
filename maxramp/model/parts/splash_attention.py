"""Splash attention, the kernel for TPUs that JAX ships: of whole rows, or of some of their tokens.

Shapes: B rows, T keys of a row, t queries of it, H query heads, K key/value heads, h head width; q
and k blocks of queries and of keys.
"""

import jax
import jax.numpy as jnp

from maxramp.model.parts.positions import Positions
from maxramp.model.parts.sight import key_blocks, query_blocks

LANES = 128  # what a block is a multiple of
_LARGEST_BLOCK = 512
CONTEXT = "context"  # what remat_policy=minimal_with_context keeps: a kernel's result and sums


def splash_attention(
    q_BtHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    positions: Positions,
    window: int = 0,
    cap: float = 0.0,
    places_Bt: jax.Array | None = None,
    run: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k) v of all tokens of rows in order, or of those at places that rise along a row in
    runs of `run` consecutive tokens, from multiples of it on: [B, t, H, h]."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # only where it is used

    (t, H), T = q_BtHh.shape[1:3], k_BTKh.shape[1]
    queries, keys = _block(run or t), _block(T)
    sizes = {f"block_{name}": queries for name in ("q", "q_dkv", "q_dq")}
    for name in ("kv", "kv_compute", "kv_dkv", "kv_dkv_compute", "kv_dq"):
        sizes[f"block_{name}"] = keys
    options = {
        "block_sizes": splash.BlockSizes(**sizes),
        "residual_checkpoint_name": CONTEXT,
        "attn_logits_soft_cap": cap or None,
        "interpret": interpret,
    }
    segments_BT, segments, masks = positions.segments_BT, None, None
    own_Bt = segments_BT
    if places_Bt is None:
        mask = splash.CausalMask((T, T))
        if window:
            mask = splash.LocalMask((T, T), (window - 1, 0), 0)
        heads = splash.MultiHeadMask([mask] * H)
        whole = splash.make_splash_mha(heads, head_shards=1, q_seq_shards=1, **options)
    else:
        masks = _masks(positions, window, places_Bt, T, queries, keys)
        if segments_BT is not None:
            own_Bt = jnp.take_along_axis(segments_BT, places_Bt, 1)
    if segments_BT is not None:
        segments = splash.SegmentIds(own_Bt, segments_BT)

    def attend_row(q_tHh, k_TKh, v_TKh, segments, masks):
        kernel = _kernel(*masks, window, options) if masks else whole
        q_HTh, k_KTh, v_KTh = (x.swapaxes(0, 1) for x in (q_tHh, k_TKh, v_TKh))
        return kernel(q_HTh, k_KTh, v_KTh, segment_ids=segments).swapaxes(0, 1)

    return jax.vmap(attend_row)(q_BtHh, k_BTKh, v_BTKh, segments, masks)


def _masks(positions, window, places_Bt, T, queries, keys):
    """Of every row the MaskInfos of queries and of keys: the number of the block that each turn of
    the kernel's loops reads, and whether there is one, [1, q, turns] and [1, turns, k]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    B, t = places_Bt.shape
    first_BT = jnp.broadcast_to(positions.first_seen(T, window), (B, T))
    seen = jnp.take_along_axis(first_BT, places_Bt, 1), places_Bt

    def turns(own: int, others: int, number: int, begin: jax.Array, end: jax.Array):
        """With a window, a block of consecutive tokens meets few others. The integers are small
        because they lie in a TPU's scalar memory: 1 MiB, which rows of 1,048,576 tokens fill."""
        near = pl.cdiv(own, others) + pl.cdiv(window - 1, others) + (own % others > 0)
        most = min(number, near) if window else number
        at = begin[..., None] + jnp.arange(most, dtype=jnp.int32)
        there = (at < end[..., None]).astype(jnp.int8)
        return jnp.clip(at, 0, jnp.maximum(end - 1, 0)[..., None]).astype(jnp.int16), there

    def mask_info(block: jax.Array, there: jax.Array):
        return info.MaskInfo(block, None, there, None, places_Bt)

    of_queries = turns(queries, keys, T // keys, *key_blocks(*seen, queries, keys))
    of_keys = turns(keys, queries, t // queries, *query_blocks(*seen, queries, keys, T))
    return (
        mask_info(*(x[:, None] for x in of_queries)),
        mask_info(*(x.swapaxes(1, 2)[:, None] for x in of_keys)),
    )


def _kernel(of_queries, of_keys, window, options):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    def sees(at_q, at_k):
        return (at_k <= at_q) & (at_k > at_q - window) if window else at_k <= at_q

    return splash.SplashAttentionKernel(
        of_queries,
        of_queries,
        of_keys,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        mask_function=sees,
        **options,
    )


def _block(tokens: int) -> int:
    return next(n for n in range(_LARGEST_BLOCK, 0, -LANES) if tokens % n == 0)
