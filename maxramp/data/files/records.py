"""What every file of records can do: be read in order, by pieces.

Record: text (str), or with `tokens` the int32 ids of a document; of the column WHOLE all of the
record's columns by name.
Piece: (start, stop, bytes) of a file in units of its own (bytes, row groups, records); the pieces
of a file cover it once.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy as np

from maxramp.files import storage

Record = str | np.ndarray | dict[str, Any]
WHOLE = ""  # the column that stands for all of a record's
Piece = tuple[int, int, int]


class BadRecord(Exception):
    """What is wrong with a record; callers add the file and the record's place."""

    def __init__(self, reason: str, place: int = -1):
        super().__init__(reason)
        self.place = place  # in the file, in its `unit`


class RecordFile:
    """The records of one file. Handles are opened when first needed and stay in their process."""

    unit = "record"  # what a place in the file counts

    def __init__(self, path: str, column: str, tokens: bool):
        """`path` may be one of fsspec's; `column` is the field of the document, or WHOLE."""
        self.path, self.column, self.tokens = path, column, tokens
        self.data_path = path
        self._make: Callable[[Any], Any] = lambda record: record

    def with_maker(self, make: Callable[[Any], Any]) -> Self:
        other = copy.copy(self)
        other._make = make
        return other

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
        count, total = len(self), self.num_bytes
        step = max(1, count * size // max(1, total))
        ranges = [(first, min(first + step, count)) for first in range(0, count, step)]
        return [(first, last, total * (last - first) // count) for first, last in ranges]

    def read(self, start: int, stop: int) -> Iterator[Record | BadRecord]:
        """In order; in the place of a wrong record, a BadRecord."""
        return (attempt(index, self._record, index) for index in range(start, stop))

    def __len__(self) -> int:
        raise NotImplementedError  # of a file whose pieces are records

    def _record(self, index: int) -> Record:
        raise NotImplementedError

    def where(self, place: int) -> str:
        return f"{self.path}: record {place}"

    def __reduce__(self):
        return type(self), (self.path, self.column, self.tokens)

    def _validate(self, value: Any) -> Record:
        if self.column == WHOLE:
            if not isinstance(value, dict):
                raise BadRecord(f"is not a record of several columns but {describe(value)}")
            return self._make(value)
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

    def _missing(self, there: Iterable[str]) -> "BadRecord":
        names = list(there)
        listed = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        return BadRecord(
            f"has no {self.column}, but {listed or 'nothing'}; name another column in "
            "train_data_columns"
        )


def attempt(place: int, parse: Callable[..., Record], *given: Any) -> Record | BadRecord:
    try:
        return parse(*given)
    except BadRecord as bad:
        return BadRecord(str(bad), place)  # without the frames, which hold the record


def without_nulls(value: Any) -> Any:
    """A table's record without the nulls that its columns fill in where it has no value."""
    if isinstance(value, dict):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


def describe(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


UTF16 = "is UTF-16 and not UTF-8; convert the file (iconv -f UTF-16 -t UTF-8)"


def is_utf16(data: bytes) -> bool:
    """Whether a text begins as UTF-16: with its mark, or with a zero in every second byte."""
    begin = data[:8]
    return begin[:2] in (b"\xff\xfe", b"\xfe\xff") or 3 <= begin.count(0) <= 5


def utf8_error(error: UnicodeDecodeError) -> BadRecord:
    return BadRecord(
        f"is not UTF-8 text (byte {error.start} is {error.object[error.start]:#x}); convert it "
        "(a file of Latin-1: iconv -f LATIN1 -t UTF-8), or leave it out"
    )
