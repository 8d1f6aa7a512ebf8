"""Attention of tokens that each see an interval, on GPUs: flash attention that reads nothing else.

A token sees from the start of its document, or of its window, to itself: one integer per token
replaces a [T, T] mask, and blocks outside of it are never read. Forward: FlashAttention-2 (Dao,
arXiv 2307.08691, algorithm 1); backward: weights made again from the log of their sum.

Shapes: B rows, T tokens, t queries of a row (all, or those of one device), H query heads, K
key/value heads, G query heads per key/value head (H = K * G), h head width; q and k in names of
blocks are tokens of queries and of keys.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxramp.model.parts.positions import query_blocks

_LOG2E = math.log2(math.e)
_BLOCK = 128  # what tokens are a multiple of; blocks are powers of two
_NEVER = -1e30  # the score of what is not seen; finite, so that no difference is NaN


def packed_attention(
    q_BtHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    first_Bt: jax.Array,
    at_Bt: jax.Array,
    scale: float,
    cap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k * scale) v over the tokens from `first` to `at` of each query (int32, both rise
    along a row): [B, t, H, h]. Scores are cap * tanh(score / cap) if there is a cap. `interpret`
    runs the kernels without a GPU, slowly."""
    _, t, _, h = q_BtHh.shape

    def pad(x: jax.Array) -> jax.Array:
        width = max(pl.next_power_of_2(h), 16) - h
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK), (0, 0), (0, width)))

    # Queries that are added see one token, whose gradients they do not change; keys, none sees.
    at = jnp.pad(at_Bt, ((0, 0), (0, -t % _BLOCK)), mode="edge")
    first = jnp.concatenate([first_Bt, at[:, t:]], 1)
    q, k, v = map(pad, (q_BtHh, k_BTKh, v_BTKh))
    return _attention(q, k, v, first, at, scale, cap, interpret)[:, :t, :, :h]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attention(q_BtHh, k_BTKh, v_BTKh, first_Bt, at_Bt, *static):
    return _forward(q_BtHh, k_BTKh, v_BTKh, first_Bt, at_Bt, *static)[0]


def _forward(q_BtHh, k_BTKh, v_BTKh, first_Bt, at_Bt, *static):
    B, t, H, h = q_BtHh.shape
    T, K = k_BTKh.shape[1:3]
    kept, *_ = blocks = _blocks(q_BtHh, backward=False)
    specs = [_tokens(kept, h), *[_row(T, h, H // K)] * 2, *[_line(t)] * 2]
    made = q_BtHh, jax.ShapeDtypeStruct((B, H, t), jnp.float32)
    call = _call(_forward_kernel, specs, made, blocks, *static)
    out_BtHh, lse_BHt = call(q_BtHh, k_BTKh, v_BTKh, first_Bt, at_Bt)
    return out_BtHh, (q_BtHh, k_BTKh, v_BTKh, first_Bt, at_Bt, out_BtHh, lse_BHt)


def _backward(scale, cap, interpret, residuals, dout_BtHh):
    q_BtHh, k_BTKh, v_BTKh, first_Bt, at_Bt, out_BtHh, lse_BHt = residuals
    _, t, H, h = q_BtHh.shape
    T, K = k_BTKh.shape[1:3]
    G, static = H // K, (scale, cap, interpret)
    kept, moving, _ = blocks = _blocks(q_BtHh, backward=True)
    delta_BHt = jnp.einsum(
        "BtHh,BtHh->BHt", out_BtHh, dout_BtHh, preferred_element_type=jnp.float32
    )
    own, sums = _tokens(kept, h), _sums(kept)
    specs = [own, *[_row(T, h, G)] * 2, *[_line(t)] * 2, own, sums, sums]
    call = _call(_dq_kernel, specs, (q_BtHh,), blocks, *static)
    (dq_BtHh,) = call(q_BtHh, k_BTKh, v_BTKh, first_Bt, at_Bt, dout_BtHh, lse_BHt, delta_BHt)
    group = pl.BlockSpec((None, t, G, h), lambda i, n, b: (b, 0, n, 0))
    sums = pl.BlockSpec((None, G, t), lambda i, n, b: (b, n, 0))
    specs = [group, own, own, *[_line(t)] * 2, *[_line(T // kept)] * 2, group, sums, sums]
    call = _call(_dkv_kernel, specs, (k_BTKh, v_BTKh), blocks, *static)
    lines = first_Bt, at_Bt, *query_blocks(first_Bt, at_Bt, moving, kept, T)
    dk_dv = call(q_BtHh, k_BTKh, v_BTKh, *lines, dout_BtHh, lse_BHt, delta_BHt)
    return dq_BtHh, *dk_dv, None, None


_attention.defvjp(_forward, _backward)


def _forward_kernel(
    q_ref, k_ref, v_ref, first_ref, at_ref, out_ref, lse_ref, *, scale, cap, kept, moving
):
    """A block of queries of one head: its outputs, and their weights' sums as logs to base 2."""
    q_qh, (first_q, at_q, keys) = q_ref[...], _sight(first_ref, at_ref, kept, moving)

    def add(j, carry):
        out_qh, top_q, sum_q = carry
        here = pl.ds(j * moving, moving)
        scores_qk, _ = _scores(triton.dot(q_qh, k_ref[here, :].T), scale, cap)
        at_k = j * moving + jnp.arange(moving)
        sees_qk = (at_k[None, :] <= at_q[:, None]) & (at_k[None, :] >= first_q[:, None])
        scores_qk = jnp.where(sees_qk, scores_qk, _NEVER)
        new_top_q = jnp.maximum(top_q, scores_qk.max(-1))
        weights_qk = jnp.exp2(scores_qk - new_top_q[:, None])
        shrink_q = jnp.exp2(top_q - new_top_q)
        v_kh = v_ref[here, :]
        out_qh = out_qh * shrink_q[:, None] + triton.dot(weights_qk.astype(v_kh.dtype), v_kh)
        return out_qh, new_top_q, sum_q * shrink_q + weights_qk.sum(-1)

    zeros_q = jnp.zeros(kept, jnp.float32)
    carry = jnp.zeros(q_qh.shape, jnp.float32), zeros_q + _NEVER, zeros_q
    out_qh, top_q, sum_q = jax.lax.fori_loop(*keys, add, carry)
    out_ref[...] = (out_qh / sum_q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top_q + jnp.log2(sum_q)


def _dq_kernel(
    q_ref, k_ref, v_ref, first_ref, at_ref, dout_ref, lse_ref, delta_ref, dq_ref,
    *, scale, cap, kept, moving
):  # fmt: skip
    """A block of queries of one head: their gradients."""
    q_qh, (first_q, at_q, keys) = q_ref[...], _sight(first_ref, at_ref, kept, moving)
    dout_qh, lse_q, delta_q = dout_ref[...], lse_ref[...], delta_ref[...]

    def add(j, dq_qh):
        here = pl.ds(j * moving, moving)
        k_kh = k_ref[here, :]
        scores_qk, slopes_qk = _scores(triton.dot(q_qh, k_kh.T), scale, cap)
        weights_qk = jnp.exp2(scores_qk - lse_q[:, None])
        at_k = j * moving + jnp.arange(moving)
        sees_qk = (at_k[None, :] <= at_q[:, None]) & (at_k[None, :] >= first_q[:, None])
        weights_qk = jnp.where(sees_qk, weights_qk, 0.0) * slopes_qk
        dscores_qk = weights_qk * (triton.dot(dout_qh, v_ref[here, :].T) - delta_q[:, None])
        return dq_qh + triton.dot(dscores_qk.astype(k_kh.dtype), k_kh)

    dq_qh = jax.lax.fori_loop(*keys, add, jnp.zeros(q_qh.shape, jnp.float32))
    dq_ref[...] = (dq_qh * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref, k_ref, v_ref, first_ref, at_ref, begin_ref, end_ref, dout_ref, lse_ref, delta_ref,
    dk_ref, dv_ref, *, scale, cap, kept, moving
):  # fmt: skip
    """A block of keys and values of one head: their gradients, from all heads that share it."""
    j, G = pl.program_id(0), q_ref.shape[1]
    k_kh, v_kh, at_k = k_ref[...], v_ref[...], j * kept + jnp.arange(kept)

    def add(turn, carry):
        dk_kh, dv_kh = carry
        g, i = jax.lax.rem(turn, G), begin + jax.lax.div(turn, G)
        here = pl.ds(i * moving, moving)
        q_qh, dout_qh = q_ref[here, g, :], dout_ref[here, g, :]
        lse_q, delta_q, first_q, at_q = (
            lse_ref[g, here],
            delta_ref[g, here],
            first_ref[here],
            at_ref[here],
        )
        scores_kq, slopes_kq = _scores(triton.dot(k_kh, q_qh.T), scale, cap)
        weights_kq = jnp.exp2(scores_kq - lse_q[None, :])
        sees_kq = (at_k[:, None] <= at_q[None, :]) & (at_k[:, None] >= first_q[None, :])
        weights_kq = jnp.where(sees_kq, weights_kq, 0.0)
        dv_kh += triton.dot(weights_kq.astype(dout_qh.dtype), dout_qh)
        dscores_kq = weights_kq * (triton.dot(v_kh, dout_qh.T) - delta_q[None, :]) * slopes_kq
        return dk_kh + triton.dot(dscores_kq.astype(q_qh.dtype), q_qh), dv_kh

    begin, zeros_kh = begin_ref[j], jnp.zeros(k_kh.shape, jnp.float32)
    turns = (end_ref[j] - begin) * G
    dk_kh, dv_kh = jax.lax.fori_loop(0, turns, add, (zeros_kh, zeros_kh))
    dk_ref[...] = (dk_kh * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_kh.astype(dv_ref.dtype)


def _sight(first_ref, at_ref, kept, moving):
    """What a program's queries see, from first to at, and the blocks of keys that hold it."""
    start = pl.program_id(0) * kept
    here, last = pl.ds(start, kept), at_ref[start + kept - 1]
    keys = jax.lax.div(first_ref[start], moving), jax.lax.div(last, moving) + 1
    return first_ref[here], at_ref[here], keys


def _scores(products, scale, cap):
    """Scores, to base 2, and how fast they rise with products * scale, to base e."""
    if not cap:
        return products * (scale * _LOG2E), 1.0
    tanh = jnp.tanh(products * (scale / cap))
    return tanh * (cap * _LOG2E), 1 - tanh * tanh


def _blocks(q_BtHh: jax.Array, backward: bool) -> tuple[int, int, int]:
    """Tokens of the block that a program keeps and of those it goes through, and its warps."""
    h = q_BtHh.shape[3]
    bytes_per_token = h * q_BtHh.dtype.itemsize
    kept = _BLOCK if bytes_per_token <= 256 else 64
    moving = 32 if backward or bytes_per_token > 256 else 64
    return kept, moving, 4 if h <= 64 else 8


def _tokens(block: int, h: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, block, None, h), lambda i, n, b: (b, i, n, 0))


def _sums(block: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, block), lambda i, n, b: (b, n, i))


def _row(T: int, h: int, heads: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, T, None, h), lambda i, n, b: (b, 0, jax.lax.div(n, heads), 0))


def _line(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, size), lambda i, n, b: (b, 0))


def _call(kernel, in_specs, made, blocks, scale, cap, interpret):
    """A program for each block of tokens and head of the first array that is `made`."""
    (kept, moving, warps), (B, T, heads, h) = blocks, made[0].shape
    return pl.pallas_call(
        functools.partial(kernel, scale=scale, cap=cap, kept=kept, moving=moving),
        grid=(T // kept, heads, B),
        in_specs=in_specs,
        out_specs=[_tokens(kept, h) if x.ndim == 4 else _sums(kept) for x in made],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )
