"""A model's folder as Hugging Face has them: what is in it besides tensors. Imports no JAX."""

import dataclasses
import functools
import itertools
import os
from typing import Any

from maxramp.data import hub
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.files.place import Place
from maxramp.huggingface import config_json
from maxramp.huggingface.adapter import CONFIG, TENSORS, AdapterFolder
from maxramp.huggingface.quantized import dequantize
from maxramp.huggingface.safetensors import Tensor, find_tensors
from maxramp.huggingface.variants import rename_as_text_model, split_experts
from maxramp.model.families.table import FAMILIES

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json"),
)
# The files that say how a model is used.
SIDE_FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *TOKENIZER,
)
# Written last and removed first: without either of them no tool opens the folder.
SENTINELS = ("config.json", CONFIG)
# Keys that the config.json of a larger model has outside that of its text model.
_SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
_SHARED_KEYS += ("quantization_config",)
RUN_COPY = "huggingface"  # a run's folder for the side files of its first weights


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model's folder, and that of its adapters if there are any."""

    path: str  # of the model
    adapter: AdapterFolder | None = None

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """What config.json says of the text model."""
        whole = self._whole_config
        if not self.is_larger:
            return whole
        shared = {name: whole[name] for name in _SHARED_KEYS if name in whole}
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
        """The folders that may hold a side file, the first before the other."""
        return [self.adapter.path, self.path] if self.adapter else [self.path]

    @property
    def keys(self) -> dict[str, Any]:
        """Our keys for this model and its adapters."""
        adapter_keys = self.adapter.keys if self.adapter else {}
        return config_json.read_keys(self.config, f"{self.path}/config.json") | adapter_keys

    def source_file(self, name: str) -> str:
        """Returns the file that a key of `keys` comes from."""
        if self.adapter and name in self.adapter.keys:
            return f"{self.adapter.path}/{CONFIG}"
        return f"{self.path}/config.json"

    @functools.cached_property
    def _whole_tensors(self) -> dict[str, Tensor]:
        tensors = rename_as_text_model(self.path, find_tensors(self.path))
        return dequantize(tensors, self.config.get("quantization_config"))

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in a text model, one for each expert."""
        family, whole = FAMILIES[self.keys["decoder_block"]], self._whole_tensors
        return split_experts(whole, family.tensors, family.released.interleaves_experts)

    @property
    def side_tensors(self) -> dict[str, Tensor]:
        """The tensors that an export has as they are here (`Released.side_prefix`)."""
        keys = self.keys
        begin = FAMILIES[keys["decoder_block"]].released.side_prefix
        begin = begin.format(keys["base_num_decoder_layers"])
        return {n: x for n, x in self._whole_tensors.items() if begin and n.startswith(begin)}

    @property
    def num_drafts(self) -> int:
        """The number of draft layers that may train."""
        keys, own = self.keys, self.tensors
        drafts = FAMILIES[keys["decoder_block"]].released.drafts
        if not drafts:
            return 0
        first = drafts.tensors["join_CD"]
        numbers = itertools.count(keys["base_num_decoder_layers"])
        whole = itertools.takewhile(lambda number: first.format(number) in own, numbers)
        return len([*whole]) if "{}" in first else int(first in own)

    @property
    def ends(self) -> list[int]:
        """The ids at which an answer ends, by generation_config.json or else config.json; [] if
        neither has any. Raises a ConfigError for other values than ids."""
        file = f"{self.path}/generation_config.json"
        value = storage.read_json(file).get("eos_token_id") if storage.exists(file) else None
        if value is None:
            file, value = f"{self.path}/config.json", self.config.get("eos_token_id")
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int for i in ids):
            raise ConfigError(f"{file}: eos_token_id={value} is neither an id nor a list of ids")
        return ids

    @property
    def data_keys(self) -> dict[str, Any]:
        """The keys of the tokenizer and, of a tokenizer.json, add_bos: whether a training document
        begins with a special token. A ConfigError without a tokenizer."""
        kind, path = self.tokenizer
        if kind != "huggingface":
            return {"tokenizer_type": kind, "tokenizer_path": path}
        # The post-processor says what transformers puts before a text: a begin token for Llama 3;
        # none for SmolLM2, whose begin token begins chats, and for Qwen.
        processor = storage.read_json(path).get("post_processor") or {}
        try:
            templates = [one.get("single") for one in processor.get("processors") or [processor]]
            begins = any(single and "SpecialToken" in single[0] for single in templates)
        except (AttributeError, TypeError, LookupError):
            raise ConfigError(f"{path}: post_processor={processor} cannot be read") from None
        return {"tokenizer_type": kind, "tokenizer_path": path, "add_bos": begins}

    @property
    def side_files(self) -> dict[str, bytes]:
        """The contents of SIDE_FILES that exist, by name."""
        contents = {}
        for folder in reversed(self._folders):
            paths = {name: f"{folder}/{name}" for name in SIDE_FILES}
            contents |= {n: storage.read_bytes(x) for n, x in paths.items() if storage.exists(x)}
        return contents

    @property
    def tokenizer(self) -> tuple[str, str]:
        """The type and file of the tokenizer; adapters bring the one that they trained with.
        Raises a ConfigError if the folder has none."""
        kinds = (("tokenizer.json", "huggingface"), ("tokenizer.model", "sentencepiece"))
        for folder in self._folders:
            for name, kind in kinds:
                if storage.exists(f"{folder}/{name}"):
                    return kind, f"{folder}/{name}"
        raise ConfigError(
            f"{self.path}: has neither tokenizer.json nor tokenizer.model; give tokenizer_path=FILE"
        )


def is_whole(folder: Place) -> bool:
    """Returns whether a folder is a model or adapters, and not left behind by a killed export."""
    return any((folder / name).exists() for name in SENTINELS)


def find(key: str, path: str, may_adapt: bool = True) -> ModelFolder | None:
    """Returns the model folder that a path, an address or a name on the Hub (which it fetches)
    means; None for a path that holds no model and could not name one.

    Raises a ConfigError for a name such as a/b if neither this machine nor the Hub has it, and for
    adapters without their config or base. `key` is whose value the path is, for messages; without
    `may_adapt` it returns None for adapters.
    """
    path = os.path.expanduser(path).rstrip("/")
    storage.check_answers(key, path)
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


def find_or_copy(key: str, path: str, copy: str) -> ModelFolder | None:
    """Returns the folder of `find`, or if the model is gone a run's `copy` of it (`RUN_COPY`);
    raises as `find` without a copy."""
    try:
        return find(key, path) or find(key, copy)
    except ConfigError:
        if not storage.exists(f"{copy}/config.json"):
            raise
        return ModelFolder(copy)
