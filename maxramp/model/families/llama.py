"""Llama: RMSNorm, rotary positions, grouped-query attention and a gated MLP (arXiv 2302.13971).

It reads Llama 3's long texts with slower rotary positions, `rope_type=llama3.1`. SmolLM2 is one
whose head is its embedding (arXiv 2502.02737).
"""

from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.layers import Layer, Pattern, Sight
from maxramp.model.parts.block import PreNormBlock
from maxramp.model.parts.rotary import Rope
from maxramp.stage import SightKeys


def _all_before(keys: SightKeys) -> Sight:
    return Sight(Rope.from_keys(keys))


def _equal_layers(keys: ModelKeys) -> Pattern:
    return Pattern((Layer("dense", _all_before),), keys.base_num_decoder_layers)


_LAYER = "model.layers.{}"

LLAMA = Family(
    _equal_layers,
    {"dense": PreNormBlock},
    {
        "embedding_VD": "model.embed_tokens.weight",
        "norm.scale_D": "model.norm.weight",
        "head_DV": "lm_head.weight",
        "layers.dense.attention_norm.scale_D": f"{_LAYER}.input_layernorm.weight",
        "layers.dense.attention.query_DHh": f"{_LAYER}.self_attn.q_proj.weight",
        "layers.dense.attention.key_DKh": f"{_LAYER}.self_attn.k_proj.weight",
        "layers.dense.attention.value_DKh": f"{_LAYER}.self_attn.v_proj.weight",
        "layers.dense.attention.out_HhD": f"{_LAYER}.self_attn.o_proj.weight",
        "layers.dense.mlp_norm.scale_D": f"{_LAYER}.post_attention_layernorm.weight",
        "layers.dense.mlp.gate_DF": f"{_LAYER}.mlp.gate_proj.weight",
        "layers.dense.mlp.up_DF": f"{_LAYER}.mlp.up_proj.weight",
        "layers.dense.mlp.out_FD": f"{_LAYER}.mlp.down_proj.weight",
    },
)
