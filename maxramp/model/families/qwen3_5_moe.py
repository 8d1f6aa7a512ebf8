"""Qwen3.5 and 3.6 with experts: a Qwen3-Next with other tensors of its gated delta rule. Its text
model alone."""

import dataclasses

from maxramp.model.families.qwen3_5 import READS
from maxramp.model.families.qwen3_next import QWEN3_NEXT, sparse_tensors

_released = QWEN3_NEXT.released
_KEYS = tuple(name for name in QWEN3_NEXT.keys if name != "norm_topk_prob")
_NAMES = {ours: theirs for ours, theirs in _released.names.items() if ours in _KEYS}
_LEFT_OUT = ("norm_topk_prob", "intermediate_size")

QWEN3_5_MOE = dataclasses.replace(
    QWEN3_NEXT,
    tensors=sparse_tensors(READS),
    released=_released._replace(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        defaults={n: x for n, x in _released.defaults.items() if n not in _LEFT_OUT}
        | {"num_experts": 256, "num_experts_per_tok": 8},
        names={**_NAMES, "base_mlp_dim": "moe_intermediate_size"},
    ),
    keys=_KEYS,
    fixed={**QWEN3_NEXT.fixed, "norm_topk_prob": True},
)
