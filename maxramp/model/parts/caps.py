"""Caps of logits: cap * tanh(logit / cap), 0 for none (Gemma 2, arXiv 2408.00118, section 2)."""

import jax
import jax.numpy as jnp


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(logits / cap) if cap else logits


def pull_back(gradient: jax.Array, capped: jax.Array, cap: float) -> jax.Array:
    """The gradient to logits of that to what `soft_cap` made of them."""
    return gradient * (1 - (capped / cap) ** 2) if cap else gradient
