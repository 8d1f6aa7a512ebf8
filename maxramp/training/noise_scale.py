"""The gradient noise scale, estimated in every step from gradients that the step computes anyway.

For gradient sums g_a over groups of n_a tokens, with n = sum n_a, N = sum n_a^2, Q = sum |g_a|^2
and P = |sum g_a|^2:

    signal   = (P - Q) / (n^2 - N)          |G|^2, of the gradient of all data, per token
    variance = (P - n^2 signal) / n         tr(Sigma), of one token's gradient

Both are unbiased where groups are independent; for two sizes they are McCandlish et al.'s (arXiv
1812.06162, appendix A). The noise scale, variance / signal of averages over many steps, is in
tokens.

There are three kinds, by the prefix of their names:

    ""       the weights of products; the groups are the micro batches of a step with accumulation,
             and in them the parts of the copies of the weights
    "adam_"  the same for Adam's g / (sqrt(v) + eps) with v from before the step; without embedding
             and head, where v is almost zero for a token that was not seen for long
    "norms_" the scales of the norms; the groups are the rows, so it needs no accumulation and
             depends on no split (it predicts that of all weights: Gray et al., arXiv 2411.00999)

Shapes: A gradient accumulation steps, B rows, C copies of the weights, D model width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.norm import RowScale
from maxramp.model.parts.weights import Weight, map_weights, weights_of
from maxramp.parallel.collectives import add_up, square_sums
from maxramp.parallel.sharding import ROWS_ACB, ROWS_B, STREAM_BD, HEAD_Bh, HEADS_BHh, stack_spec
from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.adamw import AdamState
from maxramp.training.optimizers.table import adam_state

# The devices' parts of Q by kind, for a micro batch, or for a step with a leading axis A.
Squares = dict[str, jax.Array]


def _probe_rows(model: Decoder, rows: int) -> Decoder:
    """Returns a model whose gradient also has that of every norm's scale by row, for `rows`
    rows."""

    def probe(weight: Weight) -> Weight | RowScale:
        if weight.role != "scale":
            return weight
        layers = len(weight.leading)
        shape = *weight.shape[:layers], rows, *weight.shape[layers:]
        row_spec = {"D": STREAM_BD, "h": HEAD_Bh, "c": HEAD_Bh}.get(weight.own, HEADS_BHh)
        spec = stack_spec(row_spec, layers)
        return RowScale(weight, jnp.zeros(shape, jnp.float32, out_sharding=spec))

    return map_weights(probe, model)


def measure(
    gradient: Callable[[Decoder], tuple[Decoder, Aux]],
    trained: Decoder,
    rows: int,
    keys: OptimizerKeys,
    opt_state: optax.PartitionState,
) -> tuple[tuple[Decoder, Aux], Squares]:
    """Calls `gradient` for a micro batch of `rows` rows. Returns its results and their squares."""
    gradients, sums = gradient(_probe_rows(trained, rows))
    leaves = jax.tree.leaves(gradients, is_leaf=_is_probe)
    gradients = jax.tree.map(lambda x: x.scale if _is_probe(x) else x, gradients, is_leaf=_is_probe)
    scales_by_row = [x.rows_BD for x in leaves if _is_probe(x)]
    kept = {"": square_sums(_product_weights(gradients)), "norms_": square_sums(scales_by_row)}
    if adam := _moment(gradients, opt_state):
        kept["adam_"] = _adam_squares(gradients, keys, adam)
    return (gradients, sums), kept


def metrics(
    kept: Squares,
    batch: Batch,
    copies: int,
    gradients: Decoder,
    keys: OptimizerKeys,
    opt_state: optax.PartitionState,
) -> dict[str, jax.Array]:
    """Returns the estimates of a step, float32 scalars: `noise_signal` and `noise_variance` with
    each kind's prefix, "norms_" alone with one micro batch; not finite where one group has all
    tokens. `kept` are the squares of `measure`, stacked over A, `copies` those of the weights whose
    gradients stayed apart there, `gradients` the sums over the batch; `opt_state` is that before
    the step."""
    A, B, _ = batch.tokens.shape
    tokens_AB = (batch.targets >= 0).sum(-1)
    spec = ROWS_ACB if copies > 1 else stack_spec(ROWS_B, 2)
    tokens_ACB = jax.lax.reshape(
        tokens_AB.astype(jnp.float32), (A, copies, B // copies), out_sharding=spec
    )
    n = tokens_ACB.sum()
    groups = {
        "norms_": (tokens_ACB, square_sums([x for x in weights_of(gradients) if x.role == "scale"]))
    }
    if A > 1:
        tokens_AC = tokens_ACB.sum(-1)
        groups[""] = tokens_AC, square_sums(_product_weights(gradients))
        if adam := _moment(gradients, opt_state):
            groups["adam_"] = tokens_AC, _adam_squares(gradients, keys, adam)
    estimates = {}
    for kind, (tokens, whole) in groups.items():
        Q, N = add_up(kept[kind]).sum(), (tokens**2).sum()
        P = add_up(whole)
        signal = (P - Q) / (n**2 - N)
        estimates |= {f"{kind}noise_signal": signal, f"{kind}noise_variance": P / n - n * signal}
    return estimates


def _is_probe(x: Any) -> bool:
    return isinstance(x, RowScale)


def _product_weights(tree: Any) -> list[Any]:
    """Returns the weights of products: only their gradients stay apart by copy."""
    return [x for x in weights_of(tree) if x.is_in_products]


def _moment(gradients: Decoder, opt_state: optax.PartitionState) -> AdamState | None:
    """Returns AdamW's state if it has a second moment for all products of the layers, else None."""
    adam = adam_state(opt_state)
    count = len(_product_weights(gradients.layers))
    return adam if adam and len(_product_weights(adam.nu.layers)) == count else None


def _adam_squares(gradients: Decoder, keys: OptimizerKeys, adam: AdamState) -> jax.Array:
    """Squares the layers' gradients over sqrt(v) + eps; not finite before the first step."""
    # A factor of the root, so that each weight needs one division.
    correction = jax.lax.rsqrt(1 - adam.zeros_in_nu)

    def divide(g: jax.Array, v: jax.Array, correction: jax.Array) -> jax.Array:
        return g / (jnp.sqrt(v.astype(jnp.float32)) * correction + keys.adam_eps)

    gs, vs = _product_weights(gradients.layers), _product_weights(adam.nu.layers)
    return square_sums(gs, vs, [correction] * len(gs), function=divide)
