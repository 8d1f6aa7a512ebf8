"""Llama: RMSNorm, rotary positions, grouped-query attention and a gated MLP (arXiv 2302.13971).
`rope_type=llama3.1` is Llama 3's. SmolLM2 is one whose head is its embedding (arXiv 2502.02737)."""

from maxramp.model.families.family import Family, Released
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Mixing, Pattern, Rope
from maxramp.stage import RopeKeys


def attend_window(keys: RopeKeys) -> Mixing:
    return Mixing(Rope.from_keys(keys), keys.sliding_window_size)  # 0: no window


def attend_all(keys: RopeKeys) -> Mixing:
    return Mixing(Rope.from_keys(keys))


def _attend_locally(keys: RopeKeys) -> Mixing:
    return Mixing(Rope.from_local_keys(keys), keys.sliding_window_size)


def windows_pattern(period: int, local_rope: bool, keys: ModelKeys) -> Pattern:
    """Makes the last of every `period` layers see all tokens before it, and the others a window.
    Those have the rope of `local_rope_max_timescale` if `local_rope`."""
    near = Layer("dense", _attend_locally if local_rope else attend_window)
    layers = (*(near,) * (period - 1), Layer("dense", attend_all))
    return Pattern.repeat(layers, keys.base_num_decoder_layers)


def _pattern(keys: ModelKeys) -> Pattern:
    return Pattern((Layer("dense", attend_window),), keys.base_num_decoder_layers)


LAYER = "model.layers.{}"

LLAMA = Family(
    _pattern,
    {
        "embedding_VD": "model.embed_tokens.weight",
        "norm.scale_D": "model.norm.weight",
        "head_DV": "lm_head.weight",
        "layers.dense.mixer_norm.scale_D": f"{LAYER}.input_layernorm.weight",
        "layers.dense.mixer.query_DHh": f"{LAYER}.self_attn.q_proj.weight",
        "layers.dense.mixer.key_DKh": f"{LAYER}.self_attn.k_proj.weight",
        "layers.dense.mixer.value_DKh": f"{LAYER}.self_attn.v_proj.weight",
        "layers.dense.mixer.out_HhD": f"{LAYER}.self_attn.o_proj.weight",
        "layers.dense.mlp_norm.scale_D": f"{LAYER}.post_attention_layernorm.weight",
        "layers.dense.mlp.gate_DF": f"{LAYER}.mlp.gate_proj.weight",
        "layers.dense.mlp.up_DF": f"{LAYER}.mlp.up_proj.weight",
        "layers.dense.mlp.out_FD": f"{LAYER}.mlp.down_proj.weight",
    },
    Released(
        "llama", "LlamaForCausalLM", {"num_key_value_heads": None, "max_position_embeddings": 2048}
    ),
)
