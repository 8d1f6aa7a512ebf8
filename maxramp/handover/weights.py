"""Weights to begin with, of a checkpoint or of a Hugging Face folder: opened once.

Whoever continues from a model (training, adapters, preferences, rewards, generation, evaluation, an
export) opens its weights here, and asks them for their arrays and for what a Hugging Face folder
says beside them.
"""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

from maxramp.checkpoints import arrays
from maxramp.checkpoints import folder as checkpoints
from maxramp.checkpoints.folder import Checkpoint
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place, write_whole
from maxramp.huggingface import folder as released
from maxramp.huggingface import reading
from maxramp.huggingface.folder import ModelFolder
from maxramp.keys.section import refuse
from maxramp.model.adapters import attach_adapters, has_adapters, stored_part, without_adapters
from maxramp.model.decoder import Decoder
from maxramp.model.families.table import has_experts, unify_keys
from maxramp.model.fingerprint import fingerprint_of_weights
from maxramp.model.keys import MODEL_KEYS
from maxramp.model.order import order_by_layer

_KEY = "load_parameters_path"
Note = Callable[[str], None]


class Weights(abc.ABC):
    """Weights that are there, whose arrays are still to be read.

    Attributes:
      path: of a checkpoint, or of a Hugging Face folder.
      origin: what a Hugging Face folder says of them: the one that it is, or the one that their
        run began with.
    """

    path: str
    origin: ModelFolder | None

    @abc.abstractmethod
    def prepare(
        self, model: Decoder, values: Mapping[str, Any], note: Note = lambda line: None
    ) -> Callable[[], Decoder]:
        """Makes sure that they are those of an abstract model; returns what reads them, with the
        shardings of `model`, which may raise a ConfigError too. Where `model` has adapters and
        these weights have none, it returns none. `note` takes a line about tensors and keys that
        nothing reads.
        """


class ReleasedWeights(Weights):
    """Of a Hugging Face folder, of a model or of adapters."""

    def __init__(self, folder: ModelFolder):
        self.path, self.origin = (folder.adapter or folder).path, folder

    def prepare(
        self, model: Decoder, values: Mapping[str, Any], note: Note = lambda line: None
    ) -> Callable[[], Decoder]:
        """Refuses keys that contradict config.json."""
        folder, adapter, values = self.origin, self.origin.adapter, unify_keys(values)
        there, family = folder.keys, values["decoder_block"]
        is_dense = has_experts(family) and not has_experts(there["decoder_block"])
        refuse(
            (
                values[name] != there[name] and not (grows and values[name] > there[name]),
                f"{name}={values[name]}: {folder.path}/config.json makes it {there[name]}; "
                "model_name=hf takes it from there",
            )
            for name in MODEL_KEYS
            if name in there and name in values and not (is_dense and name == "decoder_block")
            for grows in [name == "vocab_size"]
        )
        if is_dense and not model.layers["sparse"].mlp.router.is_normalized:
            note(
                f"{self.path}: with norm_topk_prob=False the weights of a token's experts add up "
                "to less than 1, so the loss does not begin at that of the dense model; "
                "norm_topk_prob=true begins there"
            )
        for line in folder.describe_unread():
            note(line)
        rows = there["vocab_size"]
        _check_adapters(self.path, adapter.keys if adapter else {}, model, values)
        load_base = reading.prepare_load(
            *(folder.path, folder.tensors, rows, without_adapters(model), family, note),
            dense_block=there["decoder_block"] if is_dense else "",
        )
        if not adapter:
            return load_base
        try:
            files, like = (adapter.path, adapter.tensors), stored_part(model)
            load_own = reading.prepare_load(*files, rows, like, family, note, adapter.layers)
        except ConfigError as error:
            raise ConfigError(f"{self.path} adapts another model than this: {error}") from None
        return lambda: attach_adapters(load_own(), load_base())


class SavedWeights(Weights):
    """Of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, base: str = ""):
        """`base` is where the weights below adapters are now; "" = where they were."""
        self.checkpoint, self.base = checkpoint, base
        self.path = str(checkpoint.path)

    @functools.cached_property
    def origin(self) -> ModelFolder | None:
        return find_kept(self.checkpoint.path.parent.parent)

    def prepare(
        self, model: Decoder, values: Mapping[str, Any], note: Note = lambda line: None
    ) -> Callable[[], Decoder]:
        """Refuses a base that is not the one that adapters were trained on."""
        there = self.checkpoint
        _check_adapters(self.path, there.config, model, values)
        adapts = bool(there.config.get("lora_rank"))
        own = stored_part(model) if adapts else without_adapters(model)
        arrays.compare(there, {"model": own}, values)

        def load_own() -> Decoder:
            return arrays.load(there.path, {"model": own})["model"]

        if not adapts:
            return load_own
        below = self.base or there.config[_KEY]
        # The keys that the run began with: a phase may have changed what its tokens see since.
        load_base = open_weights(below).prepare(model, there.config, note)

        def load() -> Decoder:
            weights = without_adapters(load_base())
            if (found := fingerprint_of_weights(order_by_layer(weights))) != there.reference:
                raise ConfigError(
                    f"{below}: not the weights that {there.path} adapts (hash {found}, was "
                    f"{there.reference}); give {_KEY}=PATH of those"
                )
            return attach_adapters(load_own(), weights)

        return load


def open_weights(path: str, key: str = _KEY) -> Weights:
    """The weights at a path, of which no array is read: a checkpoint, a folder of them or of a run,
    whose newest counts, a Hugging Face folder or the name of one. `key` is whose value the path is.
    """
    if folder := released.find(key, path):
        return ReleasedWeights(folder)
    return SavedWeights(checkpoints.read(checkpoints.find(place(path))))


def _check_adapters(
    path: str, there: Mapping[str, Any], model: Decoder, values: Mapping[str, Any]
) -> None:
    """Refuses adapters, of these keys, that `model` has no place for or would count otherwise."""
    if not (rank := there.get("lora_rank")):
        return
    if not has_adapters(model):
        raise ConfigError(
            f"{path}: holds adapters and no model; merge them first (maxramp.convert {path} "
            f"--merge --to FOLDER), or train them on with maxramp.train and lora_rank={rank}"
        )
    for name in ("lora_rank", "lora_alpha", "use_rslora", "trainable_layers"):
        if there[name] != values[name]:
            raise ConfigError(
                f"{name}={values[name]}: the adapters of {path} were trained with "
                f"{name}={there[name]}; give that"
            )


def find_kept(run: Place) -> ModelFolder | None:
    return released.find(_KEY, f"{run.absolute()}/{released.RUN_COPY}")


def keep_released(weights: Weights | None, run: Place) -> None:
    """Keeps in a run's folder what lies beside the weights that it begins with.

    What an earlier start kept of others is gone then. config.json is removed first and written
    last: without it nothing is kept.
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
