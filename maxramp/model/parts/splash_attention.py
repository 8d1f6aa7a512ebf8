"""Splash attention, the kernel for TPUs that JAX ships: of whole rows, or of some of their tokens.

Shapes: B rows, T keys of a row, t queries of it, H query heads, K key/value heads, h head width; q
and k blocks of queries and of keys.
"""

import jax
import jax.numpy as jnp

from maxramp.model.parts.positions import Positions, key_blocks, query_blocks

LANES = 128  # what a block is a multiple of
_LARGEST_BLOCK = 512
# Of a kernel's loops at once: each has an int16 and an int8 in a TPU's scalar memory of 1 MiB.
_MOST_TURNS = 2**18
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
    segments_BT, first = positions.segments_BT, positions.first_seen(T, window)
    if places_Bt is None:  # rows share masks of what any sees, and the kernel takes them together
        places_Bt = jnp.arange(T, dtype=jnp.int32)
        first = first if first.ndim == 1 else first.min(0)

    def attend_row(q_tHh, k_TKh, v_TKh, first_T, places_t, segments_T):
        k_KTh, v_KTh = (x.swapaxes(0, 1) for x in (k_TKh, v_TKh))

        def attend_some(q_pHh: jax.Array, places_p: jax.Array) -> jax.Array:
            masks = _masks(first_T[places_p], places_p, window, T, queries, keys)
            segments = None
            if segments_T is not None:
                segments = splash.SegmentIds(segments_T[places_p], segments_T)
            kernel = _kernel(*masks, window, options)
            return kernel(q_pHh.swapaxes(0, 1), k_KTh, v_KTh, segment_ids=segments).swapaxes(0, 1)

        p = _most_queries(t, T, window, queries, keys)
        if p == t:
            return attend_some(q_tHh, places_t)
        parts = q_tHh.reshape(t // p, p, *q_tHh.shape[1:]), places_t.reshape(t // p, p)
        return jax.lax.map(lambda part: attend_some(*part), parts).reshape(t, H, -1)

    rows = q_BtHh, k_BTKh, v_BTKh, first, places_Bt, segments_BT
    axes = (0, 0, 0, *(None if x is None or x.ndim == 1 else 0 for x in rows[3:]))
    return jax.vmap(attend_row, axes)(*rows)


def _turns(own: int, others: int, number: int, window: int) -> int:
    """How many of `number` blocks of others a block of consecutive tokens may meet."""
    if not window:
        return number
    near = -(-own // others) + -(-(window - 1) // others) + (own % others > 0)
    return min(number, near)


def _most_queries(t: int, T: int, window: int, queries: int, keys: int) -> int:
    """How many of t queries the kernel takes at once, so that its masks fit."""
    turns = _turns(queries, keys, T // keys, window)
    n = t // queries
    return queries * next(m for m in range(n, 0, -1) if n % m == 0 and m * turns <= _MOST_TURNS)


def _masks(first_t, places_t, window, T, queries, keys):
    """The MaskInfos of queries and of keys: the number of the block that each turn of the kernel's
    loops reads, and whether there is one, [1, q, turns] and [1, turns, k]."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    seen = first_t[None], places_t[None]

    def turns(own: int, others: int, number: int, begin_1n: jax.Array, end_1n: jax.Array):
        most = _turns(own, others, number, window)
        at = begin_1n[..., None] + jnp.arange(most, dtype=jnp.int32)
        end = end_1n[..., None]
        there = (at < end).astype(jnp.int8)
        return jnp.clip(at, 0, jnp.maximum(end - 1, 0)).astype(jnp.int16), there

    of_queries = turns(queries, keys, T // keys, *key_blocks(*seen, queries, keys))
    number = len(places_t) // queries
    of_keys = turns(keys, queries, number, *query_blocks(*seen, queries, keys, T))
    both = of_queries, (x.swapaxes(1, 2) for x in of_keys)
    return tuple(info.MaskInfo(block, None, there, None, places_t) for block, there in both)


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
