"""How much of a row its queries see, in the blocks that kernels go through.

A query sees an interval of keys, from `first` to its own place, and both rise along a row. So the
blocks of keys that a block of queries sees are an interval, and so are the blocks of queries that
see a block of keys.

Shapes: B rows, T keys of a row, t queries of it; q and k blocks of queries and of keys.
"""

import jax
import jax.numpy as jnp


def key_blocks(
    first_Bt: jax.Array, places_Bt: jax.Array, queries: int, keys: int
) -> tuple[jax.Array, jax.Array]:
    """The first block of `keys` tokens that each block of `queries` sees, and the one after the
    last: int32 [B, q]."""
    return first_Bt[:, ::queries] // keys, places_Bt[:, queries - 1 :: queries] // keys + 1


def query_blocks(
    first_Bt: jax.Array, places_Bt: jax.Array, queries: int, keys: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The first block of `queries` that sees each block of `keys` of the row's tokens, and the one
    after the last, or 0 and 0 of none: int32 [B, k]."""
    start_k1 = jnp.arange(0, tokens, keys)[:, None]
    first_Bq, last_Bq = first_Bt[:, ::queries], places_Bt[:, queries - 1 :: queries]
    begin_Bk = (last_Bq[:, None] < start_k1).sum(-1, dtype=jnp.int32)
    end_Bk = (first_Bq[:, None] < start_k1 + keys).sum(-1, dtype=jnp.int32)
    return jnp.minimum(begin_Bk, end_Bk), end_Bk
