"""Which tensors of a folder hold a model's weights, and how their axes lie in them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from maxramp.errors import ConfigError
from maxramp.model.decoder import Decoder
from maxramp.model.families.llama import LAYER
from maxramp.model.families.sparse import dense_tensors
from maxramp.model.families.table import FAMILIES
from maxramp.model.parts.weights import Weight, is_weight
from maxramp.model.pattern import DRAFT


@dataclasses.dataclass(frozen=True)
class Form:
    """How a layer's weight lies in a tensor; hashable, as programs are compiled for it."""

    axes: str  # of ours, a letter each: "DHh"
    shape: tuple[int, ...]  # of ours
    groups: tuple[str, ...]  # by axis of the tensor, our axes that it joins: ("Hh", "D")
    blocks: tuple[int, ...] = ()  # of the tensor's rows (`Weight.blocks`)

    @property
    def order(self) -> tuple[int, ...]:
        """The positions of our axes in the tensor's order."""
        return tuple(self.axes.index(letter) for group in self.groups for letter in group)

    @property
    def rows(self) -> np.ndarray:
        """The tensor's rows in our order, where they lie in blocks."""
        heads = self.tensor_shape[0] // sum(self.blocks)
        starts = heads * np.cumsum(self.blocks)[:-1]
        blocks = np.split(np.arange(self.tensor_shape[0]), starts)
        return np.concatenate([block.reshape(heads, -1) for block in blocks], axis=1).ravel()

    @property
    def split(self) -> tuple[int, ...]:
        """Our sizes in the tensor's order."""
        return tuple(self.shape[i] for i in self.order)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        sizes = dict(zip(self.axes, self.shape, strict=True))
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.groups)


# What PEFT calls the parts of an `Adapted`.
_PEFT_NAMES = {
    "weight": "{}.weight",
    "down": "base_model.model.{}.lora_A.weight",
    "up": "base_model.model.{}.lora_B.weight",
}


def _tensor_name(path: str, tensors: Mapping[str, str]) -> str:
    """Returns the name of a weight's tensor, as in `Family.tensors`."""
    if path in tensors:
        return tensors[path]
    adapted, _, part = path.rpartition(".")
    return _PEFT_NAMES[part].replace("{}", tensors[adapted].removesuffix(".weight"))


def _draft_tensors(block: str, kind: str) -> dict[str, str]:
    """Returns the tensors of a family's drafts as `Family.tensors` has those of other weights; {}
    if folders have none. Their layers are as those of a `kind`."""
    family, begin = FAMILIES[block], f"layers.{kind}."
    if not (drafts := family.released.drafts):
        return {}
    layer = {
        f"layers.{DRAFT}.block.{path.removeprefix(begin)}": name.replace(LAYER, drafts.layer)
        for path, name in family.tensors.items()
        if path.startswith(begin)
    }
    return layer | {f"layers.{DRAFT}.{path}": name for path, name in drafts.tensors.items()}


def name_copies(model: Decoder, decoder_block: str) -> dict[str, list[str]]:
    """Returns, by the path of a weight, the tensors of draft layers that hold it too."""
    drafts, layers = FAMILIES[decoder_block].released.drafts, len([*model.pattern.main])
    count = len(model.pattern.drafts)
    copies = drafts.copies.items() if drafts else ()
    return {path: [x.format(layers + i) for i in range(count)] for path, x in copies}


def _groups(weight: Weight) -> tuple[str, ...]:
    """Returns `Form.groups`: a matrix has its outputs as rows, an embedding its tokens, a table of
    biases its experts. Those of a convolution have an axis of their own for each of its inputs."""
    inputs = weight.inputs if weight.inputs.startswith("1") else [weight.inputs]
    groups = weight.outputs, *inputs
    return tuple(filter(None, groups[::-1] if weight.role in ("embedding", "bias") else groups))


@dataclasses.dataclass(frozen=True)
class NamedWeight:
    """A weight of a model, and its tensors."""

    path: str  # of ours: "layers.dense.mixer.query_DHh"
    weight: Weight  # of all layers of a stack, in their order
    form: Form  # of one layer
    # The tensors by their index in `weight`: () if there is one, (layer,) or (layer, expert) in a
    # stack.
    names: Mapping[tuple[int, ...], str]

    def turn(self) -> "NamedWeight":
        """Returns the same for tensors with the inputs of a matrix as rows."""
        form = dataclasses.replace(self.form, groups=self.form.groups[::-1])
        return dataclasses.replace(self, form=form)


def name_tensors(
    model: Decoder, decoder_block: str, layers: Sequence[int] = (), dense_block: str = ""
) -> Iterator[NamedWeight]:
    """Yields the weights of a model, or of its shapes, in the order of `jax.tree.leaves`.

    Args:
      model: its stacks are in the order of layers (`pipeline.order_by_layer`).
      layers: those that have tensors; none = all.
      dense_block: names tensors as in that family's models; routers then have none. A ConfigError
        if that family lacks another weight.
    """
    tensors = FAMILIES[decoder_block].tensors
    if dense_block:
        routers = [path for path in tensors if path.endswith("router.matrix_DE")]
        tensors = dense_tensors(FAMILIES[dense_block].tensors) | dict.fromkeys(routers, "")
    tensors = {**tensors, **_draft_tensors(decoder_block, model.pattern.period[-1].kind)}
    numbers = {kind: [] for kind in model.pattern.kinds}
    for number, layer in enumerate(model.pattern):
        numbers[layer.kind].append(number)
    drafts = FAMILIES[decoder_block].released.drafts
    if drafts and drafts.layer != LAYER:  # whose numbers begin anew
        numbers[DRAFT] = [*range(len(model.pattern.drafts))]
    for keys, weight in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_weight):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        try:
            is_draft = path.startswith(f"layers.{DRAFT}.")
            name = tensors.get(path, "") if is_draft else _tensor_name(path, tensors)
        except KeyError:
            raise ConfigError(
                f"decoder_block={decoder_block}: its {path} is in no model of "
                f"decoder_block={dense_block}, so it cannot begin with such weights"
            ) from None
        shape = tuple(weight.shape[len(weight.leading) :])
        form = Form(weight.own, shape, _groups(weight), weight.blocks)
        names = {(): name} if name else {}
        if "{}" in name or (is_draft and name):
            experts = [*np.ndindex(weight.shape[1 : len(weight.leading)])]  # [()] if it has none
            names = {
                (position, *expert): name.format(number, *expert)
                for position, number in enumerate(numbers[path.split(".")[1]])
                if not layers or number in layers
                for expert in experts
            }
        yield NamedWeight(path, weight, form, names)
