"""Qwen3: a Llama with norms of the queries and keys of every head (arXiv 2505.09388)."""

import dataclasses

from maxramp.model.families.family import Released
from maxramp.model.families.llama import LAYER, LLAMA

QWEN3 = dataclasses.replace(
    LLAMA,
    tensors={
        **LLAMA.tensors,
        "layers.dense.mixer.query_norm.scale_D": f"{LAYER}.self_attn.q_norm.weight",
        "layers.dense.mixer.key_norm.scale_D": f"{LAYER}.self_attn.k_norm.weight",
    },
    released=Released(
        "qwen3",
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768},
    ),
    fixed={"use_qk_norm": True},
)
