"""Gemma 3: a Gemma 2 with norms of queries and keys in place of caps. Five layers of a window, with
positions of their own base, come before each that sees all (arXiv 2503.19786)."""

import dataclasses
import functools

from maxramp.model.families.family import Released
from maxramp.model.families.gemma2 import DEFAULTS, GEMMA2
from maxramp.model.families.llama import windows_pattern
from maxramp.model.families.qwen3 import QWEN3

GEMMA3 = dataclasses.replace(
    GEMMA2,
    pattern=functools.partial(windows_pattern, 6, True),
    tensors={**QWEN3.tensors, **GEMMA2.tensors},
    released=Released(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**DEFAULTS, "vocab_size": 262_208, "rope_theta": 1e6, "max_position_embeddings": 131_072}
        | {"sliding_window_pattern": 6},
        {"sliding_window_size": "sliding_window", "query_pre_attn_scalar": "query_pre_attn_scalar"},
        activation="hidden_activation",
        period=6,
        local_rope=("rope_local_base_freq", 1e4),
    ),
    keys=("sliding_window_size", "query_pre_attn_scalar", "local_rope_max_timescale"),
    fixed={"use_qk_norm": True},
)
