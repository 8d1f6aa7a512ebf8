"""The gradient noise scale, estimated in every step from gradients that the step takes anyway.

For gradient sums g_a over groups of n_a tokens, with n = sum n_a, Q = sum |g_a|^2, P = |sum g_a|^2:

    signal   = (P - Q) / (n^2 - sum n_a^2)     |G|^2, of the gradient of all data, per token
    variance = (P - n^2 signal) / n            tr(Sigma), of one token's gradient

Both are unbiased where the groups are independent: E|g_a|^2 = n_a^2 |G|^2 + n_a tr(Sigma), and a
sum of groups is a group. For two sizes these are the formulas of McCandlish et al. (arXiv
1812.06162, appendix A). Their noise scale is variance / signal, the batch in tokens at which the
two are equal, of averages over many steps: a quotient of single steps has no mean.

The groups are the micro batches of a step with accumulation. Adam sees gradients divided by
sqrt(v), so the same is estimated for g / (sqrt(v) + eps) too, v from before the step. That leaves
out the embedding and the output head: a token that was not seen for long has a v of almost zero.

Shapes: A gradient accumulation steps.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxramp.training.keys import OptimizerKeys
from maxramp.training.norm import add_up, squares


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("norms", "tokens"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Group:
    """What is kept of one micro batch's gradient; of all, with a leading axis A.

    Attributes:
      norms: the devices' parts of its squared norm, by geometry ("" is the plain one).
      tokens: its target tokens.
    """

    norms: dict[str, jax.Array]
    tokens: jax.Array


def measure(keys: OptimizerKeys, opt_state: Any) -> Callable[[Any, jax.Array], Group]:
    """A function of a gradient sum and its tokens to what is kept of it.

    Args:
      keys: the optimizer, whose geometry counts too.
      opt_state: before the step.
    """

    def of(gradients: Any, tokens: jax.Array) -> Group:
        norms = {"": squares(gradients)}
        if keys.opt_type == "adamw":
            adam: optax.ScaleByAdamState = opt_state[0]
            correction = 1 - keys.adam_b2 ** adam.count.astype(jnp.float32)

            def scaled(g: jax.Array, v: jax.Array) -> jax.Array:
                return g / (jnp.sqrt(v.astype(jnp.float32) / correction) + keys.adam_eps)

            norms["adam_"] = squares(jax.tree.map(scaled, gradients.layers, adam.nu.layers))
        return Group(norms, tokens)

    return of


def metrics(groups: Group, total: Group) -> dict[str, jax.Array]:
    """The estimates of a step, as float32 scalars.

    Args:
      groups: of its micro batches.
      total: of their sum.

    Returns:
      `noise_signal` and `noise_variance`, and the same after `adam_` in Adam's geometry; nothing
      for a single micro batch.
    """
    if groups.tokens.size < 2:
        return {}
    found = {}
    for geometry, parts in groups.norms.items():
        whole = add_up(total.norms[geometry])
        signal, variance = estimate(add_up(parts), groups.tokens, whole)
        found |= {f"{geometry}noise_signal": signal, f"{geometry}noise_variance": variance}
    return found


def estimate(
    squared_norms_A: jax.Array, tokens_A: jax.Array, squared_norm_of_sum: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(signal, variance) of two groups or more; see the top of this module.

    Args:
      squared_norms_A: of each group's gradient sum.
      tokens_A: of each group, float32.
      squared_norm_of_sum: of the sum of all.
    """
    n, P, Q = tokens_A.sum(), squared_norm_of_sum, squared_norms_A.sum()
    signal = (P - Q) / (n**2 - (tokens_A**2).sum())
    return signal, P / n - n * signal
