"""config.json of a model folder <-> our keys. Imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.huggingface import rope_json
from maxramp.huggingface.rope_json import cast_key
from maxramp.keys.section import refuse
from maxramp.model.families.family import Released
from maxramp.model.families.table import FAMILIES, unify_keys
from maxramp.model.keys import ModelKeys

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_DEFAULTS |= {"use_sliding_window": False}
_NULL_FOR_0 = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

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
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
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
    rope = rope_json.keys_of(values, family.released, where)
    refuse(
        (value not in (None, _NOTHING[name]), f"{where}: {name}={value} is not supported")
        for name, value in given.items()
        if name in _NOTHING and name not in family.released.names.values()
    )
    values |= {name: values.get(name) or 0 for name in _NULL_FOR_0}
    _refuse_windows(values, family.released, where)
    heads = cast_key("base_num_query_heads", "num_attention_heads", values, where)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if values.get("head_dim") is None:
        values["head_dim"] = cast_key("base_emb_dim", "hidden_size", values, where) // max(heads, 1)
    if values.get("max_position_embeddings") is not None:  # no key of the model, and not trusted
        cast_key("max_target_length", "max_position_embeddings", values, where)
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    activation = str(values[family.released.activation])
    if activation not in activations:
        raise ConfigError(
            f"{where}: {family.released.activation}={activation} is not supported; there are "
            f"{', '.join(activations)}"
        )
    names = {**_SIZES, **family.released.names}
    return unify_keys(
        {
            "decoder_block": families[kind],
            **family.fixed,
            **{ours: cast_key(ours, theirs, values, where) for ours, theirs in names.items()},
            "mlp_activations": [activations[activation], "linear"],
            **rope,
        }
    )


def _layer_types(layers: int, period: int) -> list[str]:
    return [f"{'sliding' if i % period else 'full'}_attention" for i in range(1, layers + 1)]


def _refuse_windows(values: Mapping[str, Any], released: Released, where: str) -> None:
    """Refuses windows of other layers than the family's: in a list, or from a number of layers."""
    kinds, first = values.get("layer_types") or (), values.get("max_window_layers")
    windowed = not kinds and values["use_sliding_window"] and values["sliding_window"]
    layers = cast_key("base_num_decoder_layers", "num_hidden_layers", values, where)
    period, every = values.get("sliding_window_pattern", released.period), released.period
    refuse(
        [
            (
                period != every or (kinds and kinds != _layer_types(layers, every)),
                f"{where}: layer_types={kinds or f'one of {period}'} is not supported, but "
                f"full_attention in {'all layers' if every == 1 else f'every {every}th layer'}",
            ),
            (
                windowed and first is not None and first < layers,
                f"{where}: max_window_layers={first} of {layers} is not supported: windows are of "
                "all layers, or of none",
            ),
        ]
    )


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
        values |= {released.activation: _ACTIVATIONS[gate], "use_cache": True}
    if rope := rope_json.config_of(keys, released, values if came_in else {}):
        values = {name: value for name, value in values.items() if name != "rope_parameters"} | rope
    if released.period > 1:
        values["layer_types"] = _layer_types(keys.base_num_decoder_layers, released.period)
    own = {theirs: getattr(keys, ours) for ours, theirs in released.names.items()}
    return values | own | {name: None for name in _NULL_FOR_0 if own.get(name) == 0}
