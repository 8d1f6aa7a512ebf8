"""Opens a model to continue from: its weights, its keys and its tokenizer.

It is what a run has left behind, or a folder of Hugging Face's.
"""

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxramp.checkpoints import folder
from maxramp.commandline import print_note
from maxramp.config import load as config_files
from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.data import hub, mixtures, tokenizers
from maxramp.data.chats.chats import open_template
from maxramp.data.chats.messages import read
from maxramp.data.chats.template import ChatTemplate
from maxramp.data.files import prepared
from maxramp.data.files.records import BadRecord
from maxramp.data.keys import MARK_KEYS, ChatKeys, DataKeys
from maxramp.errors import ConfigError
from maxramp.files.place import is_near, place
from maxramp.handover.weights import ReleasedWeights, SavedWeights, Weights, open_weights
from maxramp.huggingface.folder import RUN_COPY, ModelFolder, find_or_copy
from maxramp.keys import base
from maxramp.model.decoder import Decoder
from maxramp.model.keys import ModelKeys
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.keys import MeshKeys
from maxramp.processes.keys import BackendKeys
from maxramp.stage import ROPE_KEYS
from maxramp.training.state import abstract_state

_BASE = "load_parameters_path"  # of adapters, the weights below them
# Keys of a run that say how it was computed and not what: they take their defaults.
_OF_TRAINING = (
    *("num_pipeline_microbatches", "num_layers_per_pipeline_stage", "num_pipeline_repeats"),
    *("attention", "eval_interval"),
)
# Keys that may be given beside a run.
_OPEN = (
    *(*BackendKeys.names(), *MeshKeys.names(), "dtype", "attention", "max_target_length"),
    *("tokenizer_type", "tokenizer_path", *MARK_KEYS),
    *("chat_template", "chat_template_date", "chat_template_switches"),
)
_TOKENIZER = {"tokenizer_type", "tokenizer_path"}
_CONSTANT = {
    "enable_rampup_batch_size": False,
    "per_device_batch_size": 1.0,
    "global_batch_tokens": -1,
    "row_length": -1,
    "phases": {},
    "eval_interval": -1,
}


def _say_nothing(line: str) -> None:
    pass


class ChatText(str):
    """The text of a chat up to where its answer begins: the marks in it are marks."""


@dataclasses.dataclass(frozen=True)
class PromptTokenizer:
    """The tokenizer of a model, as prompts and answers need it."""

    tokenizer: tokenizers.Tokenizer  # of the documents that the model was trained on
    released_ends: tuple[int, ...] = ()  # the ids that a released model ends answers with
    chats: ChatKeys | None = None  # how its chats become text

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer; none where documents have no end mark."""
        (ids,) = dataclasses.replace(self.tokenizer, add_bos=False).encode([""])
        return list(dict.fromkeys((*ids.tolist(), *self.released_ends)))

    @functools.cached_property
    def template(self) -> ChatTemplate:
        if not self.chats:
            raise ConfigError("a chat needs the tokenizer of a model with a chat template")
        return open_template(self.tokenizer, self.chats)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatText:
        """The text of a chat, which an answer continues. A BadRecord where it is none, the template
        refuses it, or it holds a mark.
        """
        chat, template = read({"messages": messages}), self.template
        for text in chat.texts():
            if mark := template.mark_in(text):
                raise BadRecord(f"a message holds {mark}, a mark of the tokenizer; mend it")
        return ChatText(template.render(chat, ask=True))

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Ids of prompts, int32: as documents begin, and without the mark at their end.

        Those of a chat are of its text alone, to which the template has given its marks.
        """
        texts = [prompt for prompt in prompts if not isinstance(prompt, ChatText)]
        ids = iter(dataclasses.replace(self.tokenizer, add_eos=False).encode(texts))
        return [
            self.tokenizer.encode_with_offsets(prompt)[0]
            if isinstance(prompt, ChatText)
            else next(ids)
            for prompt in prompts
        ]


class Opened:
    """A model that can be used by itself: its `weights`, still to be read, and its keys, `config`,
    on other devices; resolved once the weights are loaded.
    """

    adapted = ""  # of adapters, the Hugging Face folder or name of the model that they adapt
    saved = ""  # the name of a state that a run has saved (`Checkpoint.saved`)

    def __init__(
        self,
        weights: Weights,
        own: Mapping[str, Any],
        arguments: Sequence[str],
        may_give: Sequence[str] = _OPEN,
    ):
        """Reads the keys; no device is touched. `own` are those that the model brings, `arguments`
        key=value of those in `may_give`.
        """
        *_, given = config_files.read(str(base.CONFIGS / "base.yml"), arguments, print_note)
        for name, value in given.values.items():
            if name not in may_give:
                raise ConfigError(
                    f"{name}={value} does not change what a run generates; the keys that do are "
                    f"{', '.join(may_give)}"
                )
        self.weights, self.path, self._given = weights, weights.path, given.values
        self._another = not _TOKENIZER.isdisjoint(given.values)
        own = {k: v for k, v in own.items() if not (self._another and k in _TOKENIZER)}
        self.config = Config.from_values({**base.base(), **own, **_CONSTANT, **given.values})
        self.config.check()
        self._data = self.config.data

    @property
    def origin(self) -> ModelFolder | None:
        return self.weights.origin

    def load(self, say: Callable[[str], None] = _say_nothing) -> Decoder:
        """The weights, on a mesh of all devices of a started backend; `say` prints a line."""
        if jax.process_index():
            say = _say_nothing
        say(f"reading the weights of {self.path}")
        slices, processes = mesh_lib.num_slices(), jax.process_count()
        self.config = resolve(self.config, jax.device_count(), slices, processes)
        model = abstract_state(self.config.recipe, mesh_lib.make_mesh(self.config.mesh)).model
        return self.weights.prepare(model, self.config.values, say)()

    def tokenizer(self) -> PromptTokenizer:
        """The tokenizer of the data that it was trained on, or the one that was given."""
        return tokenizer_of(self._data, self.origin, self._another, self._given)


class ReleasedModel(Opened):
    """A model of a folder as Hugging Face has them."""

    def __init__(self, weights: ReleasedWeights, arguments: Sequence[str]):
        origin = weights.origin
        own = {"dataset_type": "synthetic", **origin.keys, "max_target_length": origin.longest_text}
        with contextlib.suppress(ConfigError):  # whoever needs the tokenizer learns of it
            own |= origin.data_keys
        own["add_eos"] = False
        super().__init__(weights, own, arguments)
        # Synthetic documents stand for those that it was trained on, which had a tokenizer.
        self._data = dataclasses.replace(self.config.data, dataset_type="hf")
        if origin.adapter:
            self.adapted = _full_name(origin.adapter.base)

    def tokenizer(self) -> PromptTokenizer:
        if not self._data.tokenizer_path:
            _ = self.origin.data_keys  # raises what is wrong with the folder's tokenizer
        return super().tokenizer()


class TrainedRun(Opened):
    """A run of ours, or one of its checkpoints."""

    def __init__(self, weights: SavedWeights, arguments: Sequence[str]):
        checkpoint = weights.checkpoint
        there = checkpoint.config | vars(checkpoint.rope_keys)
        # Of adapters, trainable_layers are those that there are.
        names = {*ModelKeys.names(), *DataKeys.names(), "trainable_layers"}.difference(_OF_TRAINING)
        own = {name: there[name] for name in names if name in there}
        adapts = bool(there.get("lora_rank"))
        super().__init__(weights, own, arguments, (*_OPEN, *[_BASE] * adapts))
        self.saved = checkpoint.saved
        if adapts:
            below = weights.base = self._given.get(_BASE, there[_BASE])
            kept = f"{checkpoint.path.parent.parent}/{RUN_COPY}"
            found = find_or_copy(_BASE, below, kept)
            # What adapts them sees as they came, and a phase may have changed that. Of weights that
            # a run has trained, what is kept says only how they began.
            if (
                found
                and not (found.path == kept and is_run(below))
                and all(there[n] == x for n, x in found.keys.items() if n in ROPE_KEYS)
            ):
                self.adapted = _full_name(found.adapter.base if found.adapter else below)


def tokenizer_of(
    keys: DataKeys,
    origin: ModelFolder | None,
    another: bool = False,
    given: Mapping[str, Any] = types.MappingProxyType({}),
) -> PromptTokenizer:
    """Of a run's data, with the marks that are `given`; `another` replaces the one of its data."""
    kind, path, marks = _document_tokenizer(keys, another)
    marks |= {name: value for name, value in given.items() if name in marks}
    ends = tuple(origin.ends) if origin and not another else ()
    return PromptTokenizer(tokenizers.load(kind, path, **marks), ends, keys)


def _document_tokenizer(keys: DataKeys, another: bool) -> tuple[str, str, dict[str, bool]]:
    """Type, file and marks."""
    of_keys = kind, path, marks = keys.type_of_tokenizer, keys.tokenizer_path, keys.mark_keys
    # A document of text_files has both marks, and so would one that synthetic stands for.
    if kind == "bytes" and keys.dataset_type in ("text", "synthetic"):
        return kind, path, marks | {"add_bos": True, "add_eos": True}
    if another:
        return of_keys
    source, are_tokens = f"hf_path={keys.hf_path}", not keys.tokenize_train_data
    if keys.dataset_type == "grain" and not keys.reads_chats:
        (source, _), *_ = mixtures.parse_mixture("grain_train_files", keys.grain_train_files)
        try:
            form, paths = mixtures.find_files("grain_train_files", source, keys.grain_file_type)
        except ConfigError as error:
            if kind == "bytes":
                raise
            given = {"tokenizer_path": path} if path else {"tokenizer_type": kind}
            shown = " ".join(f"{name}={value}" for name, value in (given | marks).items())
            print_note(f"{error}; prompts are as the keys of the run say, {shown}")
            return of_keys
        if form == "prepared":  # such sets bring theirs along
            source = paths[0]
            if of_set := prepared.read_manifest(source)["tokenizer"]:
                file = f"{source}/{of_set['file']}" if of_set["file"] else ""
                return of_set["type"], file, {name: of_set[name] for name in MARK_KEYS}
        are_tokens = are_tokens or form in ("prepared", "megatron")
    if are_tokens and kind == "bytes":
        raise ConfigError(
            f"{source} holds tokens and has no tokenizer; give tokenizer_path=FILE, or "
            "tokenizer_type=bytes"
        )
    return of_keys


def _full_name(path: str) -> str:
    """A model's name on the Hub, its address, or its folder from wherever it is asked for."""
    if hub.is_name(path) or not is_near(place(path)):
        return path
    return os.path.abspath(os.path.expanduser(path))


def is_run(path: str) -> bool:
    with contextlib.suppress(ConfigError):
        return bool(folder.find(place(path)))
    return False


def open_model(path: str, arguments: Sequence[str]) -> Opened:
    """The model at a path, as in `open_weights`; `arguments` are key=value, of the keys that may be
    given beside it."""
    return open_with_keys(open_weights(path, "RUN"), arguments)


def open_with_keys(weights: Weights, arguments: Sequence[str]) -> Opened:
    kind = ReleasedModel if isinstance(weights, ReleasedWeights) else TrainedRun
    return kind(weights, arguments)
