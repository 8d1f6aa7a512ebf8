"""Tensors of all experts of a layer, as transformers 5 holds them in memory, as one of each expert.
Imports no JAX."""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from maxramp.huggingface.safetensors import DTYPES, Tensor

_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.\w+|gate\.weight)")
# The weights of ours in them, an expert's behind each other.
_WEIGHTS = {
    "experts.gate_up_proj": ("gate_EDF", "up_EDF"),
    "experts.down_proj": ("out_EFD",),
    "gate.weight": ("router.matrix_DE",),
}


def split_experts(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a folder by the `names` of a family, as in `Family.tensors`: of one [E, k * F,
    D] its k parts [F, D] of each expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        weights = _WEIGHTS.get(match[2], ()) if match else ()
        own = [names.get(f"layers.sparse.mlp.{weight}") for weight in weights]
        if not any(own) or len(tensor.shape) <= own[0].count("{}"):  # of a dense model, or torn
            found[name] = tensor
            continue
        *experts, rows, columns = tensor.shape
        shape = rows // len(own), columns
        size = math.prod(shape) * (DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 1)
        parts = (x.format(match[1], *expert) for expert in np.ndindex(*experts) for x in own)
        for number, part in enumerate(parts):
            start = tensor.start + number * size
            found[part] = dataclasses.replace(tensor, shape=shape, start=start)
    return found


def name_fused(path: str, name: str) -> str:
    """The tensor that a tensor of a weight by its path lies in, if it is of experts."""
    for theirs, weights in _WEIGHTS.items():
        if path.removeprefix("layers.sparse.mlp.") in weights:
            return f"model.layers.{name.split('.')[2]}.mlp.{theirs}"
    return name
