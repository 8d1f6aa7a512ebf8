"""Mistral 7B: Llama whose tokens see a window of those before them (arXiv 2310.06825)."""

from maxramp.model.keys import ModelKeys
from maxramp.model.parts.block import PreNormBlock
from maxramp.model.parts.rotary import Rope
from maxramp.model.pattern import Layer, Pattern

BLOCKS = {"dense": PreNormBlock}  # by kind


def pattern(keys: ModelKeys) -> Pattern:
    """Layers that are all alike, each with the window."""
    layer = Layer("dense", Rope.of(keys), keys.sliding_window_size)
    return Pattern((layer,), keys.base_num_decoder_layers)
