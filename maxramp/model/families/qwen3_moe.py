"""Qwen3-MoE: a Qwen3 whose MLPs are mixtures of experts (arXiv 2505.09388)."""

import dataclasses

from maxramp.model.families import sparse
from maxramp.model.families.family import Released
from maxramp.model.families.qwen3 import QWEN3

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    **sparse.LAYERS,
    tensors=sparse.tensors(QWEN3.tensors),
    released=Released(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 4, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False}
        | {"max_position_embeddings": 32_768},
        {**sparse.NAMES, "base_moe_mlp_dim": "moe_intermediate_size"},
        {"num_local_experts": "num_experts"},  # as transformers 5 writes it
    ),
    keys=(*sparse.EXPERT_KEYS, "norm_topk_prob"),
)
