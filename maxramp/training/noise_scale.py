"""The gradient noise scale, estimated in every step from gradients that the step takes anyway.

For gradient sums g_a over groups of n_a tokens, with n = sum n_a, N = sum n_a^2, Q = sum |g_a|^2
and P = |sum g_a|^2:

    signal   = (P - Q) / (n^2 - N)          |G|^2, of the gradient of all data, per token
    variance = (P - n^2 signal) / n         tr(Sigma), of one token's gradient

Both are unbiased where the groups are independent: E|g_a|^2 = n_a^2 |G|^2 + n_a tr(Sigma), and a
sum of groups is a group. For two sizes these are the formulas of McCandlish et al. (arXiv
1812.06162, appendix A). Their noise scale is variance / signal, the batch in tokens at which the
two are equal, of averages over many steps: a quotient of single steps has no mean.

There are three kinds, by the prefix of their names:

    ""       all weights; the groups are the micro batches of a step with accumulation
    "adam_"  the same for what Adam makes of a gradient g, g / (sqrt(v) + eps) with v from before
             the step; without embedding and output head, where v is almost zero for a token that
             was not seen for long
    "norms_" the scales of the norms; the groups are the rows, so that it is there without
             accumulation too and depends on no split (Gray et al., arXiv 2411.00999: it predicts
             the noise scale of all weights)

Shapes: A gradient accumulation steps, B rows, T tokens, S tokens of a row and the one after it, D
model width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.data.marks import START
from maxramp.model.decoder import Decoder
from maxramp.model.layers import RowScale, Scale
from maxramp.parallel.axes import BATCH_AXES
from maxramp.parallel.sharding import P
from maxramp.training.keys import OptimizerKeys
from maxramp.training.norm import add_up, squares


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("squares", "tokens_squared"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Groups:
    """What is kept of the groups of a micro batch; of a step, with a leading axis A.

    Attributes:
      squares: by kind, the devices' parts of Q.
      tokens_squared: by kind, N.
    """

    squares: dict[str, jax.Array]
    tokens_squared: dict[str, jax.Array]


def by_rows(model: Decoder, rows: int) -> Decoder:
    """A model whose gradient holds that of every norm's scale for each of so many rows as well."""

    def probed(weight: nnx.Param) -> nnx.Param | RowScale:
        if not isinstance(weight, Scale):
            return weight
        *layers, D = weight[...].shape
        spec = P(*(None,) * len(layers), BATCH_AXES, None)
        return RowScale(weight, jax.reshard(jnp.zeros((*layers, rows, D), jnp.float32), spec))

    return jax.tree.map(probed, model, is_leaf=lambda x: isinstance(x, nnx.Param))


def take_apart(gradients: Decoder) -> tuple[Decoder, list[jax.Array]]:
    """The gradient of a model `by_rows` -> the gradient of the model, and those of the rows."""

    def is_probed(x: Any) -> bool:
        return isinstance(x, RowScale)

    rows = [x.rows_BD for x in jax.tree.leaves(gradients, is_leaf=is_probed) if is_probed(x)]
    plain = jax.tree.map(lambda x: x.scale if is_probed(x) else x, gradients, is_leaf=is_probed)
    return plain, rows


def groups_of(
    gradients: Decoder,
    gradients_of_rows: list[jax.Array],
    tokens: jax.Array,
    rows_BS: jax.Array,
    keys: OptimizerKeys,
    opt_state: Any,
) -> Groups:
    """What is kept of one micro batch.

    Args:
      gradients: sums over its tokens.
      gradients_of_rows: of every norm's scales, by rows; from `take_apart`.
      tokens: its targets.
      rows_BS: its token ids.
      keys, opt_state: the optimizer before the step.
    """
    targets_BT = (rows_BS[:, 1:] >= 0) & (rows_BS[:, 1:] < START)
    tokens_B = targets_BT.sum(-1, dtype=jnp.float32)
    found = Groups(
        {"": squares(gradients), "norms_": squares(gradients_of_rows)},
        {"": tokens**2, "norms_": (tokens_B**2).sum()},
    )
    if keys.opt_type == "adamw":
        found.squares["adam_"] = squares(_as_adam_sees(gradients, keys, opt_state))
        found.tokens_squared["adam_"] = tokens**2
    return found


def metrics(
    groups: Groups, gradients: Decoder, tokens: jax.Array, keys: OptimizerKeys, opt_state: Any
) -> dict[str, jax.Array]:
    """The estimates of a step by their names, float32 scalars.

    Args:
      groups: of its micro batches.
      gradients, tokens: sums over them all.
      keys, opt_state: the optimizer before the step.

    Returns:
      `noise_signal` and `noise_variance` after the prefix of each kind; without accumulation of
      "norms_" alone.
    """
    scales = [x for x in jax.tree.leaves(gradients, is_leaf=_is_scale) if _is_scale(x)]
    whole = {"norms_": scales}
    if len(groups.tokens_squared[""]) > 1:
        whole[""] = gradients
        if keys.opt_type == "adamw":
            whole["adam_"] = _as_adam_sees(gradients, keys, opt_state)
    found = {}
    for kind, tree in whole.items():
        Q, N = add_up(groups.squares[kind]).sum(), groups.tokens_squared[kind].sum()
        signal, variance = estimate(Q, N, add_up(squares(tree)), tokens)
        found |= {f"{kind}noise_signal": signal, f"{kind}noise_variance": variance}
    return found


def estimate(Q: jax.Array, N: jax.Array, P: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(signal, variance) by the formulas at the top of this module, of at least two groups."""
    signal = (P - Q) / (n**2 - N)
    return signal, P / n - n * signal


def _is_scale(x: Any) -> bool:
    return isinstance(x, Scale)


def _as_adam_sees(gradients: Decoder, keys: OptimizerKeys, opt_state: Any) -> Any:
    """The layers' gradients over sqrt(v) + eps; not a number before the first step."""
    adam = opt_state[0]
    correction = 1 - keys.adam_b2 ** adam.count.astype(jnp.float32)

    def scaled(g: jax.Array, v: jax.Array) -> jax.Array:
        return g / (jnp.sqrt(v.astype(jnp.float32) / correction) + keys.adam_eps)

    return jax.tree.map(scaled, gradients.layers, adam.nu.layers)
