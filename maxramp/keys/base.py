"""The keys of configs/base.yml: defaults, types of the values, and suggestions for typos."""

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
# In a checkout the files are beside the package, in an installed wheel inside it.
CONFIGS = next(
    (d for d in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if d.is_dir()), _PACKAGE
)

# Keys that may be unset, and their type if they are set.
_OPTIONAL_TEXT = ("jax_cache_dir",)  # and every text with the default ""
_OPTIONAL = {"max_num_checkpoints_to_keep": int, "rampup_batch_size": list}
_OPTIONAL |= {"learning_rate": float, "muon_consistent_rms": float}

_MAPPINGS = {  # what an error asks for, by key
    "phases": "a mapping of mappings, such as {252M: {global_batch_size: 512}}",
    "opt_arguments": "a mapping of names to values, such as {b1: 0.95}",
    "eval_sets": "a mapping of names to files or splits, such as {wiki: FILES, code: FILES}",
}
# Keys that are paths: $NAMES in them are variables of the environment. The path of snapshots is no
# such key: each node has variables of its own.
PATHS = (
    *("base_output_directory", "jax_cache_dir", "text_files", "grain_train_files", "hf_path"),
    "data_cache_dir",
    *("grain_eval_files", "eval_sets", "tokenizer_path", "evaluate_tasks_include_path"),
    *("load_parameters_path", "load_full_state_path", "chat_template", "prompt_file"),
    *("eval_prompt_file", "container_image", "container_mounts", "gke_mount_path"),
)
_MOST_VALUES = 12  # keys with their values, in one line
# By type: what an error asks for, and what it calls a value of that type.
_TYPES = {
    bool: ("True or False", "a bool"),
    int: ("an integer", "an integer"),
    float: ("a number", "a fraction"),
    str: ("text (in a file, quote it)", "text"),
    list: ("a list such as [a, b]", "a list"),
    dict: ("a mapping", "a mapping"),
    type(None): ("nothing", "nothing"),
}


@functools.cache
def base() -> Mapping[str, Any]:
    return types.MappingProxyType(read_yaml(CONFIGS / "base.yml"))


@functools.cache
def other_names() -> dict[str, str]:
    return read_yaml(pathlib.Path(__file__).with_name("other_names.yml"))


def unset(name: str) -> Any:
    """Returns the value of an unset key of base.yml by its type: -1, "" or False; None for lists,
    mappings and null."""
    return {bool: False, str: "", int: -1, float: -1.0}.get(type(base()[name]))


def may_be_unset(name: str) -> bool:
    return name in _OPTIONAL or name in _OPTIONAL_TEXT or base()[name] == ""


def cast_value(text: str, value: Any, name: str) -> Any:
    """Casts a value to the type of the default of base.yml's key `name`, which exists; a
    ConfigError if something would be lost. In a path it replaces the environment's variables that
    are set. `text` is the key and value as written, for errors."""
    default = base()[name]
    if name in _OPTIONAL:
        if value in (None, "none", "None"):
            return None
        default = _OPTIONAL[name]()
    elif may_be_unset(name) and value in (None, "none", "None"):
        return ""
    kind = type(default)
    if kind is int and type(value) is str and value[-1:].isalpha():  # 5M
        count = parse_count(value)
        value = value if count is None else count
    if kind is float and type(value) is int and abs(value) < 10**300:
        return float(value)
    if type(value) is kind:
        if kind is float and not math.isfinite(value):
            raise ConfigError(f"{text} must be a finite number")
        if kind is int and abs(value) >= 2**63:
            raise ConfigError(f"{text} must be below 2^63")
        return _expand(value) if name in PATHS else value
    if kind is int and type(value) is float and value.is_integer():  # 1.2e6
        raise ConfigError(f"{text} must be an integer without a point: {int(value)}")
    _, actual = _TYPES.get(type(value), (None, type(value)))
    raise ConfigError(f"{text} must be {_MAPPINGS.get(name, _TYPES[kind][0])}, not {actual}")


def _expand(value: Any) -> Any:
    """Replaces the environment's variables that are set, in a path or the paths of a mapping."""
    if isinstance(value, Mapping):
        return {name: _expand(inner) for name, inner in value.items()}
    return os.path.expandvars(value) if isinstance(value, str) else value


def expand_path(name: str, value: Any) -> Any:
    """Replaces the environment's variables in a path or a mapping of paths, the value of the key
    `name`; refuses unset ones."""
    expanded = _expand(value)
    for path in expanded.values() if isinstance(expanded, Mapping) else [expanded]:
        variable = re.search(r"\$(\w+|\{[^}]*\})", str(path), re.ASCII)
        if variable:
            raise ConfigError(
                f"{show_key(name, value)}: the environment has no {variable[1].strip('{}')}; set "
                "it, or give the path without it"
            )
    return expanded


def unknown_keys(keys: list[tuple[str, str]], list_of_keys: str = "--help-keys") -> str:
    """Returns the text of the error for unknown keys, at least one: each as written, and its name.
    `list_of_keys` names what lists every key. It suggests a key of base.yml for each that is near
    one."""
    nearest = [nearest_key(name) for _, name in keys]
    if len(keys) == 1:
        hint = f"did you mean {nearest[0]}? " if nearest[0] else ""
        return f"{keys[0][0]} is not a known key; {hint}{list_of_keys} lists every key"
    hints = [f" (did you mean {key}?)" if key else "" for key in nearest]
    lines = [text + hint for (text, _), hint in zip(keys, hints, strict=True)]
    return f"{', '.join(shorten(lines))} are not known keys; {list_of_keys} lists every key"


def show_key(name: str, value: Any) -> str:
    """Returns KEY=VALUE, with a long value cut."""
    text = str(value)
    return f"{name}={text if len(text) <= 60 else f'{text[:57]}...'}"


def shorten(lines: list[str]) -> list[str]:
    """Shortens many lines "FILE: KEY=VALUE": only the first ones keep their values."""
    rest = [line.partition("=")[0].rpartition(": ")[2] for line in lines[_MOST_VALUES:]]
    return [*lines[:_MOST_VALUES], *rest]


def nearest_key(name: str) -> str | None:
    """Returns the key that a wrong name probably means, None if no key is close enough. As most
    names share words, each word must be that of the key except for a typo, and only words at the
    end may be missing.
    """
    if name in other_names():
        return other_names()[name]
    for key in difflib.get_close_matches(name, base(), 5, 0.8):
        words, key_words = name.split("_"), key.split("_")
        if name.replace("_", "") == key.replace("_", ""):
            return key
        pairs = zip(words, key_words, strict=False)
        likeness = (difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        if len(words) <= len(key_words) and all(ratio >= 0.6 for ratio in likeness):
            return key
    return None
