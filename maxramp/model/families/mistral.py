"""Mistral: a Llama whose tokens see a window of those before them (arXiv 2310.06825)."""

from maxramp.model.families.llama import LLAMA
from maxramp.model.keys import ModelKeys
from maxramp.model.layers import Layer, Pattern, Sight
from maxramp.model.parts.rotary import Rope
from maxramp.stage import SightKeys


def _window(keys: SightKeys) -> Sight:
    return Sight(Rope.from_keys(keys), keys.sliding_window_size)


def _windowed_layers(keys: ModelKeys) -> Pattern:
    return Pattern((Layer("dense", _window),), keys.base_num_decoder_layers)


MISTRAL = LLAMA._replace(pattern=_windowed_layers)
