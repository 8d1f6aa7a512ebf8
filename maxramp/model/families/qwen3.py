"""Qwen3: a Llama with norms of the queries and keys of every head (arXiv 2505.09388)."""

from maxramp.model.families.llama import LLAMA

_ATTENTION = "model.layers.{}.self_attn"

QWEN3 = LLAMA._replace(
    tensors={
        **LLAMA.tensors,
        "layers.dense.attention.query_norm.scale_D": f"{_ATTENTION}.q_norm.weight",
        "layers.dense.attention.key_norm.scale_D": f"{_ATTENTION}.k_norm.weight",
    }
)
