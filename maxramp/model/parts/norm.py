"""Norms of layers. Shapes: B rows, T tokens, D model width."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.parts.weights import Weight, apply_elementwise, new_weight
from maxramp.parallel.sharding import REPLICATED, Spec


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(
        self,
        shape: tuple[int, ...],
        epsilon: float,
        dtype: str,
        axes: str = "D",
        spec: Spec = REPLICATED,
        offset: float = 0.0,
    ):
        """Builds the scale over `axes`, the letters of what is normalized: the model's width, a
        head's, or all heads together. The factor is `offset` + the weight, at first 1."""
        self.epsilon, self.normalized = epsilon, tuple(range(-len(shape), 0))
        self.offset = offset
        first = jnp.full(shape, 1 - offset, dtype, out_sharding=spec)
        self.scale_D = new_weight(first, "scale", axes)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalizes [B, T, ..., D], and keeps the dtype."""
        x = x_BTD.astype(jnp.float32)
        mean = jnp.mean(x * x, axis=self.normalized, keepdims=True)
        x = x * jax.lax.rsqrt(mean + self.epsilon)
        y = apply_elementwise(lambda x, scale: x * (scale + self.offset), x, self.scale_D)
        if isinstance(self.scale_D, RowScale):
            y = _give_row_gradients(y, x, self.scale_D.rows_BD, len(self.normalized))
        return y.astype(x_BTD.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowScale:
    """A norm's scale with a gradient for each row too, that of the zeros `rows_BD`."""

    scale: Weight
    rows_BD: jax.Array

    def __getitem__(self, index):
        return self.scale[index]

    @property
    def leading(self) -> str:
        return self.scale.leading


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _give_row_gradients(
    y_BTD: jax.Array, x_BTD: jax.Array, rows_BD: jax.Array, axes: int
) -> jax.Array:
    """Returns y = x * scale, as it is; `rows_BD` gets the gradients of a scale, of `axes` axes, per
    row."""
    return y_BTD


_give_row_gradients.defvjp(
    lambda y_BTD, x_BTD, rows_BD, axes: (y_BTD, x_BTD),
    lambda axes, x_BTD, dy_BTD: (dy_BTD, None, (dy_BTD * x_BTD).sum(range(1, x_BTD.ndim - axes))),
)
