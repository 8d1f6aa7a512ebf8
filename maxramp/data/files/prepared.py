"""Prepared sets: a folder of Megatron token files with a manifest of what they hold.

manifest.json: format, version, source (a hash of the inputs and how they were read), tokenizer
(null where the input was tokens), dtype, documents, tokens, max_token, hash (of all tokens and
document lengths, in order), and for each shard its name, documents, tokens, max_token and hash.
"""

import concurrent.futures
import hashlib
import json
import posixpath
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.data.files.megatron import MegatronFile
from maxramp.errors import ConfigError
from maxramp.files import storage

FORMAT, VERSION, NAME = "maxramp prepared tokens", 3, "manifest.json"

_PRIME = 2**127 - 1
_POINT = 0x1E3779B97F4A7C15F39CC0605CEDC834  # digits of the golden ratio


def is_prepared(folder: str) -> bool:
    """Whether a folder is a prepared set."""
    return storage.exists(posixpath.join(folder, NAME))


class DocumentsHash:
    """A hash of documents in order that can be taken of parts of the sequence and joined.

    With b(d) a 127-bit hash of the tokens of one document, the hash of d_1 ... d_n is the sum of
    b(d_i) x^(n - i) modulo a prime. For a sequence u followed by v it is h(u) x^len(v) + h(v) (Karp
    and Rabin, Efficient randomized pattern-matching algorithms, 1987), so where the shards end does
    not matter.
    """

    def __init__(self):
        self.value = 0

    def add(self, documents: Sequence[np.ndarray]) -> None:
        """Appends documents of token ids."""
        for document in documents:
            tokens = np.ascontiguousarray(document, "<i4")
            digest = int.from_bytes(hashlib.blake2b(tokens.data, digest_size=16).digest())
            self.value = (self.value * _POINT + digest) % _PRIME

    def join(self, value: int, count: int) -> None:
        """Appends a sequence of `count` documents by its hash."""
        self.value = (self.value * pow(_POINT, count, _PRIME) + value) % _PRIME

    def hex(self) -> str:
        """The hash in 32 digits."""
        return f"{self.value:032x}"


def make_manifest(
    shards: list[dict[str, Any]], tokenizer: dict[str, Any] | None, dtype: str, source: str
) -> dict[str, Any]:
    """The manifest of shards, in order; `source` identifies what they were made from."""
    whole, documents = DocumentsHash(), sum(shard["documents"] for shard in shards)
    for shard in shards:
        whole.join(int(shard["hash"], 16), shard["documents"])
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "tokenizer": tokenizer,
        "dtype": dtype,
        "documents": documents,
        "tokens": sum(shard["tokens"] for shard in shards),
        "max_token": max((shard["max_token"] for shard in shards), default=-1),
        "hash": hashlib.blake2b(f"{whole.hex()} {documents}".encode(), digest_size=8).hexdigest(),
        "shards": shards,
    }


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a prepared set.

    Raises:
      ConfigError: it is torn, of another version, or of a set without tokens.
    """
    path = posixpath.join(folder, NAME)
    if not storage.exists(path):
        raise ConfigError(f"{folder}: is no prepared set (it has no {NAME}), or was not finished")
    try:
        manifest = json.loads(storage.read_bytes(path))
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise ConfigError(
                f"{path}: is of format {manifest['format']!r} version {manifest['version']}, not "
                f"{FORMAT!r} version {VERSION}; prepare it again"
            )
        made = make_manifest(*map(manifest.get, ("shards", "tokenizer", "dtype", "source")))
        torn = [name for name in made if manifest[name] != made[name]]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is torn or no manifest; prepare the set again") from None
    if torn:
        raise ConfigError(f"{path}: {torn[0]} is not what its shards add up to; prepare it again")
    if not manifest["tokens"]:
        raise ConfigError(f"{path}: the set has {manifest['documents']} documents and no tokens")
    return manifest


def open_set(folder: str) -> tuple[dict[str, Any], list[MegatronFile]]:
    """The manifest of a prepared set, and its files in order.

    Of each file only its size and its header are read.

    Raises:
      ConfigError: it is no such set, or a file is missing, torn or of another dtype.
    """
    manifest = read_manifest(folder)
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")

    def open_shard(shard: dict[str, Any]) -> MegatronFile:
        path, n = posixpath.join(folder, shard["name"]), shard["documents"]
        file = MegatronFile(path)
        if file.dtype != dtype:
            raise ConfigError(
                f"{path}.idx: its tokens are {file.dtype}, but {NAME} says {dtype}; prepare the "
                "set again"
            )
        for suffix, wanted in (("bin", shard["tokens"] * dtype.itemsize), ("idx", 42 + 20 * n)):
            there = storage.size_of(f"{path}.{suffix}")
            if there != wanted:
                raise ConfigError(
                    f"{path}.{suffix}: has {there} bytes, but {NAME} says {wanted} ({n} documents, "
                    f"{shard['tokens']} tokens): torn; prepare the set again"
                )
        return file

    # Thousands of files on slow storage: in threads.
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return manifest, list(pool.map(open_shard, manifest["shards"]))
