"""Hugging Face's hub through its local cache: models' files, data sets with random access."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

from maxramp.data.files.records import WHOLE, Record, RecordFile, without_nulls
from maxramp.errors import ConfigError, one_line
from maxramp.files.storage import allow_many_files, optional

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILE = re.compile(r".*\.(json|model|tiktoken)", re.IGNORECASE)


def is_name(path: str) -> bool:
    """Returns whether a path is not on this machine and has the form organization/model, but not
    that of a tokenizer's file."""
    return bool(_NAME.fullmatch(path)) and not (_FILE.fullmatch(path) or os.path.lexists(path))


@functools.cache
def fetch(key: str, name: str, file: str, beside: str = "") -> str:
    """Returns the path of a model's file, in the cache or else from the hub; a ConfigError that
    names `key` if neither has it. `beside` is the path of another one, at the model's top: then it
    is of the same commit, and "" where that has none.
    """
    revision = os.path.basename(os.path.dirname(beside)) if beside else None

    def ask(hub: Any) -> str:
        cached = hub.try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str):
            return cached
        if cached is not None and beside:  # known not to be there
            return ""
        _connect(hub)
        return hub.hf_hub_download(name, file, revision=revision)

    return _ask(key, f"{name} {file}", ask, required=not beside)


@functools.cache
def fetch_model(key: str, name: str) -> str:
    """Returns the folder of a model, from the hub or its cache; a ConfigError that names `key` if
    neither has it."""
    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

    def ask(hub: Any) -> str:
        _connect(hub)
        # Mistral's folders hold their weights a second time, in a form of its own.
        return hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns="consolidated*")

    return _ask(key, name, ask, True)


@functools.cache
def _connect(hub: Any) -> None:
    """Leaves the hub's client with its cache, for the rest of the process, if the hub does not
    answer in 10 seconds: it would go on asking for half a minute.
    """
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=10)
    except Exception:  # of the client, of the network; or it shall not ask
        hub.constants.HF_HUB_OFFLINE = True


def _ask(key: str, wanted: str, ask: Callable[[Any], str], required: bool) -> str:
    """Returns what the cache or else the hub answers, a ConfigError if neither does, "" for a file
    that the model lacks and that is not `required`. `wanted` are arguments of `hf download`."""
    name, _, file = wanted.partition(" ")
    what = f"{key}={name}: no such file or folder here; a model of that name on Hugging Face"
    hub = optional("huggingface_hub", "huggingface_hub", what, "hub")
    errors = optional("huggingface_hub.errors", "huggingface_hub", what, "hub")
    try:
        return ask(hub)
    except errors.HFValidationError as error:
        why = f"no name of a model on Hugging Face ({one_line(error)})"
    except errors.LocalEntryNotFoundError:
        why = "the cache of Hugging Face does not hold it, and the hub is out of reach"
    except errors.GatedRepoError:
        why = "its owner gives access to some only; ask for it, and set HF_TOKEN"
    except errors.EntryNotFoundError as error:
        if not required:
            return ""
        why = f"the model on Hugging Face has no such file ({one_line(error)})"
    except Exception as error:  # of the client, of the network, of the disk
        why = f"cannot be fetched, with HF_TOKEN if the model needs it ({one_line(error)})"
    what = f"{file} of the model" if file else "the model"
    raise ConfigError(
        f"{key}={name}: no such file or folder here; {what} of that name on Hugging Face: {why}; "
        f"fetch it where there is a network (hf download {wanted}), or give a path"
    )


_RECORD = 1024  # bytes that a record counts as: those of a table depend on who wrote it


class HubSet(RecordFile):
    """The rows of a split of a data set; a record is what its column holds."""

    def __init__(self, hf_path: str, name: str, split: str, column: str, tokens: bool):
        """Takes a name or a folder, and its configuration (`name`), "" for its only one."""
        super().__init__(f"{hf_path}:{name}:{split}", column, tokens)
        self._source = hf_path, name, split

    @property
    def num_bytes(self) -> int:
        return len(self) * _RECORD

    @functools.cached_property
    def stamp(self) -> tuple[Any, ...]:
        return self.path, len(self), self._table._fingerprint, self.column

    def __len__(self) -> int:
        return len(self._table)

    def _record(self, index: int) -> Record:
        record = self._table[index]
        value = without_nulls(record) if self.column == WHOLE else record[self.column]
        return self._validate(value)

    @functools.cached_property
    def _table(self) -> Any:
        """The table of datasets, open for the process; a ConfigError if neither its cache nor the
        hub has it, or it has no such column."""
        path, name, split = os.path.expanduser(self._source[0]), *self._source[1:]
        allow_many_files()  # a table of Arrow files stays open
        if not os.path.isdir(path):
            _connect(optional("huggingface_hub", "huggingface_hub", f"hf_path={path}", "hub"))
        library = optional("datasets", "datasets", f"hf_path={path}", "hub")
        try:
            table = library.load_dataset(path, name or None, split=split)
        except Exception as error:  # of the client, of the network, of the set's own script
            raise ConfigError(
                f"hf_path={path} hf_name={name} (split {split}): neither the cache of datasets nor "
                f"the hub gives it ({one_line(error)}); load it once where there is a network, or "
                "give files to grain_train_files"
            ) from None
        if self.column == WHOLE:
            return table
        if self.column not in table.column_names:
            raise ConfigError(f"hf_path={path}: {self._missing(table.column_names)}")
        return table.select_columns([self.column])

    def __reduce__(self):
        return HubSet, (*self._source, self.column, self.tokens)
