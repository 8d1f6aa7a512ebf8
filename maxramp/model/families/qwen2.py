"""Qwen2.5: a Llama with biases on queries, keys and values (arXiv 2412.15115)."""

from maxramp.model.families.llama import LLAMA

_ATTENTION = "model.layers.{}.self_attn"

QWEN2 = LLAMA._replace(
    tensors={
        **LLAMA.tensors,
        "layers.dense.attention.query_bias_Hh": f"{_ATTENTION}.q_proj.bias",
        "layers.dense.attention.key_bias_Kh": f"{_ATTENTION}.k_proj.bias",
        "layers.dense.attention.value_bias_Kh": f"{_ATTENTION}.v_proj.bias",
    }
)
