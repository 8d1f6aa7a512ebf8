"""AdamW (arXiv 1412.6980, 1711.05101)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.half_lives import Pace, kept_share, with_decay


class State(NamedTuple):
    """Means, and the share of their initial zeros still in them, a product over steps: the bias."""

    mu: Any  # means of gradients, in mu_dtype
    nu: Any  # of their squares
    zeros_in_mu: jax.Array  # float32, 1 before the first step
    zeros_in_nu: jax.Array


def init(keys: OptimizerKeys, weights: Any) -> State:
    mu = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.dtype(keys.mu_dtype)), weights)
    nu = jax.tree.map(jnp.zeros_like, weights)
    return State(mu, nu, jnp.float32(1), jnp.float32(1))


def update(
    keys: OptimizerKeys, gradients: Any, state: State, weights: Any, pace: Pace
) -> tuple[Any, State]:
    b1, b2 = (kept_share(keys, name, pace) for name in ("adam_b1", "adam_b2"))
    mu = jax.tree.map(lambda m, g: (1 - b1) * g + b1 * m, state.mu, gradients)
    nu = jax.tree.map(lambda v, g: (1 - b2) * (g * g) + b2 * v, state.nu, gradients)
    zeros_in_mu, zeros_in_nu = b1 * state.zeros_in_mu, b2 * state.zeros_in_nu

    def direction(m: jax.Array, v: jax.Array) -> jax.Array:
        return m / (1 - zeros_in_mu) / (jnp.sqrt(v / (1 - zeros_in_nu)) + keys.adam_eps)

    moved = jax.tree.map(direction, mu, nu)
    moved = with_decay(moved, weights, keys, "adam_weight_decay", pace)
    mu, nu = jax.tree.map(lambda new, old: new.astype(old.dtype), (mu, nu), (state.mu, state.nu))
    return moved, State(mu, nu, zeros_in_mu, zeros_in_nu)


def second_moment(state: State) -> tuple[Any, jax.Array]:
    """The mean of squares of each weight's gradients, and what its root is to be multiplied by,
    as it began at zero: not finite before the first step."""
    return state.nu, jax.lax.rsqrt(1 - state.zeros_in_nu)
