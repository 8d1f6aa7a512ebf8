"""Layers of families in which most layers see a window. Imports no JAX."""

from maxramp.model.families.llama import attend_window
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Mixing, Pattern, Rope
from maxramp.stage import RopeKeys


def _attend_all(keys: RopeKeys) -> Mixing:
    return Mixing(Rope.from_keys(keys))


def _attend_locally(keys: RopeKeys) -> Mixing:
    return Mixing(Rope.from_local_keys(keys), keys.sliding_window_size)


def pattern(period: int, local_rope: bool, keys: ModelKeys) -> Pattern:
    """Makes the last of every `period` layers see all tokens before it, and the others a window.
    Those have the rope of `local_rope_max_timescale` if `local_rope`."""
    near = Layer("dense", _attend_locally if local_rope else attend_window)
    layers = (*(near,) * (period - 1), Layer("dense", _attend_all))
    count = keys.base_num_decoder_layers
    if count < period:
        return Pattern(layers[:count], 1)
    return Pattern(layers, count // period, remainder=layers[: count % period])
