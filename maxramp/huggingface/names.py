"""Which tensors of a folder the weights of a model are, and how their axes lie there."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from maxramp.errors import ConfigError
from maxramp.model.decoder import Decoder
from maxramp.model.families.sparse import dense_tensors
from maxramp.model.families.table import FAMILIES
from maxramp.model.parts.weights import Weight, is_weight


@dataclasses.dataclass(frozen=True)
class Form:
    """How a layer's weight lies in a folder; hashable, as programs are compiled for it."""

    axes: str  # of ours, a letter each: "DHh"
    shape: tuple[int, ...]  # of ours
    groups: tuple[str, ...]  # of theirs, the letters of ours that each axis runs over: ("Hh", "D")

    @property
    def order(self) -> tuple[int, ...]:
        """The places of our axes in the order of theirs."""
        return tuple(self.axes.index(letter) for group in self.groups for letter in group)

    @property
    def split(self) -> tuple[int, ...]:
        """Our sizes in the order of theirs."""
        return tuple(self.shape[i] for i in self.order)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        sizes = dict(zip(self.axes, self.shape, strict=True))
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.groups)


# What PEFT calls the parts of an `Adapted`.
_OF_ADAPTED = {
    "weight": "{}.weight",
    "down": "base_model.model.{}.lora_A.weight",
    "up": "base_model.model.{}.lora_B.weight",
}


def _tensor_of(path: str, tensors: Mapping[str, str]) -> str:
    """The tensor of a weight, as in `Family.tensors`."""
    if path in tensors:
        return tensors[path]
    of_weight, _, part = path.rpartition(".")
    return _OF_ADAPTED[part].replace("{}", tensors[of_weight].removesuffix(".weight"))


def _groups(weight: Weight) -> tuple[str, ...]:
    """The axes of a weight's tensor: a matrix has its outputs as rows, an embedding its tokens."""
    groups = weight.outputs, weight.inputs
    return tuple(filter(None, groups[::-1] if weight.role == "embedding" else groups))


@dataclasses.dataclass(frozen=True)
class Named:
    """A weight of a model, and its tensors."""

    path: str  # of ours: "layers.dense.mixer.query_DHh"
    weight: Weight  # of all layers of a stack, in their order
    form: Form  # of one layer
    # Of the tensors, by their places in `weight`: () where it is one, of a stack its layer, and
    # behind that the expert.
    names: Mapping[tuple[int, ...], str]


def name_tensors(
    model: Decoder, decoder_block: str, layers: Sequence[int] = (), dense_block: str = ""
) -> Iterator[Named]:
    """The weights of a model in layer order (`model.order`), or of its shapes, as `jax.tree.leaves`
    has them; `layers` have tensors, none = all. With a `dense_block` its tensors are those of that
    family's models, and routers have none.
    """
    tensors = FAMILIES[decoder_block].tensors
    if dense_block:
        routers = [path for path in tensors if path.endswith("router.matrix_DE")]
        tensors = dense_tensors(FAMILIES[dense_block].tensors) | dict.fromkeys(routers, "")
    numbers = {kind: [] for kind in model.pattern.kinds}
    for number, layer in enumerate(model.pattern):
        numbers[layer.kind].append(number)
    for keys, weight in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_weight):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        try:
            name = _tensor_of(path, tensors)
        except KeyError:
            raise ConfigError(
                f"decoder_block={decoder_block}: its {path} is in no model of "
                f"decoder_block={dense_block}, so it cannot begin with such weights"
            ) from None
        shape = weight.shape[len(weight.leading) :]
        form = Form(weight.own, tuple(shape), _groups(weight))
        names = {(): name} if name else {}
        if "{}" in name:
            of_layer = [*np.ndindex(weight.shape[1 : len(weight.leading)])]  # its experts
            names = {
                (at, *expert): name.format(i, *expert)
                for at, i in enumerate(numbers[path.split(".")[1]])
                if not layers or i in layers
                for expert in of_layer
            }
        yield Named(path, weight, form, names)
