"""Megatron's command line in our keys, by the table `megatron` of peers.yml."""

import itertools
import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from maxramp.errors import ConfigError
from maxramp.keys import peers
from maxramp.keys.base import base, cast_value, nearest_key
from maxramp.keys.yamlfile import parse

_OF_MODEL = "num-layers"  # with which a command line gives the sizes of a model
_LISTS = ("rampup_batch_size",)  # keys of three values
# Flags that are shares of other keys here, and those keys.
_SHARES = {
    "lr-warmup-samples": ("total_samples", "warmup_steps_fraction"),
    "min-lr": ("learning_rate", "learning_rate_final_fraction"),
}


def read_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """--flag value value -> the values of every flag; of one that is given twice the last. Flags in
    a shell's variable (ARGS="--flag value") are read where it is set.
    """
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in itertools.chain.from_iterable(map(_open_variable, words)):
        if not re.match("-+[a-zA-Z]", word):
            values.append(word)
            continue
        flag, equals, value = word.lstrip("-").partition("=")
        values = found[flag.replace("_", "-")] = [value] if equals else []
    return found


def _open_variable(word: str) -> list[str]:
    is_set = re.match(r"\w+=\(?(.*--.*)", word, re.DOTALL)
    return shlex.split(is_set[1]) if is_set else [word.removesuffix(")")]  # which ends an array


def translate_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our keys for a command line, and what has none here: flags, and variables that the text does
    not set. A ConfigError names a flag whose value cannot be read.
    """
    flags, keys, left_out = read_flags(words), {}, []
    for flag, values in flags.items():
        if flag in _SHARES:
            continue
        if not (argument := _argument(flag, values)):
            same = peers.MEGATRON_SAME.get(flag)  # values that change nothing; [] = any
            if same is None or (same and not {*values[:1]} & {*same}):
                left_out.append(f"--{flag}")
            continue
        name, _, text = argument.partition("=")
        if text in ("", "[]"):
            raise ConfigError(f"--{flag} has no value")
        if name in _LISTS and not re.fullmatch(r"\[-?\d+,-?\d+,-?\d+\]", text):
            raise ConfigError(f"--{flag} {' '.join(values[:3])} must be three integers")
        value = text if isinstance(base()[name], str) else _parse(flag, text)
        keys[name] = cast_value(
            f"--{flag} {text}", peers.VALUES.get(name, {}).get(text, value), name
        )
    if _OF_MODEL in flags:  # what Megatron takes where nothing is given
        heads = keys.get("base_num_query_heads", base()["base_num_query_heads"])
        width = keys.get("base_emb_dim", base()["base_emb_dim"])
        widened = width * 8 // 3 // 64 * 64 if "swiglu" in flags else 4 * width
        before = {"base_num_kv_heads": heads, "head_dim": width // max(1, heads)}
        keys = before | {"base_mlp_dim": widened, "logits_via_embedding": True} | keys
    for flag, (whole, name) in _SHARES.items():
        if flag in flags and keys.get(whole):
            part = cast_value(f"--{flag}", _parse(flag, " ".join(flags[flag][:1])), name)
            keys[name] = float(f"{part / keys[whole]:.6g}")
        elif flag in flags:
            left_out.append(f"--{flag}")
    text = " ".join(words)
    unset = {*re.findall(r"\$[{]?(\w+)", text)} - {*re.findall(r"(\w+)=", text)}
    return keys, [*left_out, *(f"${name}" for name in sorted(unset))]


def meant_by(flag: str, words: Sequence[str]) -> str:
    """The key=value that somebody meant who wrote a --flag among `words`; "" where none is."""
    name = flag.lstrip("-").partition("=")[0].replace("-", "_")
    given = name.replace("_", "-")
    values = [value for value in read_flags(words).get(given, []) if "=" not in value]
    key = name if name in base() else nearest_key(name)
    return _argument(given, values) or (f"{key}={' '.join(values[:1]) or 'VALUE'}" if key else "")


def _argument(flag: str, values: Sequence[str]) -> str:
    """key=value of a flag, with as many values as the key has; "" for one without a key."""
    name = peers.MEGATRON.get(flag, "")
    if "=" in name or not name:
        return name
    return f"{name}=[{','.join(values[:3])}]" if name in _LISTS else f"{name}={''.join(values[:1])}"


def _parse(flag: str, text: str) -> Any:
    try:
        return parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"--{flag} {text} cannot be read") from None
