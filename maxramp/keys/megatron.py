"""Megatron's command line in our keys, by the table `megatron` of peers.yml."""

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
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

# Of experts: the weights are those of all scores; the order of layers; the width of shared ones.
_WHOLE, _ORDER = "moe-router-pre-softmax", "moe-layer-freq"
_SHARED = "moe-shared-expert-intermediate-size"
_OF_EXPERTS = (_WHOLE, _ORDER, _SHARED, "qk-layernorm")  # read together
_DENSE_FIRST = r"1|\(?(\[0\]\*(?P<dense>\d+)\+)?\[1\]\*\d+\)?"


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
        if flag in _SHARES or ("num-experts" in flags and flag in _OF_EXPERTS):
            continue
        if not (argument := _argument(flag, values)):
            same = peers.MEGATRON_SAME.get(flag)  # values that change nothing; [] = any
            if same is None or (same and not {*values[:1]} & {*same}):
                left_out.append(f"--{flag} {peers.MEGATRON_NEAR.get(flag, '')}".rstrip())
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
        if "=" not in peers.MEGATRON[flag]:
            left_out += _further_values(flag, values[3 if name in _LISTS else 1 :])
    if _OF_MODEL in flags:  # what Megatron takes where nothing is given
        heads = keys.get("base_num_query_heads", base()["base_num_query_heads"])
        width = keys.get("base_emb_dim", base()["base_emb_dim"])
        widened = width * 8 // 3 // 64 * 64 if "swiglu" in flags else 4 * width
        before = {"base_num_kv_heads": heads, "head_dim": width // max(1, heads)}
        keys = before | {"base_mlp_dim": widened, "logits_via_embedding": True} | keys
    if "num_experts" in keys:
        keys, without = _translate_experts(flags, keys)
        left_out += without
    for flag, (whole, name) in _SHARES.items():
        if flag in flags and keys.get(whole):
            part = cast_value(f"--{flag}", _parse(flag, " ".join(flags[flag][:1])), name)
            keys[name] = float(f"{part / keys[whole]:.6g}")
            left_out += _further_values(flag, flags[flag][1:])
        elif flag in flags:
            left_out.append(f"--{flag}")
    text = " ".join(words)
    unset = {*re.findall(r"\$[{]?(\w+)", text)} - {*re.findall(r"(\w+)=", text)}
    return keys, [*left_out, *(f"${name}" for name in sorted(unset))]


def _translate_experts(
    flags: Mapping[str, list[str]], given: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The keys of a model of experts, and flags that have none: what Megatron takes where nothing
    is given; losses, which it adds over layers and we average; widths as numbers of experts."""
    keys = {"num_experts_per_tok": 2, "load_balance_loss_scope": "pass"} | given
    left_out, has_norms = [], "qk-layernorm" in flags
    is_sigmoid, is_whole = keys.get("routed_score_func") == "sigmoid", _WHOLE in flags
    keys["decoder_block"] = "mixtral"
    if has_norms:
        keys |= {"decoder_block": "dots1" if is_sigmoid else "qwen3_moe", "use_qk_norm": True}
        keys["norm_topk_prob"] = is_sigmoid or not is_whole
    if is_whole and (not has_norms or is_sigmoid):
        left_out.append(f"--{_WHOLE}")
    if keys.get("routed_bias"):
        keys.setdefault("routed_bias_update_rate", 1e-3)
    if (kind := keys["load_balance_loss_scope"]) not in ("row", "pass", "step"):
        left_out += [f"--moe-router-load-balancing-type {kind}"] * (kind != "none")
        keys = {n: x for n, x in keys.items() if not n.startswith("load_balance_loss")}
    layers = keys.get("base_num_decoder_layers", base()["base_num_decoder_layers"])
    if _ORDER in flags:
        order = re.fullmatch(_DENSE_FIRST, "".join(flags[_ORDER]))
        left_out += [] if order else [f"--{_ORDER}"]
        if order and order["dense"]:
            keys["first_num_dense_layers"] = int(order["dense"])
            layers -= int(order["dense"])
    for name in {"load_balance_loss_weight", "router_z_loss_weight"} & {*keys}:
        keys[name] = float(f"{keys[name] * layers:.6g}")
    if _SHARED in flags:
        width = keys.get("base_moe_mlp_dim", keys.get("base_mlp_dim", 0))
        shared = cast_value(f"--{_SHARED}", _parse(_SHARED, flags[_SHARED][0]), "base_mlp_dim")
        if width and shared % width == 0:
            keys["shared_experts"] = shared // width
            left_out += _further_values(_SHARED, flags[_SHARED][1:])
        else:
            left_out.append(f"--{_SHARED}")
    return keys, left_out


def _further_values(flag: str, values: Sequence[str]) -> list[str]:
    """The values behind those that a key takes, as a flag that has none here. What a shell makes of
    the rest of a line ($MORE, 2>&1, | tee) does not count as a value.
    """
    values = list(itertools.takewhile(lambda value: not re.match(r"\d*[$|&;<>#\\]", value), values))
    return [f"--{flag} {' '.join(values)}"] if values else []


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
