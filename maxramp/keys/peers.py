"""Keys of MaxText and NeMo: renamed, ignored where training does not depend on them, or refused
with what to do in their place, as peers.yml says.
"""

import collections
import fnmatch
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys.base import base, may_be_unset, shorten, unknown_keys
from maxramp.keys.yamlfile import read_yaml

# Its parts are explained in the file.
_TABLE = read_yaml(pathlib.Path(__file__).with_name("peers.yml"))
RENAMED: dict[str, str] = _TABLE["renamed"]
MEGATRON: dict[str, str] = _TABLE["megatron"]
MEGATRON_SAME: dict[str, list[str]] = _TABLE["megatron_same"]
MEGATRON_NEAR: dict[str, str] = _TABLE["megatron_near"]
VALUES: dict[str, dict[str, Any]] = _TABLE["values"]
_ONLY: dict[str, list[Any]] = _TABLE["only"]
_NEAR: dict[str, dict[str, str]] = _TABLE["near"]
_DERIVED: dict[str, str] = _TABLE["derived"]
FAMILY_KEYS: dict[str, dict[str, Any]] = _TABLE["family_keys"]
_IMPLIED: dict[str, dict[str, Any]] = _TABLE["implied"]
OVERRIDES_MODEL = "override_model_config"  # whether a file overrides the sizes of its model_name
_IGNORED = " ".join(_TABLE["ignored"].values())
_NOT_GIVEN = (None, "", "none", "None")


def translate(name: str, value: Any) -> tuple[str, Any] | None:
    """Returns our key and value for another trainer's. None if it is not one of theirs, if null
    unsets a renamed key, or if the value means something else to them.
    """
    key = RENAMED.get(name, name)
    if key not in base() or (key != name and value is None and not may_be_unset(key)):
        return None
    if value not in _ONLY.get(name, [value]):
        return None
    return key, VALUES.get(key, {}).get(str(value), value)


def refusal(name: str, value: Any) -> str | None:
    """Returns why another trainer's key is refused, a text that follows it in an error; "" if
    nothing depends on it with this value, None if no trainer has it. For keys that `translate`
    leaves out: one of ours counts as unknown, a renamed one as idle."""
    if name in _DERIVED:
        return f"(NeMo's): is {_DERIVED[name]} there; give that number"
    owner = "NeMo" if "." in name and not name.startswith("rl.") else "MaxText"
    for refused in _TABLE["refused"]:
        for asks_for_nothing, names in refused["keys"]:
            if _matches(name, names):
                nothing = value in (*_NOT_GIVEN, *asks_for_nothing)
                return "" if nothing else f"({refused.get('owner', owner)}'s): {refused['because']}"
    is_idle = name in RENAMED or name in FAMILY_KEYS or _matches(name, _IGNORED)
    return "" if is_idle else None


def is_of_maxtext(name: str) -> bool:
    """Tells whether a key stands in files of MaxText alone."""
    is_nemos = "." in name and not name.startswith("rl.")
    return name not in base() and not is_nemos and refusal(name, None) is not None


def check(foreign: Mapping[str, tuple[str, Any]], layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Refuses other trainers' keys that training would depend on; returns a note on the others.
    `foreign` has by name the key as written and its value; `layers` are the keys of each file and
    the command line, the base first.
    """
    refused, unknown, ignored, notes = collections.defaultdict(list), [], [], []
    for name, (text, value) in foreign.items():
        reason = refusal(name, value)
        if reason and (own := _replacement(name, layers)):
            notes.append(f"{text}: left out for {own}")
        elif reason:
            refused[reason + _eval_rows(name, value, layers)].append(text)
        elif reason is None:
            meant = MEGATRON.get(name.replace("_", "-"), name).partition("=")[0]
            unknown.append((text, meant))
        elif name not in (*FAMILY_KEYS, OVERRIDES_MODEL):
            ignored.append(name)
    for text, reason in _refused_together(layers):
        refused[reason].append(text)
    errors = [f"{', '.join(shorten(texts))} {reason}" for reason, texts in refused.items()]
    if unknown:
        errors.append(unknown_keys(unknown))
    if errors:
        raise ConfigError(". ".join(errors))
    if ignored:
        notes.append(f"ignored, as nothing here depends on them: {', '.join(ignored)}")
    return notes


def _replacement(name: str, layers: Sequence[Mapping[str, Any]]) -> str:
    """Returns KEY=VALUE of the key that is given instead of a refused one, "" without one."""
    entries = [r for r in _TABLE["refused"] for _, names in r["keys"] if _matches(name, names)]
    own = entries[0].get("instead") if entries else None
    last = max((i for i, layer in enumerate(layers) if name in layer), default=0)
    values = [layer[own] for layer in layers[last:] if own in layer]
    return f"{own}={values[-1]}" if values else ""


def _eval_rows(name: str, batches: Any, layers: Sequence[Mapping[str, Any]]) -> str:
    """Says how many rows MaxText's eval_steps are, as far as the keys tell; "" for another key."""
    keys = dict(collections.ChainMap(*reversed(layers)))
    rows = keys.get("eval_per_device_batch_size") or keys.get("per_device_batch_size")
    if name != "eval_steps" or not isinstance(batches, int) or not isinstance(rows, int | float):
        return ""
    if rows <= 0:  # from global_batch_size
        return ""
    nodes, devices = keys.get("num_nodes", -1), keys.get("devices_per_node", -1)
    rows *= batches
    if not isinstance(devices, int) or devices < 1:
        return f": {batches} batches are {rows:g} on every device"
    if not isinstance(nodes, int) or nodes < 1:
        return f": {batches} batches are {rows * devices:g} on every node"
    return f": {batches} batches are {rows * devices * nodes:g}"


def check_family(block: str, foreign: Mapping[str, tuple[str, Any]]) -> None:
    """Refuses keys of FAMILY_KEYS in `foreign` (as in `check`) that contradict the `block` of a
    family of models."""
    for name in (name for name in foreign if name in FAMILY_KEYS):
        text, value = foreign[name]
        values = (v for blocks, v in FAMILY_KEYS[name].items() if _matches(block, blocks))
        only = next(values, None)
        allowed = only if isinstance(only, list) else [only]
        if only is not None and value not in (*_NOT_GIVEN, *allowed):
            raise ConfigError(
                f"{text} (MaxText's): decoder_block={block} means {only}; use that, or leave it out"
            )


def implied_by_block(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns what MaxText's decoder_block has beside the keys `names` that are given, of the
    `values` of all keys; its qwen3_5 with experts is our qwen3_5_moe."""
    block = values["decoder_block"]
    if block == "qwen3_5" and values["num_experts"] > 1:
        block = "qwen3_5_moe"
    own = {name: value for name, value in _IMPLIED.get(block, {}).items() if name not in names}
    return own if block == values["decoder_block"] else {"decoder_block": block, **own}


def _refused_together(layers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields what the last values of the layers, the base first, may not have together: keys as
    written, and the text that follows them in an error."""
    last: dict[str, Any] = {}
    heads = "model.num_attention_heads"
    since_heads: set[str] = set()  # keys in the layer that last sets the heads, or after it
    for layer in layers:
        last |= layer
        since_heads = {*layer} if heads in layer else since_heads | {*layer}
    for name, default in _DERIVED.items():
        if heads in last and name not in last and RENAMED[name] not in since_heads:
            yield name, f"(NeMo's): is not given, and is {default} there; give that number"
    for name, nearest in _NEAR.items():
        if own := nearest.get(str(last.get(name))):
            yield f"{name}={last[name]}", f"(MaxText's): not supported; the nearest is {own}"
    if last.get("normalize_embedding_logits") and last.get("logits_via_embedding"):
        yield (
            "normalize_embedding_logits=True with logits_via_embedding=True",
            "(MaxText's): not supported: logits are the product alone; use False",
        )


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())
