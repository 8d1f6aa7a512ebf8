"""Megatron's command line in our keys, by the table `megatron` of peers.yml."""

from collections.abc import Sequence
from typing import Any

from maxramp.keys import peers
from maxramp.keys.base import base, cast_value, nearest_key
from maxramp.keys.yamlfile import parse

_FLAGS = peers.MEGATRON
_OF_MODEL = "num-layers"  # with which a command line gives the sizes of a model


def read_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """--flag value value -> the values of every flag, of those after the script's name."""
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words[scripts[-1] + 1 if scripts else 0 :]:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            values = found[flag.replace("_", "-")] = [value] if equals else []
        else:
            values.append(word)
    return found


def translate_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our keys for a command line, and the flags that have none here."""
    flags, keys = read_flags(words), {}
    for flag, values in flags.items():
        if argument := _argument(flag, values):
            name, _, text = argument.partition("=")
            given = f"--{' '.join([flag, *values])}"
            value = text if isinstance(base()[name], str) else parse(text)
            keys[name] = cast_value(given, peers.VALUES.get(name, {}).get(text, value), name)
    if _OF_MODEL in flags:  # what Megatron takes where nothing is given
        heads = keys.get("base_num_query_heads", base()["base_num_query_heads"])
        keys.setdefault("base_num_kv_heads", heads)
        width = keys.get("base_emb_dim", base()["base_emb_dim"])
        keys.setdefault("head_dim", width // heads)
        keys.setdefault(
            "base_mlp_dim", width * 8 // 3 // 64 * 64 if "swiglu" in flags else 4 * width
        )
        keys.setdefault("logits_via_embedding", True)
    shares = (
        ("lr-warmup-samples", "total_samples", "warmup_steps_fraction"),
        ("min-lr", "learning_rate", "learning_rate_final_fraction"),
    )
    for flag, whole, name in shares:
        if flag in flags and keys.get(whole):
            keys[name] = float(f"{float(''.join(flags[flag])) / keys[whole]:.6g}")
    left = [f"--{flag}" for flag in flags if flag not in _FLAGS]
    done = [f"--{flag}" for flag, _, name in shares if name in keys]
    return keys, [flag for flag in left if flag not in done]


def meant_by(flag: str, words: Sequence[str]) -> str:
    """The key=value that somebody meant who wrote a --flag among `words`; "" where none is."""
    values = read_flags(words).get(flag.lstrip("-").partition("=")[0].replace("_", "-"), [])
    values = [value for value in values if "=" not in value]
    name = flag.lstrip("-").partition("=")[0].replace("-", "_")
    argument = _argument(name.replace("_", "-"), values)
    key = name if name in base() else nearest_key(name)
    return argument or (f"{key}={_value(values) or 'VALUE'}" if key else "")


def _argument(flag: str, values: Sequence[str]) -> str:
    name = _FLAGS.get(flag, "")
    return name if "=" in name or not name else f"{name}={_value(values)}"


def _value(values: Sequence[str]) -> str:
    return f"[{','.join(values)}]" if len(values) > 1 else "".join(values)
