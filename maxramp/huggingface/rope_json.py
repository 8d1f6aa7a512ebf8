"""Rotary positions in config.json <-> our keys. Imports no JAX.

transformers 5 writes `rope_parameters`, for families with layers that see a window by layer type;
earlier ones wrote `rope_theta`, `rope_local_base_freq` and `rope_scaling`.
"""

from collections.abc import Mapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.keys.section import refuse
from maxramp.model.families.family import Released
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import yarn_amplitude

_LENGTH = "original_max_position_embeddings"
# By the name of a scaling ours, and the names of its numbers.
_SCALINGS = {
    "linear": ("default", {"rope_linear_scaling_factor": "factor"}),
    "dynamic": ("dynamic", {"rope_factor": "factor"}),
    "llama3": (
        "llama3.1",
        {"rope_factor": "factor", "rope_low_freq_factor": "low_freq_factor"}
        | {"rope_high_freq_factor": "high_freq_factor", _LENGTH: _LENGTH},
    ),
    "yarn": (
        "yarn",
        {"rope_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        | {"rope_truncate": "truncate", "rope_attention_factor": "attention_factor"}
        | {_LENGTH: _LENGTH},
    ),
}
_MSCALES = ("mscale", "mscale_all_dim")  # from which yarn's attention_factor can follow
# What every one may have: the fourth is refused unless it is the family's, and the last are for
# images among text.
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_COMMON += ("mrope_section", "mrope_interleaved")
_FULL, _LOCAL = "full_attention", "sliding_attention"  # layers


def cast_key(ours: str, theirs: str, values: Mapping[str, Any], where: str) -> Any:
    """Returns their value as the type of our key; a ConfigError, which begins with `where`, if it
    has another."""
    value = values.get(theirs)
    return base.cast_value(f"{where}: {theirs}={value}", value, ours)


def read_keys(values: Mapping[str, Any], released: Released, where: str) -> dict[str, Any]:
    """Returns the keys of positions: of all layers, and of those with a window if they differ.
    `values` are those of `config_json._complete`, with max_position_embeddings; a ConfigError,
    which begins with `where`, for what is not supported."""
    rope, local = _ropes(values, released, where)
    keys = {"rope_max_timescale": cast_key("rope_max_timescale", "rope_theta", rope, where)}
    if local:
        name = "local_rope_max_timescale"
        keys[name] = cast_key(name, "rope_theta", local, where)
        refuse([(_kind(local) != "default", f"{where}: {_LOCAL}={local} is not supported")])
    part, share = rope.get("partial_rotary_factor"), released.rotary_share
    if part not in (None, share):
        raise ConfigError(f"{where}: partial_rotary_factor={part} is not supported, but {share}")
    keys |= _scaling(rope, values, bool(local), where)
    if not released.scales_scores or _kind(rope) == "default":
        return keys
    scores = rope.get("mscale_all_dim") or 0.0
    if _kind(rope) != "yarn":
        why = f"{where}: mscale_all_dim={scores} with rope_type={_kind(rope)} is not supported"
        refuse([(scores, why)])
        return keys
    return keys | {"mscale": base.cast_value(f"{where}: mscale_all_dim={scores}", scores, "mscale")}


def unread_keys(values: Mapping[str, Any], released: Released) -> list[str]:
    """Returns the keys of positions that neither transformers nor we read."""
    rope, _ = _ropes(values, released, "")
    _, names = _SCALINGS.get(_kind(rope), ("", {}))
    read = {*_COMMON, *names.values(), *(_MSCALES if _kind(rope) == "yarn" else ())}
    return [name for name, value in rope.items() if name not in read and value is not None]


def _ropes(
    values: Mapping[str, Any], released: Released, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the positions of layers that see all, and of those with a window if they differ, as
    transformers reads them: `rope_scaling` counts before `rope_parameters`. A ConfigError for other
    forms than the family's."""
    scaling = values.get("rope_scaling") or {}
    parameters = values.get("rope_parameters") or {}
    _refuse_all_but_mappings({"rope_scaling": scaling, "rope_parameters": parameters}, where)
    theta = {"rope_theta": values.get("rope_theta", 10_000.0)}
    by_layer = {name: parameters[name] or {} for name in (_FULL, _LOCAL) if name in parameters}
    _refuse_all_but_mappings(by_layer, where)
    if not released.local_rope:
        if by_layer:
            raise ConfigError(
                f"{where}: rope_parameters={parameters} is not supported, but one for all layers"
            )
        return theta | (scaling or parameters), {}
    if parameters and not by_layer:
        raise ConfigError(
            f"{where}: rope_parameters={parameters} is not supported, but one for {_FULL} and one "
            f"for {_LOCAL}"
        )
    name, local = released.local_rope
    own = {"rope_theta": values.get(name, local)} | by_layer.get(_LOCAL, {})
    return theta | by_layer.get(_FULL, {}) | scaling, own


def _refuse_all_but_mappings(mappings: Mapping[str, Any], where: str) -> None:
    refuse(
        (not isinstance(value, dict), f"{where}: {name}={value} is not supported, but a mapping")
        for name, value in mappings.items()
    )


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _scaling(
    rope: Mapping[str, Any], values: Mapping[str, Any], by_layer: bool, where: str
) -> dict[str, Any]:
    """Returns our keys of a scaling; `by_layer` as in `_complete_yarn`. A ConfigError for one that
    is not supported, or lacks a number."""
    kind = _kind(rope)
    if kind == "default":
        return {"rope_type": "default", "rope_linear_scaling_factor": 1.0}
    ours, names = _SCALINGS.get(kind, ("", {}))
    if not ours:
        why = ": positions would turn by the length of the whole text" * (kind == "longrope")
        raise ConfigError(
            f"{where}: rope_type={kind} is not supported{why}; there are default, "
            f"{', '.join(_SCALINGS)}"
        )
    longest = values["max_position_embeddings"]
    # One beside the scaling counts before the one in it, but not where layers have their own.
    length = (not by_layer and values.get(_LENGTH)) or rope.get(_LENGTH) or longest
    if kind == "dynamic":
        length = longest
    if isinstance(length, float) and length.is_integer():
        length = int(length)
    rope = {**rope, _LENGTH: length}
    if kind == "yarn":
        rope = _complete_yarn(rope, longest, by_layer, where)
    missing = [f"has no {name}" for name in names.values() if rope.get(name) is None]
    if missing:
        raise ConfigError(f"{where}: rope_type={kind} {missing[0]}; write it there")
    keys = {ours: cast_key(ours, theirs, rope, where) for ours, theirs in names.items()}
    if kind == "dynamic":
        keys[_LENGTH] = cast_key(_LENGTH, _LENGTH, rope, where)
    return {"rope_type": ours, **keys}


def _complete_yarn(
    rope: Mapping[str, Any], longest: int, by_layer: bool, where: str
) -> dict[str, Any]:
    """Returns yarn's numbers with those that transformers takes for missing ones; attention_factor
    is -1 where it is that of the factor. A ConfigError where we could not do as transformers does.
    `rope` has original_max_position_embeddings, and `longest` is max_position_embeddings;
    `by_layer`: layers with a window have other positions."""
    length = cast_key(_LENGTH, _LENGTH, rope, where)
    rope = {"truncate": True, **rope}
    rope |= {"beta_fast": rope.get("beta_fast") or 32.0, "beta_slow": rope.get("beta_slow") or 1.0}
    if by_layer and rope["truncate"] is not True:
        raise ConfigError(
            f"{where}: truncate={rope['truncate']} of {_FULL} is not supported: transformers does "
            "not read it where layers have their own positions; leave it out"
        )
    if "factor" not in rope:
        return rope  # which is refused, as by transformers
    if rope["factor"] is None:
        rope["factor"] = longest / max(1, length)
    factor = cast_key("rope_factor", "factor", rope, where)
    default = amplitude = yarn_amplitude(max(1.0, factor))
    if all(map(rope.get, _MSCALES)):
        scale, scale_all = (cast_key("rope_factor", name, rope, where) for name in _MSCALES)
        amplitude = (1 + scale * (default - 1)) / (1 + scale_all * (default - 1))
    if (written := rope.get("attention_factor")) is not None:
        amplitude = cast_key("rope_attention_factor", "attention_factor", rope, where)
        refuse([(amplitude <= 0, f"{where}: attention_factor={written} must be above 0")])
    return rope | {"attention_factor": -1.0 if abs(amplitude - default) < 1e-6 else amplitude}


def make_values(keys: ModelKeys, released: Released, original: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with which config.json has the positions of our keys: in both forms, as
    transformers below 5 reads no `rope_parameters`; {} if it needs none. `original` is the file as
    it will be written but for them, {} for a new model or one of another family before."""
    if original:
        values = {**released.defaults, **original}
        if all(getattr(keys, name) == x for name, x in read_keys(values, released, "").items()):
            if not original.get("rope_parameters"):
                return {}
            forms = _forms(*_ropes(values, released, ""), released)
            return {n: x for n, x in forms.items() if x is not None and original.get(n) is None}
    rope = {"rope_type": "default", "rope_theta": keys.rope_max_timescale}
    if released.rotary_share != 1:
        rope["partial_rotary_factor"] = released.rotary_share
    for kind, (ours, names) in _SCALINGS.items():
        if keys.rope_type == ours and (kind != "linear" or keys.rope_linear_scaling_factor != 1):
            rope |= {"rope_type": kind} | {theirs: getattr(keys, n) for n, theirs in names.items()}
    if released.scales_scores and keys.rope_type == "yarn":
        rope["mscale_all_dim"] = keys.mscale
        if keys.rope_attention_factor == 1:  # which other readers find by these two
            rope["mscale"] = keys.mscale
    for name, usual in (("attention_factor", -1), ("truncate", True)):
        if rope.get(name) == usual:
            del rope[name]
    own = keys.local_rope_max_timescale
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"] if own == -1 else own}
    forms = _forms(rope, local if released.local_rope else {}, released)
    if original.get(_LENGTH) is not None:  # which counts before the one inside
        forms[_LENGTH] = rope.get(_LENGTH)
    if keys.rope_type == "dynamic":
        forms["max_position_embeddings"] = getattr(keys, _LENGTH)
    return forms


def _forms(rope: Mapping[str, Any], local: Mapping[str, Any], released: Released) -> dict[str, Any]:
    """Returns positions as transformers 5 and as earlier ones write them; `local` are those of
    layers with a window if they differ."""
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    forms = {"rope_theta": rope["rope_theta"], "rope_parameters": dict(rope)}
    forms["rope_scaling"] = None if _kind(rope) == "default" else scaling
    if local:
        name, _ = released.local_rope
        forms |= {name: local["rope_theta"]} if name else {}
        forms["rope_parameters"] = {_FULL: dict(rope), _LOCAL: dict(local)}
    return forms
