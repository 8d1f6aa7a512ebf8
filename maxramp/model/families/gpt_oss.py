"""gpt-oss: attention with sinks and biases, windows in every second layer, and experts with biases
and a cut gate (arXiv 2508.10925)."""

import dataclasses

from maxramp.model.families import sparse
from maxramp.model.families.family import Released
from maxramp.model.families.llama import LAYER, attend_all
from maxramp.model.families.qwen2 import QWEN2
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Pattern

_SHARED = dict(QWEN2.tensors)
_SHARED["layers.dense.mixer.out_bias_D"] = f"{LAYER}.self_attn.o_proj.bias"
_SHARED["layers.dense.mixer.sinks_H"] = f"{LAYER}.self_attn.sinks"
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 4096}


def _pattern(keys: ModelKeys) -> Pattern:
    (near,) = sparse.pattern(keys).period
    full = dataclasses.replace(near, mixing=attend_all)
    return Pattern.repeat((near, full), keys.base_num_decoder_layers)


GPT_OSS = dataclasses.replace(
    QWEN2,
    pattern=_pattern,
    check=sparse.check,
    tensors={
        **sparse.tensors(_SHARED, "mlp.router"),
        "layers.sparse.mlp.router.bias_E": f"{LAYER}.mlp.router.bias",
        "layers.sparse.mlp.gate_bias_EF": f"{LAYER}.mlp.experts.{{}}.gate_proj.bias",
        "layers.sparse.mlp.up_bias_EF": f"{LAYER}.mlp.experts.{{}}.up_proj.bias",
        "layers.sparse.mlp.out_bias_ED": f"{LAYER}.mlp.experts.down_proj_bias",
    },
    released=Released(
        "gpt_oss",
        "GptOssForCausalLM",
        {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131_072}
        | {"rope_parameters": _YARN, "rope_theta": 150_000.0},
        {
            "sliding_window_size": "sliding_window",
            "num_experts": "num_local_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "base_moe_mlp_dim": "intermediate_size",
        },
        {"num_experts": "num_local_experts"},
        period=2,
        only={"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
        | {"hidden_act": "silu"},
        interleaves_experts=True,
    ),
    keys=(*sparse.EXPERT_KEYS, "sliding_window_size"),
    fixed={"attention_bias": True, "routed_bias": True},
    expert_keys={"norm_topk_prob": True},  # a softmax over the experts of a token
    has_sinks=True,
    has_out_bias=True,
    has_expert_biases=True,
    gate_limit=7.0,
    unread=("mlp_activations",),
)
