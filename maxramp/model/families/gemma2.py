"""Gemma 2: norms before and after attention and MLP, windows in every other layer, caps of scores
and logits (arXiv 2408.00118)."""

import functools

from maxramp.model.families.family import Family, Released
from maxramp.model.families.llama import LAYER, LLAMA, windows_pattern

DEFAULTS = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
DEFAULTS |= {"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216}
DEFAULTS |= {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4}
DEFAULTS |= {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}


GEMMA2 = Family(
    functools.partial(windows_pattern, 2, False),
    {
        **LLAMA.tensors,
        "layers.dense.mixer_post_norm.scale_D": f"{LAYER}.post_attention_layernorm.weight",
        "layers.dense.mlp_norm.scale_D": f"{LAYER}.pre_feedforward_layernorm.weight",
        "layers.dense.mlp_post_norm.scale_D": f"{LAYER}.post_feedforward_layernorm.weight",
    },
    Released(
        "gemma2",
        "Gemma2ForCausalLM",
        {**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"max_position_embeddings": 8192},
        {
            "sliding_window_size": "sliding_window",
            "query_pre_attn_scalar": "query_pre_attn_scalar",
            "attn_logits_soft_cap": "attn_logit_softcapping",
            "final_logits_soft_cap": "final_logit_softcapping",
        },
        activation="hidden_activation",
        period=2,
    ),
    keys=(
        *("sliding_window_size", "query_pre_attn_scalar", "attn_logits_soft_cap"),
        "final_logits_soft_cap",
    ),
    norms="both",
    norm_offset=1.0,
    scales_embedding=True,
)
