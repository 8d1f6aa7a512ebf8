"""grain_train_files and grain_eval_files -> the parts of a corpus."""

import dataclasses
import glob
import hashlib
import itertools
import math
import os
import posixpath
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.data import tokenizers
from maxramp.data.corpus import APART, Corpus, Part
from maxramp.data.files import formats, prepared
from maxramp.data.files.hubset import HubSet
from maxramp.data.files.megatron import MegatronFile, TokenStream
from maxramp.data.files.records import RecordFile
from maxramp.data.keys import DataKeys
from maxramp.data.rows import Chain, Documents, RecordRows, StreamRows, TokenDocuments
from maxramp.data.tokenizer_keys import MARK_KEYS
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage

_SAMPLED = 64  # items of a part that are read at the start, for its hash


def parse(key: str, value: str) -> list[tuple[str, float]]:
    """(glob, weight) of every entry of "glob,weight;glob,weight"; a single one needs no weight.

    Raises:
      ConfigError: an entry without a glob, or without a weight above 0.
    """
    entries = value.split(";")
    parsed = []
    for entry in entries:
        pattern, comma, text = (part.strip() for part in entry.rpartition(","))
        if not comma and len(entries) == 1:
            pattern, text = text, "1"
        if not pattern:
            what = "is empty" if not entry.strip() else "has no weight"
            raise ConfigError(
                f'{key}={value}: the entry "{entry}" {what}; write glob,weight;glob,weight'
            )
        try:
            weight = float(text)
        except ValueError:
            raise ConfigError(
                f'{key}={value}: the weight "{text}" of {pattern} is no number; write glob,weight'
            ) from None
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"{key}={value}: the weight {text} of {pattern} must be above 0; leave it out"
            )
        parsed.append((pattern, weight))
    return parsed


def entry_of(key: str, path: str) -> str:
    """The value of grain_train_files that stands for a path, whatever characters it has.

    Raises:
      ConfigError: it has one that always ends an entry; names the key whose value the path is.
    """
    if ";" in path:
        raise ConfigError(
            f"{key} {path}: a ; ends an entry of grain_train_files; give a path without it"
        )
    return f"{glob.escape(path)},1" if "," in path else glob.escape(path)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One entry of a mixture, opened; `hash` is of its tokens, the rest as in Part and Corpus."""

    name: str
    weight: float
    items: Any
    documents: bool
    hash: str

    @property
    def packed(self) -> bool:
        return isinstance(self.items, StreamRows) and self.items.separate


def open_mixture(keys: DataKeys) -> Corpus:
    """Opens the corpus of dataset_type=grain or hf.

    Raises:
      ConfigError: files that are missing, torn, empty or of another kind than the keys say.
    """
    opener = _Opener(keys)
    source = "hf_path" if keys.dataset_type == "hf" else "grain_train_files"
    if keys.dataset_type == "hf":
        train = [opener.hub_set(keys.train_split)]
        evaluated = [opener.hub_set(keys.hf_eval_split)] if keys.hf_eval_split else []
    else:
        train = opener.entries("grain_train_files", keys.grain_train_files)
        eval_files = keys.grain_eval_files
        evaluated = opener.entries("grain_eval_files", eval_files) if eval_files else []
    kinds = {entry.documents: entry.name for entry in (*train, *evaluated)}
    if len(kinds) > 1:
        raise ConfigError(
            f"{kinds[False]} holds rows or a stream of tokens and {kinds[True]} documents, which "
            "do not mix; prepare the documents with maxramp.prepare"
        )
    (documents,) = kinds
    cuts = [len(entry.items) for entry in train]
    held_out = [entry.items for entry in evaluated]
    if not evaluated:  # the end of every part
        cuts = [count - round(count * keys.eval_fraction) for count in cuts]
        held_out = [e.items.span(cut, len(e.items)) for e, cut in zip(train, cuts, strict=True)]
    parts = tuple(
        Part(entry.name, entry.weight, entry.items.span(0, cut))
        for entry, cut in zip(train, cuts, strict=True)
    )
    noun = "documents" if documents else "rows"
    for part in parts:
        if not len(part.items):
            raise ConfigError(
                f"{source}: {part.name} has no {noun} left to train on; give more data, "
                "or a smaller eval_fraction"
            )
    count, held_count = sum(cuts), sum(map(len, held_out))
    if keys.eval_interval > 0 and not held_count:
        raise ConfigError(
            f"eval_interval={keys.eval_interval}, but eval_fraction={keys.eval_fraction} of "
            f"{count} {noun} holds none out; give grain_eval_files, a larger eval_fraction, or "
            "eval_interval=-1"
        )
    total = sum(part.weight for part in parts)
    names = [f"{part.name} {part.weight / total:.3g}" for part in parts]
    path = "" if opener.uses_tokenizer else keys.tokenizer_path
    unused = f"; tokenizer_path={path} is not used, the files hold tokens" if path else ""
    hashed = [keys.max_target_length, cuts, [(entry.weight, entry.hash) for entry in train]]
    hashed.append([entry.hash for entry in evaluated])
    packed = any(entry.packed for entry in (*train, *evaluated))
    return Corpus(
        parts,
        Chain(held_out),
        f"{', '.join(names) if len(parts) > 1 else parts[0].name}: {count} {noun} to train on and "
        f"{held_count} held out{unused}",
        hashlib.blake2b(repr(hashed).encode(), digest_size=8).hexdigest() + APART * packed,
        documents,
        packed,
    )


class _Opener:
    """Opens entries of a mixture, the tokenizer with the first that needs it.

    Attributes:
      uses_tokenizer: whether an entry was tokenized by the tokenizer of the keys, now or before.
    """

    def __init__(self, keys: DataKeys):
        self._keys = keys
        self._tokenizer: Tokenizer | None = None
        self._first_set: tuple[str, dict[str, Any]] | None = None  # that names its tokenizer
        self.uses_tokenizer = False

    def entries(self, key: str, value: str) -> list[_Entry]:
        """The entries of a key's value, opened."""
        return [
            _Entry(pattern, weight, *self._open(key, pattern))
            for pattern, weight in parse(key, value)
        ]

    def hub_set(self, split: str) -> _Entry:
        """A split of the data set that hf_path names."""
        keys = self._keys
        (column,), tokens = keys.train_data_columns, not keys.tokenize_train_data
        file = HubSet(keys.hf_path, keys.hf_name, split, column, tokens)
        return _Entry(file.path, 1.0, *self._open_files("hf_path", file.path, "hf", [file]))

    def _open(self, key: str, pattern: str) -> tuple[Any, bool, str]:
        """The items of an entry, whether they are documents, and their hash."""
        keys = self._keys
        kind, paths = find_files(key, pattern, keys.grain_file_type)
        if kind == "prepared":
            manifests, files = zip(*map(prepared.open_set, paths), strict=True)
            for folder, manifest in zip(paths, manifests, strict=True):
                self._check_set(folder, manifest)
            rows = self._stream_rows(key, pattern, list(itertools.chain(*files)))
            return rows, False, "+".join(manifest["hash"] for manifest in manifests)
        (column,) = keys.train_data_columns
        tokens = not keys.tokenize_train_data
        files = [formats.READERS[kind](path, column, tokens) for path in paths]
        return self._open_files(key, pattern, kind, files)

    def _open_files(
        self, key: str, pattern: str, kind: str, files: list[RecordFile]
    ) -> tuple[Any, bool, str]:
        """The same as `_open`, of files of one format that is no prepared set."""
        keys, tokens = self._keys, not self._keys.tokenize_train_data
        for file in files:
            file.check()
        documents = kind != "megatron" and not (kind == "arrayrecord" and tokens)
        if kind == "megatron":
            items: Any = self._stream_rows(key, pattern, files)
        elif not documents:
            items = RecordRows(files, keys.max_target_length, keys.vocab_size)
        elif tokens:
            items = TokenDocuments(files, keys.vocab_size)
        else:
            items = Documents(files, self._open_tokenizer())
        self._refuse_empty(key, pattern, items)
        size = sum(file.num_bytes for file in files)
        return items, documents, _sampled_hash(items, documents, size)

    def _check_set(self, folder: str, manifest: dict[str, Any]) -> None:
        """Refuses a prepared set whose tokens are of another vocabulary or another tokenizer."""
        tokenizer, largest = manifest["tokenizer"], manifest["max_token"]
        if tokenizer:
            self._check_tokenizer(folder, tokenizer)
        if largest >= self._keys.vocab_size:
            needed = tokenizer["vocab_size"] if tokenizer else largest + 1
            raise ConfigError(
                f"{folder}: its largest token id is {largest}, not below "
                f"vocab_size={self._keys.vocab_size}; use {-(-needed // 64) * 64} or more"
            )

    def _check_tokenizer(self, folder: str, tokenizer: dict[str, Any]) -> None:
        """Refuses a set if the other sets, or the keys, have another tokenizer than its own."""
        other, others = self._first_set = self._first_set or (folder, tokenizer)
        if others["hash"] != tokenizer["hash"]:
            raise ConfigError(
                f"{other} was prepared with {_shown(others)} and {folder} with "
                f"{_shown(tokenizer)}; prepare both with one tokenizer"
            )
        keys = self._keys
        if tokenizer["split_special_tokens"] and not keys.split_special_tokens:
            raise ConfigError(
                f"split_special_tokens=False is not what {folder} was prepared with, "
                f"{_shown(tokenizer)}; leave it out, or prepare the set again"
            )
        if keys.tokenizer_type == "bytes":
            return  # also where neither key is given
        given = Tokenizer(keys.tokenizer_type, keys.tokenizer_path, **keys.mark_keys)
        # By its bytes: training reads tokens, and needs no package that makes them.
        if given.type != tokenizer["type"] or (
            given.file
            and storage.read_bytes(given.file)
            != storage.read_bytes(posixpath.join(folder, tokenizer["file"]))
        ):
            raise ConfigError(
                f"tokenizer_type={given.type} tokenizer_path={given.path} is not what {folder} was "
                f"prepared with, {_shown(tokenizer)}; leave it out, or prepare the set again"
            )
        self.uses_tokenizer = True

    def _stream_rows(self, key: str, pattern: str, files: Sequence[MegatronFile]) -> StreamRows:
        """Rows that say where documents begin, if more than one does and that is wanted."""
        keys, stream = self._keys, TokenStream(files)
        separate = keys.separate_documents and stream.num_documents > 1
        rows = StreamRows(stream, keys.max_target_length, keys.vocab_size, separate)
        self._refuse_empty(key, pattern, rows)
        return rows

    def _refuse_empty(self, key: str, pattern: str, items: Any) -> None:
        if not len(items):
            raise ConfigError(
                f"{key}: {pattern} has not one row of max_target_length + 1 = "
                f"{self._keys.max_target_length + 1} tokens; give more data or shorter rows"
            )

    def _open_tokenizer(self) -> Tokenizer:
        self.uses_tokenizer = True
        if self._tokenizer is None:
            keys = self._keys
            self._tokenizer = tokenizers.load(
                keys.tokenizer_type, keys.tokenizer_path, **keys.mark_keys
            )
            if self._tokenizer.vocab_size > keys.vocab_size:
                raise ConfigError(
                    f"vocab_size={keys.vocab_size} is below the {self._tokenizer.vocab_size} ids "
                    f"of tokenizer_type={keys.tokenizer_type} "
                    f"tokenizer_path={keys.tokenizer_path}; raise it to a multiple of 64"
                )
        return self._tokenizer


def _shown(tokenizer: dict[str, Any]) -> str:
    """A manifest's tokenizer, for a person."""
    marks = "".join(f" {name}={tokenizer[name]}" for name in MARK_KEYS)
    size = f"{tokenizer['vocab_size']:,} ids"
    return f"{tokenizer['type']} of {size}{marks} (hash {tokenizer['hash']})"


def find_files(key: str, pattern: str, file_type: str) -> tuple[str, list[str]]:
    """What a path, glob or URL stands for.

    Args:
      key: the key that it is the value of, for messages.
      pattern: the path, glob or URL; of Megatron's files also their common name.
      file_type: a format, or "" for what the names say.

    Returns:
      The format, and its files in order: folders of prepared sets, of Megatron's files the names
      without .bin and .idx.

    Raises:
      ConfigError: nothing, or files of several formats.
    """
    paths = storage.find(pattern)
    if not paths and storage.exists(f"{os.path.expanduser(pattern)}.idx"):
        paths = [f"{os.path.expanduser(pattern)}.idx"]
    if not paths:
        raise ConfigError(f"{key}: {pattern}: no such file, and no glob that matches one")
    if all(map(prepared.is_prepared, paths)) and file_type in ("", "prepared"):
        return "prepared", paths
    folder = next((path for path in paths if os.path.isdir(path)), None)
    if folder or file_type == "prepared":
        raise ConfigError(
            f"{key}: {folder or paths[0]} is no prepared set (it has no {prepared.NAME}), or was "
            "not finished; name the files in a folder by a glob, such as folder/*.parquet"
        )
    kinds = {file_type or formats.detect(path): path for path in paths}
    if len(kinds) > 1:
        (one, path), (other, other_path), *_ = kinds.items()
        raise ConfigError(
            f"{key}: {pattern} matches files of several formats, {path} ({one}) and {other_path} "
            f"({other}); give each its own entry"
        )
    (kind,) = kinds
    if kind == "megatron":
        paths = sorted({path.removesuffix(".bin").removesuffix(".idx") for path in paths})
    return kind, paths


def _sampled_hash(items: Sequence[Any], documents: bool, size: int) -> str:
    """Of the count, the bytes and evenly spaced items: reading terabytes would take hours."""
    digest = hashlib.blake2b(f"{len(items)} {size}".encode(), digest_size=8)
    for index in np.unique(np.linspace(0, len(items) - 1, _SAMPLED).astype(np.int64)):
        tokens = items[int(index)] if documents else items[int(index)].tokens
        digest.update(f"{len(tokens)} ".encode() + tokens.tobytes())
    return digest.hexdigest()
