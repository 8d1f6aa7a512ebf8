"""Prepared sets: a folder of Megatron token files with a manifest of what they hold.

manifest.json: format, version, source (a hash of the inputs and how they were read), tokenizer
(null where the input was tokens), dtype, documents, tokens, max_token, hash (of all tokens and
document lengths, in order), and for each shard its name, documents, tokens, max_token, hash, and
index (a hash of the .idx: which tokens make a document).

A set of chats has `chats` too: the keys and the hash of the template that made it (made_by), how
many of its tokens are targets, and how many chats are left out, why. Beside the tokens of a shard
are those of SHARD.targets, a byte for each token: 1 for a target, 2 where the second chat of a pair
begins; targets_index is a hash of their .idx. A chat that is left out for the marks in its messages
is an empty document.
"""

import hashlib
import json
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from maxramp.commandline import count
from maxramp.data.files.megatron import MegatronFile, TokenStream
from maxramp.data.rows import LEFT_OUT, LONG, MARKED, UNANSWERED, Document
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.objectives.table import find_objective

FORMAT, VERSION, NAME = "maxramp prepared tokens", 4, "manifest.json"
TARGETS = ".targets"  # what the files beside a shard's tokens are called, behind its name
_TARGET, _BEGINS = 1, 2

_PRIME = 2**127 - 1
_POINT = 0x1E3779B97F4A7C15F39CC0605CEDC834  # digits of the golden ratio


class ChatShard:
    """A shard of a set of chats; a record is a chat, or a pair."""

    def __init__(self, tokens: MegatronFile, targets: MegatronFile):
        self.tokens, self._targets = tokens, targets

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Document:
        tokens, what = self.tokens[index], self._targets[index]
        if not len(tokens):
            return Document(tokens, left_out=MARKED)
        begins = np.flatnonzero(what & _BEGINS).tolist()
        return Document(tokens, (what & _TARGET).astype(bool), begins=(0, *begins))

    def counts(self, length: int, cut: bool) -> np.ndarray:
        """Counts, as `Documents.counts`, what `packing.fit_to_row` makes of every chat: it reads
        what every token of the shard is."""
        lengths, what = self.tokens.lengths(), self._targets.raw_tokens()
        starts = np.cumsum(lengths) - lengths
        is_target, is_text = what & _TARGET, np.zeros(len(what) + 1, bool)
        is_text[starts] = True
        is_target[starts[lengths > 0]] = 0  # what begins a document is nobody's target
        for chat in np.flatnonzero(lengths > length + 1):
            is_target[starts[chat] + length + 1 : starts[chat] + lengths[chat]] = 0
        targets = _sum_parts(is_target, starts)
        is_text[:-1] |= (what & _BEGINS) > 0
        texts = np.flatnonzero(is_text[:-1])
        is_target[texts] = 0
        answered = np.ones(len(lengths), bool)
        owners = np.searchsorted(starts, texts, "right") - 1
        answered[owners[_sum_parts(is_target, texts) == 0]] = False
        reasons = np.where(answered, 0, LEFT_OUT.index(UNANSWERED))
        if not cut:
            reasons[lengths > length + 1] = LEFT_OUT.index(LONG)
        reasons[lengths == 0] = LEFT_OUT.index(MARKED)
        counts = np.stack([np.minimum(lengths, length + 1), targets, reasons], 1).astype(np.int32)
        counts[reasons > 0, :2] = 0
        return counts


def _sum_parts(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns the sums of values from each start up to the next; 0 where that is the same."""
    sums, ends = np.zeros(len(starts), np.int64), np.append(starts[1:], len(values))
    if (filled := ends > starts).any():
        sums[filled] = np.add.reduceat(values, starts[filled], dtype=np.int32)
    return sums


def targets_of(document: Document) -> np.ndarray:
    """Returns what is kept of a chat, with targets, beside its tokens: int32 [tokens]."""
    if document.left_out:
        return np.empty(0, np.int32)
    what = document.is_target.astype(np.int32) * _TARGET
    what[list(document.begins[1:])] |= _BEGINS
    return what


def is_prepared(folder: str) -> bool:
    """Returns whether a folder is a prepared set: its manifest, the last file of one, is there."""
    return storage.exists(posixpath.join(folder, NAME))


def hash_documents(documents: Sequence[np.ndarray]) -> int:
    """Hashes documents of token ids, in order; `join` joins the hash with that of others.

    With b(d) a 127-bit hash of the tokens of one document, the hash of d_1 ... d_n is the sum of
    b(d_i) x^(n - i) modulo a prime. For a sequence u followed by v it is h(u) x^len(v) + h(v) (Karp
    and Rabin, Efficient randomized pattern-matching algorithms, 1987), so where the shards end does
    not matter.
    """
    value = 0
    for document in documents:
        tokens = np.ascontiguousarray(document, "<i4")
        digest = hashlib.blake2b(tokens.data, digest_size=16).digest()
        value = (value * _POINT + int.from_bytes(digest)) % _PRIME
    return value


def join(first: int, second: int, count: int) -> int:
    """Returns the hash of documents and `count` others after them, by their hashes."""
    return (first * pow(_POINT, count, _PRIME) + second) % _PRIME


def read_manifest(folder: str) -> dict[str, Any]:
    """Reads what a set holds; a ConfigError if it is not finished, torn or of another version."""
    path = posixpath.join(folder, NAME)
    if not storage.exists(path):
        raise ConfigError(f"{folder}: is not a prepared set (it has no {NAME}), or is not finished")
    try:
        manifest = json.loads(storage.read_bytes(path))
        kind = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: is torn or not a manifest; prepare the set again") from None
    if kind != (FORMAT, VERSION):
        raise ConfigError(
            f"{path}: is of format {kind[0]!r} version {kind[1]}, not {FORMAT!r} version "
            f"{VERSION}; prepare it again"
        )
    return manifest


def describe(manifest: dict[str, Any]) -> str:
    """Returns documents, tokens and targets of a set, for a person."""
    documents, tokens, chats = manifest["documents"], manifest["tokens"], manifest.get("chats")
    if not chats:
        return f"{count(documents, 'document')}, {tokens:,} tokens"
    noun = find_objective(chats["made_by"]).noun
    share = chats["targets"] / tokens
    return f"{documents:,} {noun}, {tokens:,} tokens, {share:.1%} of them targets"


def describe_left_out(manifest: dict[str, Any]) -> list[str]:
    """Returns how many chats are left out, a line for each reason."""
    counts = manifest.get("chats", {}).get("left_out", {})
    return [f"{count} {why}" for why, count in counts.items() if count]


def vocab_size_for(manifest: dict[str, Any]) -> int:
    """Returns the vocab_size to train on a set with: a multiple of 64."""
    tokenizer = manifest["tokenizer"]
    return -(-(tokenizer["vocab_size"] if tokenizer else manifest["max_token"] + 1) // 64) * 64


class PreparedSet(NamedTuple):
    """An open set."""

    folder: str
    manifest: dict[str, Any]
    shards: list[MegatronFile] | list[ChatShard]
    digest: str  # of all that was prepared, and of tokens that are in the files now


def open_set(folder: str) -> PreparedSet:
    """Opens a set, reading its indexes and evenly spaced tokens, not all; a ConfigError if an index
    or a file's size is not what was prepared."""
    manifest = read_manifest(folder)

    def open_shard(shard: dict[str, Any]) -> MegatronFile | ChatShard:
        tokens = open_file(shard, shard["name"], manifest["dtype"], shard["index"])
        if "chats" not in manifest:
            return tokens
        name = f"{shard['name']}{TARGETS}"
        return ChatShard(tokens, open_file(shard, name, "uint8", shard["targets_index"]))

    def open_file(shard: dict[str, Any], name: str, dtype: str, index: str) -> MegatronFile:
        path, wanted_dtype = posixpath.join(folder, name), np.dtype(dtype).newbyteorder("<")
        file = MegatronFile(path)
        contents = file.dtype, len(file), storage.size_of(file.data_path)
        wanted = wanted_dtype, shard["documents"], shard["tokens"] * wanted_dtype.itemsize
        if contents != wanted:
            says = "{1} documents of {0} in {2} bytes".format
            raise ConfigError(
                f"{path}.bin and .idx hold {says(*contents)}, but {NAME} says {says(*wanted)}: "
                "torn; prepare the set again"
            )
        digest = hashlib.blake2b(file.index, digest_size=8).hexdigest()
        if digest != index:
            raise ConfigError(
                f"{path}.idx is not the one that was prepared (hash {digest}, {NAME} says {index});"
                " prepare the set again"
            )
        return file

    shards = storage.map_in_threads(open_shard, manifest["shards"])
    # Tokens may have been exchanged since the set was prepared.
    stream = TokenStream([x.tokens if isinstance(x, ChatShard) else x for x in shards])
    return PreparedSet(folder, manifest, shards, f"{manifest['hash']}{stream.sample()}")
