"""A model's folder as Hugging Face has them: what is in it besides tensors. Imports no JAX."""

import dataclasses
import functools
import os
from typing import Any

from maxramp.data import hub
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.files.place import Place
from maxramp.huggingface import config_json
from maxramp.huggingface.adapter import CONFIG, TENSORS, AdapterFolder
from maxramp.huggingface.experts import split_experts
from maxramp.huggingface.parts import rename
from maxramp.huggingface.safetensors import Tensor, tensors_of
from maxramp.model.families.table import FAMILIES

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json"),
)
# What says how a model is used, and not what it is made of.
BESIDE = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *TOKENIZER,
)
# Written last and removed first: without either, no tool takes the folder for a model.
MARKS = ("config.json", CONFIG)
# What a model of several parts says once.
_OF_ALL_PARTS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
KEPT_IN = "huggingface"  # the folder of a run that began with such weights, for these files


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder with a config.json; or of adapters, with that of the model that they adapt."""

    path: str  # of the model
    adapter: AdapterFolder | None = None

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """config.json; where the model also sees or hears, what it says of its text model."""
        whole = self._whole_config
        if not self.is_larger:
            return whole
        shared = {name: whole[name] for name in _OF_ALL_PARTS if name in whole}
        return shared | whole["text_config"]

    @functools.cached_property
    def _whole_config(self) -> dict[str, Any]:
        return storage.read_json(f"{self.path}/config.json")

    @property
    def is_larger(self) -> bool:
        """Whether the model also sees or hears."""
        return isinstance(self._whole_config.get("text_config"), dict)

    @property
    def _folders(self) -> list[str]:
        """Where a file may lie that says how it is used, the first before the others."""
        return [self.adapter.path, self.path] if self.adapter else [self.path]

    @property
    def keys(self) -> dict[str, Any]:
        own = self.adapter.keys if self.adapter else {}
        return config_json.keys_of(self.config, f"{self.path}/config.json") | own

    @property
    def longest_text(self) -> int:
        """The tokens of the longest text that the model is for."""
        return config_json.longest_text(self.config, f"{self.path}/config.json")

    @property
    def unread(self) -> list[str]:
        """Lines about what config.json says and nobody reads."""
        return config_json.unread(self.config, f"{self.path}/config.json")

    def file_of(self, name: str) -> str:
        """The file that says a key of `keys`."""
        of_adapter = self.adapter and name in self.adapter.keys
        return f"{self.adapter.path}/{CONFIG}" if of_adapter else f"{self.path}/config.json"

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in a text model."""
        tensors = rename(self.path, tensors_of(self.path))
        return split_experts(tensors, FAMILIES[self.keys["decoder_block"]].tensors)

    @property
    def ends(self) -> list[int]:
        """The ids at which an answer ends: of generation_config.json, else of config.json."""
        name = f"{self.path}/generation_config.json"
        found = storage.read_json(name).get("eos_token_id") if storage.exists(name) else None
        if found is None:
            name, found = f"{self.path}/config.json", self.config.get("eos_token_id")
        ids = found if isinstance(found, list) else [found] * (found is not None)
        if any(type(i) is not int for i in ids):
            raise ConfigError(f"{name}: eos_token_id={found} is neither an id nor a list of ids")
        return ids

    @property
    def data_keys(self) -> dict[str, Any]:
        """The keys of the tokenizer, and of the marks that documents had when it was trained."""
        kind, path = self.tokenizer
        if kind != "huggingface":
            return {"tokenizer_type": kind, "tokenizer_path": path}
        # What transformers puts before a text, its post-processor says: Llama 3 has a begin mark
        # there; SmolLM2 has one that begins chats, and Qwen has none.
        processor = storage.read_json(path).get("post_processor") or {}
        try:
            templates = [one.get("single") for one in processor.get("processors") or [processor]]
            begins = any(single and "SpecialToken" in single[0] for single in templates)
        except (AttributeError, TypeError, LookupError):
            raise ConfigError(f"{path}: post_processor={processor} cannot be read") from None
        return {"tokenizer_type": kind, "tokenizer_path": path, "add_bos": begins}

    @property
    def side_files(self) -> dict[str, bytes]:
        found = {}
        for folder in reversed(self._folders):
            paths = {name: f"{folder}/{name}" for name in BESIDE}
            found |= {n: storage.read_bytes(x) for n, x in paths.items() if storage.exists(x)}
        return found

    @property
    def tokenizer(self) -> tuple[str, str]:
        """Its type and file; beside adapters lies the one that they were trained with."""
        kinds = (("tokenizer.json", "huggingface"), ("tokenizer.model", "sentencepiece"))
        for folder in self._folders:
            for name, kind in kinds:
                if storage.exists(f"{folder}/{name}"):
                    return kind, f"{folder}/{name}"
        raise ConfigError(
            f"{self.path}: has neither tokenizer.json nor tokenizer.model; give tokenizer_path=FILE"
        )


def is_whole(folder: Place) -> bool:
    """Whether a folder is a model or adapters, and not what a killed export has left."""
    return any((folder / name).exists() for name in MARKS)


def find(key: str, path: str, may_adapt: bool = True) -> ModelFolder | None:
    """The model folder that a path, an address or a name on the Hub means; None if it means none.

    `key` is whose value the path is, for messages; without `may_adapt` adapters are not a model.
    """
    path = os.path.expanduser(path).rstrip("/")
    if storage.exists(f"{path}/config.json"):
        return ModelFolder(path)
    if not storage.exists(f"{path}/{CONFIG}"):
        if storage.exists(f"{path}/{TENSORS}"):
            raise ConfigError(
                f"{path}: has {TENSORS} and no {CONFIG}, which PEFT writes beside it; copy that too"
            )
        if not hub.is_name(path):
            return None
        path = hub.fetch_model(key, path)
        if not storage.exists(f"{path}/{CONFIG}"):
            return ModelFolder(path)
    if not may_adapt:
        return None
    adapter = AdapterFolder(path)
    base = find(f"{path}/{CONFIG}: base_model_name_or_path", adapter.base, may_adapt=False)
    if base is None:
        raise ConfigError(
            f"{path}/{CONFIG}: base_model_name_or_path={adapter.base} is not a model; write the "
            "folder of the one that it adapts there"
        )
    return ModelFolder(base.path, adapter)


def find_or_kept(key: str, path: str, kept: str) -> ModelFolder | None:
    """As `find`; where the model is gone, what a run has `kept` of it (`KEPT_IN`), if it has."""
    try:
        return find(key, path) or find(key, kept)
    except ConfigError:
        if not storage.exists(f"{kept}/config.json"):
            raise
        return ModelFolder(kept)
