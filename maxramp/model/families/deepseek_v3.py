"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and mixtures of experts after some dense
layers. Kimi K2 and Moonlight are such models."""

import dataclasses

from maxramp.keys.section import Relations
from maxramp.model.families import sparse
from maxramp.model.families.dots1 import DOTS1, NAMES
from maxramp.model.families.family import Released
from maxramp.model.families.glm4_moe import APPENDED
from maxramp.model.families.llama import LAYER
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Mixing, Pattern, Rope, yarn_amplitude
from maxramp.stage import RopeKeys

_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MIXER = {
    "query_DHh": "q_proj",
    "query_Dc": "q_a_proj",
    "query_norm.scale_D": "q_a_layernorm",
    "query_cHh": "q_b_proj",
    "latent_Dx": "kv_a_proj_with_mqa",
    "latent_norm.scale_D": "kv_a_layernorm",
    "key_value_cHx": "kv_b_proj",
    "out_HvD": "o_proj",
}
_OTHERS = {path: name for path, name in DOTS1.tensors.items() if ".mixer." not in path}


def _attend(keys: RopeKeys) -> Mixing:
    is_scaled = keys.rope_type == "yarn"
    amplitude = yarn_amplitude(keys.rope_factor, keys.mscale) if is_scaled else 1.0
    return Mixing(Rope.from_keys(keys), score_factor=amplitude**2)


def _pattern(keys: ModelKeys) -> Pattern:
    def change(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        own = {"mixing": _attend, "mixer": "latent_attention"}
        return tuple(dataclasses.replace(layer, **own) for layer in layers)

    plain = sparse.pattern(keys)
    return dataclasses.replace(plain, period=change(plain.period), prefix=change(plain.prefix))


def _check(keys: ModelKeys) -> Relations:
    heads = keys.base_num_query_heads
    yield (
        keys.base_num_kv_heads != heads,
        f"base_num_kv_heads={keys.base_num_kv_heads}: decoder_block=deepseek_v3 makes keys and "
        f"values for every query head; give base_num_kv_heads={heads}",
    )
    queries, absent = ["q_a_proj", "q_b_proj"], ["q_proj"]
    if not keys.q_lora_rank:
        queries, absent = absent, queries
    adapted = [name for name in absent if name in keys.lora_targets]
    yield (
        keys.lora_rank and adapted,
        f"lora_targets={list(keys.lora_targets)}: with q_lora_rank={keys.q_lora_rank} there is no "
        f"{', '.join(adapted)}; leave it out",
    )
    yield from sparse.check(keys, [*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])


DEEPSEEK_V3 = dataclasses.replace(
    DOTS1,
    pattern=_pattern,
    check=_check,
    latent=True,
    tensors={
        **_OTHERS,
        **{
            f"layers.{kind}.mixer.{ours}": f"{LAYER}.self_attn.{theirs}.weight"
            for kind in ("dense", "sparse")
            for ours, theirs in _MIXER.items()
        },
    },
    released=Released(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {"num_key_value_heads": 128, "moe_intermediate_size": 2048, "norm_topk_prob": True}
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096},
        {**NAMES, **{name: name for name in _WIDTHS}, "head_dim": ""},
        DOTS1.released.other_names,
        only={"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"moe_layer_freq": 1},
        same={"num_key_value_heads": "num_attention_heads"},
        side_prefix=f"{LAYER}.",  # behind its last layer
        drafts=APPENDED,
        model_types=("kimi_k2",),
        scales_scores=True,
    ),
    keys=(*DOTS1.keys, *_WIDTHS, "mscale"),
    unread=("head_dim",),
    fixed={name: x for name, x in DOTS1.fixed.items() if name != "use_qk_norm"},
)
