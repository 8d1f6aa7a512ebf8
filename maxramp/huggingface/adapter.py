"""A folder of LoRA adapters as PEFT has them. Imports no JAX."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.files.storage import read_json
from maxramp.huggingface.parts import is_of_text, rename
from maxramp.huggingface.safetensors import Tensor, tensors_of
from maxramp.keys.section import refuse
from maxramp.model.keys import LORA_MODULES, ModelKeys

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

# What PEFT can do besides, and how a file says that it is not done.
_NOTHING = (
    *("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices"),
    "alora_invocation_tokens",
)
_OF_LAYER = re.compile(r"\.layers\.(\d+)\.(.+)\.lora_")  # a tensor's layer and matrix
# Ways to begin that leave the base as it is.
_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva", None)


@dataclasses.dataclass(frozen=True)
class AdapterFolder:
    """A folder with an adapter_config.json."""

    path: str

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        where = f"{self.path}/{CONFIG}"
        found = read_json(where)
        wanted = {"peft_type": ("LORA",), "bias": ("none", None)}
        wanted["init_lora_weights"] = _BEGINNINGS
        wanted |= {name: (None, False, [], {}) for name in _NOTHING}
        refuse(
            (
                found.get(name) not in values,
                f"{where}: {name}={found.get(name)} is not supported: adapters are LoRA's, of "
                "matrices of layers alike",
            )
            for name, values in wanted.items()
        )
        layers = found.get("layers_to_transform")
        if any(type(number) is not int for number in _list_of(layers)):
            raise ConfigError(f"{where}: layers_to_transform={layers} are not numbers of layers")
        rank = found.get("r")
        if type(rank) is not int or rank < 1 or not found.get("base_model_name_or_path"):
            raise ConfigError(f"{where}: has no r and base_model_name_or_path; save it with PEFT")
        return found

    @property
    def base(self) -> str:
        """The model that they adapt: a folder, or a name on the Hub."""
        return self.config["base_model_name_or_path"]

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in adapters of a text model."""
        return rename(self.path, tensors_of(self.path, TENSORS))

    @functools.cached_property
    def layers(self) -> list[int]:
        """None = all."""
        if not isinstance(pattern := self.config.get("target_modules"), str):
            return sorted({*_list_of(self.config.get("layers_to_transform"))})
        # A regular expression chooses matrices one by one: those that it has chosen are there.
        modules: dict[int, set[str]] = {}
        for name in filter(is_of_text, self.tensors):
            if found := _OF_LAYER.search(name):
                modules.setdefault(int(found[1]), set()).add(found[2])
        if len({*map(frozenset, modules.values())}) > 1:
            shown = "; ".join(f"{n}: {', '.join(sorted(modules[n]))}" for n in sorted(modules))
            raise ConfigError(
                f"{self.path}/{CONFIG}: target_modules={pattern} is not supported: it adapts other "
                f"matrices in one layer than in another ({shown})"
            )
        return sorted(modules)

    @property
    def keys(self) -> dict[str, Any]:
        modules = {
            name.split(".")[-3] for name in self.tensors if is_of_text(name) and name.count(".") > 2
        }
        targets = [name for name in LORA_MODULES if name in modules]
        if targets == list(LORA_MODULES):
            targets = ["matrix"]
        return {
            "lora_rank": self.config["r"],
            "lora_alpha": float(self.config.get("lora_alpha", 8)),
            "use_rslora": bool(self.config.get("use_rslora")),
            "lora_targets": targets,
            "trainable_layers": self.layers,
        }


def _list_of(layers: Any) -> list[Any]:
    """What PEFT takes for numbers of layers: None, a list or one number."""
    return [] if layers is None else layers if isinstance(layers, list) else [layers]


def config_of(keys: ModelKeys, base: str, layers: Sequence[int], is_larger: bool = False) -> bytes:
    """The adapter_config.json of adapters of these layers (none = all) of a `base`, or of its text
    model if it `is_larger`."""
    modules = list(keys.lora_modules)
    if is_larger:  # whose other parts may have such matrices too
        numbers, layers = "|".join(map(str, layers)) or r"\d+", ()
        modules = rf".*\.language_model\.layers\.({numbers})\..*\.({'|'.join(modules)})"
    values = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": list(layers) or None,
        "lora_alpha": int(keys.lora_alpha) if keys.lora_alpha % 1 == 0 else keys.lora_alpha,
        "lora_dropout": keys.lora_dropout,
        "peft_type": "LORA",
        "r": keys.lora_rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_rslora": keys.use_rslora,
    }
    return json.dumps(values, indent=2).encode() + b"\n"
