"""config.json of a model folder <-> our keys. Imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.keys.section import refuse
from maxramp.model.families.table import FAMILIES, unify_keys
from maxramp.model.keys import ModelKeys

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_DEFAULTS |= {"use_sliding_window": False}

_SIZES = {
    "base_emb_dim": "hidden_size",
    "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "base_mlp_dim": "intermediate_size",
    "base_num_decoder_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "logits_via_embedding": "tie_word_embeddings",
    "normalization_layer_epsilon": "rms_norm_eps",
}
_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_ACTIVATIONS = {"silu": "silu", "relu": "relu", "gelu": "gelu_pytorch_tanh"}
# What these families can have in transformers and not here, with the value that means nothing.
_NOTHING = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1,
    "clip_qkv": None,
    "router_jitter_noise": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def keys_of(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of the model that a config.json describes; `where` is the file, for messages.

    Reads what transformers 5 writes (`rope_parameters`) and what earlier ones wrote (`rope_theta`,
    `rope_scaling`).
    """
    families = {family.released.model_type: name for name, family in FAMILIES.items()}
    kind = str(values.get("model_type"))
    if kind not in families:
        raise ConfigError(
            f"{where}: model_type={kind} is not a family that we have; there are "
            f"{', '.join(families)}"
        )
    family = FAMILIES[families[kind]]
    given, others = values, family.released.other_names
    values = {others.get(name, name): value for name, value in values.items()}
    values = {**_DEFAULTS, **family.released.defaults, **values}
    rope = _rope_keys(values, where)
    refuse(
        (value not in (None, _NOTHING[name]), f"{where}: {name}={value} is not supported")
        for name, value in given.items()
        if name in _NOTHING
    )
    values["sliding_window"] = values.get("sliding_window") or 0
    _refuse_windows(values, where)
    heads = _key("base_num_query_heads", "num_attention_heads", values, where)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if values.get("head_dim") is None:
        values["head_dim"] = _key("base_emb_dim", "hidden_size", values, where) // max(heads, 1)
    if values.get("max_position_embeddings") is not None:  # no key of the model, and not trusted
        _key("max_target_length", "max_position_embeddings", values, where)
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    activation = str(values["hidden_act"])
    if activation not in activations:
        raise ConfigError(
            f"{where}: hidden_act={activation} is not supported; there are {', '.join(activations)}"
        )
    names = {**_SIZES, **family.released.names}
    return unify_keys(
        {
            "decoder_block": families[kind],
            **family.fixed,
            **{ours: _key(ours, theirs, values, where) for ours, theirs in names.items()},
            "mlp_activations": [activations[activation], "linear"],
            **rope,
        }
    )


def _refuse_windows(values: Mapping[str, Any], where: str) -> None:
    """Refuses windows of some layers alone: in a list, or from a number of layers on."""
    kinds, first = values.get("layer_types") or (), values.get("max_window_layers")
    windowed = not kinds and values["use_sliding_window"] and values["sliding_window"]
    layers = _key("base_num_decoder_layers", "num_hidden_layers", values, where)
    refuse(
        [
            (
                {*kinds} - {"full_attention"},
                f"{where}: layer_types={kinds} is not supported, but full_attention in all layers",
            ),
            (
                windowed and first is not None and first < layers,
                f"{where}: max_window_layers={first} of {layers} is not supported: windows are of "
                "all layers, or of none",
            ),
        ]
    )


def _key(ours: str, theirs: str, values: Mapping[str, Any], where: str) -> Any:
    value = values.get(theirs)
    return base.cast_value(f"{where}: {theirs}={value}", value, ours)


def _rope_keys(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    said = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(said, dict) or any(isinstance(value, dict) for value in said.values()):
        raise ConfigError(
            f"{where}: rope_parameters={said} is not supported, but one for all layers"
        )
    rope = {"rope_theta": values.get("rope_theta", 10_000.0), **said}
    base_key = {"rope_max_timescale": _key("rope_max_timescale", "rope_theta", rope, where)}
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"{where}: partial_rotary_factor={rope['partial_rotary_factor']} is not supported"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {**base_key, "rope_type": "default"}
    missing = [theirs for theirs in _SCALING.values() if theirs not in rope]
    if kind != "llama3" or missing:
        raise ConfigError(
            f"{where}: rope_type={kind}{f' without {missing[0]}' if kind == 'llama3' else ''} is "
            "not supported; there are default and llama3"
        )
    scaling = {ours: _key(ours, theirs, rope, where) for ours, theirs in _SCALING.items()}
    return {**base_key, "rope_type": "llama3.1", **scaling}


def config_of(keys: ModelKeys, came_in: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of a model that was trained here, with tensors of this dtype.

    `came_in` is the one that its weights came with; {} where they were made here.
    """
    gate, other = keys.mlp_activations
    if gate not in _ACTIVATIONS or other != "linear":
        raise ConfigError(
            f"mlp_activations={list(keys.mlp_activations)} is in no model of transformers; there "
            f"are {', '.join(f'[{name}, linear]' for name in _ACTIVATIONS)}"
        )
    released = FAMILIES[keys.decoder_block].released
    keys = dataclasses.replace(
        keys,
        base_moe_mlp_dim=keys.moe_mlp_dim,
        n_routing_groups=max(1, keys.n_routing_groups),
        topk_routing_group=max(1, keys.topk_routing_group),
    )
    longest = max(keys.max_target_length, came_in.get("max_position_embeddings") or 0)
    written = {theirs: getattr(keys, ours) for ours, theirs in _SIZES.items()}
    values = {
        "architectures": [released.architecture],
        **came_in,
        **written,
        "model_type": released.model_type,
        "max_position_embeddings": longest,
        "torch_dtype": dtype,
    }
    if came_in.get("model_type") != released.model_type:  # of a dense model
        values["architectures"] = [released.architecture]
    values.pop("dtype", None)  # as transformers 5 calls it; both read the other
    if not came_in:
        values |= {"hidden_act": _ACTIVATIONS[gate], "use_cache": True}
    said = _rope_keys(came_in, "") if came_in else {}
    if not said or any(getattr(keys, name) != value for name, value in said.items()):
        values.pop("rope_parameters", None)
        values |= {"rope_theta": keys.rope_max_timescale, "rope_scaling": None}
        if keys.rope_type == "llama3.1":
            scaling = {theirs: getattr(keys, ours) for ours, theirs in _SCALING.items()}
            values["rope_scaling"] = {"rope_type": "llama3", **scaling}
    own = {theirs: getattr(keys, ours) for ours, theirs in released.names.items()}
    if own.get("sliding_window") == 0:
        own["sliding_window"] = None
    return values | own
