"""Flash attention for GPUs in which each token sees an interval, and no other keys are read.

A token sees from the start of its document, or of its window, to itself: one integer per token
replaces a [T, T] mask, and blocks outside of it are never read. Forward: FlashAttention-2 (Dao,
arXiv 2307.08691, algorithm 1); backward: weights recomputed from the log of their sum.

Shapes: B rows, T tokens, t queries of a row (all, or those of one device), H query heads, K
key/value heads, G query heads per key/value head (H = K * G), h width of a head's query and key, v
of its value; q and k in names of blocks are tokens of queries and of keys.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxramp.model.parts.positions import query_blocks

_LOG2E = math.log2(math.e)
_BLOCK = 128  # tokens are padded to a multiple of it; blocks are powers of two
_MASKED = -1e30  # the score of an invisible key; finite, so that no difference is NaN


def packed_attention(
    q_BtHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKv: jax.Array,
    first_Bt: jax.Array,
    last_Bt: jax.Array,
    scale: float,
    cap: float = 0.0,
    sinks_H: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns softmax(q k * scale) v over the tokens from `first` to `last` of each query, at least
    one (int32, both rise along a row): [B, t, H, v]. Scores are cap * tanh(score / cap) if there is
    a cap; the softmax has the head's sink as one more score if there are sinks, float32.
    `interpret` runs the kernels without a GPU, slowly."""
    t, width = q_BtHh.shape[1], v_BTKv.shape[-1]

    def pad(x: jax.Array, width: int) -> jax.Array:
        more = width - x.shape[-1]
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK), (0, 0), (0, more)))

    # Padded queries see one token and do not change its gradients; no query sees padded keys.
    last = jnp.pad(last_Bt, ((0, 0), (0, -t % _BLOCK)), mode="edge")
    first = jnp.concatenate([first_Bt, last[:, t:]], 1)
    q, k = (pad(x, sum(_part_widths(x.shape[-1]))) for x in (q_BtHh, k_BTKh))
    v = pad(v_BTKv, max(pl.next_power_of_2(width), 16))
    return _attention(q, k, v, sinks_H, first, last, scale, cap, interpret)[:, :t, :, :width]


def _part_widths(width: int) -> tuple[int, ...]:
    """Returns one or two powers of two, 16 at least, the fewest numbers that hold a head's: arrays
    in a kernel have no other sizes."""
    whole = max(pl.next_power_of_2(width), 16)
    more = max(pl.next_power_of_2(width - whole // 2), 16)
    return (whole,) if more >= whole // 2 else (whole // 2, more)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attention(q_BtHh, k_BTKh, v_BTKv, sinks_H, first_Bt, last_Bt, *static):
    return _forward(q_BtHh, k_BTKh, v_BTKv, sinks_H, first_Bt, last_Bt, *static)[0]


def _forward(q_BtHh, k_BTKh, v_BTKv, sinks_H, first_Bt, last_Bt, *static):
    (B, t, H, h), v = q_BtHh.shape, v_BTKv.shape[-1]
    T, K = k_BTKh.shape[1:3]
    kept, *_ = blocks = _blocks(q_BtHh, backward=False)
    specs = [_tokens(kept, h), *(_row(T, x, H // K) for x in (h, v)), *[_line(t)] * 2]
    # Scores are to base 2; a sink that weighs nothing stands for none.
    sinks_1H = jnp.full((1, H), 2 * _MASKED) if sinks_H is None else sinks_H[None] * _LOG2E
    specs.append(pl.BlockSpec((None, 1), lambda i, n, b: (0, n)))
    out_BtHv = jax.ShapeDtypeStruct((B, t, H, v), q_BtHh.dtype)
    outputs = out_BtHv, jax.ShapeDtypeStruct((B, H, t), jnp.float32)
    call = _call(_forward_kernel, specs, outputs, blocks, *static)
    out_BtHv, lse_BHt = call(q_BtHh, k_BTKh, v_BTKv, first_Bt, last_Bt, sinks_1H)
    return out_BtHv, (q_BtHh, k_BTKh, v_BTKv, sinks_H, first_Bt, last_Bt, out_BtHv, lse_BHt)


def _backward(scale, cap, interpret, residuals, dout_BtHv):
    q_BtHh, k_BTKh, v_BTKv, sinks_H, first_Bt, last_Bt, out_BtHv, lse_BHt = residuals
    (_, t, H, h), v = q_BtHh.shape, v_BTKv.shape[-1]
    T, K = k_BTKh.shape[1:3]
    G, static = H // K, (scale, cap, interpret)
    kept, moving, _ = blocks = _blocks(q_BtHh, backward=True)
    delta_BHt = jnp.einsum(
        "BtHv,BtHv->BHt", out_BtHv, dout_BtHv, preferred_element_type=jnp.float32
    )
    own, own_v, sums = _tokens(kept, h), _tokens(kept, v), _sums(kept)
    rows = (_row(T, x, G) for x in (h, v))
    specs = [own, *rows, *[_line(t)] * 2, own_v, sums, sums]
    call = _call(_dq_kernel, specs, (q_BtHh,), blocks, *static)
    (dq_BtHh,) = call(q_BtHh, k_BTKh, v_BTKv, first_Bt, last_Bt, dout_BtHv, lse_BHt, delta_BHt)
    group, group_v = (pl.BlockSpec((None, t, G, x), lambda i, n, b: (b, 0, n, 0)) for x in (h, v))
    sums = pl.BlockSpec((None, G, t), lambda i, n, b: (b, n, 0))
    specs = [group, own, own_v, *[_line(t)] * 2, *[_line(T // kept)] * 2, group_v, sums, sums]
    call = _call(_dkv_kernel, specs, (k_BTKh, v_BTKv), blocks, *static)
    lines = first_Bt, last_Bt, *query_blocks(first_Bt, last_Bt, moving, kept, T)
    dk_dv = call(q_BtHh, k_BTKh, v_BTKv, *lines, dout_BtHv, lse_BHt, delta_BHt)
    dsinks_H = None
    if sinks_H is not None:
        weights_BHt = jnp.exp2(sinks_H[:, None] * _LOG2E - lse_BHt)
        dsinks_H = -(weights_BHt * delta_BHt).sum((0, 2))
    return dq_BtHh, *dk_dv, dsinks_H, None, None


_attention.defvjp(_forward, _backward)


def _forward_kernel(
    q_ref, k_ref, v_ref, first_ref, last_ref, sink_ref, out_ref, lse_ref,
    *, scale, cap, kept, moving
):  # fmt: skip
    """Computes outputs of a block of queries of a head, and their weights' sums as log2."""
    q_parts, (first_q, last_q, keys) = _load(q_ref), _visible(first_ref, last_ref, kept, moving)

    def add(j, carry):
        out_qh, top_q, sum_q = carry
        block = pl.ds(j * moving, moving)
        scores_qk, _ = _scores(_products(q_parts, _load(k_ref, block)), scale, cap)
        index_k = j * moving + jnp.arange(moving)
        sees_qk = (index_k[None, :] <= last_q[:, None]) & (index_k[None, :] >= first_q[:, None])
        scores_qk = jnp.where(sees_qk, scores_qk, _MASKED)
        new_top_q = jnp.maximum(top_q, scores_qk.max(-1))
        weights_qk = jnp.exp2(scores_qk - new_top_q[:, None])
        shrink_q = jnp.exp2(top_q - new_top_q)
        v_kh = v_ref[block, :]
        out_qh = out_qh * shrink_q[:, None] + triton.dot(weights_qk.astype(v_kh.dtype), v_kh)
        return out_qh, new_top_q, sum_q * shrink_q + weights_qk.sum(-1)

    # The sum begins with the sink, as if it were the first score.
    zeros_q = jnp.zeros(kept, jnp.float32)
    carry = jnp.zeros((kept, v_ref.shape[-1]), jnp.float32), zeros_q + sink_ref[0], zeros_q + 1
    out_qh, top_q, sum_q = jax.lax.fori_loop(*keys, add, carry)
    out_ref[...] = (out_qh / sum_q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top_q + jnp.log2(sum_q)


def _dq_kernel(
    q_ref, k_ref, v_ref, first_ref, last_ref, dout_ref, lse_ref, delta_ref, dq_ref,
    *, scale, cap, kept, moving
):  # fmt: skip
    """Computes the gradients of a block of queries of one head."""
    q_parts, (first_q, last_q, keys) = _load(q_ref), _visible(first_ref, last_ref, kept, moving)
    dout_qh, lse_q, delta_q = dout_ref[...], lse_ref[...], delta_ref[...]

    def add(j, dq_parts):
        block = pl.ds(j * moving, moving)
        k_parts = _load(k_ref, block)
        scores_qk, slopes_qk = _scores(_products(q_parts, k_parts), scale, cap)
        weights_qk = jnp.exp2(scores_qk - lse_q[:, None])
        index_k = j * moving + jnp.arange(moving)
        sees_qk = (index_k[None, :] <= last_q[:, None]) & (index_k[None, :] >= first_q[:, None])
        weights_qk = jnp.where(sees_qk, weights_qk, 0.0) * slopes_qk
        dscores_qk = weights_qk * (triton.dot(dout_qh, v_ref[block, :].T) - delta_q[:, None])
        return _add_products(dq_parts, dscores_qk, k_parts)

    dq_parts = jax.lax.fori_loop(*keys, add, _zeros(q_parts))
    _store(dq_ref, dq_parts, scale)


def _dkv_kernel(
    q_ref, k_ref, v_ref, first_ref, last_ref, begin_ref, end_ref, dout_ref, lse_ref, delta_ref,
    dk_ref, dv_ref, *, scale, cap, kept, moving
):  # fmt: skip
    """Computes the gradients of a block of keys and values of one head, from all query heads."""
    j, G = pl.program_id(0), q_ref.shape[1]
    k_parts, v_kh, index_k = _load(k_ref), v_ref[...], j * kept + jnp.arange(kept)

    def add(step, carry):
        dk_parts, dv_kh = carry
        g, i = jax.lax.rem(step, G), begin + jax.lax.div(step, G)
        block = pl.ds(i * moving, moving)
        q_parts, dout_qh = _load(q_ref, block, g), dout_ref[block, g, :]
        lse_q, delta_q, first_q, last_q = (
            lse_ref[g, block],
            delta_ref[g, block],
            first_ref[block],
            last_ref[block],
        )
        scores_kq, slopes_kq = _scores(_products(k_parts, q_parts), scale, cap)
        weights_kq = jnp.exp2(scores_kq - lse_q[None, :])
        sees_kq = (index_k[:, None] <= last_q[None, :]) & (index_k[:, None] >= first_q[None, :])
        weights_kq = jnp.where(sees_kq, weights_kq, 0.0)
        dv_kh += triton.dot(weights_kq.astype(dout_qh.dtype), dout_qh)
        dscores_kq = weights_kq * (triton.dot(v_kh, dout_qh.T) - delta_q[None, :]) * slopes_kq
        return _add_products(dk_parts, dscores_kq, q_parts), dv_kh

    begin, zeros_kh = begin_ref[j], jnp.zeros(v_kh.shape, jnp.float32)
    steps = (end_ref[j] - begin) * G
    dk_parts, dv_kh = jax.lax.fori_loop(0, steps, add, (_zeros(k_parts), zeros_kh))
    _store(dk_ref, dk_parts, scale)
    dv_ref[...] = dv_kh.astype(dv_ref.dtype)


def _columns(ref) -> list[pl.Slice]:
    """Returns the parts of queries or keys, in the last axis of an array."""
    widths = _part_widths(ref.shape[-1])
    return [pl.ds(sum(widths[:i]), width) for i, width in enumerate(widths)]


def _load(ref, *index) -> tuple[jax.Array, ...]:
    """Loads a block of queries or keys in parts; all of the array without an index."""
    index = index or (slice(None),)
    return tuple(ref[*index, columns] for columns in _columns(ref))


def _store(ref, parts, scale) -> None:
    for columns, part in zip(_columns(ref), parts, strict=True):
        ref[:, columns] = (part * scale).astype(ref.dtype)


def _zeros(parts) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(part.shape, jnp.float32) for part in parts)


def _products(rows, columns) -> jax.Array:
    return sum(triton.dot(a, b.T) for a, b in zip(rows, columns, strict=True))


def _add_products(sums, dscores, parts) -> tuple[jax.Array, ...]:
    """Adds the gradients that scores give to their queries or keys."""
    both = zip(sums, parts, strict=True)
    return tuple(x + triton.dot(dscores.astype(part.dtype), part) for x, part in both)


def _visible(first_ref, last_ref, kept, moving):
    """Returns the first and last tokens that a program's queries see, and those blocks of keys."""
    start = pl.program_id(0) * kept
    own, last = pl.ds(start, kept), last_ref[start + kept - 1]
    keys = jax.lax.div(first_ref[start], moving), jax.lax.div(last, moving) + 1
    return first_ref[own], last_ref[own], keys


def _scores(products, scale, cap):
    """Returns scores, to base 2, and their derivatives by products * scale, to base e."""
    if not cap:
        return products * (scale * _LOG2E), 1.0
    tanh = jnp.tanh(products * (scale / cap))
    return tanh * (cap * _LOG2E), 1 - tanh * tanh


def _blocks(q_BtHh: jax.Array, backward: bool) -> tuple[int, int, int]:
    """Returns the tokens of a program's own block and of those it loops over, and its warps."""
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


def _call(kernel, in_specs, outputs, blocks, scale, cap, interpret):
    """Builds a call with a program for each block of tokens and head of the first output."""
    (kept, moving, warps), (B, T, heads, _) = blocks, outputs[0].shape
    return pl.pallas_call(
        functools.partial(kernel, scale=scale, cap=cap, kept=kept, moving=moving),
        grid=(T // kept, heads, B),
        in_specs=in_specs,
        out_specs=[_tokens(kept, x.shape[3]) if x.ndim == 4 else _sums(kept) for x in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )
