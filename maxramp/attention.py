"""Causal grouped-query attention with rotary positions.

Shapes: B rows, T tokens, S tokens attended to (= T), H query heads, K key/value heads, G query
heads per key/value head (H = K * G), h head width.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxramp.mesh import BATCH_AXES


def rotary_angles(length: int, head_dim: int, max_timescale: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angle of every position and pair: two arrays [T, h/2] in float32.

    Pair i turns by position / max_timescale^(2i/h) (Su et al., arXiv 2104.09864).
    """
    fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] / max_timescale**fraction
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHh: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (x_i, x_{i + h/2}) of every head by the angles of their position."""
    cos_T1h, sin_T1h = (part[:, None, :] for part in angles)
    first, second = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHh.dtype)


def causal_attention(q_BTHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(h)) v over the tokens up to each token's own.

    Scores and softmax are float32 whatever the inputs are.

    Returns:
      [B, T, H, h], of the dtype of the inputs.
    """
    B, T, H, h = q_BTHh.shape
    K = k_BSKh.shape[2]
    spec = P(BATCH_AXES, None, "tensor", None, None)
    q_BTKGh = jax.lax.reshape(q_BTHh, (B, T, K, H // K, h), out_sharding=spec)
    scores_BKGTS = jnp.einsum(
        "BTKGh,BSKh->BKGTS", q_BTKGh * h**-0.5, k_BSKh, preferred_element_type=jnp.float32
    )
    causal_TS = jnp.tril(jnp.ones((T, T), bool))
    scores_BKGTS = jnp.where(causal_TS, scores_BKGTS, jnp.finfo(jnp.float32).min)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKh.dtype)
    out_BTKGh = jnp.einsum("BKGTS,BSKh->BTKGh", weights_BKGTS, v_BSKh)
    return jax.lax.reshape(
        out_BTKGh, (B, T, H, h), out_sharding=P(BATCH_AXES, None, "tensor", None)
    )
