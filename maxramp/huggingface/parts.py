"""Which tensors of a folder are of its text model, where the model also sees or hears. Imports no
JAX."""

from collections.abc import Mapping

from maxramp.errors import ConfigError
from maxramp.huggingface.safetensors import Tensor

_OTHER_PARTS = ("vision_tower.", "vision_model.", "visual.", "audio_tower.", "multi_modal_")
_ADAPTED = "base_model.model."  # before a tensor's name in PEFT's files


def is_of_text(name: str) -> bool:
    return not name.removeprefix(_ADAPTED).removeprefix("model.").startswith(_OTHER_PARTS)


def name_in_larger(name: str) -> str:
    """Returns a layer's name where transformers opens the text model with its other parts."""
    return name.replace("model.layers.", "model.language_model.layers.", 1)


def rename(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors by their names in a text model."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before = _ADAPTED if name.startswith(_ADAPTED) else ""
        short = name.removeprefix(before).replace("language_model.", "", 1)
        if short.startswith(("embed_tokens.", "layers.", "norm.")):  # saved without a head
            short = f"model.{short}"
        short = before + short
        if short in renamed:
            raise ConfigError(f"{folder}: has both {renamed[short].name} and {name}")
        renamed[short] = tensor
    return renamed
