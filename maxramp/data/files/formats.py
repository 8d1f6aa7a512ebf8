"""JSON lines, Parquet and text files, and the reader of every format."""

import functools
import gzip
import io
import json
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from maxramp.data.files.arrayrecord import ArrayRecordFile
from maxramp.data.files.megatron import MegatronFile
from maxramp.data.files.records import (
    BadRecord,
    Piece,
    Record,
    RecordFile,
    attempt,
    decode_text,
    not_utf8,
    shown,
)
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.files.storage import optional

_BLANK = (b"\n", b"\r\n")
LONGEST_LINE = 1 << 30  # bytes of JSON; no document is longer, and it takes memory several times

SUFFIXES = {
    "arrayrecord": (".array_record", ".arrayrecord", ".riegeli"),
    "parquet": (".parquet", ".pq"),
    "jsonl": tuple(
        f"{name}{packed}"
        for name in (".jsonl", ".ndjson", ".json")
        for packed in ("", ".gz", ".zst")
    ),
    "text": (".txt", ".text", ".md", ".rst", ".py"),
    "megatron": (".bin", ".idx"),
}


def detect(path: str) -> str:
    """The format that a file's name stands for.

    Raises:
      ConfigError: it stands for none.
    """
    for name, suffixes in SUFFIXES.items():
        if path.lower().endswith(suffixes):
            return name
    raise ConfigError(
        f"{path}: its name does not say what it holds; give grain_file_type={'|'.join(SUFFIXES)}"
    )


class TextFile(RecordFile):
    """A file that is one document."""

    def __len__(self) -> int:
        return 1

    def _record(self, index: int) -> Record:
        if self.tokens:
            raise ConfigError(
                f"{self.path}: a text file holds no token ids; use tokenize_train_data=True"
            )
        return decode_text(storage.read_bytes(self.path))

    def where(self, index: int) -> str:
        """The file."""
        return self.path


class JsonLines(RecordFile):
    """A JSON object a line; blank lines are none. Compressed files are read by streams."""

    unit = "byte"

    def split(self, size: int) -> list[Piece]:
        """Ranges of bytes; a compressed file is one."""
        total = storage.size_of(self.path)
        step = total if self._compression else size
        return [(a, min(a + step, total), min(step, total - a)) for a in range(0, total, step or 1)]

    def read(self, start: int, stop: int) -> Iterator[Record | BadRecord]:
        """The lines that begin in bytes [start, stop); of a compressed file, all."""
        with self._open() as file:
            position = 0
            if start:  # a line that begins before `start` belongs to the piece before
                file.seek(start - 1)
                position = start - 1 + self._read_line(file)[1]
            while self._compression or position < stop:
                try:
                    line, size = self._read_line(file)
                except (OSError, EOFError, zlib.error) as error:
                    raise ConfigError(self._torn(error)) from None
                if not line:
                    return
                if line not in _BLANK:
                    yield attempt(position, self._parse, line, size)
                position += size

    def __len__(self) -> int:
        return len(self._index[1]) - 1

    def _record(self, index: int) -> Record:
        data, starts = self._index
        start, stop = int(starts[index]), int(starts[index + 1])
        return self._parse(data[start : min(stop, start + LONGEST_LINE)].tobytes(), stop - start)

    def where(self, index: int) -> str:
        """The file and the number of the line, from 1 on."""
        return self.where_place(int(self._index[1][index]))

    def where_place(self, place: int) -> str:
        """The same of the line at a byte; it is counted, which only errors need."""
        count = 1
        with self._open() as file:
            while place > 0 and (block := file.read(min(place, 1 << 20))):
                count, place = count + block.count(b"\n"), place - len(block)
        return f"{self.path}: line {count}"

    @functools.cached_property
    def _compression(self) -> str:
        return {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(self.path)[1].lower(), "")

    def _open(self) -> BinaryIO:
        file = storage.open_binary(self.path)
        if self._compression == "gzip":
            return gzip.open(file)
        if self._compression == "zstd":
            arrow = optional("pyarrow", "pyarrow", self.path)
            return io.BufferedReader(arrow.CompressedInputStream(file, "zstd"), 1 << 20)
        return io.BufferedReader(file, 1 << 20) if storage.is_remote(self.path) else file

    @staticmethod
    def _read_line(file: BinaryIO) -> tuple[bytes, int]:
        """The next line, of an over-long one its beginning, and its size."""
        line = part = file.readline(LONGEST_LINE)
        size = len(line)
        while size >= LONGEST_LINE and part and not part.endswith(b"\n"):
            part = file.readline(1 << 20)
            size += len(part)
        return line, size

    @functools.cached_property
    def _index(self) -> tuple[Any, np.ndarray]:
        """The bytes of the file, and where its lines that are not blank begin (and the last ends).

        What is compressed or far away is brought to a temporary file first.
        """
        if self._compression or storage.is_remote(self.path):
            with tempfile.TemporaryFile() as copy, self._open() as file:
                try:
                    while block := file.read(1 << 20):
                        copy.write(block)
                except (OSError, EOFError, zlib.error) as error:
                    raise ConfigError(self._torn(error)) from None
                copy.flush()
                empty = not copy.tell()
                data = np.empty(0, np.uint8) if empty else np.memmap(copy, np.uint8, "r")
        else:
            data = storage.map_bytes(self.path)
        blocks = range(0, len(data), 1 << 24)
        breaks = [1 + a + np.flatnonzero(data[a : a + (1 << 24)] == ord("\n")) for a in blocks]
        starts = np.concatenate([[0], *breaks, [len(data)]]).astype(np.int64)
        length, first = np.diff(starts), starts[:-1]
        blank = length == 0
        for size, byte in ((1, ord("\n")), (2, ord("\r"))):
            short = np.flatnonzero(length == size)
            blank[short] = data[first[short]] == byte
        return data, np.append(first[~blank], len(data))

    def _parse(self, line: bytes, size: int) -> Record:
        if size > LONGEST_LINE:
            raise BadRecord(f"has {size:,} bytes, more than the {LONGEST_LINE:,} of a line")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", None) or str(error)
            raise BadRecord(f"is not JSON ({what}); cut off?") from None
        if not isinstance(record, dict):
            raise BadRecord(f"is no JSON object but {shown(record)}")
        if self.column not in record:
            raise self._missing(record)
        return self._checked(record[self.column])

    def _torn(self, error: Exception) -> str:
        if reason := getattr(error, "strerror", None):  # the system's, not the decompressor's
            return f"{self.path}: cannot be read: {reason}"
        return f"{self.path}: is cut off or no {self._compression} file ({error}); make it again"


class _Recent:
    """What was used last, up to a number of bytes; what has `nbytes` may be kept."""

    def __init__(self, limit: int):
        self._limit, self._held, self._kept = limit, 0, {}
        self._lock = threading.Lock()

    def get(self, key: Any, read: Callable[[], Any]) -> Any:
        """The value of a key, read if it is not kept."""
        with self._lock:
            value = self._kept.pop(key, None)
            if value is None:
                value = read()
                self._held += value.nbytes
            self._kept[key] = value  # dicts are in order of insertion: the last used is last
            while self._held > self._limit and len(self._kept) > 1:
                self._held -= self._kept.pop(next(iter(self._kept))).nbytes
            return value


_ROW_GROUPS = _Recent(512 << 20)


class ParquetFile(RecordFile):
    """The rows of one column. A row group is read whole, and the last of them are kept."""

    def split(self, size: int) -> list[Piece]:
        """Ranges of row groups."""
        pieces, start, held = [], 0, 0
        for index in range(self._metadata.num_row_groups):
            held += self._metadata.row_group(index).total_byte_size
            if held >= size or index == self._metadata.num_row_groups - 1:
                pieces.append((start, index + 1, held))
                start, held = index + 1, 0
        return pieces

    def read(self, start: int, stop: int) -> Iterator[Record | BadRecord]:
        """The rows of row groups [start, stop)."""
        index = int(self._starts[start])
        with self._open(self._metadata) as file:
            batches = file.iter_batches(1024, list(range(start, stop)), [self.column])
            while batch := self._guarded(lambda: next(batches, None)):
                for scalar in batch.column(0):
                    yield attempt(index, self._value, scalar)
                    index += 1

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _record(self, index: int) -> Record:
        group = int(np.searchsorted(self._starts, index, "right")) - 1
        column = _ROW_GROUPS.get((self.path, self.column, group), lambda: self._column(group))
        return self._value(column[index - int(self._starts[group])])

    def _column(self, group: int) -> Any:
        with self._open(self._metadata) as file:
            return self._guarded(lambda: file.read_row_group(group, [self.column]).column(0))

    def _value(self, scalar: Any) -> Record:
        try:
            return self._checked(scalar.as_py())
        except UnicodeDecodeError as error:  # Arrow reads strings without looking at them
            raise not_utf8(error) from None

    def _open(self, metadata: Any = None) -> Any:
        parquet = optional("pyarrow.parquet", "pyarrow", self.path)
        source = storage.open_binary(self.path)
        return self._guarded(lambda: parquet.ParquetFile(source, metadata=metadata))

    @functools.cached_property
    def _metadata(self) -> Any:
        # Kept without the file: a run may have more files than a process can hold open.
        with self._open() as file:
            names = file.schema_arrow.names
            if self.column not in names:
                raise ConfigError(f"{self.path}: {self._missing(names)}")
            return file.metadata

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        return np.cumsum([0, *(group.num_rows for group in groups)])

    def _guarded(self, reading: Callable[[], Any]) -> Any:
        try:
            return reading()
        except (OSError, ValueError) as error:  # Arrow's own are among them
            what = " ".join(str(error).split())[:150]
            raise ConfigError(f"{self.path}: is torn or no Parquet file ({what})") from None


READERS = {
    "arrayrecord": ArrayRecordFile,
    "parquet": ParquetFile,
    "jsonl": JsonLines,
    "text": TextFile,
    "megatron": MegatronFile,
}
