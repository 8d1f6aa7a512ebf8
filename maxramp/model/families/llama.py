"""Llama: RMSNorm, rotary positions, grouped-query attention and a gated MLP (arXiv 2302.13971).

It reads Llama 3's long texts with slower rotary positions, `rope_type=llama3.1`. Mistral 7B is a
Llama whose tokens see a window of those before them (arXiv 2310.06825).
"""

from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.layers import Layer, Pattern
from maxramp.model.parts.block import PreNormBlock
from maxramp.model.parts.rotary import Rope


def _all_alike(keys: ModelKeys) -> Pattern:
    layer = Layer("dense", Rope.of(keys), keys.sliding_window_size)
    return Pattern((layer,), keys.base_num_decoder_layers)


LLAMA = Family(_all_alike, {"dense": PreNormBlock})
