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
# What transformers can compute otherwise in some of these families, with the value of what is
# computed here.
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
    "is_causal": True,
    "use_bidirectional_attention": False,
    "per_layer_config": None,
    "router_jitter_noise": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def keys_of(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of the model that a config.json describes; `where` is the file, for messages.

    Reads what transformers 5 writes (`rope_parameters`) and what earlier ones wrote (`rope_theta`,
    `rope_scaling`).
    """
    name = _family_of(values, where)
    family, written = FAMILIES[name], values
    released, values = family.released, _complete(values, family.released)
    cast_key("max_target_length", "max_position_embeddings", values, where)  # no key of the model
    rope = rope_json.keys_of(values, released, where)
    refuse(
        (
            value not in (None, _NOTHING[key], family.fixed.get(key)),
            f"{where}: {key}={value} is not supported, but {_NOTHING[key]}",
        )
        for key, value in written.items()
        if key in _NOTHING and key not in released.names.values()
    )
    _refuse_architectures(values, released, where)
    values |= {key: values.get(key) or 0 for key in _NULL_FOR_0}
    _refuse_windows(values, released, where)
    heads = cast_key("base_num_query_heads", "num_attention_heads", values, where)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if values.get("head_dim") is None:
        values["head_dim"] = cast_key("base_emb_dim", "hidden_size", values, where) // max(heads, 1)
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    activation = str(values[released.activation])
    if activation not in activations:
        raise ConfigError(
            f"{where}: {released.activation}={activation} is not supported; there are "
            f"{', '.join(activations)}"
        )
    names = {**_SIZES, **released.names}
    return unify_keys(
        {
            "decoder_block": name,
            **family.fixed,
            **{ours: cast_key(ours, theirs, values, where) for ours, theirs in names.items()},
            "mlp_activations": [activations[activation], "linear"],
            **rope,
        }
    )


def longest_text(values: Mapping[str, Any], where: str) -> int:
    """Returns the tokens of the longest text that a config.json's model is for."""
    released = FAMILIES[_family_of(values, where)].released
    return _complete(values, released)["max_position_embeddings"]


def unread(values: Mapping[str, Any], where: str) -> list[str]:
    """Makes a line of each key of a config.json that transformers passes over, as we do."""
    released = FAMILIES[_family_of(values, where)].released
    names = rope_json.unread(_complete(values, released), released)
    return [f"{where}: {name} of its positions is not read, as in transformers" for name in names]


def _family_of(values: Mapping[str, Any], where: str) -> str:
    """Returns the value of decoder_block."""
    families = {family.released.model_type: name for name, family in FAMILIES.items()}
    kind = str(values.get("model_type"))
    if kind not in families:
        raise ConfigError(
            f"{where}: model_type={kind} is not a family that we have; there are "
            f"{', '.join(families)}"
        )
    return families[kind]


def _complete(values: Mapping[str, Any], released: Released) -> dict[str, Any]:
    """Fills in what transformers' class has where a config.json leaves it open."""
    values = {released.other_names.get(name, name): value for name, value in values.items()}
    return {**_DEFAULTS, **released.defaults, **values}


def _layer_types(layers: int, period: int) -> list[str]:
    return [f"{'sliding' if i % period else 'full'}_attention" for i in range(1, layers + 1)]


def _refuse_architectures(values: Mapping[str, Any], released: Released, where: str) -> None:
    """Refuses classes that are not transformers' own of the family: they compute something else."""
    own = released.architecture, released.architecture.replace("ForCausalLM", "Model")
    names = values.get("architectures") or []
    refuse(
        (
            name not in own,
            f"{where}: architectures={name} is not supported, but {' and '.join(own)}; if it "
            f"computes what {own[0]} does, write that there",
        )
        for name in (names if isinstance(names, list) else [names])
    )


def _refuse_windows(values: Mapping[str, Any], released: Released, where: str) -> None:
    """Refuses windows of other layers than the family's: in a list, or from a number of layers."""
    kinds, first = values.get("layer_types") or (), released.defaults.get("max_window_layers")
    if first:  # the first that has a window, where it is read
        first = values["max_window_layers"]
    layers = cast_key("base_num_decoder_layers", "num_hidden_layers", values, where)
    every, period = released.period, released.defaults.get("sliding_window_pattern")
    if period:
        period = values["sliding_window_pattern"]
    refuse(
        [
            (
                kinds and kinds != _layer_types(layers, every),
                f"{where}: layer_types={kinds} is not supported, but full_attention in "
                f"{'all layers' if every == 1 else f'every {every}th layer'}",
            ),
            (
                period not in (None, every),
                f"{where}: sliding_window_pattern={period} is not supported, but {every}",
            ),
            (
                not kinds and values["sliding_window"] and first is not None and first < layers,
                f"{where}: max_window_layers={first} of {layers} is not supported: windows are of "
                "all layers, or of none",
            ),
        ]
    )


def config_of(keys: ModelKeys, came_in: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the config.json of a model that was trained here, with tensors of this dtype.

    `came_in` is the one that its weights came with; what the run did not change stays as it is in
    it. {} = the run began with new weights.
    """
    gate, other = keys.mlp_activations
    if gate not in _ACTIVATIONS or other != "linear":
        raise ConfigError(
            f"mlp_activations={list(keys.mlp_activations)} is in no model of transformers; there "
            f"are {', '.join(f'[{name}, linear]' for name in _ACTIVATIONS)}"
        )
    released = FAMILIES[keys.decoder_block].released
    names = {**_SIZES, **released.names}
    is_same = came_in.get("model_type") == released.model_type  # and not a dense model
    before = keys_of(came_in, "config.json") if is_same else {}
    own = {**vars(keys), "mlp_activations": list(keys.mlp_activations)}
    own = unify_keys(own) if came_in else own
    changed = {
        name for name, value in own.items() if not before or before.get(name, value) != value
    }
    keys = dataclasses.replace(
        keys,
        base_moe_mlp_dim=keys.moe_mlp_dim,
        n_routing_groups=max(1, keys.n_routing_groups),
        topk_routing_group=max(1, keys.topk_routing_group),
    )
    values = {theirs: getattr(keys, ours) for ours, theirs in names.items() if ours in changed}
    values |= {name: None for name in _NULL_FOR_0 if values.get(name) == 0}
    if "mlp_activations" in changed:
        values[released.activation] = _ACTIVATIONS[gate]
    if released.period > 1 and "base_num_decoder_layers" in changed:
        values["layer_types"] = _layer_types(keys.base_num_decoder_layers, released.period)
    longest = longest_text(came_in, "config.json") if came_in else 1
    if not is_same or longest < keys.max_target_length:
        values["max_position_embeddings"] = max(longest, keys.max_target_length)
    if not is_same:
        values |= {"architectures": [released.architecture], "model_type": released.model_type}
    if not came_in:
        values["use_cache"] = True
    dtypes = {name for name in ("dtype", "torch_dtype") if name in came_in} or {"torch_dtype"}
    values = {"architectures": [released.architecture], **came_in, **values}
    values |= dict.fromkeys(dtypes, dtype)
    return values | rope_json.config_of(keys, released, values if is_same else {})
