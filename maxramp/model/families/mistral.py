"""Mistral: a Llama whose tokens see a window of those before them (arXiv 2310.06825)."""

import dataclasses

from maxramp.model.families.family import Released
from maxramp.model.families.llama import LLAMA
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Pattern, Rope, Sight
from maxramp.stage import SightKeys


def _see_window(keys: SightKeys) -> Sight:
    return Sight(Rope.from_keys(keys), keys.sliding_window_size)


def _pattern(keys: ModelKeys) -> Pattern:
    return Pattern((Layer("dense", _see_window),), keys.base_num_decoder_layers)


MISTRAL = dataclasses.replace(
    LLAMA,
    pattern=_pattern,
    released=Released(
        "mistral",
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096},
        {"sliding_window_size": "sliding_window"},
    ),
    keys=("sliding_window_size",),
)
