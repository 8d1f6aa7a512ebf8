"""Llama: RMSNorm, rotary positions, grouped-query attention and a gated MLP (arXiv 2302.13971).
`rope_type=llama3.1` is Llama 3's. SmolLM2 is one whose head is its embedding (arXiv 2502.02737)."""

from collections.abc import Callable, Mapping
from typing import Any

from maxramp.model.families.family import Family, LayerSizes, Released
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Pattern, Rope, Sight
from maxramp.stage import SightKeys


def see_before(keys: SightKeys) -> Sight:
    return Sight(Rope.from_keys(keys), keys.sliding_window_size)  # 0: no window


def _pattern(keys: ModelKeys) -> Pattern:
    return Pattern((Layer("dense", see_before),), keys.base_num_decoder_layers)


def _blocks() -> Mapping[str, Callable[..., Any]]:
    from maxramp.model.parts.block import Block

    return {"dense": Block}


def _sizes(keys: ModelKeys, layer: Layer) -> LayerSizes:
    queries = keys.base_num_query_heads * keys.head_dim
    kv, mlp = keys.base_num_kv_heads * keys.head_dim, keys.base_mlp_dim
    return LayerSizes(
        {"q_proj": queries, "k_proj": kv, "v_proj": kv, "gate_proj": mlp, "up_proj": mlp},
        {"o_proj": queries, "down_proj": mlp},
        heads=keys.base_num_query_heads,
        context=queries,
        activations=2 * mlp,
    )


LAYER = "model.layers.{}"

LLAMA = Family(
    _pattern,
    _blocks,
    _sizes,
    {
        "embedding_VD": "model.embed_tokens.weight",
        "norm.scale_D": "model.norm.weight",
        "head_DV": "lm_head.weight",
        "layers.dense.attention_norm.scale_D": f"{LAYER}.input_layernorm.weight",
        "layers.dense.attention.query_DHh": f"{LAYER}.self_attn.q_proj.weight",
        "layers.dense.attention.key_DKh": f"{LAYER}.self_attn.k_proj.weight",
        "layers.dense.attention.value_DKh": f"{LAYER}.self_attn.v_proj.weight",
        "layers.dense.attention.out_HhD": f"{LAYER}.self_attn.o_proj.weight",
        "layers.dense.mlp_norm.scale_D": f"{LAYER}.post_attention_layernorm.weight",
        "layers.dense.mlp.gate_DF": f"{LAYER}.mlp.gate_proj.weight",
        "layers.dense.mlp.up_DF": f"{LAYER}.mlp.up_proj.weight",
        "layers.dense.mlp.out_FD": f"{LAYER}.mlp.down_proj.weight",
    },
    Released("llama", "LlamaForCausalLM", {"num_key_value_heads": None}),
)
