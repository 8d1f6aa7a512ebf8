"""Tensors of all experts of a layer, as transformers 5 holds them in memory, as one of each expert.
Imports no JAX."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from maxramp.huggingface.safetensors import DTYPES, Tensor

_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.\w+|gate\.weight)")
# The weights of ours in them, an expert's behind each other.
_WEIGHTS = {
    "experts.gate_up_proj": ("gate_EDF", "up_EDF"),
    "experts.down_proj": ("out_EFD",),
    "gate.weight": ("router.matrix_DE",),
}


def split_experts(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a folder by the `names` of a family, as in `Family.tensors`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        weights = _WEIGHTS.get(match[2], ()) if match else ()
        own = [names.get(f"layers.sparse.mlp.{weight}") for weight in weights]
        if not any(own):  # or of a dense model
            found[name] = tensor
        elif len(tensor.shape) == 3:
            found |= _parts(tensor, int(match[1]), own)
        else:
            found[own[0].format(match[1])] = tensor
    return found


def _parts(tensor: Tensor, layer: int, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Of a tensor [E, k * F, D] its k parts [F, D] of each expert, of these names."""
    experts, rows, columns = tensor.shape
    shape = rows // len(names), columns
    size = math.prod(shape) * (DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 1)
    every = ((expert, name) for expert in range(experts) for name in names)
    for number, (expert, name) in enumerate(every):
        part = dataclasses.replace(tensor, shape=shape, start=tensor.start + number * size)
        yield name.format(layer, expert), part
