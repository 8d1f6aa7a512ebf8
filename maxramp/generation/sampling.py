"""Samples the next token from the logits.

Shapes: B rows, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError

_COLDEST = 1e-3  # the lowest temperature that can divide logits


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_k: int = 0  # draw from the k likeliest tokens; 0 = from all
    # and of these from the likeliest that together have this probability (nucleus sampling,
    # Holtzman et al., arXiv 1904.09751)
    top_p: float = 1.0
    vocab_size: int = 0  # draw only ids below it, which the tokenizer knows; 0 = all

    def check(self) -> None:
        """Refuses values out of bounds, by the names of a command's options."""
        is_temperature = self.temperature == 0 or _COLDEST <= self.temperature < math.inf
        for name, holds, bound in (
            ("temperature", is_temperature, f"0, which is greedy, or {_COLDEST:g} or more"),
            ("top_k", self.top_k >= 0, "0 or more; 0 draws from all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not holds:
                raise ConfigError(f"--{name}={getattr(self, name):g} must be {bound}")


def sample(
    logits_BV: jax.Array, sampling: Sampling, draws_B2: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the next token of every row, int32, and its log-probability, float32.

    The log-probability is under softmax(logits / temperature), whatever top_k, top_p and vocab_size
    leave out; for temperature 0 under softmax(logits). Draws depend only on draws_B2 (uint32: seed
    and number of the sample) and positions_B (int32, of the new token), not on other rows.
    """
    logits_BV = logits_BV / (sampling.temperature or 1.0)
    kept_BV = _mask_unlikely(logits_BV, sampling)
    if sampling.temperature:
        gumbel = functools.partial(_gumbel, size=logits_BV.shape[1])
        kept_BV = kept_BV + jax.vmap(gumbel)(draws_B2, positions_B)
    tokens_B = jnp.argmax(kept_BV, axis=-1).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def _gumbel(draw_2: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """Returns noise: the argmax of logits + noise is a draw from their softmax."""
    seed, sample = draw_2
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
    return jax.random.gumbel(key, (size,))


def _mask_unlikely(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns logits, already divided by the temperature, with -inf for tokens that must not be
    drawn; those equal to the last one that may be drawn stay, too."""
    V = logits_BV.shape[1]
    if 0 < sampling.vocab_size < V:
        logits_BV = jnp.where(jnp.arange(V) < sampling.vocab_size, logits_BV, -jnp.inf)
    k = min(sampling.top_k or V, V)
    if k == V and sampling.top_p == 1:
        return logits_BV
    likeliest_Bk, _ = jax.lax.top_k(logits_BV, k)
    least_B1 = likeliest_Bk[:, -1:]
    if sampling.top_p < 1:
        probabilities_Bk = jax.nn.softmax(likeliest_Bk, axis=-1)
        before_Bk = jnp.cumsum(probabilities_Bk, axis=-1) - probabilities_Bk
        inside_Bk = before_Bk < sampling.top_p  # the first one always
        least_B1 = jnp.where(inside_Bk, likeliest_Bk, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
