"""config.json of a model folder <-> our keys. Imports no JAX."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.huggingface import quantized, rope_json
from maxramp.huggingface.rope_json import cast_key
from maxramp.keys.section import refuse
from maxramp.model.families.family import Family, Released
from maxramp.model.families.table import FAMILIES, unify_keys
from maxramp.model.keys import ModelKeys

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_NULL_FOR_0 = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")

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
# Keys with which transformers computes something else in some of these families, and the value that
# stands for what is computed here.
_SUPPORTED = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "use_sliding_window": False,
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


def read_keys(written: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the keys of the text model that a config.json, or its `text_config`, describes;
    messages name the file `where`.

    Reads what transformers 5 writes (`rope_parameters`) and what earlier ones wrote (`rope_theta`,
    `rope_scaling`). A ConfigError for a model that is not supported.
    """
    name = _family_name(written, where)
    family, released = FAMILIES[name], FAMILIES[name].released
    values = _complete(written, released)
    cast_key("max_target_length", "max_position_embeddings", values, where)  # checks its type
    rope = rope_json.read_keys(values, released, where)
    layers = cast_key("base_num_decoder_layers", "num_hidden_layers", values, where)
    heads = cast_key("base_num_query_heads", "num_attention_heads", values, where)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    refuse(
        (is_other, f"{where}: {key}={value} is not supported{why}")
        for is_other, key, value, why in _check_supported(written, values, family, layers)
    )
    values |= {key: values.get(key) or 0 for key in _NULL_FOR_0}
    if values.get("head_dim") is None:
        values["head_dim"] = cast_key("base_emb_dim", "hidden_size", values, where) // max(heads, 1)
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    names = _names(released)
    return unify_keys(
        {
            "decoder_block": name,
            **family.fixed,
            **{ours: cast_key(ours, theirs, values, where) for ours, theirs in names.items()},
            "mlp_activations": [activations[values[released.activation]], "linear"],
            **rope,
        }
    )


def _names(released: Released) -> dict[str, str]:
    """Returns the names of our keys in a family's config.json, but for those that it lacks."""
    return {ours: theirs for ours, theirs in {**_SIZES, **released.names}.items() if theirs}


def _check_supported(
    written: Mapping[str, Any], values: Mapping[str, Any], family: Family, layers: int
) -> Iterator[tuple[bool, str, Any, str]]:
    """Yields, for each key that changes what transformers computes, whether it differs from what is
    computed here, the key, its value, and how an error ends.

    `values` are those that config.json has `written`, completed.
    """
    released = family.released
    only = {"partial_rotary_factor": released.rotary_share, **released.only}
    for key, supported in (_SUPPORTED | only).items():
        if key in written and key not in released.names.values():
            allowed = None, supported, family.fixed.get(key)
            yield written[key] not in allowed, key, written[key], f", but {supported}"
    if not quantized.is_readable(quantization := written.get("quantization_config")):
        why = ", but mxfp4 and fp8 with a weight_block_size; give the model before it was quantized"
        yield True, "quantization_config", quantization, why
    # Classes that are not transformers' own of the family.
    own = released.architecture, released.architecture.replace("ForCausalLM", "Model")
    classes = values.get("architectures") or []
    for name in classes if isinstance(classes, list) else [classes]:
        why = f", but {' and '.join(own)}; if it computes what {own[0]} does, write that there"
        yield name not in own, "architectures", name, why
    activation, known = str(values[released.activation]), _ACTIVATIONS.values()
    yield (
        activation not in known,
        released.activation,
        activation,
        f"; there are {', '.join(known)}",
    )
    # Windows of other layers than the family's: in a list, by a period, or from a layer on.
    kinds, period = values.get("layer_types"), released.period
    layer = "all layers" if period == 1 else f"the last of every {period} layers"
    is_other = bool(kinds) and kinds != _layer_types(layers, released)
    yield is_other, "layer_types", kinds, f", but full_attention in {layer}"
    if "sliding_window_pattern" in released.defaults:
        pattern = values["sliding_window_pattern"]
        yield pattern not in (None, period), "sliding_window_pattern", pattern, f", but {period}"
    for key, other in released.same.items():
        yield values[key] != values[other], key, values[key], f", but {other}={values[other]}"
    if "max_window_layers" in released.defaults:
        first = values["max_window_layers"]
        is_part = first is not None and not (type(first) is int and first >= layers)
        is_part &= not kinds and bool(values["sliding_window"])
        why = ": windows are of all layers, or of none"
        yield is_part, "max_window_layers", f"{first} of {layers}", why


def longest_text(values: Mapping[str, Any], where: str) -> int:
    """Returns how many tokens the longest text has that a config.json's model is for."""
    released = FAMILIES[_family_name(values, where)].released
    return _complete(values, released)["max_position_embeddings"]


def describe_unread(values: Mapping[str, Any], where: str) -> list[str]:
    """Returns a line for each key of a config.json that transformers passes over, as we do."""
    released = FAMILIES[_family_name(values, where)].released
    names = rope_json.unread_keys(_complete(values, released), released)
    return [f"{where}: {name} of its positions is not read, as in transformers" for name in names]


def _family_name(values: Mapping[str, Any], where: str) -> str:
    """Returns the value of decoder_block; a ConfigError for a model_type that none here has."""
    families = {
        kind: name
        for name, family in FAMILIES.items()
        for kind in (family.released.model_type, *family.released.model_types)
    }
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


def _layer_types(layers: int, released: Released) -> list[str]:
    kinds = released.others, "full_attention"
    return [kinds[i % released.period == 0] for i in range(1, layers + 1)]


def make_config(keys: ModelKeys, original: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the config.json of a model that was trained here, with tensors of this dtype.

    `original` is the one that its weights came with, perhaps a dense model's; what the run did not
    change stays as it is there. {} = the run began with new weights. A ConfigError for activations
    that no model of transformers has.
    """
    gate, other = keys.mlp_activations
    if gate not in _ACTIVATIONS or other != "linear":
        raise ConfigError(
            f"mlp_activations={list(keys.mlp_activations)} is in no model of transformers; there "
            f"are {', '.join(f'[{name}, linear]' for name in _ACTIVATIONS)}"
        )
    released = FAMILIES[keys.decoder_block].released
    if original.get("model_type") in released.model_types:
        original = {**original, "model_type": released.model_type}
    is_same = original.get("model_type") == released.model_type  # and not a dense model
    before = read_keys(original, "config.json") if is_same else {}
    own = {**vars(keys), "mlp_activations": list(keys.mlp_activations)}
    own = unify_keys(own) if original else own
    changed = {
        name for name, value in own.items() if not before or before.get(name, value) != value
    }
    scalar = keys.query_pre_attn_scalar
    keys = dataclasses.replace(
        keys,
        base_moe_mlp_dim=keys.moe_mlp_dim,
        n_routing_groups=max(1, keys.n_routing_groups),
        topk_routing_group=max(1, keys.topk_routing_group),
        query_pre_attn_scalar=keys.head_dim if scalar == -1 else scalar,
    )
    names = _names(released)
    values = {theirs: getattr(keys, ours) for ours, theirs in names.items() if ours in changed}
    values |= {key: values[other] for key, other in released.same.items() if other in values}
    values |= {name: None for name in _NULL_FOR_0 if values.get(name) == 0}
    if "mlp_activations" in changed:
        values[released.activation] = _ACTIVATIONS[gate]
    if released.period > 1 and "base_num_decoder_layers" in changed:
        values["layer_types"] = _layer_types(keys.base_num_decoder_layers, released)
    longest = longest_text(original, "config.json") if original else 1
    if not is_same or longest < keys.max_target_length:
        values["max_position_embeddings"] = max(longest, keys.max_target_length)
    if not is_same:
        values |= {"architectures": [released.architecture], "model_type": released.model_type}
    if released.drafts and (keys.mtp_num_layers or not is_same):
        values[released.drafts.key] = keys.mtp_num_layers
    if not original:
        values["use_cache"] = True
    dtype_keys = {name for name in ("dtype", "torch_dtype") if name in original} or {"torch_dtype"}
    values = {"architectures": [released.architecture], **original, **values}
    values.pop("quantization_config", None)  # weights are written as they are here
    values |= dict.fromkeys(dtype_keys, dtype)
    return values | rope_json.make_values(keys, released, values if is_same else {})
