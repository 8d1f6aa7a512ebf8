"""A mixture of experts in place of an MLP (Shazeer et al., arXiv 1701.06538): each token goes to
some of them, and no token is dropped.

Shapes: B rows, T tokens, D model width, E experts, F width of an expert, k experts of a token; M
rows of a device's experts.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.parts import dispatch, grouped
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.mlp import ACTIVATIONS, MLP
from maxramp.model.parts.routing import CHOICES, Router
from maxramp.model.parts.weights import dense, normal, zeros
from maxramp.parallel.mesh import axis_size, platform
from maxramp.parallel.sharding import (
    BIASES_OUT_ED,
    EXPERT_BIASES_EF,
    EXPERTS_IN_EDF,
    EXPERTS_OUT_EFD,
    ROUTER_DE,
    STREAM_BTD,
    X_BTD,
)

GATE_SLOPE = 1.702  # of a cut gate: its sigmoid is then near a GELU (gpt-oss, arXiv 2508.10925)


class Experts(nnx.Module):
    """A router and gated MLPs; beside them, shared experts for every token (DeepSeekMoE, arXiv
    2401.06066), which are one MLP of their total width, perhaps gated by a number of each token.
    Biases of experts' results are added outside of the experts, once."""

    def __init__(self, keys: ModelKeys, key: jax.Array, family: Family):
        E, D, F, dtype = keys.num_experts, keys.base_emb_dim, keys.moe_mlp_dim, keys.weight_dtype
        router, gate, up, out, shared = jax.random.split(key, 5)
        self.activations, self.kernel = tuple(keys.mlp_activations), keys.grouped_matmul
        self.num_experts, self.dispatch = E, keys.expert_dispatch
        self.router = Router(keys, router, family.has_expert_biases)
        matrix = functools.partial(normal, "matrix", dtype=dtype, leading="E")
        self.gate_EDF = matrix("D F", gate, (E, D, F), EXPERTS_IN_EDF, D**-0.5)
        self.up_EDF = matrix("D F", up, (E, D, F), EXPERTS_IN_EDF, D**-0.5)
        self.out_EFD = matrix("F D", out, (E, F, D), EXPERTS_OUT_EFD, F**-0.5)
        self.has_shared = keys.shared_experts > 0
        if self.has_shared:
            self.shared = MLP(keys, shared, keys.shared_experts * F)
        self.gate_limit, self.has_biases = family.gate_limit, family.has_expert_biases
        if self.has_biases:
            bias = functools.partial(zeros, "bias", "F", (E, F), EXPERT_BIASES_EF, dtype, "E")
            self.gate_bias_EF, self.up_bias_EF = bias(), bias()
            self.out_bias_ED = zeros("bias", "E D", (E, D), BIASES_OUT_ED, dtype)
        self.gates_shared = family.gates_shared
        if self.gates_shared:
            gate = jax.random.fold_in(shared, 1)
            self.shared_gate_DF = normal("router", "D F", gate, (D, 1), ROUTER_DE, D**-0.5, dtype)

    def __call__(
        self, x_BTD: jax.Array, token_weight_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """Returns [B, T, D], and the router's sums; without weights of tokens there are none."""
        x_BTD = jax.reshard(x_BTD, X_BTD)
        (experts_BTk, weights_BTk), aux = self.router(x_BTD, token_weight_BT)
        way = dispatch.select(self.dispatch, platform(), experts_BTk.shape[2])
        plan = dispatch.plan(experts_BTk, self.num_experts, way)
        # Saved by every remat_policy, as are the choices: rows are sorted once.
        plan = jax.tree.map(lambda x: checkpoint_name(x, CHOICES), plan)
        y_MD = self._compute(*dispatch.spread(x_BTD, weights_BTk, plan), plan)
        y_BTD = dispatch.collect(y_MD, plan)
        if self.has_biases:
            is_chosen_BTkE = experts_BTk[..., None] == jnp.arange(self.num_experts)
            share_BTE = jnp.where(is_chosen_BTkE, weights_BTk[..., None], 0).sum(2)
            y_BTD += dense(share_BTE.astype(y_BTD.dtype), self.out_bias_ED, STREAM_BTD)
        if self.has_shared:
            shared_BTD, _ = self.shared(x_BTD)
            if self.gates_shared:
                shared_BTD *= jax.nn.sigmoid(dense(x_BTD, self.shared_gate_DF, X_BTD))
            y_BTD = y_BTD + shared_BTD
        return y_BTD, aux

    def _compute(self, x_MD: jax.Array, weights_M: jax.Array, plan: dispatch.Plan) -> jax.Array:
        """Returns the weighted results [M, D] of rows that are sorted by expert; those after the
        last group are undefined."""
        f, g = (ACTIVATIONS[name] for name in self.activations)
        kernel = grouped.select(self.kernel, platform())
        own = self.num_experts // axis_size("expert")

        # Weighted before the last product, whose result no gradient then needs.
        def weigh(both_MF: jax.Array, weights_M: jax.Array) -> jax.Array:
            gate_MF, up_MF = jnp.split(both_MF, 2, axis=1)
            if limit := self.gate_limit:
                gate_MF = jnp.minimum(gate_MF, limit)
                gate_MF *= jax.nn.sigmoid(GATE_SLOPE * gate_MF)
                up_MF = 1 + jnp.clip(up_MF, -limit, limit)
            else:
                gate_MF, up_MF = f(gate_MF), g(up_MF)
            return (gate_MF * up_MF * weights_M[:, None]).astype(both_MF.dtype)

        # The compiler does not know how long a kernel takes: `planning.hlo` reads this.
        with jax.named_scope(grouped.describe(kernel, plan.equal_rows, plan.rows, own)):
            inputs = self.gate_EDF, self.up_EDF
            both_MF = grouped.product(x_MD, inputs, plan.sizes_E, kernel)
            if self.has_biases:
                biases = self.gate_bias_EF, self.up_bias_EF
                both_MF = grouped.add_biases(both_MF, biases, plan.sizes_E)
            hidden_MF = dispatch.map_rows(weigh, plan, both_MF, weights_M)
            return grouped.product(hidden_MF, (self.out_EFD,), plan.sizes_E, kernel)
