"""Fingerprints: of the rows that a step trained on, in their order, and of weights.

Shapes: A gradient accumulation steps, B rows of a micro batch, S tokens of a row and the next one.
"""

from typing import Any

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


def fingerprint_of_weights(weights: Any) -> str:
    """A 64-bit hash of a tree of arrays, in hex: the same on any mesh of devices.

    A value with the bits b at index i of the n-th array adds mix(mix(i + n c) ^ b) to the word
    whose constant is c, modulo 2^32; n counts from 1.
    """
    high, low = (int(word) for word in _of_weights(jax.tree.leaves(weights)))
    return f"{high:08x}{low:08x}"


@jax.jit
def _of_weights(arrays: list[jax.Array]) -> jax.Array:
    words = jnp.zeros((2,), jnp.uint32)
    for number, x in enumerate(arrays, 1):
        sharding = jax.typeof(x).sharding.spec
        index = jnp.uint32(0)
        for axis, size in enumerate(x.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding)
            index = index * jnp.uint32(size) + along
        unsigned = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        for word, constant in enumerate((0x9E3779B9, 0x7F4A7C15)):
            mixed = _mix(_mix(index + jnp.uint32(number * constant % 2**32)) ^ bits)
            words = words.at[word].add(mixed.sum(dtype=jnp.uint32))
    return words


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
