"""What families share in which most layers see a window. Imports no JAX."""

from maxramp.model.families.llama import see_before
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Mixing, Pattern, Rope
from maxramp.stage import RopeKeys


def _see_all(keys: RopeKeys) -> Mixing:
    return Mixing(Rope.from_keys(keys))


def _see_near(keys: RopeKeys) -> Mixing:
    return Mixing(Rope.from_local_keys(keys), keys.sliding_window_size)


def pattern(period: int, own_rope: bool, keys: ModelKeys) -> Pattern:
    """The last of every `period` layers sees all before it, the others a window, with an `own_rope`
    or the same."""
    near = Layer("dense", _see_near if own_rope else see_before)
    layers = (*(near,) * (period - 1), Layer("dense", _see_all))
    count = keys.base_num_decoder_layers
    if count < period:
        return Pattern(layers[:count], 1)
    return Pattern(layers, count // period, remainder=layers[: count % period])
