"""AdamW (arXiv 1412.6980, 1711.05101): that of optax, with betas that may change with the batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.half_lives import Pace, decay_weights, kept_share


class AdamState(NamedTuple):
    """The means, and their bias: the share of the initial zeros in them, a product over steps."""

    mu: Any  # means of gradients, in mu_dtype
    nu: Any  # of their squares
    zeros_in_mu: jax.Array  # float32, 1 before the first step
    zeros_in_nu: jax.Array


def transform(keys: OptimizerKeys, rate: Any, pace: Pace) -> optax.GradientTransformation:
    """Makes AdamW's update at one learning rate and pace; table.py loads it by name."""
    b1, b2 = (kept_share(keys, name, pace) for name in ("adam_b1", "adam_b2"))
    return optax.chain(
        scale_by_adam(b1, b2, keys.adam_eps, keys.mu_dtype),
        decay_weights(keys, "adam_weight_decay", pace),
        optax.scale_by_learning_rate(rate),
    )


def scale_by_adam(b1: Any, b2: Any, eps: float, mu_dtype: str) -> optax.GradientTransformation:
    """Scales as `optax.scale_by_adam`, which counts steps and so has one beta for all of them. Its
    moments are sharded as the weights.
    """

    def init(weights: Any) -> AdamState:
        mu = optax.tree.zeros_like(weights, dtype=jnp.dtype(mu_dtype))
        return AdamState(mu, optax.tree.zeros_like(weights), jnp.float32(1), jnp.float32(1))

    def update(gradients: Any, state: AdamState, weights: Any = None) -> tuple[Any, AdamState]:
        mu = optax.tree.update_moment(gradients, state.mu, b1, 1)
        nu = optax.tree.update_moment(gradients, state.nu, b2, 2)
        zeros_in_mu, zeros_in_nu = b1 * state.zeros_in_mu, b2 * state.zeros_in_nu

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            return m / (1 - zeros_in_mu) / (jnp.sqrt(v / (1 - zeros_in_nu)) + eps)

        return jax.tree.map(direction, mu, nu), AdamState(mu, nu, zeros_in_mu, zeros_in_nu)

    return optax.GradientTransformation(init, update)
