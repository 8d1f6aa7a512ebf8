"""Attention over packed rows on GPUs: flash attention that reads only a token's own document.

A token sees an interval, from the start of its document to itself: one integer per token replaces a
[T, T] mask, and blocks outside of it are never read. Forward: FlashAttention-2 (Dao, arXiv
2307.08691, algorithm 1); backward: weights made again from the log of their sum.

Shapes: B rows, T tokens, H query heads, K key/value heads, G query heads per key/value head (H = K
* G), h head width; q and k in names of blocks are tokens of queries and of keys.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_NEVER = -1e30  # the score of what is not seen; finite, so that no difference is NaN


def packed_attention(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    start_BT: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(h)) v over the tokens from `start` of each token (int32, rises along a
    row) to itself. `interpret` runs the kernels without a GPU, slowly."""
    _, T, _, h = q_BTHh.shape
    # Blocks are powers of two. What is added sees only itself, and is seen by no other.
    block = min(128, pl.next_power_of_2(max(T, 16)))
    tokens, width = (0, -T % block), (0, max(pl.next_power_of_2(h), 16) - h)
    q, k, v = (jnp.pad(x, ((0, 0), tokens, (0, 0), width)) for x in (q_BTHh, k_BTKh, v_BTKh))
    start = jnp.concatenate(
        [start_BT, jnp.broadcast_to(jnp.arange(T, T + tokens[1]), (len(start_BT), tokens[1]))], 1
    )
    return _attention(q, k, v, start, h**-0.5, interpret)[:, :T, :, :h]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q_BTHh, k_BTKh, v_BTKh, start_BT, scale, interpret):
    return _forward(q_BTHh, k_BTKh, v_BTKh, start_BT, scale, interpret)[0]


def _forward(q_BTHh, k_BTKh, v_BTKh, start_BT, scale, interpret):
    B, T, H, h = q_BTHh.shape
    heads = H // k_BTKh.shape[2]
    kept, *_ = blocks = _blocks(q_BTHh, backward=False)
    specs = [_tokens(kept, h), *[_row(T, h, heads)] * 2, _starts(T)]
    made = q_BTHh, jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    call = _call(_forward_kernel, specs, made, scale, blocks, interpret)
    out_BTHh, lse_BHT = call(q_BTHh, k_BTKh, v_BTKh, start_BT)
    return out_BTHh, (q_BTHh, k_BTKh, v_BTKh, start_BT, out_BTHh, lse_BHT)


def _backward(scale, interpret, residuals, dout_BTHh):
    q_BTHh, k_BTKh, v_BTKh, start_BT, out_BTHh, lse_BHT = residuals
    B, T, H, h = q_BTHh.shape
    K = k_BTKh.shape[2]
    G = H // K
    kept, *_ = blocks = _blocks(q_BTHh, backward=True)
    delta_BHT = jnp.einsum(
        "BTHh,BTHh->BHT", out_BTHh, dout_BTHh, preferred_element_type=jnp.float32
    )
    own, sums = _tokens(kept, h), _sums(kept)
    specs = [own, *[_row(T, h, G)] * 2, _starts(T), own, sums, sums]
    call = _call(_dq_kernel, specs, (q_BTHh,), scale, blocks, interpret)
    (dq_BTHh,) = call(q_BTHh, k_BTKh, v_BTKh, start_BT, dout_BTHh, lse_BHT, delta_BHT)
    # Where the documents end that a block of keys has a part of: starts rise, so it is the number
    # of tokens whose document starts before the end of the block.
    past_k = jnp.arange(kept, T + 1, kept)
    end_Bk = (start_BT[:, None] < past_k[:, None]).sum(-1, dtype=jnp.int32)
    group = pl.BlockSpec((None, T, G, h), lambda i, n, b: (b, 0, n, 0))
    sums = pl.BlockSpec((None, G, T), lambda i, n, b: (b, n, 0))
    specs = [group, own, own, _starts(T), _starts(T // kept), group, sums, sums]
    call = _call(_dkv_kernel, specs, (k_BTKh, v_BTKh), scale, blocks, interpret)
    found = call(q_BTHh, k_BTKh, v_BTKh, start_BT, end_Bk, dout_BTHh, lse_BHT, delta_BHT)
    return dq_BTHh, *found, None


_attention.defvjp(_forward, _backward)


def _forward_kernel(q_ref, k_ref, v_ref, start_ref, out_ref, lse_ref, *, scale, kept, moving):
    """A block of queries of one head: its outputs, and their weights' sums as logs to base 2."""
    i = pl.program_id(0)
    q_qh, at_q = q_ref[...], i * kept + jnp.arange(kept)
    start_q = start_ref[pl.ds(i * kept, kept)]

    def add(j, carry):
        out_qh, top_q, sum_q = carry
        here = pl.ds(j * moving, moving)
        scores_qk = triton.dot(q_qh, k_ref[here, :].T) * (scale * math.log2(math.e))
        scores_qk = jnp.where(_sees(at_q, start_q, j, moving), scores_qk, _NEVER)
        new_top_q = jnp.maximum(top_q, scores_qk.max(-1))
        weights_qk = jnp.exp2(scores_qk - new_top_q[:, None])
        shrink_q = jnp.exp2(top_q - new_top_q)
        v_kh = v_ref[here, :]
        out_qh = out_qh * shrink_q[:, None] + triton.dot(weights_qk.astype(v_kh.dtype), v_kh)
        return out_qh, new_top_q, sum_q * shrink_q + weights_qk.sum(-1)

    zeros_q = jnp.zeros(kept, jnp.float32)
    carry = jnp.zeros(q_qh.shape, jnp.float32), zeros_q + _NEVER, zeros_q
    out_qh, top_q, sum_q = jax.lax.fori_loop(*_keys(start_ref, i, kept, moving), add, carry)
    out_ref[...] = (out_qh / sum_q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top_q + jnp.log2(sum_q)


def _dq_kernel(
    q_ref, k_ref, v_ref, start_ref, dout_ref, lse_ref, delta_ref, dq_ref, *, scale, kept, moving
):
    """A block of queries of one head: their gradients."""
    i = pl.program_id(0)
    q_qh, dout_qh, at_q = q_ref[...], dout_ref[...], i * kept + jnp.arange(kept)
    start_q, lse_q, delta_q = start_ref[pl.ds(i * kept, kept)], lse_ref[...], delta_ref[...]

    def add(j, dq_qh):
        here = pl.ds(j * moving, moving)
        k_kh = k_ref[here, :]
        scores_qk = triton.dot(q_qh, k_kh.T) * (scale * math.log2(math.e))
        weights_qk = jnp.exp2(scores_qk - lse_q[:, None])
        weights_qk = jnp.where(_sees(at_q, start_q, j, moving), weights_qk, 0.0)
        dscores_qk = weights_qk * (triton.dot(dout_qh, v_ref[here, :].T) - delta_q[:, None])
        return dq_qh + triton.dot(dscores_qk.astype(k_kh.dtype), k_kh)

    zeros_qh = jnp.zeros(q_qh.shape, jnp.float32)
    dq_qh = jax.lax.fori_loop(*_keys(start_ref, i, kept, moving), add, zeros_qh)
    dq_ref[...] = (dq_qh * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref, k_ref, v_ref, start_ref, end_ref, dout_ref, lse_ref, delta_ref, dk_ref, dv_ref,
    *, scale, kept, moving
):  # fmt: skip
    """A block of keys and values of one head: their gradients, from all heads that share it."""
    j, G = pl.program_id(0), q_ref.shape[1]
    k_kh, v_kh, at_k = k_ref[...], v_ref[...], j * kept + jnp.arange(kept)

    def add(turn, carry):
        dk_kh, dv_kh = carry
        g, i = jax.lax.rem(turn, G), first + jax.lax.div(turn, G)
        here = pl.ds(i * moving, moving)
        q_qh, dout_qh = q_ref[here, g, :], dout_ref[here, g, :]
        lse_q, delta_q, start_q = lse_ref[g, here], delta_ref[g, here], start_ref[here]
        at_q = i * moving + jnp.arange(moving)
        scores_kq = triton.dot(k_kh, q_qh.T) * (scale * math.log2(math.e))
        weights_kq = jnp.exp2(scores_kq - lse_q[None, :])
        sees_kq = (at_k[:, None] <= at_q[None, :]) & (at_k[:, None] >= start_q[None, :])
        weights_kq = jnp.where(sees_kq, weights_kq, 0.0)
        dv_kh += triton.dot(weights_kq.astype(dout_qh.dtype), dout_qh)
        dscores_kq = weights_kq * (triton.dot(v_kh, dout_qh.T) - delta_q[None, :])
        return dk_kh + triton.dot(dscores_kq.astype(q_qh.dtype), q_qh), dv_kh

    first, end = jax.lax.div(j * kept, moving), jax.lax.div(end_ref[j] + moving - 1, moving)
    zeros_kh = jnp.zeros(k_kh.shape, jnp.float32)
    dk_kh, dv_kh = jax.lax.fori_loop(0, (end - first) * G, add, (zeros_kh, zeros_kh))
    dk_ref[...] = (dk_kh * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_kh.astype(dv_ref.dtype)


def _keys(start_ref, i, kept, moving):
    """The blocks of keys that block i of queries sees: from the first token's start on."""
    return jax.lax.div(start_ref[i * kept], moving), pl.cdiv((i + 1) * kept, moving)


def _sees(at_q, start_q, j, moving):
    at_k = j * moving + jnp.arange(moving)
    return (at_k[None, :] <= at_q[:, None]) & (at_k[None, :] >= start_q[:, None])


def _blocks(q_BTHh: jax.Array, backward: bool) -> tuple[int, int, int]:
    """Tokens of the block that a program keeps and of those it goes through, and its warps."""
    T, h = q_BTHh.shape[1], q_BTHh.shape[3]
    bytes_per_token = h * q_BTHh.dtype.itemsize
    kept = 128 if bytes_per_token <= 256 else 64
    moving = 32 if backward or bytes_per_token > 256 else 64
    return min(kept, T), min(moving, T), 4 if h <= 64 else 8


def _tokens(block: int, h: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, block, None, h), lambda i, n, b: (b, i, n, 0))


def _sums(block: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, block), lambda i, n, b: (b, n, i))


def _row(T: int, h: int, heads: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, T, None, h), lambda i, n, b: (b, 0, jax.lax.div(n, heads), 0))


def _starts(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, size), lambda i, n, b: (b, 0))


def _call(kernel, in_specs, made, scale, blocks, interpret):
    """A program for each block of tokens and head of the first array that is `made`."""
    (kept, moving, warps), (B, T, heads, h) = blocks, made[0].shape
    return pl.pallas_call(
        functools.partial(kernel, scale=scale, kept=kept, moving=moving),
        grid=(T // kept, heads, B),
        in_specs=in_specs,
        out_specs=[_tokens(kept, h) if x.ndim == 4 else _sums(kept) for x in made],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )
