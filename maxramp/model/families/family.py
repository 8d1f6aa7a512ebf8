"""What a model family says: which blocks it has, in which order its layers stand, their names."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxramp.model.keys import ModelKeys
from maxramp.model.layers import Pattern


class Family(NamedTuple):
    """What a model of a family is made of."""

    pattern: Callable[[ModelKeys], Pattern]  # the layers, by the keys
    blocks: Mapping[str, Callable[..., Any]]  # the module of each kind of layer
    # Of every weight by its path the tensor of a Hugging Face folder; {} is a layer's number.
    tensors: Mapping[str, str]
