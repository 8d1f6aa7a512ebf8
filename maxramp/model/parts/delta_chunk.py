"""The gated delta rule of one head in one chunk, in matrices: what `gated_delta` maps over heads
and chunks, and what its kernels run on the chip. Shapes as in `gated_delta`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

LEAST = -1e4  # exp of it is 0, and sums of such numbers keep their fractions
Product = Callable[[jax.Array, jax.Array], jax.Array]


def multiply_high(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="high")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _invert(A_ij: jax.Array, multiply: Product) -> jax.Array:
    """Returns (I + A)^-1 of a strictly lower triangular matrix [C, C], by blocks that double; its
    gradient is two products."""
    (i, j), level = square(len(A_ij)), 0
    X_ij = (i == j).astype(A_ij.dtype)
    while 1 << level < len(A_ij):  # X is the inverse of diagonal blocks of this size
        block_i, block_j = i >> level, j >> level
        S_ij = jnp.where((block_i & 1 == 1) & (block_i - 1 == block_j), A_ij, 0)  # joins pairs
        X_ij -= S_ij if level == 0 else multiply(multiply(X_ij, S_ij), X_ij)
        level += 1
    return X_ij


def _invert_forward(A_ij: jax.Array, multiply: Product) -> tuple[jax.Array, jax.Array]:
    return (_invert(A_ij, multiply),) * 2


def _invert_backward(multiply: Product, X_ij: jax.Array, dX_ij: jax.Array) -> tuple[jax.Array]:
    i, j = square(len(X_ij))
    return (jnp.where(i > j, -multiply(multiply(X_ij.T, dX_ij), X_ij.T), 0),)


_invert.defvjp(_invert_forward, _invert_backward)


def square(C: int) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows and columns of a [C, C]."""
    return tuple(jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies two matrices as `jnp.einsum` does, float32; gradients multiply in their dtype."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _product_forward(axes: str, x: jax.Array, y: jax.Array):
    return _product(axes, x, y), (x, y)


def _product_backward(axes: str, factors: tuple[jax.Array, jax.Array], dz: jax.Array):
    (x, y), (x_axes, y_axes, z_axes) = factors, axes.replace("->", ",").split(",")
    dz = dz.astype(x.dtype)
    dx = _product(f"{z_axes},{y_axes}->{x_axes}", dz, y)
    dy = _product(f"{x_axes},{z_axes}->{y_axes}", x, dz)
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
        """Makes the factors of a chunk's tokens from the logarithms of their decays, `LEAST` where
        a document begins: nothing before it counts."""
        whole_C = jax.lax.stop_gradient(jnp.round(g_C))
        rest_C = _sum_since(g_C <= LEAST, g_C - whole_C)
        return cls(jnp.cumsum(whole_C, -1), rest_C, beta_C)


def _sum_since(is_first_C: jax.Array, x_C: jax.Array) -> jax.Array:
    """Adds up along the last axis, anew from every first token: not a bit of those before stays."""
    size = 1
    while size < x_C.shape[-1]:
        before_C, is_before_C = (
            jnp.pad(x[..., :-size], ((0, 0),) * (x.ndim - 1) + ((size, 0),))
            for x in (x_C, is_first_C)
        )
        x_C += jnp.where(is_first_C, 0, before_C)
        is_first_C, size = is_first_C | is_before_C, 2 * size
    return x_C


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
    multiply: Product = multiply_high,
) -> Chunk:
    """Computes all that does not depend on the state, for one head and chunk. Products are those of
    `overlap`; `rows` [1, C] and `columns` [C, 1] are the same gates."""
    C, dtype = len(v_Cv), v_Cv.dtype
    i, j = square(C)
    whole_11, rest_11, _ = (jnp.where(j[:1] == C - 1, x, 0).sum(1, keepdims=True) for x in rows)
    between_ij = columns.whole - rows.whole + (columns.rest - rows.rest)  # after j, up to i
    after_C1 = whole_11 - columns.whole + (rest_11 - columns.rest)
    decay_ij = jnp.exp(jnp.where(i >= j, between_ij, LEAST))
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
