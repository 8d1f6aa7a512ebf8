"""Splash attention, JAX's kernel for TPUs, for whole rows or for some of their tokens.

Shapes: B rows, T keys of a row, t queries of it, H query heads, K key/value heads, h head width; q
and k blocks of queries and of keys.
"""

import jax
import jax.numpy as jnp

from maxramp.model.parts.positions import Positions, key_blocks, query_blocks

LANES = 128  # blocks are multiples of it
_LARGEST_BLOCK = 512
# Steps of a kernel's loops: each has an int16 and an int8 in a TPU's scalar memory of 1 MiB.
_MOST_STEPS = 2**18
CONTEXT = "context"  # what remat_policy=minimal_with_context keeps: a kernel's result and sums


def splash_attention(
    q_BtHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    positions: Positions,
    window: int = 0,
    cap: float = 0.0,
    sinks_H: jax.Array | None = None,
    index_Bt: jax.Array | None = None,
    run: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Returns softmax(q k) v for all tokens of rows in order, or for those at `index_Bt`: [B, t, H,
    h]; queries are scaled before. Indices rise along a row in runs of `run` consecutive tokens,
    from multiples of it on; T and `run` are multiples of LANES. `window`, `cap` and `sinks_H` are
    as in `AttentionMask`."""
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
    segments_BT, first = positions.segments_BT, positions.first_seen(T, window)
    if index_Bt is None:  # one mask of what any row sees, so that the kernel runs all rows at once
        index_Bt = jnp.arange(T, dtype=jnp.int32)
        first = first if first.ndim == 1 else first.min(0)

    def attend_row(q_tHh, k_TKh, v_TKh, first_T, index_t, segments_T):
        k_KTh, v_KTh = (x.swapaxes(0, 1) for x in (k_TKh, v_TKh))

        def attend_some(q_pHh: jax.Array, index_p: jax.Array) -> jax.Array:
            masks = _masks(first_T[index_p], index_p, window, T, queries, keys)
            segments = None
            if segments_T is not None:
                segments = splash.SegmentIds(segments_T[index_p], segments_T)
            kernel = _kernel(*masks, window, options)
            sinks = None if sinks_H is None else _cast_gradient(sinks_H)
            return kernel(q_pHh.swapaxes(0, 1), k_KTh, v_KTh, segments, sinks).swapaxes(0, 1)

        p = _most_queries(t, T, window, queries, keys)
        if p == t:
            return attend_some(q_tHh, index_t)
        parts = q_tHh.reshape(t // p, p, *q_tHh.shape[1:]), index_t.reshape(t // p, p)
        return jax.lax.map(lambda part: attend_some(*part), parts).reshape(t, H, -1)

    rows = q_BtHh, k_BTKh, v_BTKh, first, index_Bt, segments_BT
    axes = (0, 0, 0, *(None if x is None or x.ndim == 1 else 0 for x in rows[3:]))
    return jax.vmap(attend_row, axes)(*rows)


@jax.custom_vjp
def _cast_gradient(x: jax.Array) -> jax.Array:
    """Returns float32 x, whose gradient jax 0.10's kernel computes in the dtype of the queries."""
    return x


_cast_gradient.defvjp(lambda x: (x, None), lambda _, dx: (dx.astype(jnp.float32),))


def _most_steps(own: int, others: int, number: int, window: int) -> int:
    """Bounds how many of `number` blocks of others a block of consecutive tokens may meet."""
    if not window:
        return number
    near = -(-own // others) + -(-(window - 1) // others) + (own % others > 0)
    return min(number, near)


def _most_queries(t: int, T: int, window: int, queries: int, keys: int) -> int:
    """Returns how many of t queries the kernel takes at once, so that its masks fit."""
    steps = _most_steps(queries, keys, T // keys, window)
    n = t // queries
    return queries * next(m for m in range(n, 0, -1) if n % m == 0 and m * steps <= _MOST_STEPS)


def _masks(first_t, index_t, window, T, queries, keys):
    """Returns the MaskInfos of queries and of keys: which block each step of the kernel's loops
    reads, and whether it reads one, [1, q, steps] and [1, steps, k]."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    visible = first_t[None], index_t[None]

    def steps(own: int, others: int, number: int, begin_1n: jax.Array, end_1n: jax.Array):
        most = _most_steps(own, others, number, window)
        block = begin_1n[..., None] + jnp.arange(most, dtype=jnp.int32)
        end = end_1n[..., None]
        is_read = (block < end).astype(jnp.int8)
        return jnp.clip(block, 0, jnp.maximum(end - 1, 0)).astype(jnp.int16), is_read

    query_steps = steps(queries, keys, T // keys, *key_blocks(*visible, queries, keys))
    number = len(index_t) // queries
    key_steps = steps(keys, queries, number, *query_blocks(*visible, queries, keys, T))
    both = query_steps, (x.swapaxes(1, 2) for x in key_steps)
    return tuple(info.MaskInfo(block, None, is_read, None, index_t) for block, is_read in both)


def _kernel(query_mask, key_mask, window, options):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    def sees(index_q, index_k):
        is_before = index_k <= index_q
        return is_before & (index_k > index_q - window) if window else is_before

    return splash.SplashAttentionKernel(
        query_mask,
        query_mask,
        key_mask,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        mask_function=sees,
        **options,
    )


def _block(tokens: int) -> int:
    return next(n for n in range(_LARGEST_BLOCK, 0, -LANES) if tokens % n == 0)
