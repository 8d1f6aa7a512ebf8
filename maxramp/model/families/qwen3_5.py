"""Qwen3.5 and 3.6: a Qwen3-Next with an MLP in each layer, and other tensors of its gated delta
rule. Its text model alone."""

import dataclasses

from maxramp.model.families import qwen3_next
from maxramp.model.families.family import Released
from maxramp.model.families.llama import attend_window
from maxramp.model.families.qwen3 import QWEN3
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Pattern

READS = {
    "qkv_DKx": "in_proj_qkv.weight",
    "z_DKx": "in_proj_z.weight",
    "b_DKx": "in_proj_b.weight",
    "a_DKx": "in_proj_a.weight",
}


def _pattern(keys: ModelKeys) -> Pattern:
    return qwen3_next.pattern_around(Layer("dense", attend_window), keys)


QWEN3_5 = dataclasses.replace(
    QWEN3,
    **qwen3_next.HYBRID,
    pattern=_pattern,
    check=qwen3_next.check_heads,
    tensors=qwen3_next.add_delta(QWEN3.tensors, "dense", READS),
    released=Released(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        {**qwen3_next.GDN_DEFAULTS, "num_key_value_heads": 4},
        qwen3_next.GDN_NAMES,
        period=qwen3_next.PERIOD,
        only=qwen3_next.ONLY,
        others="linear_attention",
        rotary_share=0.25,
        side_prefix="mtp.",
        drafts=qwen3_next.DRAFTS,
    ),
    keys=tuple(qwen3_next.GDN_NAMES),
)
