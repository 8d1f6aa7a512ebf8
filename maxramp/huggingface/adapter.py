"""A folder of LoRA adapters as PEFT has them. Imports no JAX."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.files.storage import read_json
from maxramp.huggingface.safetensors import Tensor, find_tensors
from maxramp.huggingface.variants import is_of_text_model, rename_as_text_model
from maxramp.keys.base import cast_value
from maxramp.keys.section import refuse
from maxramp.model.families.table import lora_modules
from maxramp.model.keys import LORA_MODULES, ModelKeys

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

# What PEFT can do besides: unset in a file of adapters that are read here.
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices"),
    "alora_invocation_tokens",
)
_LAYER_TENSOR = re.compile(r"\.layers\.(\d+)\.(.+)\.lora_")  # a tensor's layer and matrix
# Initializations that leave the base as it is.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva", None)


@dataclasses.dataclass(frozen=True)
class AdapterFolder:
    """A folder with an adapter_config.json."""

    path: str

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The values of adapter_config.json; a ConfigError for adapters that are not plain LoRA, or
        without rank or base."""
        where = f"{self.path}/{CONFIG}"
        values = read_json(where)
        supported = {"peft_type": ("LORA",), "bias": ("none", None)}
        supported["init_lora_weights"] = _INITIALIZATIONS
        supported |= {name: (None, False, [], {}) for name in _UNSUPPORTED}
        refuse(
            (
                values.get(name) not in choices,
                f"{where}: {name}={values.get(name)} is not supported: adapters are LoRA's, of "
                "matrices of layers alike",
            )
            for name, choices in supported.items()
        )
        layers = values.get("layers_to_transform")
        if any(type(number) is not int for number in _as_list(layers)):
            raise ConfigError(f"{where}: layers_to_transform={layers} are not numbers of layers")
        rank, base = values.get("r"), values.get("base_model_name_or_path")
        if type(rank) is not int or rank < 1 or not base or not isinstance(base, str):
            raise ConfigError(f"{where}: has no r and base_model_name_or_path; save it with PEFT")
        return values

    @property
    def base(self) -> str:
        """The model that they adapt: a folder, or a name on the Hub."""
        return self.config["base_model_name_or_path"]

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in adapters of a text model."""
        return rename_as_text_model(self.path, find_tensors(self.path, TENSORS))

    @functools.cached_property
    def layers(self) -> list[int]:
        """The numbers of the layers that have adapters, sorted; [] = all. A ConfigError if a
        regular expression adapts other matrices in one layer than in another, or none in any.
        """
        pattern = self.config.get("target_modules")
        if not isinstance(pattern, str):
            return sorted({*_as_list(self.config.get("layers_to_transform"))})
        # A regular expression chooses matrices one by one: the tensors show which.
        modules: dict[int, set[str]] = {}
        for name in filter(is_of_text_model, self.tensors):
            if match := _LAYER_TENSOR.search(name):
                modules.setdefault(int(match[1]), set()).add(match[2])
        if not modules:
            raise ConfigError(
                f"{self.path}/{CONFIG}: target_modules={pattern} is not supported: {TENSORS} has "
                "adapters of no layer of a text model"
            )
        if len({*map(frozenset, modules.values())}) > 1:
            shown = "; ".join(f"{n}: {', '.join(sorted(modules[n]))}" for n in sorted(modules))
            raise ConfigError(
                f"{self.path}/{CONFIG}: target_modules={pattern} is not supported: it adapts other "
                f"matrices in one layer than in another ({shown})"
            )
        return sorted(modules)

    @property
    def keys(self) -> dict[str, Any]:
        """Our keys for training such adapters, without lora_dropout; a ConfigError as `config`, and
        for values of other types."""
        names = filter(is_of_text_model, self.tensors)
        modules = {name.split(".")[-3] for name in names if name.count(".") > 2}
        targets = [name for name in LORA_MODULES if name in modules]
        values = {"lora_alpha": 8, "use_rslora": False}  # PEFT's defaults
        values |= {name: self.config[name] for name in values if name in self.config}
        where = f"{self.path}/{CONFIG}"
        return {
            "lora_rank": self.config["r"],
            **{n: cast_value(f"{where}: {n}={x}", x, n) for n, x in values.items()},
            "lora_targets": targets,
            "trainable_layers": self.layers,
        }


def _as_list(layers: Any) -> list[Any]:
    """Returns the layers that PEFT means by None, a list or one number."""
    if layers is None:
        return []
    return layers if isinstance(layers, list) else [layers]


def make_config(
    keys: ModelKeys, base: str, layers: Sequence[int], is_larger: bool = False
) -> bytes:
    """Returns the adapter_config.json for adapters of these layers (none = all) of a model `base`,
    a folder or a name on the Hub.

    `is_larger` = they are of the text model in a base that also sees or hears.
    """
    modules = list(lora_modules(keys))
    if is_larger:  # its other parts may have such matrices too
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
