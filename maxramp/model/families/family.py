"""What the rest of maxramp knows of a model family. Imports no JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.sizes import MixerSizes
from maxramp.model.pattern import Layer, Pattern


class MlpSizes(NamedTuple):
    """The widths of an MLP's products, as in `MixerSizes`."""

    reads: Mapping[str, int]
    writes: Mapping[str, int]
    activations: int  # what lies between the products

    @classmethod
    def from_width(cls, width: int) -> Self:
        return cls({"gate_proj": width, "up_proj": width}, {"down_proj": width}, 2 * width)


class LayerSizes(NamedTuple):
    """What a layer computes of a token; FLOPs and memory follow from it."""

    mixer: MixerSizes
    mlp: MlpSizes

    @property
    def reads(self) -> dict[str, int]:
        return {**self.mixer.reads, **self.mlp.reads}

    @property
    def writes(self) -> dict[str, int]:
        return {**self.mixer.writes, **self.mlp.writes}


class Released(NamedTuple):
    """How a family's config.json differs from those of the others (`huggingface.config_json`)."""

    model_type: str
    architecture: str  # the class of transformers that opens it
    defaults: Mapping[str, Any]  # what transformers takes where config.json does not say
    names: Mapping[str, str] = {}  # of keys of ours
    other_names: Mapping[str, str] = {}  # that it may have in place of some of these
    activation: str = "hidden_act"
    # Of families whose layers that see a window have a rope_theta of their own: its key, "" = none,
    # and its value where config.json does not say.
    local_rope: tuple[str, float] | None = None
    period: int = 1  # in layer_types: the last of these layers sees all, those before it a window


@dataclasses.dataclass(frozen=True)
class Family:
    """All facts of a family of models."""

    pattern: Callable[[ModelKeys], Pattern]  # the layers, by the keys
    # By kind of layer its module, made of keys and a random key: it holds the weights, computes the
    # layer, and makes the cache that generation keeps of it. A function, as modules import JAX.
    blocks: Callable[[], Mapping[str, Callable[..., Any]]]
    sizes: Callable[[ModelKeys, Layer], LayerSizes]
    # Of every weight by its path the tensor of a Hugging Face folder; {} is a layer's number.
    tensors: Mapping[str, str]
    released: Released
    keys: tuple[str, ...] = ()  # of what not all families have; the others have base.yml's values
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such keys with one value
    norm_offset: float = 0.0  # what norms multiply by is this + their weights
    scales_embedding: bool = False  # by the root of the width
