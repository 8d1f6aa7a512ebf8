"""OLMo 2: norms after attention and MLP, and of the queries and keys of all heads together (arXiv
2501.00656)."""

import dataclasses

from maxramp.model.families.family import Released
from maxramp.model.families.llama import LAYER
from maxramp.model.families.qwen3 import QWEN3

_BEFORE = ("layers.dense.mixer_norm.scale_D", "layers.dense.mlp_norm.scale_D")


OLMO2 = dataclasses.replace(
    QWEN3,
    norms="after",
    heads_together=True,
    tensors={
        **{path: tensor for path, tensor in QWEN3.tensors.items() if path not in _BEFORE},
        "layers.dense.mixer_post_norm.scale_D": f"{LAYER}.post_attention_layernorm.weight",
        "layers.dense.mlp_post_norm.scale_D": f"{LAYER}.post_feedforward_layernorm.weight",
    },
    released=Released(
        "olmo2",
        "Olmo2ForCausalLM",
        {"num_key_value_heads": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
)
