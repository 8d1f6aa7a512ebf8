"""The file of a snapshot: the pieces of a state's arrays that one process keeps.

The pieces stand one after another. Behind them come, as JSON, their index and all fields of the
checkpoint, and the length of this JSON in 8 bytes. A file gets its name when all of it is written.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxramp.checkpoints.folder import Checkpoint

_LENGTH = 8  # bytes of the index's length

Arrays = Mapping[str, tuple[str, Sequence[int]]]  # dtype and shape of each, by name
Values = tuple[str, Sequence[int], np.ndarray]  # of an array from an index on


class FileName(NamedTuple):
    """The name of a file: STEP.START.PROCESS.PROCESSES."""

    step: int
    start: str  # the id of the start that took it
    process: int  # that wrote it
    processes: int  # of its job

    def __str__(self) -> str:
        return ".".join(map(str, self))


class Piece(NamedTuple):
    """A part of an array, and its place in the file."""

    array: str
    start: Sequence[int]  # the index of its first value
    shape: Sequence[int]
    offset: int
    size: int  # bytes
    checksum: int

    def overlap(self, start: Sequence[int], shape: Sequence[int]) -> tuple[Any, Any] | None:
        """Returns where it meets another part of its array: slices of itself, and of that part;
        None if it does not."""
        own, other = [], []
        for a, m, b, n in zip(self.start, self.shape, start, shape, strict=True):
            low, high = max(a, b), min(a + m, b + n)
            if low >= high:
                return None
            own.append(slice(low - a, high - a))
            other.append(slice(low - b, high - b))
        return tuple(own), tuple(other)


@dataclasses.dataclass(frozen=True)
class Snapshot(Checkpoint):
    """A checkpoint whose arrays lie with the nodes; `path` is where its checkpoint would be."""

    kind = "snapshot"

    arrays: Arrays = dataclasses.field(default_factory=dict)
    # the values of an array from an index on, of a shape
    read: Callable[[str, Sequence[int], Sequence[int]], np.ndarray] | None = None

    def __str__(self) -> str:
        return f"the snapshot after step {self.step}"


def list_files(folder: pathlib.Path) -> list[FileName]:
    """Lists the files of snapshots in a folder, the oldest step first; [] without the folder."""
    names = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(ValueError):  # other files, such as an unfinished one
            step, start, process, processes = path.name.split(".")
            names.append(FileName(int(step), start, int(process), int(processes)))
    return sorted(names)


def write_pieces(
    path: pathlib.Path, checkpoint: Checkpoint, arrays: Arrays, pieces: Iterable[Values]
) -> None:
    """Writes the file of this process's pieces, host arrays that may be made as it goes; raises as
    `write_parts`."""

    def parts() -> Iterator[bytes | memoryview]:
        listed, offset = [], 0
        for name, start, x in pieces:
            data = memoryview(x.reshape(-1).view(np.uint8))
            listed.append(Piece(name, start, x.shape, offset, x.nbytes, zlib.crc32(data)))
            offset += x.nbytes
            yield data
        index = {"checkpoint": checkpoint.to_json(), "arrays": arrays, "pieces": listed}
        data = json.dumps(index).encode()
        yield data
        yield len(data).to_bytes(_LENGTH, "big")

    write_parts(path, parts())


def write_parts(path: pathlib.Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a file to the disk, whole or not at all; an OSError leaves the file as it was
    before."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with open(unfinished, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_part(path: pathlib.Path, offset: int, size: int) -> bytes:
    """Reads `size` bytes from an offset on, fewer at the end of the file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def verify(path: pathlib.Path) -> dict[str, Any] | None:
    """Reads what stands behind the pieces: `checkpoint`, `arrays` and `pieces` (the fields of
    `Piece`). None if the file is missing or torn, or a piece is not as it was written."""
    try:
        with open(path, "rb") as file:
            end = file.seek(-_LENGTH, os.SEEK_END)
            begin = end - int.from_bytes(file.read(_LENGTH), "big")
            file.seek(begin)
            index = json.loads(file.read(end - begin))
        for piece in (Piece(*values) for values in index["pieces"]):
            data = np.memmap(path, np.uint8, "r", piece.offset, (piece.size,))
            if zlib.crc32(data) != piece.checksum:
                return None
        return index
    except (OSError, ValueError, LookupError, TypeError):
        return None
