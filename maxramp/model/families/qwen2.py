"""Qwen2.5: a Llama with biases on queries, keys and values (arXiv 2412.15115)."""

import dataclasses

from maxramp.model.families.family import Released
from maxramp.model.families.llama import LAYER, LLAMA

QWEN2 = dataclasses.replace(
    LLAMA,
    tensors={
        **LLAMA.tensors,
        "layers.dense.mixer.query_bias_Hh": f"{LAYER}.self_attn.q_proj.bias",
        "layers.dense.mixer.key_bias_Kh": f"{LAYER}.self_attn.k_proj.bias",
        "layers.dense.mixer.value_bias_Kh": f"{LAYER}.self_attn.v_proj.bias",
    },
    released=Released(
        "qwen2", "Qwen2ForCausalLM", {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
    ),
    fixed={"attention_bias": True},
)
