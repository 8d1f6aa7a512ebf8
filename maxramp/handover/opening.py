"""Opens a model to use or to continue from, a run or a Hugging Face folder: its weights, its keys
and its tokenizer."""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxramp.commandline import print_note
from maxramp.config import load as config_files
from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.data import mixtures, tokenizers
from maxramp.data.chats.chats import open_template
from maxramp.data.chats.messages import read
from maxramp.data.chats.template import ChatTemplate
from maxramp.data.files import prepared
from maxramp.data.files.records import BadRecord
from maxramp.data.keys import MARK_KEYS, ChatKeys, DataKeys
from maxramp.errors import ConfigError
from maxramp.handover.weights import KEY, ReleasedWeights, SavedWeights, Weights, open_weights
from maxramp.huggingface.folder import ModelFolder
from maxramp.keys import base
from maxramp.model.decoder import Decoder
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.keys import MeshKeys
from maxramp.processes.keys import BackendKeys
from maxramp.training.state import abstract_state

# Keys that may be given beside a model.
_OPEN_KEYS = (
    *(*BackendKeys.names(), *MeshKeys.names(), "dtype", "attention", "max_target_length"),
    *("tokenizer_type", "tokenizer_path", *MARK_KEYS),
    *("chat_template", "chat_template_date", "chat_template_switches"),
)
_TOKENIZER_KEYS = {"tokenizer_type", "tokenizer_path"}
_FIXED_KEYS = {
    "enable_rampup_batch_size": False,
    "per_device_batch_size": 1.0,
    "global_batch_tokens": -1,
    "row_length": -1,
    "phases": {},
    "eval_interval": -1,
}


class ChatText(str):
    """The text of a chat up to where its answer begins, with the template's special tokens."""


@dataclasses.dataclass(frozen=True)
class PromptTokenizer:
    """The tokenizer of a model, as prompts and answers need it."""

    tokenizer: tokenizers.Tokenizer  # of the documents that the model was trained on
    released_ends: tuple[int, ...] = ()  # the ids that a released model ends answers with
    chats: ChatKeys | None = None  # how its chats become text

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer; none where documents have no end token."""
        (ids,) = dataclasses.replace(self.tokenizer, add_bos=False).encode([""])
        return list(dict.fromkeys((*ids.tolist(), *self.released_ends)))

    @functools.cached_property
    def template(self) -> ChatTemplate:
        if not self.chats:
            raise ConfigError("a chat needs the tokenizer of a model with a chat template")
        return open_template(self.tokenizer, self.chats)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatText:
        """Returns the text of a chat, which an answer continues.

        A BadRecord if it is not a chat, the template refuses it, or it holds a special token; a
        ConfigError without a template.
        """
        chat, template = read({"messages": messages}), self.template
        for text in chat.texts():
            if mark := template.mark_in(text):
                raise BadRecord(f"a message holds {mark}, a special token; remove it")
        return ChatText(template.render(chat, ask=True))

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of prompts, int32: as documents begin, without their end token.

        Those of a chat are of its text alone, in which the template has put special tokens.
        """
        tokenizer = self.tokenizer
        texts = [prompt for prompt in prompts if not isinstance(prompt, ChatText)]
        encoded = iter(dataclasses.replace(tokenizer, add_eos=False).encode(texts))
        ids = []
        for prompt in prompts:
            is_chat = isinstance(prompt, ChatText)
            ids.append(tokenizer.encode_with_offsets(prompt)[0] if is_chat else next(encoded))
        return ids


class ModelSource:
    """A model to use: its weights, not yet read, and its keys, as `config`, on other devices."""

    def __init__(self, weights: Weights, arguments: Sequence[str], with_drafts: bool = False):
        """Reads the keys; no device is touched. `arguments` are key=value; a ConfigError if one
        is neither of _OPEN_KEYS nor, for weights that begin with others, KEY. `with_drafts`: a
        released model has its drafts, too, which a run has in any case; a ConfigError without any.
        """
        *_, command_line = config_files.read(str(base.CONFIGS / "base.yml"), arguments, print_note)
        overrides = command_line.values
        allowed = (*_OPEN_KEYS, KEY) if weights.base else _OPEN_KEYS
        for name, value in overrides.items():
            if name not in allowed:
                raise ConfigError(
                    f"{name}={value} does not change what a run generates; the keys that do are "
                    f"{', '.join(allowed)}"
                )
        if KEY in overrides:
            weights = SavedWeights(weights.checkpoint, overrides[KEY])
        self.weights, self.path, self._overrides = weights, weights.path, overrides
        self._replaces_tokenizer = not _TOKENIZER_KEYS.isdisjoint(overrides)
        keys = weights.keys
        if self._replaces_tokenizer:
            keys = {name: value for name, value in keys.items() if name not in _TOKENIZER_KEYS}
        if with_drafts and isinstance(weights, ReleasedWeights):
            keys = {**keys, "mtp_num_layers": weights.origin.num_drafts}
        self.config = Config.from_values({**base.base(), **keys, **_FIXED_KEYS, **overrides})
        if with_drafts and not self.config.model.mtp_num_layers:
            raise ConfigError(
                f"{self.path} has no draft to propose tokens (mtp_num_layers=0); leave out "
                "--num_speculative_tokens"
            )
        self.config.check()
        self._data = self.config.data  # before `resolve` drops what synthetic documents do not use
        if isinstance(weights, ReleasedWeights):
            self._data = dataclasses.replace(self._data, dataset_type="hf")

    @property
    def origin(self) -> ModelFolder | None:
        return self.weights.origin

    def load(self, say: Callable[[str], None] = lambda line: None) -> Decoder:
        """Loads the weights on a mesh of all devices of a started backend, on all processes
        together; resolves `config`.

        `say` prints a line, on the first process.
        """
        say = say if jax.process_index() == 0 else lambda line: None
        say(f"loading the weights of {self.path}")
        slices, processes = mesh_lib.num_slices(), jax.process_count()
        self.config = resolve(self.config, jax.device_count(), slices, processes)
        model = abstract_state(self.config.recipe, mesh_lib.make_mesh(self.config.mesh)).model
        return self.weights.prepare(model, self.config.values, say)()

    def tokenizer(self) -> PromptTokenizer:
        """Loads the tokenizer of the data that it was trained on, or the one that was given."""
        if isinstance(self.weights, ReleasedWeights) and not self._data.tokenizer_path:
            _ = self.origin.data_keys  # raises what is wrong with the folder's tokenizer
        return load_tokenizer(self._data, self.origin, self._replaces_tokenizer, self._overrides)


def load_tokenizer(
    keys: DataKeys,
    origin: ModelFolder | None,
    is_replaced: bool = False,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
) -> PromptTokenizer:
    """Loads the tokenizer of the data, or if it `is_replaced` the one that the keys name, for a run
    that began with the model `origin`. Of `overrides` only MARK_KEYS count. A ConfigError if it
    cannot be loaded, or the data hold tokens and name no tokenizer.
    """
    kind, path, options = _document_tokenizer(keys, is_replaced)
    options |= {name: value for name, value in overrides.items() if name in options}
    ends = tuple(origin.ends) if origin and not is_replaced else ()
    return PromptTokenizer(tokenizers.load(kind, path, **options), ends, keys)


def _document_tokenizer(keys: DataKeys, is_replaced: bool) -> tuple[str, str, dict[str, bool]]:
    """Returns the type and file of a tokenizer, and the values of MARK_KEYS; a ConfigError if the
    data hold tokens and name none. Where the run's files are gone it prints that, and goes by the
    keys; without a tokenizer in these that is an error."""
    by_keys = kind, path, options = keys.type_of_tokenizer, keys.tokenizer_path, keys.mark_keys
    # Documents of text_files have both tokens, and so would those that synthetic ones stand for.
    if kind == "bytes" and keys.dataset_type in ("text", "synthetic"):
        return kind, path, options | {"add_bos": True, "add_eos": True}
    if is_replaced:
        return by_keys
    source, are_tokens = f"hf_path={keys.hf_path}", not keys.tokenize_train_data
    if keys.dataset_type == "grain" and not keys.reads_chats:
        (source, _), *_ = mixtures.parse_mixture("grain_train_files", keys.grain_train_files)
        try:
            form, paths = mixtures.find_files("grain_train_files", source, keys.grain_file_type)
        except ConfigError as error:
            if kind == "bytes":
                raise
            shown = {"tokenizer_path": path} if path else {"tokenizer_type": kind}
            shown = " ".join(f"{name}={value}" for name, value in (shown | options).items())
            print_note(f"{error}; prompts are as the keys of the run say, {shown}")
            return by_keys
        if form == "prepared":  # such sets bring theirs along
            source = paths[0]
            if manifest := prepared.read_manifest(source)["tokenizer"]:
                file = f"{source}/{manifest['file']}" if manifest["file"] else ""
                return manifest["type"], file, {name: manifest[name] for name in MARK_KEYS}
        are_tokens = are_tokens or form in ("prepared", "megatron")
    if are_tokens and kind == "bytes":
        raise ConfigError(
            f"{source} holds tokens and has no tokenizer; give tokenizer_path=FILE, or "
            "tokenizer_type=bytes"
        )
    return by_keys


def open_model(path: str, arguments: Sequence[str], with_drafts: bool = False) -> ModelSource:
    """Opens the model at a path, as `open_weights`; the others are those of a ModelSource. A
    ConfigError as either."""
    return ModelSource(open_weights(path, "RUN"), arguments, with_drafts)
