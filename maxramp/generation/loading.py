"""What a run left behind, to write text with: its weights, its keys and its tokenizer."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from maxramp.checkpoints import arrays, folder
from maxramp.commandline import print_note
from maxramp.config import load as config_files
from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.data import mixture, tokenizers
from maxramp.data.files import prepared
from maxramp.data.keys import MARK_KEYS, DataKeys
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.keys import base
from maxramp.model.decoder import Decoder
from maxramp.model.keys import ModelKeys
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.keys import MeshKeys
from maxramp.processes import backend
from maxramp.processes.keys import BackendKeys
from maxramp.training.state import abstract_state

# Keys of a run that say how it was computed and not what: they take their defaults.
_OF_TRAINING = (
    "attention",
    "num_pipeline_microbatches",
    "num_layers_per_pipeline_stage",
    "num_pipeline_repeats",
    "eval_interval",
)
# Keys that may be given beside a run.
_OPEN = (
    *(field.name for section in (BackendKeys, MeshKeys) for field in dataclasses.fields(section)),
    *("dtype", "attention", "max_target_length"),
    *("tokenizer_type", "tokenizer_path", *MARK_KEYS),
)
_TOKENIZER = {"tokenizer_type", "tokenizer_path"}
_CONSTANT = {"enable_rampup_batch_size": False, "per_device_batch_size": 1.0, "eval_interval": -1}


@dataclasses.dataclass(frozen=True)
class PromptTokenizer:
    """The tokenizer of a run, as prompts and answers need it."""

    tokenizer: tokenizers.Tokenizer  # of the documents that the run was trained on

    @property
    def ends(self) -> list[int]:
        """The ids that end a document: one, or none."""
        (ids,) = dataclasses.replace(self.tokenizer, add_bos=False).encode([""])
        return ids.tolist()

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Ids of prompts, int32: as documents begin, and without the mark at their end."""
        return dataclasses.replace(self.tokenizer, add_eos=False).encode(prompts)


class TrainedRun:
    """A run whose weights write text."""

    def __init__(self, path: Place, arguments: Sequence[str]):
        """Reads the keys; no device is touched.

        Args:
          path: the folder of a run, or a checkpoint.
          arguments: key=value, of the keys that generation takes.

        Raises:
          ConfigError: there is no such checkpoint, it is torn, or a key is wrong.
        """
        self.checkpoint = folder.read(folder.find(path))  # the newest, or the one that is asked for
        *_, given = config_files.read(str(base.CONFIGS / "base.yml"), arguments, print_note)
        for name, value in given.values.items():
            if name not in _OPEN:
                raise ConfigError(
                    f"{name}={value} does not change what a run generates; the keys that do are "
                    f"{', '.join(_OPEN)}"
                )
        there, self._given = self.checkpoint.config, given.values
        names = {f.name for section in (ModelKeys, DataKeys) for f in dataclasses.fields(section)}
        taken = (names & there.keys()).difference(_OF_TRAINING)
        self._another = not _TOKENIZER.isdisjoint(given.values)
        taken -= _TOKENIZER if self._another else set()
        values = base.base() | {name: there[name] for name in taken} | _CONSTANT
        # Its keys on other devices; resolved once the weights are loaded.
        self.config = Config.of(values | given.values)
        self.config.check()

    def load(self) -> Decoder:
        """The weights, on a mesh of all devices; starts the backend.

        Raises:
          ConfigError: the devices do not suit the keys, or the weights cannot be read.
        """
        backend.start(self.config.backend)
        slices, processes = mesh_lib.num_slices(), jax.process_count()
        self.config = resolve(self.config, jax.device_count(), slices, processes)
        model = abstract_state(self.config.recipe, mesh_lib.make_mesh(self.config.mesh)).model
        return arrays.load_parameters(self.checkpoint.path, model, self.config.values)

    def tokenizer(self) -> PromptTokenizer:
        """The tokenizer of the data that it was trained on, or the one that was given.

        Raises:
          ConfigError: its file is not there, or is damaged.
        """
        kind, path, marks = self._of_data()
        marks |= {name: value for name, value in self._given.items() if name in marks}
        return PromptTokenizer(tokenizers.load(kind, path, **marks))

    def _of_data(self) -> tuple[str, str, dict[str, bool]]:
        """Type, file and marks of the tokenizer of the documents."""
        keys = self.config.data
        of_keys = kind, path, marks = keys.type_of_tokenizer, keys.tokenizer_path, keys.mark_keys
        if keys.dataset_type not in ("grain", "hf"):  # a document of text_files has both marks
            return kind, path, marks | {"add_bos": True, "add_eos": True}
        if self._another:
            return of_keys
        source, are_tokens = f"hf_path={keys.hf_path}", not keys.tokenize_train_data
        if keys.dataset_type == "grain":
            (source, _), *_ = mixture.parse("grain_train_files", keys.grain_train_files)
            try:
                form, paths = mixture.find("grain_train_files", source, keys.grain_file_type)
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
