"""The batch fingerprint: which rows a step trained on, and in which order.

Shapes: A gradient accumulation steps, B rows of a micro batch, S tokens of a row and the next one.
"""

import jax
import jax.numpy as jnp

from maxramp.data.batch import Batch
from maxramp.data.marks import START
from maxramp.parallel.sharding import BATCH_ABS


def fingerprint(batch: Batch) -> jax.Array:
    """An order-sensitive 64-bit hash of a step's rows: uint32[2], high and low word.

    Token t at position i of the step's rows, read in order, adds mix(mix(i + c) ^ t) to each word,
    modulo 2^32; mix is the finalizer of MurmurHash3 and c the word's constant. A sum, so that
    shards add up to the same whatever devices hold them; positions are those in the step, so that
    the split into micro batches does not show either.
    """
    tokens_ABS = batch.tokens
    if batch.begins is not None:
        tokens_ABS += START * batch.begins.astype(jnp.int32)
    A, B, S = tokens_ABS.shape
    # Built from iotas on the batch's own shape, so that every device makes only its part.
    rows = jax.lax.broadcasted_iota(jnp.uint32, (A, B, S), 0, out_sharding=BATCH_ABS) * jnp.uint32(
        B
    )
    rows += jax.lax.broadcasted_iota(jnp.uint32, (A, B, S), 1, out_sharding=BATCH_ABS)
    column = jax.lax.broadcasted_iota(jnp.uint32, (A, B, S), 2, out_sharding=BATCH_ABS)
    index = rows * jnp.uint32(S) + column

    def word(constant: int) -> jax.Array:
        mixed = _mix(_mix(index + jnp.uint32(constant)) ^ tokens_ABS.astype(jnp.uint32))
        return mixed.sum(dtype=jnp.uint32)

    return jnp.stack([word(0x9E3779B9), word(0x7F4A7C15)])


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
