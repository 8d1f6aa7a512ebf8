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
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxramp.model.parts import gated_delta_kernel
from maxramp.model.parts.delta_chunk import LEAST, Chunk, Gates, overlap, prepare
from maxramp.model.parts.delta_sizes import chunk_length, has_kernel
from maxramp.parallel.collectives import all_gather, permute
from maxramp.parallel.mesh import platform


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


def _prepare_heads(q_Ck: jax.Array, k_Ck: jax.Array, v_RCv: jax.Array, gates_RC: Gates) -> Chunk:
    rows, columns = (Gates(*(jnp.expand_dims(x, axis) for x in gates_RC)) for axis in (1, 2))
    prepare_head = functools.partial(prepare, q_Ck, k_Ck, *overlap(q_Ck, k_Ck))
    return jax.vmap(prepare_head)(v_RCv, rows, columns)


def _map_leading(function: Callable, axes: int) -> Callable:
    """Returns the function for arrays with more axes in front, over which it is mapped."""
    return function if axes == 0 else jax.vmap(_map_leading(function, axes - 1))


@functools.partial(jax.checkpoint, prevent_cse=False)
def _step(S_kv: jax.Array, chunk: Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    after_kv, writes = _map_leading(Chunk.advance, 3)(chunk, S_kv)
    return after_kv, (S_kv, writes)


def _find_state(advance: Callable, S_kv: jax.Array, axis: str) -> jax.Array:
    """Returns the state before this device's part of rows, whose parts lie along the axis, from
    that before the first part.

    A part maps the state S to M S + U, with M = 0 if a document begins in it: these travel, and
    they are as large for a long part as for a short one. `advance` takes the states [I, 0], for
    values [0, v], to [M, U].
    """
    k = S_kv.shape[-2]
    identity = jnp.broadcast_to(jnp.eye(k), (*S_kv.shape[:-1], k))
    M_U = advance(jnp.concatenate([identity, jnp.zeros_like(S_kv)], -1))
    own, before_kv = jax.lax.axis_index(axis), S_kv
    for device, part in enumerate(all_gather(M_U[None], axis)[:-1], 1):
        S_kv = jnp.matmul(part[..., :k], S_kv, precision="highest") + part[..., k:]
        before_kv = jnp.where(own == device, S_kv, before_kv)
    return before_kv


def _put_behind_zeros(v_Cv: jax.Array, k: int) -> jax.Array:
    return jnp.concatenate([jnp.zeros((*v_Cv.shape[:-1], k), v_Cv.dtype), v_Cv], -1)


def _run_kernels(
    q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates, S_kv: jax.Array, axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Does what `gated_delta_kernel.scan_chunks` does, for rows whose parts lie along an axis,
    inside `map_shards`; None = they are whole."""
    scan = gated_delta_kernel.scan_chunks
    if axis is not None:
        wide = _put_behind_zeros(v, k.shape[-1])
        S_kv = _find_state(lambda M_U: scan(q, k, wide, gates, M_U)[1], S_kv, axis)
    return scan(q, k, v, gates, S_kv)


def _scan_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates, S_kv: jax.Array, axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Does what `_run_kernels` does, on all platforms."""
    chunks = _map_leading(_prepare_heads, 3)(q, k, v, gates)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def advance(M_U: jax.Array, chunk: Chunk) -> tuple[jax.Array, None]:
        wide = _put_behind_zeros(chunk.values_Cv, M_U.shape[-2])
        chunk = chunk._replace(values_Cv=wide)
        return _map_leading(Chunk.advance, 3)(chunk, M_U)[0], None

    if axis is not None:
        S_kv = _find_state(lambda M_U: jax.lax.scan(advance, M_U, chunks)[0], S_kv, axis)
    S_kv, read = jax.lax.scan(_step, S_kv, chunks)
    return _map_leading(Chunk.read, 4)(chunks, *read), S_kv


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
    C = chunk_length(platform(), T)
    N = -(-T // C)

    def split(x: jax.Array, *heads: int) -> jax.Array:
        """Returns [N, B, heads, C, ...], with zeros behind the last token: such tokens neither
        write nor decay."""
        x = jnp.pad(x, ((0, 0), (0, N * C - T), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(B, N, C, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

    g_BTH = _cut_at_borders(g_BTH, segments_BT, axis)
    q, key = (split(x.astype(v_BTHv.dtype), K) for x in (q_BTKk, k_BTKk))
    values, g, beta = (split(x, K, H // K) for x in (v_BTHv, g_BTH, beta_BTH))
    if state_BHkv is None:
        S = jnp.zeros((B, K, H // K, k, v), jnp.float32)
    else:
        S = state_BHkv.reshape(B, K, H // K, k, v)
    scan = _run_kernels if has_kernel(platform(), C, k, v, H // K) else _scan_chunks
    o, S = scan(q, key, values, Gates.from_decays(g, beta), S, axis)
    o = jnp.moveaxis(o, (0, 4), (1, 2))  # [B, N, C, K, R, v]
    return o.reshape(B, N * C, H, v)[:, :T], S.reshape(B, H, k, v)


def _cut_at_borders(g_BTH: jax.Array, segments_BT: jax.Array, axis: str | None) -> jax.Array:
    """Returns decays that leave nothing of the state at the first token of a document, whatever
    its own; so nothing else has to know of documents."""
    first_B1 = segments_BT[:, :1] if axis is None else shift_in(segments_BT[:, -1:], axis)
    before_BT = jnp.concatenate([first_B1, segments_BT[:, :-1]], 1)
    is_same_BT1 = (segments_BT == before_BT)[..., None]
    return jnp.where(is_same_BT1, jnp.maximum(g_BTH, LEAST), LEAST)


def gated_delta_token(
    q_BKk: jax.Array,
    k_BKk: jax.Array,
    v_BHv: jax.Array,
    g_BH: jax.Array,
    beta_BH: jax.Array,
    state_BHkv: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Does what `gated_delta` does for one more token of each row, in float32; returns what it
    reads [B, H, v], and the next state."""
    exact = functools.partial(jnp.einsum, precision="highest")
    q_BHk, k_BHk = (jnp.repeat(x, v_BHv.shape[1] // x.shape[1], 1) for x in (q_BKk, k_BKk))
    S_BHkv = state_BHkv * jnp.exp(g_BH)[..., None, None]
    error_BHv = v_BHv - exact("BHkv,BHk->BHv", S_BHkv, k_BHk)
    S_BHkv += k_BHk[..., None] * (beta_BH[..., None] * error_BHv)[..., None, :]
    return exact("BHkv,BHk->BHv", S_BHkv, q_BHk), S_BHkv
