"""Llama: RMSNorm, rotary positions, grouped-query attention, gated MLP (arXiv 2302.13971).

Llama 3's long texts are read with slower rotary positions, `rope_type=llama3.1`.
"""

from maxramp.model.keys import ModelKeys
from maxramp.model.parts.block import PreNormBlock
from maxramp.model.parts.rotary import Rope
from maxramp.model.pattern import Layer, Pattern

BLOCKS = {"dense": PreNormBlock}  # by kind


def pattern(keys: ModelKeys) -> Pattern:
    """Layers that are all alike."""
    return Pattern((Layer("dense", Rope.of(keys)),), keys.base_num_decoder_layers)
