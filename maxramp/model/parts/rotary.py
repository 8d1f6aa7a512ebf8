"""Rotary positions: each pair of a head's numbers turns by an angle that grows with the position.

Shapes: B rows, T tokens, H heads, h head width.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from maxramp.stage import SightKeys


@dataclasses.dataclass(frozen=True, order=True)  # a key of trees
class Rope:
    """How fast pairs turn."""

    # pair i turns by position / max_timescale^(2i/h) (Su et al., arXiv 2104.09864)
    max_timescale: float
    factor: float = 1.0  # how much slower the slowest pairs turn; 1 = as above
    # turns in `length` tokens; pairs with fewer than `low` are `factor` times slower, those with
    # more than `high` as fast as ever, and in between it goes from one to the other
    low: float = 1.0
    high: float = 4.0
    length: int = 1  # tokens of the texts that a model read before it was given longer ones

    @classmethod
    def from_keys(cls, keys: SightKeys) -> "Rope":
        """What the keys say: under rope_type=llama3.1 with its scaling."""
        if keys.rope_type == "default":
            return cls(keys.rope_max_timescale)
        return cls(
            keys.rope_max_timescale,
            keys.rope_factor,
            keys.rope_low_freq_factor,
            keys.rope_high_freq_factor,
            keys.original_max_position_embeddings,
        )

    def angles(self, positions_T: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of the angle of every position and pair: two arrays [T, h/2] in float32.

        Positions [B, T], each row's own, give [B, T, h/2].
        """
        fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        timescale = self.max_timescale**fraction
        if self.factor != 1:  # as Llama 3.1 does (arXiv 2407.21783; its reference code)
            turns = self.length / (2 * math.pi * timescale)
            share = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
            timescale /= share + (1 - share) / self.factor
        angle = positions_T.astype(jnp.float32)[..., None] / timescale
        return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHh: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (x_i, x_{i + h/2}) of every head by the angles of their position.

    Cosine and sine are [T, h/2], or [B, T, h/2] where rows have positions of their own.
    """
    cos_T1h, sin_T1h = (part[..., None, :] for part in angles)
    first, second = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHh.dtype)
