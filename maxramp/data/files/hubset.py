"""Data sets by name, through the package datasets: tables in its cache, with random access."""

import functools
from typing import Any

from maxramp.data.files.records import Record, RecordFile
from maxramp.errors import ConfigError
from maxramp.files.storage import allow_many_files, optional

_RECORD = 1024  # bytes that a record counts as: those of a table depend on who wrote it


class HubSet(RecordFile):
    """The rows of a split of a data set; a record is what its column holds."""

    def __init__(self, hf_path: str, name: str, split: str, column: str, tokens: bool):
        """
        Args:
          hf_path: the data set's name, or a folder that holds it.
          name: its configuration; "" = its only one.
          split: of it.
          column, tokens: as in RecordFile.
        """
        super().__init__(f"{hf_path}:{name}:{split}", column, tokens)
        self._given = hf_path, name, split

    @property
    def num_bytes(self) -> int:
        """Of all records, nominally."""
        return len(self) * _RECORD

    @property
    def stamp(self) -> tuple[Any, ...]:
        """What changes when the data set does."""
        return self.path, len(self), self._table._fingerprint, self.column

    def __len__(self) -> int:
        return len(self._table)

    def _record(self, index: int) -> Record:
        return self._checked(self._table[index][self.column])

    @functools.cached_property
    def _table(self) -> Any:
        path, name, split = self._given
        allow_many_files()  # a table of Arrow files stays open
        library = optional("datasets", "datasets", f"hf_path={path}", "hub")
        try:
            table = library.load_dataset(path, name or None, split=split)
        except Exception as error:  # of the client, of the network, of the set's own script
            what = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"hf_path={path} hf_name={name} (split {split}): neither the cache of datasets nor "
                f"the hub gives it ({what}); load it once where there is a network, or give "
                "files to grain_train_files"
            ) from None
        if self.column not in table.column_names:
            raise ConfigError(f"hf_path={path}: {self._missing(table.column_names)}")
        return table.select_columns([self.column])

    def __reduce__(self):
        return HubSet, (*self._given, self.column, self.tokens)
