"""Routing: which experts a token goes to, with which weights, and what balances their loads.

Shapes: B rows, T tokens, D model width, E experts, k experts of a token, g groups of experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.keys import ModelKeys
from maxramp.model.parts.aux import Aux, sum_by_stage
from maxramp.model.parts.weights import Weight, apply_elementwise, dense, normal, zeros
from maxramp.parallel.sharding import REPLICATED, ROUTER_DE, ROWS_BT, CHOICES_BTk

CHOICES = "experts of tokens"  # and what follows from them alone, saved by every remat_policy
LOAD = "expert_load"  # counts of tokens by expert

# experts, int32 [B, T, k], in which E means dropped for lack of capacity; their float32 weights
Choice = tuple[jax.Array, jax.Array]


class Router(nnx.Module):
    """Scores experts in float32: softmax, or DeepSeek-V3's sigmoid with groups and a bias that
    balances the load (arXiv 2412.19437, section 2.1.2). `trains_bias`: its biases are instead those
    of the product, and train."""

    def __init__(self, keys: ModelKeys, key: jax.Array, trains_bias: bool = False):
        D, E = keys.base_emb_dim, keys.num_experts
        self.matrix_DE = normal("router", "D E", key, (D, E), ROUTER_DE, D**-0.5, keys.weight_dtype)
        self.experts = E
        self.per_token, self.is_normalized = keys.num_experts_per_tok, keys.norm_topk_prob
        self.score, self.factor = keys.routed_score_func, keys.routed_scaling_factor
        self.groups = max(1, keys.n_routing_groups), keys.topk_routing_group
        self.has_bias, self.trains_bias = keys.routed_bias, trains_bias
        if self.has_bias:
            role, dtype = ("bias", keys.weight_dtype) if trains_bias else ("balance", "float32")
            self.bias_E = zeros(role, "E", (E,), REPLICATED, dtype)
        layers = self.layers = keys.base_num_decoder_layers - keys.first_num_dense_layers
        self.scope = keys.load_balance_loss_scope
        self.balance_weight = keys.load_balance_loss_weight / layers
        self.z_weight = keys.router_z_loss_weight / layers
        self.capacity_factor = keys.capacity_factor
        self.last_shares_E = None  # with scope="step" the last step's loads (`with_last_step`)

    def __call__(self, x_BTD: jax.Array, token_weight_BT: jax.Array | None) -> tuple[Choice, Aux]:
        """Chooses the experts of tokens [B, T, D]. Without weights of tokens (`Positions`) nothing
        is summed, and no token is dropped."""
        x_BTD = x_BTD.astype(jnp.float32)
        logits_BTE = dense(x_BTD, self.matrix_DE, CHOICES_BTk, precision="highest")
        if self.trains_bias:
            logits_BTE = apply_elementwise(jnp.add, logits_BTE, self.bias_E)
        if self.score == "sigmoid":
            scores_BTE = jax.nn.sigmoid(logits_BTE)
        else:
            scores_BTE = jax.nn.softmax(logits_BTE)
        biased_BTE = jax.lax.stop_gradient(scores_BTE)
        if self.has_bias and not self.trains_bias:
            biased_BTE = apply_elementwise(jnp.add, biased_BTE, self.bias_E)
        experts_BTk = checkpoint_name(self._choose(biased_BTE), CHOICES)
        is_chosen_BTkE = experts_BTk[..., None] == jnp.arange(scores_BTE.shape[-1])
        weights_BTk = jnp.where(is_chosen_BTkE, scores_BTE[:, :, None], 0).sum(-1)
        if self.is_normalized:
            weights_BTk /= weights_BTk.sum(-1, keepdims=True) + 1e-20
        weights_BTk *= self.factor
        choice, dropped_BT = (experts_BTk, weights_BTk), None
        if token_weight_BT is None:
            return choice, Aux()
        if self.capacity_factor > 0:
            choice, dropped_BT = self._limit_loads(choice, is_chosen_BTkE, token_weight_BT > 0)
        return choice, self._sums(
            logits_BTE, scores_BTE, is_chosen_BTkE, token_weight_BT, dropped_BT
        )

    def _choose(self, scores_BTE: jax.Array) -> jax.Array:
        """Returns the experts of each token [B, T, k]: those of the highest scores, in the groups
        whose two best experts have the highest sum."""
        groups, open_groups = self.groups
        if groups > 1:
            B, T, E = scores_BTE.shape
            scores_BTge = scores_BTE.reshape(B, T, groups, E // groups)
            best_BTg = jax.lax.top_k(scores_BTge, 2)[0].sum(-1)
            group_BTt = jax.lax.top_k(best_BTg, open_groups)[1]
            is_open_BTg = (group_BTt[..., None] == jnp.arange(groups)).any(-2)
            scores_BTge = jnp.where(is_open_BTg[..., None], scores_BTge, -jnp.inf)
            scores_BTE = scores_BTge.reshape(B, T, E)
        return jax.lax.top_k(scores_BTE, self.per_token)[1]

    def _limit_loads(
        self, choice: Choice, is_chosen_BTkE: jax.Array, counts_BT: jax.Array
    ) -> tuple[Choice, jax.Array]:
        """Drops choices over an expert's capacity, those of a row's last tokens first: the factor
        times an equal share of the row's tokens that count. Returns the choice, and how many
        choices each token lost."""
        k, E = is_chosen_BTkE.shape[2:]
        most_B = jnp.ceil(counts_BT.sum(1) * (k * self.capacity_factor / E))
        is_chosen_BTkE &= counts_BT[..., None, None]
        is_chosen_BTE = jax.reshard(is_chosen_BTkE.any(2), ROWS_BT)
        before_BTE = jnp.cumsum(is_chosen_BTE, axis=1, dtype=jnp.int32)  # and this token
        is_over_BTE = before_BTE > most_B[:, None, None]
        is_late_BTk = (is_chosen_BTkE & is_over_BTE[:, :, None]).any(-1)
        kept = tuple(jnp.where(is_late_BTk, x, y) for x, y in zip((E, 0), choice, strict=True))
        return kept, is_late_BTk.sum(-1)

    def _sums(self, logits_BTE, scores_BTE, is_chosen_BTkE, token_weight_BT, dropped_BT) -> Aux:
        """Computes the balance loss E * sum f_i P_i (Switch, arXiv 2101.03961, equation 4; f sums
        to 1, as in MaxText), with P the mean probability of an expert and f its share of the tokens
        in the row, the pass, or the last step; and the z-loss (arXiv 2202.08906, equation 5)."""
        E, minimized = scores_BTE.shape[-1], {}
        counts_BE = ((token_weight_BT > 0)[..., None, None] & is_chosen_BTkE).sum(
            (1, 2), dtype=jnp.int32
        )
        counts_BE = checkpoint_name(counts_BE, CHOICES)
        if self.balance_weight:
            if self.score == "sigmoid":
                scores_BTE = scores_BTE / scores_BTE.sum(-1, keepdims=True)
            mass_B1E = (token_weight_BT[..., None] * scores_BTE).sum(1, keepdims=True)
            if self.scope == "row":
                products_B1E = mass_B1E * load_shares(counts_BE)[:, None]
            else:
                shares_E = self.last_shares_E or self._pass_shares(counts_BE)
                products_B1E = apply_elementwise(jnp.multiply, mass_B1E, shares_E)
            minimized["load_balance_loss"] = self.balance_weight * E * products_B1E.sum((1, 2))
        if self.z_weight:
            z_BT = jax.nn.logsumexp(logits_BTE, -1) ** 2
            minimized["router_z_loss"] = self.z_weight * (token_weight_BT * z_BT).sum(1)
        shown = {}
        if dropped_BT is not None:
            share = 1 / (self.layers * self.per_token)
            shown["dropped_share"] = share * (token_weight_BT * dropped_BT).sum(1)
        return Aux(minimized, shown, {LOAD: counts_BE})

    def _pass_shares(self, counts_BE: jax.Array) -> Weight:
        """Returns the experts' shares of a pass; in a pipeline those of each stage's layer."""
        leading = self.matrix_DE.leading
        counts_E = sum_by_stage(counts_BE) if "S" in leading else counts_BE.sum(0)
        return Weight(
            load_shares(counts_E), role="balance", leading=leading, inputs="", outputs="E"
        )


def load_shares(counts_E: jax.Array) -> jax.Array:
    return counts_E / jnp.maximum(counts_E.sum(-1, keepdims=True), 1)
