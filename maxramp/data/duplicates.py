"""Documents that an earlier one equals, by hashes of 128 bits."""

import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np

from maxramp.data.files.records import Record

_AT_A_TIME = 1 << 25  # hashes that are sorted together; each takes about 70 bytes meanwhile
_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])


def hash_of(record: Record) -> bytes:
    """16 bytes that stand for a text, or for the ids of a document."""
    data = record.encode() if isinstance(record, str) else record.tobytes()
    return hashlib.blake2b(data, digest_size=_HASH.itemsize).digest()


def find(paths: Sequence[pathlib.Path], at_a_time: int = _AT_A_TIME) -> list[np.ndarray]:
    """Which documents repeat an earlier one.

    Args:
      paths: files of hashes, 16 bytes a document, in the order of the documents.
      at_a_time: hashes that are sorted together, about; each part takes a pass over the files.

    Returns:
      For each file the numbers of its documents that do, ascending.
    """
    sizes = [path.stat().st_size // _HASH.itemsize for path in paths]
    starts = np.cumsum([0, *sizes])
    parts = -(-int(starts[-1]) // at_a_time)
    found = [np.empty(0, np.int64)]
    for part in range(parts):
        numbers, hashes = [], []
        for path, size, start in zip(paths, sizes, starts[:-1], strict=True):
            if size:
                there = np.memmap(path, _HASH, "r")
                chosen = np.flatnonzero(there["high"] % parts == part)
                numbers.append(chosen + start)
                hashes.append(there[chosen])
        number, value = np.concatenate(numbers), np.concatenate(hashes)
        order = np.lexsort((value["low"], value["high"]))  # stable: the earliest comes first
        value = value[order]
        found.append(number[order[1:][value[1:] == value[:-1]]])
    repeated = np.sort(np.concatenate(found))
    bounds = np.searchsorted(repeated, starts)
    return [
        repeated[a:b] - start
        for a, b, start in zip(bounds[:-1], bounds[1:], starts[:-1], strict=True)
    ]
