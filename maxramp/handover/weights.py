"""Weights to begin with, of a checkpoint or of a Hugging Face folder: opened once.

Whoever continues from a model (training, adapters, preferences, rewards, generation, evaluation, an
export) opens its weights here, and asks them for their arrays and for what a Hugging Face folder
says beside them.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from maxramp.checkpoints import arrays, starts
from maxramp.checkpoints import folder as checkpoints
from maxramp.checkpoints.folder import Checkpoint
from maxramp.config.keys import Config
from maxramp.data import hub
from maxramp.data.keys import DataKeys
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.files.place import Place, is_near, place, write_whole
from maxramp.huggingface import config_json, reading
from maxramp.huggingface import folder as released
from maxramp.huggingface.folder import ModelFolder
from maxramp.huggingface.safetensors import Tensor
from maxramp.keys.yamlfile import read_yaml
from maxramp.model.adapters import attach_adapters, has_adapters, stored_part, without_adapters
from maxramp.model.decoder import Decoder
from maxramp.model.families.table import has_experts, unify_keys
from maxramp.model.keys import MODEL_KEYS, ModelKeys
from maxramp.model.parts.weights import fingerprint_of_weights
from maxramp.model.pipeline import order_by_layer
from maxramp.processes import agreement
from maxramp.stage import ROPE_KEYS

KEY = "load_parameters_path"
_KEYS = KEY, "load_full_state_path"
# Keys of a run that say how it was computed and not what: they take their defaults.
_TRAINING_KEYS = (
    *("num_pipeline_microbatches", "num_layers_per_pipeline_stage", "num_pipeline_repeats"),
    *("attention", "eval_interval"),
)
Note = Callable[[str], None]


class ReleasedWeights:
    """Of a Hugging Face folder, of a model or of adapters."""

    base = saved = ""

    def __init__(self, folder: ModelFolder):
        self.path, self.origin = (folder.adapter or folder).path, folder

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the model and of its tokenizer; the latter are left out where they cannot be
        read."""
        # Synthetic documents stand for those that it was trained on.
        keys = {"dataset_type": "synthetic", **self.origin.keys}
        file = f"{self.origin.path}/config.json"
        keys["max_target_length"] = config_json.longest_text(self.origin.config, file)
        with contextlib.suppress(ConfigError):  # whoever needs the tokenizer learns of it
            keys |= self.origin.data_keys
        return keys | {"add_eos": False}

    @property
    def side_tensors(self) -> dict[str, Tensor]:
        return self.origin.side_tensors

    @property
    def adapted_model(self) -> str:
        return _full_name(self.origin.adapter.base) if self.origin.adapter else ""

    def prepare(
        self, model: Decoder, values: Mapping[str, Any], note: Note = lambda line: None
    ) -> Callable[[], Decoder]:
        """Refuses keys that contradict config.json; as in `Weights`."""
        folder, adapter, values = self.origin, self.origin.adapter, unify_keys(values)
        keys, family = folder.keys, values["decoder_block"]
        is_dense = has_experts(family) and not has_experts(keys["decoder_block"])
        for name in MODEL_KEYS:
            if name not in keys or name not in values or (is_dense and name == "decoder_block"):
                continue
            grows = name == "vocab_size" and values[name] > keys[name]
            if values[name] != keys[name] and not grows:
                raise ConfigError(
                    f"{name}={values[name]}: {folder.path}/config.json makes it {keys[name]}; "
                    "model_name=hf takes it from there"
                )
        if is_dense and not model.layers["sparse"].mlp.router.is_normalized:
            note(
                f"{self.path}: with norm_topk_prob=False the weights of a token's experts add up "
                "to less than 1, so the loss does not begin at that of the dense model; "
                "norm_topk_prob=true begins there"
            )
        count, drafts = values["mtp_num_layers"], folder.num_drafts
        if count not in (0, drafts):
            other = f"{drafts} to train them, or 0" if drafts else "0"
            raise ConfigError(
                f"mtp_num_layers={count}: {folder.path} has {drafts} draft layers that can train; "
                f"use {other}"
            )
        for line in config_json.describe_unread(folder.config, f"{folder.path}/config.json"):
            note(line)
        rows = keys["vocab_size"]
        _check_adapters(self.path, adapter.keys if adapter else {}, model, values)
        load_base = reading.prepare_load(
            *(folder.path, folder.tensors, rows, without_adapters(model), family, note),
            dense_block=keys["decoder_block"] if is_dense else "",
        )
        if not adapter:
            return load_base
        try:
            files, like = (adapter.path, adapter.tensors), stored_part(model)
            load_own = reading.prepare_load(*files, rows, like, family, note, adapter.layers)
        except ConfigError as error:
            raise ConfigError(f"{self.path} adapts another model than this: {error}") from None
        return lambda: attach_adapters(load_own(), load_base())


class SavedWeights:
    """Of a checkpoint."""

    base = ""

    def __init__(self, checkpoint: Checkpoint, base: str = ""):
        """Opens a checkpoint's weights; `base` is where those below adapters are now, "" = where
        they were."""
        self.checkpoint, self.saved = checkpoint, checkpoint.saved
        self.path, self._run = str(checkpoint.path), checkpoint.path.parent.parent
        if checkpoint.config.get("lora_rank"):
            self.base = base or checkpoint.config[KEY]

    @functools.cached_property
    def origin(self) -> ModelFolder | None:
        return find_kept(self._run)

    @property
    def side_tensors(self) -> dict[str, Tensor]:
        paths = [self.checkpoint.config[name] for name in _KEYS if self.checkpoint.config[name]]
        return open_weights(self.base or paths[0]).side_tensors if paths else {}

    @property
    def _values(self) -> dict[str, Any]:
        return self.checkpoint.config | vars(self.checkpoint.rope_keys)

    @property
    def keys(self) -> dict[str, Any]:
        # Of adapters, trainable_layers are those that have one.
        names = {*ModelKeys.names(), *DataKeys.names(), "trainable_layers"}
        values = self._values
        return {name: values[name] for name in names.difference(_TRAINING_KEYS) if name in values}

    @functools.cached_property
    def adapted_model(self) -> str:
        if not self.base:
            return ""
        copy = f"{self._run}/{released.RUN_COPY}"
        folder = released.find_or_copy(KEY, self.base, copy)
        # A copy says only how weights began that a run has trained since.
        if not folder or (folder.path == copy and is_run(self.base)):
            return ""
        # Released adapters see what their model sees; a phase may have changed that.
        values = self._values
        if any(values[n] != x for n, x in folder.keys.items() if n in ROPE_KEYS):
            return ""
        return _full_name(folder.adapter.base if folder.adapter else self.base)

    def prepare(
        self, model: Decoder, values: Mapping[str, Any], note: Note = lambda line: None
    ) -> Callable[[], Decoder]:
        """Refuses other shapes than the checkpoint's, and, when it is read, a base that is not the
        one that adapters were trained on; as in `Weights`."""
        checkpoint = self.checkpoint
        _check_adapters(self.path, checkpoint.config, model, values)
        own = stored_part(model) if self.base else without_adapters(model)
        arrays.compare(checkpoint, {"model": own}, values)

        def load_own() -> Decoder:
            return arrays.load(checkpoint.path, {"model": own})["model"]

        if not self.base:
            return load_own
        # The keys that the run began with: a phase may have changed what its tokens see since.
        load_base = open_weights(self.base).prepare(model, checkpoint.config, note)

        def load() -> Decoder:
            weights = without_adapters(load_base())
            fingerprint = fingerprint_of_weights(order_by_layer(weights))
            if fingerprint != checkpoint.reference:
                raise ConfigError(
                    f"{self.base}: not the weights that {checkpoint.path} adapts (hash "
                    f"{fingerprint}, was {checkpoint.reference}); give {KEY}=PATH of those"
                )
            return attach_adapters(load_own(), weights)

        return load


# Weights on a disk or in a storage, whose arrays are still to be read.
#   path: of a checkpoint, or of a Hugging Face folder.
#   origin: the Hugging Face folder that they are, or that their run began with.
#   base: where a run's adapters have the weights below them; "" for weights of a whole model.
#   saved: the name of a state that a run has saved (`Checkpoint.saved`), or "".
#   keys: the keys of the model and of its tokenizer.
#   side_tensors: tensors of the Hugging Face folder that their run began with, for exports as
#     they are; a ConfigError if it is gone.
#   adapted_model: the Hugging Face folder or name of the model that adapters adapt, or "".
#   prepare: refuses weights that are not those of an abstract model and the `values` of all keys;
#     returns what reads them, with the shardings of `model`; adapters that it has beyond these
#     weights are missing. `note` takes a line about tensors and keys that nothing reads.
Weights = ReleasedWeights | SavedWeights


def open_weights(path: str, key: str = KEY) -> Weights:
    """Opens the weights at a path without reading an array; raises a ConfigError without them.

    The path is that of a checkpoint, of a folder of them or of a run, whose newest counts, or of a
    Hugging Face folder, or the name of one. `key` is whose value it is.
    """
    if folder := released.find(key, path):
        return ReleasedWeights(folder)
    return SavedWeights(checkpoints.read(checkpoints.find(place(path))))


def is_run(path: str) -> bool:
    """Returns whether a path is a run, or a checkpoint of one."""
    with contextlib.suppress(ConfigError):
        return bool(checkpoints.find(place(path)))
    return False


def _full_name(path: str) -> str:
    """Returns a model's name on the Hub, its address, or its folder's absolute path."""
    if hub.is_name(path) or not is_near(place(path)):
        return path
    return os.path.abspath(os.path.expanduser(path))


def _check_adapters(
    path: str, keys: Mapping[str, Any], model: Decoder, values: Mapping[str, Any]
) -> None:
    """Refuses adapters that `model` lacks, or that were trained with other LoRA keys than `values`.
    `keys` are those of their training, without a lora_rank if the weights have no adapters."""
    rank = keys.get("lora_rank")
    if not rank:
        return
    if not has_adapters(model):
        raise ConfigError(
            f"{path}: holds adapters and no model; merge them first (maxramp.convert {path} "
            f"--merge --to FOLDER), or train them on with maxramp.train and lora_rank={rank}"
        )
    for name in ("lora_rank", "lora_alpha", "use_rslora", "trainable_layers"):
        if keys[name] != values[name]:
            raise ConfigError(
                f"{name}={values[name]}: the adapters of {path} were trained with "
                f"{name}={keys[name]}; give that"
            )


def find_kept(run: Place) -> ModelFolder | None:
    """Returns a run's copy of the released folder that it began with, if it has one."""
    return released.find(KEY, f"{run.absolute()}/{released.RUN_COPY}")


def keep_released(weights: Weights | None, run: Place) -> None:
    """Copies into a run's folder, on one process, the side files of the weights that it begins with
    (None: no files).

    Those of other weights that an earlier start kept are removed. config.json goes first and comes
    last: without it nothing is kept. A ConfigError if they cannot be written.
    """
    own = run / released.RUN_COPY
    files = weights.origin.side_files if weights and weights.origin else {}
    try:
        for name in released.SIDE_FILES if own.is_dir() else ():
            (own / name).unlink(missing_ok=True)
        for name, data in reversed(files.items()):
            own.mkdir(parents=True, exist_ok=True)
            write_whole(own / name, data)
    except OSError as error:
        raise ConfigError(f"{own}: cannot be written: {error.strerror}") from None


@dataclasses.dataclass(frozen=True)
class FirstWeights:
    """The weights that a run begins with: `path` is the value of `key`, "" for new ones."""

    key: str
    path: str
    states: dict[str, str]  # as `Checkpoint.first`

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights, None for new ones; opened at the first use, as a restart may not need them
        and then they may be gone."""
        return open_weights(self.path, self.key) if self.path else None


def key_of_first_weights(config: Config) -> str:
    """Returns the key that names the first weights of a run, "load_parameters_path" if none does:
    it may also begin with a state and other weights."""
    for name in _KEYS:
        if config.values[name]:
            return name
    return _KEYS[0]


def check_first_weights(config: Config) -> None:
    """Refuses a run that needs weights to begin with, and has no key that names them."""
    values, key = config.values, key_of_first_weights(config)
    needs = config.objective.needs_weights
    if not needs and config.model.lora_rank:
        needs = f"lora_rank={config.model.lora_rank} adapts the weights of a model"
    if needs and not values[key]:
        raise ConfigError(f"{key} is empty: {needs}; give its folder, a run or a checkpoint")


def pin_first_weights(config: Config) -> tuple[Config, FirstWeights]:
    """Returns a resolved configuration with the paths that `find_first_weights` finds on process 0;
    all processes call it together, and get its error."""
    weights = agreement.decide_on_first(lambda: find_first_weights(config))
    paths = {name: path for name, (path, _) in weights.items()}
    states = {name: saved for name, (_, saved) in weights.items()}
    if any(config.values[name] != path for name, path in paths.items()):
        config = config.replace(**paths)
    key = key_of_first_weights(config)
    return config, FirstWeights(key, config.values[key], states)


def find_first_weights(config: Config) -> dict[str, tuple[str, str]]:
    """Finds the weights that a run begins with, by the keys that name them (resolved or not), {}
    without any: the path of one checkpoint and its `saved`, or of a Hugging Face folder and "".
    Called before the start writes into the run's own folder, which it reads.

    The folder of another run means its newest checkpoint at the first start and the same one at
    every restart, even if that run has trained on, was moved or is gone. Raises a ConfigError if a
    path holds no weights, lies in the run's own folder, or is in a storage that does not answer.
    """
    return {name: _find(name, config) for name in _KEYS if config.values[name]}


def _find(name: str, config: Config) -> tuple[str, str]:
    """Returns what the key `name`, which has a value, names: path and `saved`, as
    `find_first_weights`."""
    value, own = config.values[name], config.run.folder
    path = place(value).absolute()
    position, _ = checkpoints.newest(own / "checkpoints")
    before = position.config[name] if position else _path_at_start(name, own)
    first = place(before).absolute()
    state = position.first.get(name, "") if position and before else _state_at(first)
    same = first, first.parent / checkpoints.BEST, *first.parents[:2]  # its folder, its run
    if before and (position or state) and path in same:
        return before, state
    storage.check_answers(name, value)
    if name == _KEYS[0] and released.find(name, value):
        return value, ""
    if own.resolve() in (path.resolve(), *path.resolve().parents):
        remedy = f"give {before}" if before else "leave it out"
        remedy = f"to continue the run {remedy}" if position else "give weights from elsewhere"
        raise ConfigError(
            f"{name}={value}: lies in this run's own folder, whose checkpoints come and go; "
            f"{remedy}, or another run_name"
        )
    try:
        newest = checkpoints.find(path)
    except ConfigError as error:
        raise ConfigError(f"{name}={value}: {error}, or that of a released model") from None
    moved = newest.with_name(first.name)  # with the other run
    if newest != path and state and _state_at(moved) == state:
        return str(moved), state
    return str(newest), _state_at(newest)


def _path_at_start(name: str, own: Place) -> str:
    """Returns the path that a run began with, if it has snapshots and no checkpoint yet."""
    for file in (own / "config.resolved.yml", own / "config.yml"):
        if file.is_file():
            has_snapshots = starts.read(own).directory is not None
            return read_yaml(file).get(name, "") if has_snapshots else ""
    return ""


def _state_at(path: Place) -> str:
    """Returns the name of the state that a checkpoint holds, "" if it holds none."""
    with contextlib.suppress(ConfigError):
        return checkpoints.read(path).saved if checkpoints.is_committed(path) else ""
    return ""
