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
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from maxramp.parallel.collectives import all_gather, permute
from maxramp.parallel.mesh import platform

_LEAST = -1e4  # exp of it is 0, and sums of such numbers keep their fractions
Product = Callable[[jax.Array, jax.Array], jax.Array]


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


def multiply_exactly(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="high")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _invert(A_ij: jax.Array, multiply: Product) -> jax.Array:
    """Returns (I + A)^-1 of a strictly lower triangular matrix [C, C], by blocks that double; its
    gradient is two products."""
    (i, j), size = _square(len(A_ij)), 1
    X_ij = (i == j).astype(A_ij.dtype)
    while size < len(A_ij):  # X is the inverse of diagonal blocks of this size; S joins pairs
        S_ij = jnp.where((i // size % 2 == 1) & (i // size - 1 == j // size), A_ij, 0)
        X_ij -= S_ij if size == 1 else multiply(multiply(X_ij, S_ij), X_ij)
        size *= 2
    return X_ij


def _invert_forward(A_ij: jax.Array, multiply: Product) -> tuple[jax.Array, jax.Array]:
    return (_invert(A_ij, multiply),) * 2


def _invert_backward(multiply: Product, X_ij: jax.Array, dX_ij: jax.Array) -> tuple[jax.Array]:
    i, j = _square(len(X_ij))
    return (jnp.where(i > j, -multiply(multiply(X_ij.T, dX_ij), X_ij.T), 0),)


_invert.defvjp(_invert_forward, _invert_backward)


def _square(C: int) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows and columns of a [C, C]."""
    return tuple(jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies two matrices as `jnp.einsum` does, float32; gradients multiply in their dtype."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _product_forward(axes: str, x: jax.Array, y: jax.Array):
    return _product(axes, x, y), (x, y)


def _product_backward(axes: str, factors: tuple[jax.Array, jax.Array], dz: jax.Array):
    (x, y), (of_x, of_y, of_z) = factors, axes.replace("->", ",").split(",")
    dz = dz.astype(x.dtype)
    dx, dy = _product(f"{of_z},{of_y}->{of_x}", dz, y), _product(f"{of_x},{of_z}->{of_y}", x, dz)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_product.defvjp(_product_forward, _product_backward)


class Gates(NamedTuple):
    """Factors of tokens, float32; `whole` and `rest` add up to the logarithm of the decay from
    before the chunk up to the token: whole numbers add up exactly, and small ones keep their
    digits."""

    whole: jax.Array
    rest: jax.Array
    beta: jax.Array

    @classmethod
    def from_decays(cls, g_C: jax.Array, beta_C: jax.Array) -> Self:
        whole_C = jax.lax.stop_gradient(jnp.round(g_C))
        return cls(jnp.cumsum(whole_C, -1), jnp.cumsum(g_C - whole_C, -1), beta_C)


class Chunk(NamedTuple):
    """What a chunk does to the state of a head, and how its tokens read it."""

    values_Cv: jax.Array  # what tokens write if the state is 0, float32
    lookups_Ck: jax.Array  # what they subtract of it is this times the state
    keys_Ck: jax.Array  # where they write, decayed to the end of the chunk
    decay_11: jax.Array  # of the state, float32; 0 if another document ends the chunk
    scores_ij: jax.Array  # how they read what tokens of the chunk write
    queries_Ck: jax.Array  # and how they read the state

    def advance(self, S_kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the state after the chunk, and what its tokens write into it."""
        writes_Cv = self.values_Cv - _product("ik,kv->iv", self.lookups_Ck, self.cast(S_kv))
        added_kv = _product("ik,iv->kv", self.keys_Ck, self.cast(writes_Cv))
        return S_kv * self.decay_11 + added_kv, writes_Cv

    def read(self, S_kv: jax.Array, writes_Cv: jax.Array) -> jax.Array:
        """Returns the tokens' results [C, v], float32."""
        o_Cv = _product("ik,kv->iv", self.queries_Ck, self.cast(S_kv))
        return o_Cv + _product("ij,jv->iv", self.scores_ij, self.cast(writes_Cv))

    def cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.keys_Ck.dtype)


def overlap(q_Ck: jax.Array, k_Ck: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the products of keys and of queries with keys, [C, C], which value heads share."""
    return _product("ik,jk->ij", k_Ck, k_Ck), _product("ik,jk->ij", q_Ck, k_Ck)


def prepare(
    q_Ck: jax.Array,
    k_Ck: jax.Array,
    kk_ij: jax.Array,
    qk_ij: jax.Array,
    v_Cv: jax.Array,
    rows: Gates,
    columns: Gates,
    multiply: Product = multiply_exactly,
) -> Chunk:
    """Computes all that does not depend on the state, for one head and chunk."""
    C, dtype = len(v_Cv), v_Cv.dtype
    i, j = _square(C)
    whole_11, rest_11, _ = (jnp.where(j[:1] == C - 1, x, 0).sum(1, keepdims=True) for x in rows)
    between_ij = columns.whole - rows.whole + (columns.rest - rows.rest)  # after j, up to i
    after_C1 = whole_11 - columns.whole + (rest_11 - columns.rest)
    decay_ij = jnp.exp(jnp.where(i >= j, between_ij, _LEAST))
    overlaps_ij = jnp.where(i > j, columns.beta * decay_ij * kk_ij, 0)
    X_ij = _invert(overlaps_ij, multiply) * rows.beta
    lookups_ij = (X_ij * jnp.exp(rows.whole + rows.rest)).astype(dtype)
    return Chunk(
        values_Cv=_product("ij,jv->iv", X_ij.astype(dtype), v_Cv),
        lookups_Ck=_product("ij,jk->ik", lookups_ij, k_Ck).astype(dtype),
        keys_Ck=(k_Ck * jnp.exp(after_C1)).astype(dtype),
        decay_11=jnp.exp(whole_11 + rest_11),
        scores_ij=(decay_ij * qk_ij).astype(dtype),
        queries_Ck=(q_Ck * jnp.exp(columns.whole + columns.rest)).astype(dtype),
    )


def _prepare_heads(q_Ck: jax.Array, k_Ck: jax.Array, v_RCv: jax.Array, gates_RC: Gates) -> Chunk:
    of_head = functools.partial(prepare, q_Ck, k_Ck, *overlap(q_Ck, k_Ck))
    rows, columns = (jax.tree.map(lambda x: jnp.expand_dims(x, a), gates_RC) for a in (1, 2))
    return jax.vmap(of_head)(v_RCv, rows, columns)


def _map_leading(function: Callable, axes: int) -> Callable:
    """Returns the function for arrays with more axes in front, over which it is mapped."""
    return function if axes == 0 else jax.vmap(_map_leading(function, axes - 1))


@functools.partial(jax.checkpoint, prevent_cse=False)
def _step(S_kv: jax.Array, chunk: Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    after_kv, writes = _map_leading(Chunk.advance, 3)(chunk, S_kv)
    return after_kv, (S_kv, writes)


def _find_state(chunks: Chunk, axis: str) -> jax.Array:
    """Returns the state before this device's part of rows, whose parts lie along the axis.

    A part maps the state S to M S + U, with M = 0 if a document begins in it: these travel, and
    they are as large for a long part as for a short one.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(M_U: jax.Array, chunk: Chunk) -> tuple[jax.Array, None]:
        zeros = jnp.zeros(chunk.keys_Ck.shape, jnp.float32)
        chunk = chunk._replace(values_Cv=jnp.concatenate([zeros, chunk.values_Cv], -1))
        return _map_leading(Chunk.advance, 3)(chunk, M_U)[0], None

    k, (*heads, _, v) = chunks.keys_Ck.shape[-1], chunks.values_Cv.shape[1:]
    S_kv = jnp.zeros((*heads, k, v), jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(k), (*heads, k, k))
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
        """Returns [N, B, heads, C, ...], with zeros behind the last token: such tokens neither
        write nor decay."""
        x = jnp.pad(x, ((0, 0), (0, N * C - T), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(B, N, C, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

    g_BTH = _cut_at_borders(g_BTH, segments_BT, axis)
    q, key = (split(x.astype(v_BTHv.dtype), K) for x in (q_BTKk, k_BTKk))
    values, g, beta = (split(x, K, H // K) for x in (v_BTHv, g_BTH, beta_BTH))
    chunks = _map_leading(_prepare_heads, 3)(q, key, values, Gates.from_decays(g, beta))
    if axis is not None:
        S = _find_state(chunks, axis)
    elif state_BHkv is not None:
        S = state_BHkv.reshape(B, K, H // K, k, v)
    else:
        S = jnp.zeros((B, K, H // K, k, v), jnp.float32)
    S, read = jax.lax.scan(_step, S, chunks)
    o = jnp.moveaxis(_map_leading(Chunk.read, 4)(chunks, *read), (0, 4), (1, 2))
    return o.reshape(B, N * C, H, v)[:, :T], S.reshape(B, H, k, v)


def _cut_at_borders(g_BTH: jax.Array, segments_BT: jax.Array, axis: str | None) -> jax.Array:
    """Returns decays that leave nothing of the state at the first token of a document, whatever
    its own; so nothing else has to know of documents."""
    first_B1 = segments_BT[:, :1] if axis is None else shift_in(segments_BT[:, -1:], axis)
    before_BT = jnp.concatenate([first_B1, segments_BT[:, :-1]], 1)
    is_same_BT1 = (segments_BT == before_BT)[..., None]
    return jnp.where(is_same_BT1, jnp.maximum(g_BTH, _LEAST), _LEAST)


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
