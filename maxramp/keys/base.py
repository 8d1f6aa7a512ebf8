"""The keys of configs/base.yml: defaults, types of the values, and names that come close."""

import difflib
import functools
import math
import os
import pathlib
import re
import types
from collections.abc import Mapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys.numbers import parse_count
from maxramp.keys.yamlfile import read_yaml

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent
# In a checkout the files stand beside the package, in an installed wheel inside it.
CONFIGS = next(
    (d for d in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if d.is_dir()), _PACKAGE
)

# Keys that may be unset, and their type where they are set.
_OPTIONAL_TEXT = ("jax_cache_dir",)  # and every text whose default is ""
_OPTIONAL = {"max_num_checkpoints_to_keep": int, "rampup_batch_size": list}
_OPTIONAL |= {"learning_rate": float, "muon_consistent_rms": float}

_MAPPINGS = {  # keys that are one, as an error says it
    "phases": "a mapping of mappings, such as {252M: {global_batch_size: 512}}",
    "opt_arguments": "a mapping of names to values, such as {b1: 0.95}",
    "eval_sets": "a mapping of names to files or splits, such as {wiki: FILES, code: FILES}",
}
# Keys that are paths: $NAMES in them are variables of the environment. That of snapshots is not
# among them: each node has variables of its own.
PATHS = (
    *("base_output_directory", "jax_cache_dir", "text_files", "grain_train_files", "hf_path"),
    "data_cache_dir",
    *("grain_eval_files", "eval_sets", "tokenizer_path", "evaluate_tasks_include_path"),
    *("load_parameters_path", "load_full_state_path", "chat_template", "prompt_file"),
    *("eval_prompt_file", "container_image", "container_mounts", "gke_mount_path"),
)
_MOST_WHOLE = 12  # keys with their values, in one line


@functools.cache
def base() -> Mapping[str, Any]:
    return types.MappingProxyType(read_yaml(CONFIGS / "base.yml"))


@functools.cache
def other_names() -> dict[str, str]:
    return read_yaml(pathlib.Path(__file__).with_name("other_names.yml"))


def unset(name: str) -> Any:
    """The value of a key that is not given, by its type; None for lists, mappings and null."""
    return {bool: False, str: "", int: -1, float: -1.0}.get(type(base()[name]))


def may_be_unset(name: str) -> bool:
    return name in _OPTIONAL or name in _OPTIONAL_TEXT or base()[name] == ""


def cast_value(given: str, value: Any, name: str) -> Any:
    """`value` as the type of the default of the key `name`; only lossless changes."""
    default = base()[name]
    if name in _OPTIONAL:
        if value in (None, "none", "None"):
            return None
        default = _OPTIONAL[name]()
    elif may_be_unset(name) and value in (None, "none", "None"):
        return ""
    kind = type(default)
    if kind is int and type(value) is str and value[-1:].isalpha():  # 5M
        value = value if (count := parse_count(value)) is None else count
    if kind is float and type(value) is int and abs(value) < 10**300:
        return float(value)
    if type(value) is kind:
        if kind is float and not math.isfinite(value):
            raise ConfigError(f"{given} must be a finite number")
        if kind is int and abs(value) >= 2**63:
            raise ConfigError(f"{given} must be below 2^63")
        return _expand(value) if name in PATHS else value
    wanted = {bool: "True or False", int: "an integer", float: "a number"}
    wanted |= {str: "text (in a file, quote it)", list: "a list such as [a, b]"}
    wanted |= {dict: _MAPPINGS.get(name, "a mapping")}
    if kind is int and type(value) is float and value.is_integer():  # 1.2e6
        raise ConfigError(f"{given} must be an integer without a point: {int(value)}")
    found = {bool: "a bool", int: "an integer", float: "a fraction", str: "text", list: "a list"}
    found |= {dict: "a mapping", type(None): "nothing"}
    raise ConfigError(f"{given} must be {wanted[kind]}, not {found.get(type(value), type(value))}")


def _expand(value: Any) -> Any:
    """A path or the paths of a mapping with the variables that are set."""
    if isinstance(value, Mapping):
        return {name: _expand(inner) for name, inner in value.items()}
    return os.path.expandvars(value) if isinstance(value, str) else value


def expand_path(name: str, value: Any) -> Any:
    """A path, or a mapping of paths, with the variables of the environment in place of their names;
    refuses one that is not set.
    """
    expanded = _expand(value)
    for text in expanded.values() if isinstance(expanded, Mapping) else [expanded]:
        if unset := re.search(r"\$(\w+|\{[^}]*\})", str(text), re.ASCII):
            raise ConfigError(
                f"{show_key(name, value)}: the environment has no {unset[1].strip('{}')}; set it, "
                "or give the path without it"
            )
    return expanded


def unknown_keys(found: list[tuple[str, str]], list_of_keys: str = "--help-keys") -> str:
    meant = [nearest_key(name) for _, name in found]
    if len(found) == 1:
        hint = f"did you mean {meant[0]}? " if meant[0] else ""
        return f"{found[0][0]} is not a known key; {hint}{list_of_keys} lists every key"
    hints = [f" (did you mean {key}?)" if key else "" for key in meant]
    lines = [given + hint for (given, _), hint in zip(found, hints, strict=True)]
    return f"{', '.join(shorten(lines))} are not known keys; {list_of_keys} lists every key"


def show_key(name: str, value: Any) -> str:
    """KEY=VALUE as given, a long value cut."""
    text = str(value)
    return f"{name}={text if len(text) <= 60 else f'{text[:57]}...'}"


def shorten(given: list[str]) -> list[str]:
    """FILE: KEY=VALUE; of many the last ones by their names alone."""
    rest = [part.partition("=")[0].rpartition(": ")[2] for part in given[_MOST_WHOLE:]]
    return [*given[:_MOST_WHOLE], *rest]


def nearest_key(name: str) -> str | None:
    """The key that somebody who wrote `name` meant; None where none is close enough to say so. Most
    names share words: word by word the name has to be the key's, but for a slip in each, and only
    words at the end may be missing.
    """
    if name in other_names():
        return other_names()[name]
    for key in difflib.get_close_matches(name, base(), 5, 0.8):
        words, of_key = name.split("_"), key.split("_")
        if name.replace("_", "") == key.replace("_", ""):
            return key
        slips = (difflib.SequenceMatcher(None, *pair) for pair in zip(words, of_key, strict=False))
        if len(words) <= len(of_key) and all(slip.ratio() >= 0.6 for slip in slips):
            return key
    return None
