"""Documents that an earlier one equals, by hashes of 128 bits."""

import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np

from maxramp.data.files.records import Record

_SIZE = 16  # bytes of a hash


def hash_of(record: Record) -> bytes:
    """16 bytes that stand for a text, or for the ids of a document."""
    data = record.encode() if isinstance(record, str) else record.tobytes()
    return hashlib.blake2b(data, digest_size=_SIZE).digest()


def find(paths: Sequence[pathlib.Path]) -> list[np.ndarray]:
    """Which documents repeat an earlier one.

    Args:
      paths: files of hashes, 16 bytes a document, in the order of the documents.

    Returns:
      For each file the numbers of its documents that do, ascending.
    """
    hashes = [np.fromfile(path, f"S{_SIZE}") for path in paths]
    repeated = np.ones(sum(map(len, hashes)), bool)
    repeated[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    parts = np.split(repeated, np.cumsum([len(part) for part in hashes])[:-1])
    return [np.flatnonzero(part) for part in parts]
