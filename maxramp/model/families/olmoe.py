"""OLMoE: a Llama with norms of the queries and keys of all heads together, and mixtures of experts
as MLPs (arXiv 2409.02060)."""

import dataclasses
import functools

from maxramp.model.families import sparse
from maxramp.model.families.family import Released
from maxramp.model.families.qwen3 import QWEN3

OLMOE = dataclasses.replace(
    QWEN3,
    **sparse.LAYERS,
    blocks=functools.partial(sparse.blocks, heads_together=True),
    tensors=sparse.tensors(QWEN3.tensors),
    released=Released(
        "olmoe",
        "OlmoeForCausalLM",
        {"num_key_value_heads": None, "rms_norm_eps": 1e-5}
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}
        | {"max_position_embeddings": 4096},
        {**sparse.NAMES, "base_moe_mlp_dim": "intermediate_size"},
        {"num_local_experts": "num_experts"},
    ),
    keys=(*sparse.EXPERT_KEYS, "norm_topk_prob"),
)
