"""Model families: which blocks each has, and in which order its layers stand.

Llama has RMSNorm, rotary positions, grouped-query attention and a gated MLP (arXiv 2302.13971); it
reads Llama 3's long texts with slower rotary positions, `rope_type=llama3.1`. Mistral 7B is a Llama
whose tokens see a window of those before them (arXiv 2310.06825).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxramp.model.keys import ModelKeys
from maxramp.model.layers import Layer, Pattern
from maxramp.model.parts.block import PreNormBlock
from maxramp.model.parts.rotary import Rope


class Family(NamedTuple):
    """What a model of a family is made of."""

    pattern: Callable[[ModelKeys], Pattern]  # the layers, by the keys
    blocks: Mapping[str, Callable[..., Any]]  # the module of each kind of layer


def _all_alike(keys: ModelKeys) -> Pattern:
    layer = Layer("dense", Rope.of(keys), keys.sliding_window_size)
    return Pattern((layer,), keys.base_num_decoder_layers)


_LLAMA = Family(_all_alike, {"dense": PreNormBlock})

FAMILIES = {"llama2": _LLAMA, "mistral": _LLAMA}  # by `decoder_block`
