"""What every file of records can do: be read in order, by pieces.

Glossary
  record    text (str), or with `tokens` the int32 ids of a document; with the column WHOLE all of
            the record's columns by name
  piece     (start, stop, bytes) of a file in units of its own (bytes, row groups, records); the
            pieces of a file cover it once
  position  of a record in its file: its number, or in JSON lines its first byte
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from maxramp.files import storage

Record = str | np.ndarray | dict[str, Any]
WHOLE = ""  # stands for all columns of a record
Piece = tuple[int, int, int]


class BadRecord(Exception):
    """What is wrong with a record; callers add the file and the record's position."""


class RecordFile:
    """The records of one file. Handles are opened when first needed and stay in their process."""

    unit = "record"  # what a position in the file counts

    def __init__(self, path: str, column: str, tokens: bool):
        """Takes what names a file's records; nothing is read yet.

        Args:
          path: on a disk, or an address for fsspec.
          column: the field that holds the document, or WHOLE.
          tokens: whether documents are token ids.
        """
        self.path, self.column, self.tokens = path, column, tokens
        self.data_path = path

    @property
    def num_bytes(self) -> int:
        return storage.size_of(self.data_path)

    @functools.cached_property
    def stamp(self) -> tuple[Any, ...]:
        """Differs between files of other contents, and changes when the file does."""
        path, how = self.data_path, (type(self).__name__, self.column, self.tokens)
        return os.path.basename(path), *storage.version_of(path), *how

    @property
    def is_empty(self) -> bool:
        return not len(self)

    def split(self, size: int) -> list[Piece]:
        """Returns pieces of about `size` bytes, the same at every start; [] for an empty file."""
        count, total = len(self), self.num_bytes
        step = max(1, count * size // max(1, total))
        ranges = [(first, min(first + step, count)) for first in range(0, count, step)]
        return [(first, last, total * (last - first) // count) for first, last in ranges]

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Record | BadRecord]]:
        """Yields the position and the record, or what is wrong with it, in order."""
        return ((index, attempt(self._record, index)) for index in range(start, stop))

    def __len__(self) -> int:
        raise NotImplementedError  # of a file whose pieces are records

    def _record(self, index: int) -> Record:
        raise NotImplementedError

    def where(self, position: int) -> str:
        """Returns file and record, for errors."""
        return f"{self.path}: record {position}"

    def __reduce__(self):
        return type(self), (self.path, self.column, self.tokens)

    def _validate(self, value: Any) -> Record:
        """Returns a value as a record (module docstring); a BadRecord otherwise."""
        if self.column == WHOLE:
            if not isinstance(value, dict):
                raise BadRecord(f"is not a record of several columns but {describe(value)}")
            return value
        if self.tokens:
            try:
                ids = np.asarray(value)
            except ValueError:  # lists of several lengths
                ids = np.asarray(None)
            if ids.size == 0:
                return np.empty(0, np.int32)
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise BadRecord(
                    f"{self.column} holds no list of token ids but {describe(value)}; "
                    "tokenize_train_data=True reads text"
                )
            if ids.min() < 0 or ids.max() >= 2**31:
                wrong = ids[(ids < 0) | (ids >= 2**31)][0]
                raise BadRecord(f"{self.column} holds {wrong}, not a token id (0 to 2^31 - 1)")
            return ids.astype(np.int32)
        if isinstance(value, bytes):
            if is_utf16(value):
                raise BadRecord(UTF16)
            try:
                text = value.decode()
            except UnicodeDecodeError as error:
                raise utf8_error(error) from None
            if "\0" in text:
                raise BadRecord(f"is not text (it holds a zero byte at {text.index(chr(0))})")
            return text
        if not isinstance(value, str):
            raise BadRecord(
                f"{self.column} is {describe(value)}, not text; mend it, name another column in "
                "train_data_columns, or use tokenize_train_data=False for token ids"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON may hold half of a pair, "\ud83d"
            raise BadRecord(
                f"{self.column} holds half of a surrogate pair, {value[error.start]!a}, at "
                f"character {error.start}, which no encoding has; mend it, or leave it out"
            ) from None
        return value

    def _missing(self, columns: Iterable[str]) -> "BadRecord":
        names = list(columns)
        listed = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        return BadRecord(
            f"has no {self.column}, but {listed or 'nothing'}; name another column in "
            "train_data_columns"
        )


def attempt(parse: Callable[[Any], Any], source: Any) -> Any:
    """Returns what `parse` makes of a source, or the BadRecord that it raises."""
    try:
        return parse(source)
    except BadRecord as bad:
        return BadRecord(str(bad))  # without the frames, which hold the record


def without_nulls(value: Any) -> Any:
    """Removes the nulls that a table's columns fill in where a record has no value."""
    if isinstance(value, dict):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


def describe(value: Any) -> str:
    """Returns the type and the beginning of a value, for errors."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


UTF16 = "is UTF-16 and not UTF-8; convert the file (iconv -f UTF-16 -t UTF-8)"


def is_utf16(data: bytes) -> bool:
    """Returns whether a text begins as UTF-16: with its mark, or a zero in every second byte."""
    begin = data[:8]
    return begin[:2] in (b"\xff\xfe", b"\xfe\xff") or 3 <= begin.count(0) <= 5


def utf8_error(error: UnicodeDecodeError) -> BadRecord:
    """Returns what is wrong with a record that is not UTF-8."""
    return BadRecord(
        f"is not UTF-8 text (byte {error.start} is {error.object[error.start]:#x}); convert it "
        "(a file of Latin-1: iconv -f LATIN1 -t UTF-8), or leave it out"
    )
