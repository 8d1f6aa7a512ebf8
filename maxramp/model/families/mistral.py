"""Mistral: a Llama whose tokens see a window of those before them (arXiv 2310.06825)."""

import dataclasses

from maxramp.model.families.family import Released
from maxramp.model.families.llama import LLAMA

MISTRAL = dataclasses.replace(
    LLAMA,
    released=Released(
        "mistral",
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
        {"sliding_window_size": "sliding_window"},
    ),
    keys=("sliding_window_size",),
)
