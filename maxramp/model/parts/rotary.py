"""Rotary positions: each pair of a head's numbers rotates by an angle that grows with the position.

Shapes: B rows, T tokens, H heads, h head width.
"""

import math

import jax
import jax.numpy as jnp

from maxramp.model.pattern import Rope

Angles = tuple[jax.Array, jax.Array]  # cosine and sine


def angles(rope: Rope, positions_T: jax.Array, head_dim: int) -> Angles:
    """Returns the cosine and sine for every position and pair: float32 [T, h/2], or [B, T, h/2]."""
    fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    timescale = rope.max_timescale**fraction
    share = 0.0  # how much of a pair keeps the speed that it has without the factor
    if rope.kind == "llama3.1":  # arXiv 2407.21783; its reference code
        rotations = rope.length / (2 * math.pi * timescale)
        share = jnp.clip((rotations - rope.low) / (rope.high - rope.low), 0, 1)
    if rope.kind == "yarn":  # arXiv 2309.00071, section 3.2, in pairs, not in rotations
        first, last = _pair(rope, rope.high, head_dim), _pair(rope, rope.low, head_dim)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pairs = jnp.arange(head_dim // 2, dtype=jnp.float32)
        share = 1 - jnp.clip((pairs - first) / (last - first or 0.001), 0, 1)
    if rope.factor != 1:
        timescale /= share + (1 - share) / rope.factor
    angle = positions_T.astype(jnp.float32)[..., None] / timescale
    return jnp.cos(angle) * rope.amplitude, jnp.sin(angle) * rope.amplitude


def _pair(rope: Rope, rotations: float, head_dim: int) -> float:
    """Returns the pair, perhaps a fraction, that rotates this often in `length` tokens."""
    timescale = rope.length / (2 * math.pi * rotations)
    return head_dim * math.log(timescale) / (2 * math.log(rope.max_timescale))


def rotate(x_BTHh: jax.Array, angles: Angles) -> jax.Array:
    """Rotates the pairs (x_i, x_{i + h/2}) of every head by `angles`."""
    cos_T1h, sin_T1h = (part[..., None, :] for part in angles)
    first, second = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h)
    return jnp.concatenate(rotated, axis=-1).astype(x_BTHh.dtype)
