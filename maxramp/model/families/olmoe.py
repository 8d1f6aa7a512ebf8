"""OLMoE: a Llama with norms of the queries and keys of all heads together, and mixtures of experts
as MLPs (arXiv 2409.02060)."""

import dataclasses

from maxramp.keys.section import Relations
from maxramp.model.families import sparse
from maxramp.model.families.family import Released
from maxramp.model.families.qwen3 import QWEN3
from maxramp.model.keys import ModelKeys


def _check(keys: ModelKeys) -> Relations:
    heads = keys.base_num_query_heads * keys.head_dim
    yield (
        heads != keys.base_emb_dim,
        f"base_num_query_heads x head_dim = {heads}: decoder_block=olmoe has base_emb_dim="
        f"{keys.base_emb_dim} numbers of all heads together; change one of them",
    )
    yield from sparse.check(keys)


OLMOE = dataclasses.replace(
    QWEN3,
    **sparse.LAYERS | {"check": _check},
    heads_together=True,
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
