"""dots.llm1: a Qwen3 with DeepSeek-V3's mixtures of experts after some dense layers (arXiv
2506.05767)."""

import dataclasses

from maxramp.model.families import sparse
from maxramp.model.families.family import Released
from maxramp.model.families.llama import LAYER
from maxramp.model.families.qwen3 import QWEN3

NAMES = {
    **sparse.NAMES,
    "num_experts": "n_routed_experts",
    "base_moe_mlp_dim": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "first_num_dense_layers": "first_k_dense_replace",
    "routed_scaling_factor": "routed_scaling_factor",
    "n_routing_groups": "n_group",
    "topk_routing_group": "topk_group",
}
_SHARED = {"gate_DF": "gate_proj", "up_DF": "up_proj", "out_FD": "down_proj"}

DOTS1 = dataclasses.replace(
    QWEN3,
    **sparse.LAYERS,
    tensors={
        **QWEN3.tensors,
        **sparse.tensors(QWEN3.tensors),
        "layers.sparse.mlp.router.bias_E": f"{LAYER}.mlp.gate.e_score_correction_bias",
        **{
            f"layers.sparse.mlp.shared.{ours}": f"{LAYER}.mlp.shared_experts.{theirs}.weight"
            for ours, theirs in _SHARED.items()
        },
    },
    released=Released(
        "dots1",
        "Dots1ForCausalLM",
        {"num_key_value_heads": 32, "moe_intermediate_size": 1408, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
        | {"sliding_window": 4096, "max_window_layers": 62, "max_position_embeddings": 2048},
        NAMES,
        {"num_local_experts": "n_routed_experts"},
    ),
    keys=(
        *sparse.EXPERT_KEYS,
        *(name for name in NAMES if name not in sparse.EXPERT_KEYS),
        "routed_bias_update_rate",
    ),
    fixed={"use_qk_norm": True, "routed_score_func": "sigmoid", "routed_bias": True},
)
