"""The other ways in which folders hold a text model's tensors: named as parts of a model that also
sees or hears, or with all experts of a layer in one tensor, in which gpt-oss has inputs as rows,
and gates and ups in turn. Imports no JAX."""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from maxramp.errors import ConfigError
from maxramp.huggingface.quantized import Mxfp4
from maxramp.huggingface.safetensors import DTYPES, Tensor

_OTHER_PARTS = ("vision_tower.", "vision_model.", "visual.", "audio_tower.", "multi_modal_")
_PEFT_PREFIX = "base_model.model."
_FUSED_NAME = re.compile(r"(model|mtp)\.layers\.(\d+)\.mlp\.(experts\.\w+|gate\.weight)")
# The weights of ours in a fused tensor, those of one expert behind each other.
_FUSED_WEIGHTS = {
    "experts.gate_up_proj": ("gate_EDF", "up_EDF"),
    "experts.down_proj": ("out_EFD",),
    "experts.gate_up_proj_bias": ("gate_bias_EF", "up_bias_EF"),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Tensor):
    """Some rows of another tensor, which is read as rows of its last axis, or the numbers of its
    last axis that one of two interleaved weights has."""

    base: Tensor
    begin: int  # its first row
    step: int = 1  # from row to row
    column: int = 0  # its first column
    columns: int = 1  # from column to column

    def read(self, first: int, stop: int) -> np.ndarray:
        start = self.begin + first * self.step
        stop = max(start, self.begin + (stop - 1) * self.step + 1)
        rows = self.base.read(start, stop)[:: self.step]
        return rows if self.columns == 1 else rows[:, self.column :: self.columns]


def _divide(size: int, count: int) -> int:
    """Returns the size of one of `count` parts; of a torn tensor all, which no weight has."""
    return size if size % count else size // count


def _split_interleaved(tensor: Tensor, names: list[str], layer: str) -> dict[str, Tensor]:
    """Returns each expert's parts, by name, of a tensor that holds one or two weights."""
    E, rows, *rest = tensor.shape
    inputs_first, count = bool(rest) and not isinstance(tensor, Mxfp4), len(names)
    *_, last = tensor.shape
    flat = (E * rows, last) if rest else (E * rows,)
    base, parts = dataclasses.replace(tensor, shape=flat), {}
    shape = (rows, _divide(last, count)) if inputs_first else (_divide(rows, count), *rest)
    for expert in range(E):
        for number, name in enumerate(names):
            own = {"begin": expert * rows + number, "step": count}
            if inputs_first:
                own = {"begin": expert * rows, "column": number, "columns": count}
            own |= {"base": base, "inputs_first": inputs_first}
            name = name.format(layer, expert)
            parts[name] = Part(tensor.name, tensor.file, tensor.dtype, shape, tensor.start, **own)
    return parts


def split_experts(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], interleaved: bool = False
) -> dict[str, Tensor]:
    """Returns a folder's tensors with one for each expert, by the names in `Family.tensors`.

    A tensor [E, k * F, D] becomes k tensors [F, D] of each expert; others stay as they are.
    `interleaved` is as in `Released.interleaves_experts`.
    """
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _FUSED_NAME.fullmatch(name)
        weights = _FUSED_WEIGHTS.get(match[3], ()) if match else ()
        parts = [names.get(f"layers.sparse.mlp.{weight}") for weight in weights]
        if interleaved and any(parts) and parts[0].count("{}") > 1 and len(tensor.shape) > 1:
            split |= _split_interleaved(tensor, parts, match[2])
            continue
        if not any(parts) or len(tensor.shape) <= parts[0].count("{}"):  # of a dense model, or torn
            split[name] = tensor
            continue
        *experts, rows, columns = tensor.shape
        shape = _divide(rows, len(parts)), columns
        size = math.prod(shape) * (DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 1)
        start = tensor.start
        for expert in np.ndindex(*experts):
            for part in parts:
                part = part.format(match[2], *expert).replace("model", match[1], 1)
                split[part] = dataclasses.replace(tensor, shape=shape, start=start)
                start += size
    return split


def name_fused(path: str, name: str) -> str:
    """Returns the fused tensor that holds the tensor `name` of a weight, or `name` if none does."""
    for fused, weights in _FUSED_WEIGHTS.items():
        if path.partition(".mlp.")[2] in weights:
            return ".".join([*name.split(".")[:3], "mlp", fused])
    return name
