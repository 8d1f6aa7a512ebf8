"""A hash by which a run recognizes weights that it does not store."""

from typing import Any

import jax
import jax.numpy as jnp

from maxramp.model.parts.weights import hash_bits


def fingerprint_of_weights(weights: Any) -> str:
    """Returns a 64-bit hash of a tree of arrays, in hex: the same on any mesh of devices.

    A value with the bits b at index i of the n-th array adds mix(mix(i + n c) ^ b) to the word
    whose constant is c, modulo 2^32; n counts from 1.
    """
    high, low = (int(word) for word in _hash_words(jax.tree.leaves(weights)))
    return f"{high:08x}{low:08x}"


@jax.jit
def _hash_words(arrays: list[jax.Array]) -> jax.Array:
    words = jnp.zeros((2,), jnp.uint32)
    for number, x in enumerate(arrays, 1):
        sharding = jax.typeof(x).sharding  # with its mesh: none need be set here
        index = jnp.uint32(0)
        for axis, size in enumerate(x.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding)
            index = index * jnp.uint32(size) + along
        unsigned = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        for word, constant in enumerate((0x9E3779B9, 0x7F4A7C15)):
            hashed = hash_bits(hash_bits(index + jnp.uint32(number * constant % 2**32)) ^ bits)
            words = words.at[word].add(hashed.sum(dtype=jnp.uint32))
    return words
