"""The gated delta rule (Yang et al., arXiv 2412.06464) in chunks of tokens, exact for packed rows.

A value head keeps a state S [k, v]. Each token of a document shrinks it by exp(g), corrects what it
returns for the token's key, and reads it:

  S <- exp(g) S;  S <- S + beta key (value - S^T key)^T;  o = S^T query

A document begins with S = 0. In a chunk all corrections follow from one triangular system (Yang et
al., arXiv 2406.06484), so only S itself passes from chunk to chunk.

Shapes: B rows, T tokens, N chunks, C tokens of a chunk (i, j: two of them), K key heads, R value
heads of a key head, H = K R value heads, k width of a key, v of a value, x numbers of a key head, t
taps of a convolution.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxramp.parallel.collectives import all_gather, permute
from maxramp.parallel.mesh import platform

_LEAST = -1e4  # exp of it is 0, and sums of such numbers keep their fractions


def normalize(x: jax.Array) -> jax.Array:
    """Divides the vectors of heads by their lengths, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def causal_conv(
    x_BTKx: jax.Array,
    taps_tKx: jax.Array,
    segments_BT: jax.Array,
    before_BtKx: jax.Array,
    segments_before_Bt: jax.Array,
) -> jax.Array:
    """Adds up each token's input and those of the t - 1 tokens before it in its segment, by the
    factors `taps_tKx` (the last is the token's own): float32 [B, T, K, x].

    `before_BtKx` are the inputs of exactly t - 1 tokens before the first, with their segments; 0
    where there are none.
    """
    T, t = x_BTKx.shape[1], len(taps_tKx)
    x = jnp.concatenate([before_BtKx, x_BTKx], 1).astype(jnp.float32)
    segments = jnp.concatenate([segments_before_Bt, segments_BT], 1)
    y_BTKx = x[:, t - 1 :] * taps_tKx[-1]
    for tap in range(t - 1):
        same_BT = segments[:, tap : tap + T] == segments_BT
        y_BTKx += jnp.where(same_BT[..., None, None], x[:, tap : tap + T], 0) * taps_tKx[tap]
    return y_BTKx


def shift_in(x: jax.Array, axis: str) -> jax.Array:
    """Returns what the device before this one along the axis holds; zeros on the first one."""
    return permute(x, axis, [(i, i + 1) for i in range(jax.lax.axis_size(axis) - 1)])


def last_before(x: jax.Array, length: int, axis: str | None) -> jax.Array:
    """Returns the `length` entries [B, length, ...] that lie before a device's own along an axis of
    rows, however few each device holds; zeros before the first."""
    if axis is None:
        return jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype)
    part, parts = x[:, -length:], []
    for _ in range(-(-length // part.shape[1])):
        part = shift_in(part, axis)
        parts.insert(0, part)
    return jnp.concatenate(parts, 1)[:, -length:]


@jax.custom_vjp
def _invert(A_ij: jax.Array) -> jax.Array:
    """Returns (I + A)^-1 of strictly lower triangular matrices [..., C, C], by blocks that double;
    its gradient is two products."""
    C = A_ij.shape[-1]
    i, size = jnp.arange(C), 1
    X_ij = jnp.broadcast_to(jnp.eye(C, dtype=A_ij.dtype), A_ij.shape)
    while size < C:  # X is the inverse of diagonal blocks of this size; S joins pairs of these
        joins = (i[:, None] // size % 2 == 1) & (i[:, None] // size - 1 == i // size)
        S_ij = jnp.where(joins, A_ij, 0)
        X_ij -= S_ij if size == 1 else _multiply_exactly(_multiply_exactly(X_ij, S_ij), X_ij)
        size *= 2
    return X_ij


def _invert_backward(X_ij: jax.Array, dX_ij: jax.Array) -> tuple[jax.Array]:
    X_ji = jnp.swapaxes(X_ij, -1, -2)
    return (-jnp.tril(_multiply_exactly(_multiply_exactly(X_ji, dX_ij), X_ji), -1),)


_multiply_exactly = functools.partial(jnp.matmul, precision="high")
_invert.defvjp(lambda A_ij: (_invert(A_ij),) * 2, _invert_backward)
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class _Chunks(NamedTuple):
    """What chunks do to the state, and how their tokens read it; each [N, B, K, R, ...]."""

    values: jax.Array  # [.., C, v] what tokens write if the state is 0, float32
    lookups: jax.Array  # [.., C, k] what they subtract of it is this times the state
    keys: jax.Array  # [.., C, k] where they write, decayed to the end of the chunk
    decay: jax.Array  # [.., 1, 1] of the state, float32; 0 if another document ends the chunk
    scores: jax.Array  # [.., C, C] how they read what tokens of the chunk write
    queries: jax.Array  # [.., C, k] and how they read the state

    def advance(self, S_kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the state after one chunk, and what its tokens write into it."""
        writes = self.values - _product("...ik,...kv->...iv", self.lookups, self.cast(S_kv))
        added_kv = _product("...ik,...iv->...kv", self.keys, self.cast(writes))
        return S_kv * self.decay + added_kv, writes

    def read(self, S_kv: jax.Array, writes: jax.Array) -> jax.Array:
        """Returns the tokens' results [..., C, v], float32."""
        o = _product("...ik,...kv->...iv", self.queries, self.cast(S_kv))
        return o + _product("...ij,...jv->...iv", self.scores, self.cast(writes))

    def cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.keys.dtype)


def _exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    # Masked on both sides: outside exp may be infinite, and 0 times its gradient no number.
    return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0)), 0)


def _prepare(q_Ck, k_Ck, v_Cv, g_C, beta_C, segments_C, before_1) -> _Chunks:
    """Computes all that does not depend on the state. Arrays are [N, B, K, R, ...], with 1 for axes
    that they have not; `before_1` is the segment of the state before each chunk."""
    C, dtype = g_C.shape[-1], v_Cv.dtype
    i = jnp.arange(C)
    same_ij = segments_C[..., :, None] == segments_C[..., None, :]
    # Whole numbers add up exactly and fractions stay small: differences of sums keep their digits.
    g_C = jnp.maximum(g_C, _LEAST)
    whole_C = jax.lax.stop_gradient(jnp.round(g_C))
    sums = jnp.cumsum(whole_C, -1), jnp.cumsum(g_C - whole_C, -1)
    between_ij = sum(x[..., :, None] - x[..., None, :] for x in sums)  # after j, up to i
    decay_ij = _exp(between_ij, same_ij & (i[:, None] >= i))
    decay_in_C = _exp(sum(sums), segments_C == before_1)
    overlaps_ij = beta_C[..., None] * decay_ij * _product("...ik,...jk->...ij", k_Ck, k_Ck)
    X_ij = _invert(jnp.where(i[:, None] > i, overlaps_ij, 0)) * beta_C[..., None, :]
    lookups_ij = (X_ij * decay_in_C[..., None, :]).astype(dtype)
    return _Chunks(
        values=_product("...ij,...jv->...iv", X_ij.astype(dtype), v_Cv),
        lookups=_product("...ij,...jk->...ik", lookups_ij, k_Ck).astype(dtype),
        keys=(k_Ck * decay_ij[..., -1, :, None]).astype(dtype),
        decay=decay_in_C[..., -1:, None],
        scores=(decay_ij * _product("...ik,...jk->...ij", q_Ck, k_Ck)).astype(dtype),
        queries=(q_Ck * decay_in_C[..., None]).astype(dtype),
    )


@functools.partial(jax.checkpoint, prevent_cse=False)
def _step(S_kv: jax.Array, chunk: _Chunks) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    after_kv, writes = chunk.advance(S_kv)
    return after_kv, (S_kv, writes)


def _find_state(chunks: _Chunks, axis: str) -> jax.Array:
    """Returns the state before this device's part of rows, whose parts lie along the axis.

    A part maps the state S to M S + U, with M = 0 if a document begins in it: these travel, and
    they are as large for a long part as for a short one.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(M_U: jax.Array, chunk: _Chunks) -> tuple[jax.Array, None]:
        values = jnp.concatenate([jnp.zeros(chunk.keys.shape, jnp.float32), chunk.values], -1)
        return chunk._replace(values=values).advance(M_U)[0], None

    k = chunks.keys.shape[-1]
    S_kv = jnp.zeros((*chunks.values.shape[1:4], k, chunks.values.shape[-1]), jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(k), (*S_kv.shape[:-1], k))
    M_U, _ = jax.lax.scan(step, jnp.concatenate([identity, S_kv], -1), chunks)
    own, before_kv = jax.lax.axis_index(axis), S_kv
    for device, part in enumerate(all_gather(M_U[None], axis)[:-1], 1):
        S_kv = jnp.matmul(part[..., :k], S_kv, precision="highest") + part[..., k:]
        before_kv = jnp.where(own == device, S_kv, before_kv)
    return before_kv


def chunk_length() -> int:
    """Returns the tokens of a chunk, by what compilers make of them."""
    return 128 if platform() == "tpu" else 64


def gated_delta(
    q_BTKk: jax.Array,
    k_BTKk: jax.Array,
    v_BTHv: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    segments_BT: jax.Array,
    state_BHkv: jax.Array | None = None,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns what tokens read [B, T, H, v], and the state after the last [B, H, k, v]; both
    float32, as the state and the decays are. Products are in the dtype of values.

    Args:
      q_BTKk: queries and keys have the length 1, queries times their scale.
      g_BTH: logarithms of decays, at most 0.
      segments_BT: tokens of other segments neither see nor change each other's state.
      state_BHkv: the state before the first token, of its segment; None = 0.
      axis: in a `shard_map` the axis along which the tokens of rows lie; `state_BHkv` is then None.
    """
    (B, T, K, k), (H, v) = q_BTKk.shape, v_BTHv.shape[2:]
    C = min(chunk_length(), T)
    N = -(-T // C)

    def split(x: jax.Array, *heads: int) -> jax.Array:
        """Returns [N, B, heads, C, ...], with zeros behind the last token."""
        x = jnp.pad(x, ((0, 0), (0, N * C - T), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(B, N, C, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

    # Tokens behind the last one are of its segment, and neither write nor decay.
    segments = jnp.pad(segments_BT, ((0, 0), (0, N * C - T)), mode="edge")
    segments = jnp.moveaxis(segments.reshape(B, N, 1, 1, C), 1, 0)
    first = segments_BT[:, 0] if axis is None else shift_in(segments_BT[:, -1], axis)
    before = jnp.concatenate([first.reshape(1, B, 1, 1, 1), segments[:-1, ..., -1:]])
    q, key = (split(x.astype(v_BTHv.dtype), K, 1) for x in (q_BTKk, k_BTKk))
    values, g, beta = (split(x, K, H // K) for x in (v_BTHv, g_BTH, beta_BTH))
    chunks = _prepare(q, key, values, g, beta, segments, before)
    if axis is not None:
        S = _find_state(chunks, axis)
    elif state_BHkv is not None:
        S = state_BHkv.reshape(B, K, H // K, k, v)
    else:
        S = jnp.zeros((B, K, H // K, k, v), jnp.float32)
    S, read = jax.lax.scan(_step, S, chunks)
    o = jnp.moveaxis(chunks.read(*read), (0, 4), (1, 2))  # [B, N, C, K, R, v]
    return o.reshape(B, N * C, H, v)[:, :T], S.reshape(B, H, k, v)


def gated_delta_token(
    q_BKk: jax.Array,
    k_BKk: jax.Array,
    v_BHv: jax.Array,
    g_BH: jax.Array,
    beta_BH: jax.Array,
    state_BHkv: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Does what `gated_delta` does for one more token of each row, in float32."""
    exact = functools.partial(jnp.einsum, precision="highest")
    q_BHk, k_BHk = (jnp.repeat(x, v_BHv.shape[1] // x.shape[1], 1) for x in (q_BKk, k_BKk))
    S_BHkv = state_BHkv * jnp.exp(g_BH)[..., None, None]
    error_BHv = v_BHv - exact("BHkv,BHk->BHv", S_BHkv, k_BHk)
    S_BHkv += k_BHk[..., None] * (beta_BH[..., None] * error_BHv)[..., None, :]
    return exact("BHkv,BHk->BHv", S_BHkv, q_BHk), S_BHkv
