"""Translates Megatron's command line into our keys, by the table `megatron` of peers.yml."""

import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from maxramp.errors import ConfigError
from maxramp.keys import peers
from maxramp.keys.base import base, cast_value, nearest_key
from maxramp.keys.yamlfile import parse

_MODEL_SIZE = "num-layers"  # a command line with it gives the sizes of a model
_LISTS = ("rampup_batch_size",)  # keys of three values
# Flags whose keys are shares of other keys: those keys, and the shares.
_SHARES = {
    "lr-warmup-samples": ("total_samples", "warmup_steps_fraction"),
    "min-lr": ("learning_rate", "learning_rate_final_fraction"),
}

_PRE_SOFTMAX, _LAYER_ORDER = "moe-router-pre-softmax", "moe-layer-freq"
_SHARED_WIDTH = "moe-shared-expert-intermediate-size"
_LATENT = "multi-latent-attention"
_YARN = ("rope-type", "rotary-scaling-factor", "mscale", "mscale-all-dim")  # with _LATENT
# They depend on each other.
_EXPERT_FLAGS = (_PRE_SOFTMAX, _LAYER_ORDER, _SHARED_WIDTH, "qk-layernorm", _LATENT, *_YARN)
_DENSE_FIRST = r"1|\(?(\[0\]\*(?P<dense>\d+)\+)?\[1\]\*\d+\)?"


def read_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of every --flag-name by its name, the last ones if it comes again, without
    words before the first flag. Flags in a shell's variable (ARGS="--flag value") are read where it
    is set; a ValueError if a quotation in it does not end.
    """
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in itertools.chain.from_iterable(map(_open_variable, words)):
        if not re.match("-+[a-zA-Z]", word):
            values.append(word)
            continue
        if re.fullmatch("-[a-zA-Z]", word):  # another program's, as in python -m
            values = []
            continue
        flag, equals, value = word.lstrip("-").partition("=")
        values = flags[flag.replace("_", "-")] = [value] if equals else []
    return flags


def _open_variable(word: str) -> list[str]:
    is_set = re.match(r"\w+=\(?(.*--.*)", word, re.DOTALL)
    return shlex.split(is_set[1]) if is_set else [word.removesuffix(")")]  # the end of an array


def split_command(text: str) -> list[str]:
    """Splits a shell's text into words, for `read_flags`. Values stand for the variables that the
    text sets, but for those of flags; a ValueError if a quotation does not end.
    """
    variables: dict[str, str] = {}

    def replace(part: str) -> str:
        return re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda x: variables.get(x[1] or x[2], x[0]), part)

    for word in shlex.split(text, comments=True):
        if is_set := re.fullmatch(r"(\w+)=([^(].*)", word, re.DOTALL):
            variables[is_set[1]] = replace(is_set[2])
    variables = {name: value for name, value in variables.items() if "--" not in value}
    return shlex.split(replace(text), comments=True)


def translate_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns our keys for a command line (`split_command`), and what has no key: flags, and
    variables that the text does not set. A ConfigError names a flag whose value cannot be read;
    raises as `read_flags`.
    """
    flags, keys, left_out = read_flags(words), {}, []
    for flag, values in flags.items():
        if flag in _SHARES or ("num-experts" in flags and flag in _EXPERT_FLAGS):
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
    if _MODEL_SIZE in flags:  # Megatron's defaults
        heads = keys.get("base_num_query_heads", base()["base_num_query_heads"])
        width = keys.get("base_emb_dim", base()["base_emb_dim"])
        widened = width * 8 // 3 // 64 * 64 if "swiglu" in flags else 4 * width
        defaults = {"base_num_kv_heads": heads, "head_dim": width // max(1, heads)}
        keys = defaults | {"base_mlp_dim": widened, "logits_via_embedding": True} | keys
    if "num_experts" in keys:
        keys, without_key = _translate_experts(flags, keys)
        left_out += without_key
    for flag, (whole, name) in _SHARES.items():
        if flag in flags and keys.get(whole):
            part = _first_value(flag, flags[flag], name)
            keys[name] = float(f"{part / keys[whole]:.6g}")
            left_out += _further_values(flag, flags[flag][1:])
        elif flag in flags:
            left_out.append(f"--{flag}")
    text = " ".join(words)
    unset = {*re.findall(r"\$[{]?(\w+)", text)} - {*re.findall(r"(\w+)=", text)}
    return keys, [*left_out, *(f"${name}" for name in sorted(unset))]


def _translate_experts(
    flags: Mapping[str, list[str]], keys: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the keys of a model of experts, and flags without a key; a ConfigError for a value of
    another type. It adds Megatron's defaults, scales losses, which Megatron sums over layers and we
    average, and counts shared experts.

    `keys` holds those of all flags but _EXPERT_FLAGS, and Megatron's defaults of the sizes, as the
    losses' weights and shared experts depend on them.
    """
    keys = {"num_experts_per_tok": 2, "load_balance_loss_scope": "pass"} | keys
    left_out, has_norms = [], "qk-layernorm" in flags
    is_sigmoid, is_whole = keys.get("routed_score_func") == "sigmoid", _PRE_SOFTMAX in flags
    keys["decoder_block"] = "mixtral"
    if has_norms:
        keys |= {"decoder_block": "dots1" if is_sigmoid else "qwen3_moe", "use_qk_norm": True}
        keys["norm_topk_prob"] = is_sigmoid or not is_whole
    if _LATENT in flags and has_norms:
        keys = _translate_latents(flags, keys)
    else:
        left_out += [f"--{flag}" for flag in (_LATENT, *_YARN) if flag in flags]
    if is_whole and (not has_norms or is_sigmoid):
        left_out.append(f"--{_PRE_SOFTMAX}")
    if keys.get("routed_bias"):
        keys.setdefault("routed_bias_update_rate", 1e-3)
    if (kind := keys["load_balance_loss_scope"]) not in ("row", "pass", "step"):
        left_out += [f"--moe-router-load-balancing-type {kind}"] * (kind != "none")
        keys = {n: x for n, x in keys.items() if not n.startswith("load_balance_loss")}
    layers = keys.get("base_num_decoder_layers", base()["base_num_decoder_layers"])
    if _LAYER_ORDER in flags:
        order = re.fullmatch(_DENSE_FIRST, "".join(flags[_LAYER_ORDER]))
        left_out += [] if order else [f"--{_LAYER_ORDER}"]
        if order and order["dense"]:
            keys["first_num_dense_layers"] = int(order["dense"])
            layers -= int(order["dense"])
    for name in {"load_balance_loss_weight", "router_z_loss_weight"} & {*keys}:
        keys[name] = float(f"{keys[name] * layers:.6g}")
    if _SHARED_WIDTH in flags:
        width = keys.get("base_moe_mlp_dim", keys.get("base_mlp_dim", 0))
        shared = _first_value(_SHARED_WIDTH, flags[_SHARED_WIDTH], "base_mlp_dim")
        if width and shared % width == 0:
            keys["shared_experts"] = shared // width
            left_out += _further_values(_SHARED_WIDTH, flags[_SHARED_WIDTH][1:])
        else:
            left_out.append(f"--{_SHARED_WIDTH}")
    return keys, left_out


def _translate_latents(flags: Mapping[str, list[str]], keys: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of latent attention, with Megatron's defaults, in place of `keys` of heads
    and their norms. Its positions are yarn's, which a factor of 1 leaves as they are. A ConfigError
    for text in place of a number, and for a factor of 0 or less."""
    widths = {"kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    heads = keys.get("base_num_query_heads", base()["base_num_query_heads"])
    keys = widths | {"v_head_dim": 128} | keys
    keys |= {"decoder_block": "deepseek_v3", "base_num_kv_heads": heads}
    factor, rotated, scores = (
        _first_value(flag, flags.get(flag, [default]), "mscale")
        for flag, default in zip(_YARN[1:], ("1", "1", "0"), strict=True)
    )
    if factor <= 0:
        raise ConfigError(f"--{_YARN[1]} {factor:g} must be above 0")
    if factor != 1 and flags.get("rope-type") != ["rope"]:
        rotated, scores_factor = (0.1 * x * math.log(factor) + 1 for x in (rotated, scores))
        keys |= {"rope_type": "yarn", "rope_factor": factor, "mscale": scores}
        keys["rope_attention_factor"] = float(f"{rotated / scores_factor:.6g}")
        keys["original_max_position_embeddings"] = 4096
    return {name: x for name, x in keys.items() if name not in ("head_dim", "use_qk_norm")}


def _first_value(flag: str, values: Sequence[str], name: str) -> Any:
    """Returns a flag's first value as the type of a key of ours; a ConfigError if it has none."""
    if not values:
        raise ConfigError(f"--{flag} has no value")
    return cast_value(f"--{flag} {values[0]}", _parse(flag, values[0]), name)


def _further_values(flag: str, values: Sequence[str]) -> list[str]:
    """Returns a flag's further values, for which there is no key, as one flag. The shell's part of
    a line ($MORE, 2>&1, | tee) does not count.
    """
    values = list(itertools.takewhile(lambda value: not re.match(r"\d*[$|&;<>#\\]", value), values))
    return [f"--{flag} {' '.join(values)}"] if values else []


def suggest_argument(flag: str, words: Sequence[str]) -> str:
    """Returns the key=value that a --flag among `words` probably means, "" if none."""
    name = flag.lstrip("-").partition("=")[0].replace("-", "_")
    flag = name.replace("_", "-")
    values = read_flags([x for x in words if x[:1] == "-" or "=" not in x]).get(flag, [])
    argument = _argument(flag, values)
    key = name if name in base() else nearest_key(name)
    if not argument and key:
        return f"{key}={' '.join(values[:1]) or 'VALUE'}"
    return argument


def _argument(flag: str, values: Sequence[str]) -> str:
    """Returns a flag's key=value, with as many values as the key has; "" if it has no key."""
    name = peers.MEGATRON.get(flag, "")
    if "=" in name or not name:
        return name
    return f"{name}=[{','.join(values[:3])}]" if name in _LISTS else f"{name}={''.join(values[:1])}"


def _parse(flag: str, text: str) -> Any:
    try:
        return parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"--{flag} {text} cannot be read") from None
