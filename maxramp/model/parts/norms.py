"""Norms, in float32 whatever the arithmetic's dtype is.

Shapes: B rows, T tokens, D model width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.parts.products import stages_of
from maxramp.model.parts.weights import Weight, ones
from maxramp.parallel.sharding import staged


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, epsilon: float, dtype: str):
        self.epsilon = epsilon
        self.scale_D = ones("scale", "D", (width,), dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalizes every token's vector; [B, T, D], dtype kept."""
        x = x_BTD.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale_D[...].astype(jnp.float32)
        if scale.ndim > 1:  # of every stage of a pipeline
            spec = jax.typeof(x).sharding.spec
            y = jax.lax.reshape(x, stages_of(x.shape), out_sharding=staged(spec))
            y = jax.lax.reshape(y * scale[:, None, None], x.shape, out_sharding=spec)
        else:
            y = x * scale
        if isinstance(self.scale_D, RowScale):
            y = _by_rows(y, x, self.scale_D.rows_BD)
        return y.astype(x_BTD.dtype)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("scale", "rows_BD"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class RowScale:
    """A norm's scale whose gradient is wanted for each row as well: as that of `rows_BD`, zeros."""

    scale: Weight
    rows_BD: jax.Array

    def __getitem__(self, index):
        return self.scale[index]


@jax.custom_vjp
def _by_rows(y_BTD: jax.Array, x_BTD: jax.Array, rows_BD: jax.Array) -> jax.Array:
    """y = x * scale as it is; the gradient to `rows_BD` is what a scale of each row would have."""
    return y_BTD


def _by_rows_backward(x_BTD, dy_BTD):
    return dy_BTD, None, (dy_BTD * x_BTD).sum(1)


_by_rows.defvjp(lambda y_BTD, x_BTD, rows_BD: (y_BTD, x_BTD), _by_rows_backward)
