"""Keys of MaxText and NeMo: renamed, ignored where training does not depend on them, or refused
with what to do in their place, as peers.yml says.
"""

import collections
import fnmatch
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys.base import base, may_be_unset, shorten, unknown_keys
from maxramp.keys.yamlfile import read_yaml

# What each part is stands there.
_TABLE = read_yaml(pathlib.Path(__file__).with_name("peers.yml"))
RENAMED: dict[str, str] = _TABLE["renamed"]
MEGATRON: dict[str, str] = _TABLE["megatron"]
MEGATRON_SAME: dict[str, list[str]] = _TABLE["megatron_same"]
MEGATRON_NEAR: dict[str, str] = _TABLE["megatron_near"]
VALUES: dict[str, dict[str, Any]] = _TABLE["values"]
_ONLY: dict[str, list[Any]] = _TABLE["only"]
_DERIVED: dict[str, str] = _TABLE["derived"]
OF_FAMILY: dict[str, list[str]] = _TABLE["of_family"]
_IGNORED = " ".join(_TABLE["ignored"].values())
_NOT_GIVEN = (None, "", "none", "None")


def translate(name: str, value: Any) -> tuple[str, Any] | None:
    """None for a name that is not theirs, for a renamed one whose null leaves it out, and for a
    value that means something else there.
    """
    key = RENAMED.get(name, name)
    if key not in base() or (key != name and value is None and not may_be_unset(key)):
        return None
    if value not in _ONLY.get(name, [value]):
        return None
    return key, VALUES.get(key, {}).get(str(value), value)


def refusal(name: str, value: Any) -> str | None:
    """What is wrong with a key: "" where nothing depends on it; None where no trainer has it."""
    if name in _DERIVED:
        return f"(NeMo's): is {_DERIVED[name]} there; give that number"
    owner = "NeMo" if "." in name and not name.startswith("rl.") else "MaxText"
    for refused in _TABLE["refused"]:
        for asks_for_nothing, names in refused["keys"]:
            if _matches(name, names):
                nothing = value in (*_NOT_GIVEN, *asks_for_nothing)
                return "" if nothing else f"({refused.get('owner', owner)}'s): {refused['because']}"
    is_idle = name in RENAMED or name in OF_FAMILY or _matches(name, _IGNORED)
    return "" if is_idle else None


def check(foreign: Mapping[str, tuple[str, Any]], layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of other keys than ours on which training does not depend. `foreign` is (as given,
    value) by name; `layers` are the keys of each file and the command line, the base first.
    """
    refused, unknown, ignored = collections.defaultdict(list), [], []
    for name, (given, value) in foreign.items():
        if why := refusal(name, value):
            refused[why].append(given)
        elif why is None:
            unknown.append((given, name))
        elif name not in OF_FAMILY:
            ignored.append(name)
    for together, why in _refused_together(layers):
        refused[why].append(together)
    wrong = [f"{', '.join(shorten(given))} {why}" for why, given in refused.items()]
    if unknown:
        wrong.append(unknown_keys(unknown))
    if wrong:
        raise ConfigError(". ".join(wrong))
    return ignored


def check_family(block: str, given: Mapping[str, tuple[str, Any]]) -> None:
    """Refuses keys that do not agree with the family of models; `given` as in `check`."""
    for name, (shown, value) in given.items():
        switched, always = (block in blocks.split() for blocks in OF_FAMILY[name])
        if value not in _NOT_GIVEN and value != switched and not always:
            has = "has" if switched else "does not have"
            raise ConfigError(
                f"{shown} (MaxText's): decoder_block={block} {has} these norms; use {switched}, or "
                "leave it out"
            )


def _refused_together(layers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    last: dict[str, Any] = {}
    beside: set[str] = set()  # the keys that go with the newest heads
    for given in layers:
        last |= given
        beside = {*given} | (set() if "model.num_attention_heads" in given else beside)
    for name, default in _DERIVED.items():
        if "model.num_attention_heads" in last and name not in last and RENAMED[name] not in beside:
            yield name, f"(NeMo's): is not given, and is {default} there; give that number"
    if last.get("normalize_embedding_logits") and last.get("logits_via_embedding"):
        yield (
            "normalize_embedding_logits=True with logits_via_embedding=True",
            "(MaxText's): not supported: logits are the product alone; use False",
        )


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())
