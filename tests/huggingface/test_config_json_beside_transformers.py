"""config.json beside transformers' classes: keys left open, all keys, positions, and exports."""

import json

import numpy as np
import pytest
from later import Later
from opened import config_of, load, logits
from peers import assert_near, opened, theirs
from small_models import CONFIGS, TOKENS_BT, write_folder

from maxramp.errors import ConfigError
from maxramp.handover.export import export
from maxramp.handover.opening import open_model
from maxramp.huggingface import config_json
from maxramp.huggingface import folder as released
from maxramp.model.families.table import FAMILIES

transformers = Later("transformers")
pytestmark = pytest.mark.slow


def ours(folder):
    config = config_of(folder)
    return logits(load(folder, config), config, TOKENS_BT)


def class_of(kind):
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_config_json_leaves_open_is_what_the_class_has(name):
    family = FAMILIES[name].released
    config = class_of(family.model_type)(use_sliding_window=True)
    for key, value in family.defaults.items():
        if key in ("rope_theta", "sliding_window_pattern"):
            continue
        value = config.num_attention_heads if value is None else value
        if key == "rope_parameters":
            value = value | {"rope_theta": family.defaults["rope_theta"]}
        assert getattr(config, key) == value, key
    rope = config.rope_parameters
    if family.local_rope:
        assert rope["sliding_attention"]["rope_theta"] == family.local_rope[1]
        rope = rope["full_attention"]
    assert rope["rope_theta"] == family.defaults.get("rope_theta", 10_000)


# Sizes of tensors, which every comparison of logits reads, and the names of what a file is.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"}
SIZES |= {"num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "num_experts"}
SIZES |= {"moe_intermediate_size", "num_local_experts", "n_shared_experts", "n_routed_experts"}
SIZES |= {f"linear_num_{x}_heads" for x in ("key", "value")}
SIZES |= {f"linear_{x}_head_dim" for x in ("key", "value")}
SIZES |= {"first_k_dense_replace", "model_type", "dtype", "transformers_version", "_name_or_path"}
SIZES |= {"use_qk_norm", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"}
SIZES |= {"v_head_dim", "qk_head_dim"}
# Another value of every other key.
OTHER = {
    **{"architectures": ["BidirectionalModel"], "rms_norm_eps": 1e-2},
    **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "silu"},
    "rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0},
    **{"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0},
    **{"rope_local_base_freq": 7.0, "partial_rotary_factor": 0.75},
    **{"original_max_position_embeddings": 8, "attention_bias": True, "mlp_bias": True},
    **{"clip_qkv": 0.1, "use_sliding_window": True, "sliding_window": 3},
    **{"sliding_window_pattern": 2, "_sliding_window_pattern": 2, "max_window_layers": 1},
    **{"layer_types": ["sliding_attention"] * 8, "query_pre_attn_scalar": 8},
    **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "is_causal": False},
    **{"use_bidirectional_attention": True, "per_layer_config": {"0": {"sliding_window": 2}}},
    **{"num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 2},
    **{"mlp_only_layers": [0], "n_group": 2, "topk_group": 3, "routed_scaling_factor": 1.5},
    **{"max_position_embeddings": 32, "attention_dropout": 0.5, "router_jitter_noise": 0.5},
    **{"linear_conv_kernel_dim": 2, "full_attention_interval": 2, "rope_interleave": False},
    **{"shared_expert_intermediate_size": 12, "swiglu_limit": 3.0, "swiglu_alpha": 1.0},
}
# Of training and generation by transformers, and of what it returns: tried all at once.
NEUTRAL = {
    **{"router_aux_loss_coef": 0.5, "output_router_logits": True, "output_attentions": True},
    **{"output_hidden_states": True, "return_dict": True, "initializer_range": 1.0},
    **{"use_cache": False, "pretraining_tp": 2, "chunk_size_feed_forward": 2},
    **{"is_encoder_decoder": True, "problem_type": "regression", "id2label": {"0": "a"}},
    "num_nextn_predict_layers": 0,
    **{"label2id": {"a": 0}, "pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5},
}


# Keys that all families read by the same lines: compared in one family of each kind of positions.
COMMON = {"rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"}


def test_every_key_has_another_value():
    kinds = [family.released.model_type for family in FAMILIES.values()]
    keys = {key for kind in kinds for key in class_of(kind)().to_dict()}
    assert keys - SIZES - OTHER.keys() - NEUTRAL.keys() == set()


@pytest.mark.parametrize(
    "name", [x for x in CONFIGS if x not in ("llama3.1", "smollm2", "moonlight")]
)
def test_a_key_is_read_as_transformers_does_or_refused(tmp_path, name):
    """Whatever another value of it changes: the model that we compute is theirs."""
    folder = write_folder(tmp_path, name)
    keys_before, logits_before = released.find("", str(folder)).keys, ours(folder)
    refused, read, others = set(), set(), []
    cases = {key: {key: value} for key, value in OTHER.items()} | {"neutral": NEUTRAL}
    cases["norm_topk_prob"] = {"norm_topk_prob": not CONFIGS[name].get("norm_topk_prob", False)}
    for key, values in cases.items():
        (folder / "config.json").write_text(json.dumps(CONFIGS[name] | values))
        try:
            keys = released.find("", str(folder)).keys
        except ConfigError as error:
            assert key in str(error) or key == "rope_parameters"
            refused.add(key)
            continue
        if keys != keys_before:
            read.add(key)
            if key in COMMON and name not in ("llama2", "gemma3"):
                continue
        logits_BTV = ours(folder) if keys != keys_before else logits_before
        expected = theirs(opened(folder))
        if np.abs(logits_BTV - expected).max() > 1e-5 * np.ptp(expected):
            others.append(key)
    assert others == []
    assert {"rms_norm_eps"} <= read
    assert {"is_causal", "architectures", "per_layer_config", "partial_rotary_factor"} <= refused


_YARN = {"rope_type": "yarn", "factor": 4.0}
_LENGTH = {"original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
SCALINGS = {
    "yarn of the class's length": (_YARN, {"max_position_embeddings": None}),
    "yarn of the model's length": (_YARN, {}),
    "fractions": (_YARN | {"original_max_position_embeddings": 16.0}, {}),
    "whole factor": (_YARN | {"factor": 4} | _LENGTH, {}),
    "a length beside it": (_YARN | {"original_max_position_embeddings": 32}, _LENGTH),
    "fractions of pairs": (_YARN | {"truncate": False} | _LENGTH, {}),
    "attention_factor": (_YARN | {"attention_factor": 1.5}, {}),
    "mscale": (_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, {}),
    "mscale alone": (_YARN | {"mscale": 2.0}, {}),
    "mscale of both": (_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, {}),
    "factor of the lengths": (_YARN | {"factor": None} | _LENGTH, {}),
    "betas": (_YARN | {"beta_fast": 0, "beta_slow": None} | _LENGTH, {}),
    "attn_factor": (_YARN | {"attn_factor": 3.0}, {}),
    "dynamic": ({"type": "dynamic", "factor": 2.0}, {"max_position_embeddings": None}),
    "llama3": (_LLAMA3, {}),
}
_OTHER = {"rope_parameters": _LINEAR | {"factor": 8.0, "rope_theta": 9.0}}
SCALINGS["before rope_parameters"] = (_LINEAR, _OTHER)


@pytest.mark.parametrize("name", ["llama2", "qwen3", "gemma3", "olmo3"])
def test_scaled_positions_give_the_logits_of_transformers(tmp_path, name):
    """Ours are theirs, and so is what an export says; what nobody reads is named."""
    folder = write_folder(tmp_path / "in", name)
    for case, (scaling, others) in SCALINGS.items():
        config = CONFIGS[name] | {"rope_scaling": scaling} | others
        is_local = FAMILIES[name].released.local_rope
        if is_local and case in ("fractions of pairs", "before rope_parameters"):
            continue  # refused there
        config = {key: x for key, x in config.items() if x is not None}
        (folder / "config.json").write_text(json.dumps(config))
        expected = theirs(opened(folder))
        assert_near(ours(folder), expected)
        if case == "attn_factor":
            lines = []
            open_model(str(folder), ["hardware=cpu"]).load(lines.append)
            assert f"{folder}/config.json: attn_factor of its positions is not read" in str(lines)
        model = config_of(folder).model
        others = {"rope_scaling": None}, {"original_max_position_embeddings": 24}
        for original in ({}, config, *(config | change for change in others)):
            written = config_json.make_config(model, original, "float32")
            (folder / "config.json").write_text(json.dumps(written))
            assert_near(theirs(opened(folder)), expected)


def values_of(folder):
    """What transformers makes of a config.json."""
    return transformers.AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""}


@pytest.mark.parametrize("writer", ["earlier", "transformers 5"])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_has_the_config_json_that_came_in(tmp_path, name, writer):
    """As JSON and to transformers; one below 5 reads the same positions."""
    folder, to = write_folder(tmp_path / "in", name), tmp_path / "out"
    if writer == "transformers 5":
        transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder)
    opened = open_model(str(folder), ["hardware=cpu"])
    export(opened, opened.load(), to)
    before, after = (json.loads((x / "config.json").read_text()) for x in (folder, to))
    if writer == "transformers 5":
        assert before["rope_parameters"] and "rope_theta" not in before
    more = {"rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"}
    assert {key: after[key] for key in before} == before
    assert after.keys() - before.keys() <= (more if "rope_parameters" in before else set())
    assert values_of(to) == values_of(folder)
    del before["model_type"]
    earlier = {key: x for key, x in after.items() if key not in ("rope_parameters", "model_type")}
    expected = transformers.AutoConfig.for_model(opened.origin.config["model_type"], **before)
    read = transformers.AutoConfig.for_model(opened.origin.config["model_type"], **earlier)
    if name != "olmo3":  # whose earlier form has one base for all layers
        assert read.rope_parameters == expected.rope_parameters
