"""Rotary positions in config.json <-> our keys. Imports no JAX.

transformers 5 writes `rope_parameters`, for families with layers that see a window by layer type;
earlier ones wrote `rope_theta`, `rope_local_base_freq` and `rope_scaling`.
"""

import math
from collections.abc import Mapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.keys.section import refuse
from maxramp.model.families.family import Released
from maxramp.model.keys import ModelKeys

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
        | {_LENGTH: _LENGTH},
    ),
}
_FULL, _LOCAL = "full_attention", "sliding_attention"  # layers
_BASE = "rope_local_base_freq"  # of the latter


def cast_key(ours: str, theirs: str, values: Mapping[str, Any], where: str) -> Any:
    value = values.get(theirs)
    return base.cast_value(f"{where}: {theirs}={value}", value, ours)


def keys_of(values: Mapping[str, Any], released: Released, where: str) -> dict[str, Any]:
    """The keys of all layers, and of those that see a window where they have their own."""
    said = values.get("rope_parameters") or values.get("rope_scaling") or {}
    by_layer = isinstance(said, dict) and any(isinstance(x, dict) for x in said.values())
    has_local = _BASE in released.defaults
    if not isinstance(said, dict) or (by_layer and not has_local):
        raise ConfigError(
            f"{where}: rope_parameters={said} is not supported, but one for all layers"
        )
    local = {"rope_theta": values.get(_BASE)}
    if by_layer:
        local, said = local | (said.get(_LOCAL) or {}), said.get(_FULL) or {}
    rope = {"rope_theta": values.get("rope_theta", 10_000.0), **said}
    found = {"rope_max_timescale": cast_key("rope_max_timescale", "rope_theta", rope, where)}
    if has_local:
        name = "local_rope_max_timescale"
        found[name] = cast_key(name, "rope_theta", local, where)
        refuse([(_kind(local) != "default", f"{where}: {_LOCAL}={local} is not supported")])
    return found | _scaling(rope, values.get("max_position_embeddings"), where)


def _kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _scaling(rope: Mapping[str, Any], longest: Any, where: str) -> dict[str, Any]:
    kind, part = _kind(rope), rope.get("partial_rotary_factor", 1)
    if part != 1:
        raise ConfigError(f"{where}: partial_rotary_factor={part} is not supported")
    if kind == "default":
        return {"rope_type": "default", "rope_linear_scaling_factor": 1.0}
    # As transformers does where they are not given.
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, _LENGTH: longest}
    rope = usual | {name: x for name, x in rope.items() if x is not None}
    ours, names = _SCALINGS.get(kind, ("", {}))
    missing = [f" without {name}" for name in names.values() if rope.get(name) is None]
    if not ours or missing:
        raise ConfigError(
            f"{where}: rope_type={kind}{''.join(missing[:1])} is not supported; there are default, "
            f"{', '.join(_SCALINGS)}"
        )
    found = {ours: cast_key(ours, theirs, rope, where) for ours, theirs in names.items()}
    if kind == "dynamic":
        found[_LENGTH] = cast_key(_LENGTH, _LENGTH, {_LENGTH: longest}, where)
    if kind == "yarn":
        amplitude = 0.1 * math.log(max(1, found["rope_factor"])) + 1
        rope = {"attention_factor": amplitude} | rope
        given = cast_key("rope_factor", "attention_factor", rope, where)
        usual = {"attention_factor": amplitude if abs(given - amplitude) > 1e-6 else given}
        usual |= {"truncate": True, "mscale": None, "mscale_all_dim": None}
        refuse(
            (
                rope.get(name, value) != value,
                f"{where}: {name}={rope.get(name)} of rope_type=yarn is not supported, but {value}",
            )
            for name, value in usual.items()
        )
    return {"rope_type": ours, **found}


def config_of(keys: ModelKeys, released: Released, there: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of them; {} where it is `there` already."""
    if there:
        said = keys_of({**released.defaults, **there}, released, "")
        if all(getattr(keys, name) == value for name, value in said.items()):
            return {}
    scaling, linear = {}, keys.rope_linear_scaling_factor != 1
    for kind, (ours, names) in _SCALINGS.items():
        if keys.rope_type == ours and (linear or kind != "linear"):
            numbers = {theirs: getattr(keys, ours) for ours, theirs in names.items()}
            scaling = {"rope_type": kind, **numbers}
    found = {"rope_theta": keys.rope_max_timescale, "rope_scaling": scaling or None}
    if keys.rope_type == "dynamic":
        found["max_position_embeddings"] = getattr(keys, _LENGTH)
    if _BASE not in released.defaults:
        return found
    own = keys.local_rope_max_timescale
    full = {"rope_type": "default", "rope_theta": keys.rope_max_timescale, **scaling}
    local = {"rope_type": "default", "rope_theta": full["rope_theta"] if own == -1 else own}
    by_layer = {_FULL: full, _LOCAL: local}
    return found | {_BASE: local["rope_theta"], "rope_parameters": by_layer}
