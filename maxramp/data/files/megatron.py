"""Megatron's token files: `NAME.bin` holds the tokens, `NAME.idx` says where documents lie in it.

An index is little-endian: 9 bytes of magic, version (uint64), code of the dtype (uint8), number of
sequences n (uint64), number of document borders d (uint64); then the length of each sequence in
tokens (int32 [n]), its first byte in the .bin (int64 [n]) and the borders, from 0 to n: document i
is sequences [borders[i], borders[i + 1]) (int64 [d]). A mode per sequence (int8 [n]) may follow.
"""

import array
import bisect
import contextlib
import functools
import hashlib
import itertools
import os
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from maxramp.data.files.records import RecordFile
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.files.place import write_whole

_MAGIC = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)
_HEADER = struct.Struct("<17sBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_SPANS, _SPAN = 64, 256  # parts of a sample, and the tokens of each
_BLOCK = 1 << 20  # sequences looked at together


class MegatronFile(RecordFile):
    """A pair of files; a record is a document, and all of them are one stream of tokens."""

    def __init__(self, path: str, column: str = "", tokens: bool = True):
        """Takes the path of both files, with or without .bin or .idx; the rest is not used."""
        super().__init__(path.removesuffix(".bin").removesuffix(".idx"), column, True)
        self.data_path = f"{self.path}.bin"

    @functools.cached_property
    def num_tokens(self) -> int:
        return storage.size_of(self.data_path) // self.dtype.itemsize

    @functools.cached_property
    def stamp(self) -> tuple[Any, ...]:
        return *super().stamp, *storage.version_of(f"{self.path}.idx")

    @property
    def dtype(self) -> np.dtype:
        return self._header[0]

    def tokens_between(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of the stream, fewer at its end, int32; raises a ConfigError
        if one is negative or too large."""
        tokens = self.raw_tokens(start, stop)
        if self.dtype.kind == "i" and tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**31:
            position = int(np.argmax((tokens < 0) | (tokens >= 2**31)))
            raise ConfigError(
                f"{self.where_token(start + position)}: {tokens[position]} is not a token id (0 to "
                "2^31 - 1)"
            )
        return tokens.astype(np.int32)

    def raw_tokens(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns tokens [start, stop), all without a `stop`, in the file's dtype and not
        checked."""
        size, stop = self.dtype.itemsize, self.num_tokens if stop is None else stop
        return self._data[start * size : stop * size].view(self.dtype)

    def where_token(self, position: int) -> str:
        """Returns file, document and token of a position in the stream, for errors."""
        sequence = bisect.bisect_right(self._pointers, position * self.dtype.itemsize) - 1
        document = bisect.bisect_right(self._borders, sequence) - 1
        return f"{self.path}.bin: document {document}, token {position}"

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Returns where documents begin in tokens [start, stop): int64, ascending; an empty one
        where the next does. The index is read on access (by bisect: numpy would copy what is not
        aligned), so a row costs the same among a billion documents.
        """
        size = self.dtype.itemsize
        first, last = (bisect.bisect_left(self._pointers, n * size) for n in (start, stop))
        begin, end = (bisect.bisect_left(self._borders, sequence) for sequence in (first, last))
        return self._pointers[self._borders[begin:end]] // size

    def __len__(self) -> int:
        return max(0, self._header[2] - 1)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens_between(*map(self._start_of, self._borders[index : index + 2]))

    _record = __getitem__

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of every document: int64."""
        starts = np.append(self._pointers // self.dtype.itemsize, self.num_tokens)
        return np.diff(starts[self._borders])

    def counts(self, length: int, cut: bool) -> np.ndarray:
        """Counts as `Documents.counts`; every token of a text but the first is a target."""
        lengths = self.lengths()
        return np.stack([lengths, lengths - 1, 0 * lengths], 1).astype(np.int32)

    def _start_of(self, sequence: int) -> int:
        exists = sequence < self._header[1]
        return int(self._pointers[sequence]) // self.dtype.itemsize if exists else self.num_tokens

    def where(self, index: int) -> str:
        return f"{self.path}.bin: document {index}"

    def check(self) -> None:
        """Raises a ConfigError unless there are tokens, sequences fill the .bin in order, and
        documents take them all."""
        _, n, _ = self._header
        lengths = self._field(0, n, "<i4")
        end, itemsize, total = 0, self.dtype.itemsize, storage.size_of(self.data_path)
        for first in range(0, n, _BLOCK):
            sizes = lengths[first : first + _BLOCK].astype(np.int64)
            pointers = self._pointers[first : first + _BLOCK]
            ends = end + np.cumsum(sizes * itemsize)
            wrong = (sizes < 0) | (pointers != ends - sizes * itemsize) | (ends > total)
            if wrong.any():
                i = int(np.argmax(wrong))
                raise ConfigError(
                    f"{self.path}.idx: sequence {first + i} has {sizes[i]} tokens from byte "
                    f"{pointers[i]} on, but the one before ends at {ends[i] - sizes[i] * itemsize} "
                    f"and {self.data_path} at {total}; one of them is torn: make them again"
                )
            end = int(ends[-1])
        borders = self._borders
        if end != total:
            raise ConfigError(
                f"{self.data_path}: has {total} bytes, but its index names {end // itemsize} "
                f"tokens of {itemsize}; one of them is torn: make them again"
            )
        ends = [*borders[:1], *borders[-1:]]
        if ends != [0, n] or (np.diff(borders) < 0).any():
            raise ConfigError(
                f"{self.path}.idx: its document borders do not run from 0 to its {n} sequences; "
                "make it again"
            )
        if not total:
            raise ConfigError(f"{self.data_path}: holds no tokens; leave it out")

    @functools.cached_property
    def _data(self) -> Any:
        return storage.map_bytes(self.data_path)

    @functools.cached_property
    def _header(self) -> tuple[np.dtype, int, int]:
        """dtype, number of sequences, number of borders; a ConfigError if the index is torn or
        another program's."""
        path = f"{self.path}.idx"
        with storage.open_binary(path) as file:
            header = file.read(_HEADER.size)
        size = storage.size_of(path)
        _, code, n, d = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        wanted = _HEADER.size + 12 * n + 8 * d
        if not header.startswith(_MAGIC):
            raise ConfigError(
                f"{path}: is not a Megatron index of version 1 (it begins with {header[:17]!r}, "
                f"not {_MAGIC!r})"
            )
        if size not in (wanted, wanted + n):
            raise ConfigError(
                f"{path}: is torn: {size} bytes, but {n} sequences and {d} document borders take "
                f"{wanted}; make it again"
            )
        if _DTYPES.get(code, "<f0")[1] == "f":
            raise ConfigError(
                f"{path}: dtype code {code} is not an integer type; tokens are of code 1 to 5 or 8"
            )
        return np.dtype(_DTYPES[code]), n, d

    @functools.cached_property
    def _pointers(self) -> np.ndarray:
        return self._field(4 * self._header[1], self._header[1], "<i8")

    @functools.cached_property
    def _borders(self) -> np.ndarray:
        return self._field(12 * self._header[1], self._header[2], "<i8")

    def _field(self, offset: int, count: int, dtype: str) -> np.ndarray:
        start = _HEADER.size + offset
        return self.index[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    @functools.cached_property
    def index(self) -> np.ndarray:
        return np.asarray(storage.map_bytes(f"{self.path}.idx")[:])


class TokenStream:
    """The tokens of several files as one array that is read on access."""

    def __init__(self, files: Sequence[MegatronFile]):
        self._files = files
        self._starts = [0, *itertools.accumulate(file.num_tokens for file in files)]

    def __len__(self) -> int:
        return self._starts[-1]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[MegatronFile, int, int, int]]:
        """Yields each file in reach, with its tokens [first, last) and where it begins."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            offset, end = self._starts[index], min(stop, self._starts[index + 1])
            if start < end:
                yield self._files[index], start - offset, end - offset, offset
            start, index = end, index + 1

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns the tokens of a slice, int32, which must not be empty; raises as
        `tokens_between`."""
        start, stop, _ = part.indices(len(self))
        parts = self._parts(start, stop)
        return np.concatenate([file.tokens_between(a, b) for file, a, b, _ in parts])

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Returns where documents begin in tokens [start, stop), as `MegatronFile` does."""
        parts = self._parts(start, stop)
        return np.concatenate([first + file.document_starts(a, b) for file, a, b, first in parts])

    def sample(self) -> str:
        """Returns a hash of evenly spaced tokens."""
        digest, last = hashlib.blake2b(digest_size=8), max(0, len(self) - _SPAN)
        for start in np.linspace(0, last, _SPANS, dtype=np.int64).tolist() if len(self) else ():
            digest.update(self[start : start + _SPAN].tobytes())
        return digest.hexdigest()

    def where(self, position: int) -> str:
        index = bisect.bisect_right(self._starts, position) - 1
        return self._files[index].where_token(position - self._starts[index])


class MegatronWriter(contextlib.AbstractContextManager):
    """Writes a pair of files, a document a sequence; `finish` gives them their names."""

    def __init__(self, path: str, dtype: np.dtype):
        self._path, self._dtype = path, np.dtype(dtype).newbyteorder("<")
        self._unfinished = f"{path}.bin.{os.getpid()}.tmp"  # no other process writes to it
        self._data = open(self._unfinished, "wb", buffering=1 << 20)  # noqa: SIM115
        self._sizes = array.array("i")
        self.num_tokens, self.max_token = 0, -1

    def __exit__(self, kind, error, trace) -> None:
        self._data.close()

    def add(self, documents: Sequence[np.ndarray]) -> None:
        """Writes documents, at least one, behind the others; the dtype must hold their ids."""
        tokens = np.concatenate(documents)
        if len(tokens):
            self.max_token = max(self.max_token, int(tokens.max()))
        self._data.write(tokens.astype(self._dtype).data)
        self._sizes.extend(map(len, documents))
        self.num_tokens += len(tokens)

    def finish(self) -> dict[str, Any]:
        """Gives the files their names, when all is added; returns counts and the index's hash. Call
        it once, inside the context: without it only a .tmp is left."""
        sizes = np.asarray(self._sizes, "<i4")
        pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * self._dtype.itemsize
        borders = np.arange(len(sizes) + 1, dtype="<i8")
        code = next(code for code, name in _DTYPES.items() if np.dtype(name) == self._dtype)
        header = _HEADER.pack(_MAGIC, code, len(sizes), len(borders))
        index = b"".join([header, sizes, pointers, borders])
        self._data.flush()
        os.fsync(self._data.fileno())
        os.replace(self._unfinished, f"{self._path}.bin")
        write_whole(pathlib.Path(f"{self._path}.idx"), index)
        counts = {"documents": len(sizes), "tokens": self.num_tokens, "max_token": self.max_token}
        return counts | {"index": hashlib.blake2b(index, digest_size=8).hexdigest()}
