"""Mixtral: a Mistral whose MLPs are mixtures of experts (arXiv 2401.04088)."""

import dataclasses

from maxramp.model.families import sparse
from maxramp.model.families.family import Released
from maxramp.model.families.llama import LLAMA

MIXTRAL = dataclasses.replace(
    LLAMA,
    **sparse.LAYERS,
    expert_keys={"norm_topk_prob": True},  # whose weights always are
    tensors=sparse.tensors(
        LLAMA.tensors, *("block_sparse_moe.gate", "block_sparse_moe.experts"), ("w1", "w3", "w2")
    ),
    released=Released(
        "mixtral",
        "MixtralForCausalLM",
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131_072},
        {
            "sliding_window_size": "sliding_window",
            "num_experts": "num_local_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "base_moe_mlp_dim": "intermediate_size",
        },
        {"num_experts": "num_local_experts"},
    ),
    keys=(*sparse.EXPERT_KEYS, "sliding_window_size"),
)
