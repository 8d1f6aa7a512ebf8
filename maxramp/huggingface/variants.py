"""The other ways in which folders hold a text model's tensors: named as parts of a model that also
sees or hears, or with all experts of a layer in one tensor. Imports no JAX."""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from maxramp.errors import ConfigError
from maxramp.huggingface.safetensors import DTYPES, Tensor

_OTHER_PARTS = ("vision_tower.", "vision_model.", "visual.", "audio_tower.", "multi_modal_")
_PEFT_PREFIX = "base_model.model."
_FUSED_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.\w+|gate\.weight)")
# The weights of ours in a fused tensor, those of one expert behind each other.
_FUSED_WEIGHTS = {
    "experts.gate_up_proj": ("gate_EDF", "up_EDF"),
    "experts.down_proj": ("out_EFD",),
    "gate.weight": ("router.matrix_DE",),
}


def is_of_text_model(name: str) -> bool:
    return not name.removeprefix(_PEFT_PREFIX).removeprefix("model.").startswith(_OTHER_PARTS)


def name_in_larger(name: str) -> str:
    """Returns a layer's name where transformers opens the text model with its other parts."""
    return name.replace("model.layers.", "model.language_model.layers.", 1)


def rename_as_text_model(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors by their names in a text model; refuses two that get the same one."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = _PEFT_PREFIX if name.startswith(_PEFT_PREFIX) else ""
        short = name.removeprefix(prefix).replace("language_model.", "", 1)
        if short.startswith(("embed_tokens.", "layers.", "norm.")):  # saved without a head
            short = f"model.{short}"
        short = prefix + short
        if short in renamed:
            raise ConfigError(f"{folder}: has both {renamed[short].name} and {name}")
        renamed[short] = tensor
    return renamed


def split_experts(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns a folder's tensors with one for each expert, by the names in `Family.tensors`.

    A tensor [E, k * F, D] becomes k tensors [F, D] of each expert; others stay as they are.
    """
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _FUSED_NAME.fullmatch(name)
        weights = _FUSED_WEIGHTS.get(match[2], ()) if match else ()
        parts = [names.get(f"layers.sparse.mlp.{weight}") for weight in weights]
        if not any(parts) or len(tensor.shape) <= parts[0].count("{}"):  # of a dense model, or torn
            split[name] = tensor
            continue
        *experts, rows, columns = tensor.shape
        shape = rows // len(parts), columns
        size = math.prod(shape) * (DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 1)
        start = tensor.start
        for expert in np.ndindex(*experts):
            for part in parts:
                part = part.format(match[1], *expert)
                split[part] = dataclasses.replace(tensor, shape=shape, start=start)
                start += size
    return split


def name_fused(path: str, name: str) -> str:
    """Returns the fused tensor that holds the tensor `name` of a weight, or `name` if none does."""
    for fused, weights in _FUSED_WEIGHTS.items():
        if path.partition(".mlp.")[2] in weights:
            return f"model.layers.{name.split('.')[2]}.mlp.{fused}"
    return name
