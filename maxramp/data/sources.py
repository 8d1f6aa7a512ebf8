"""The data keys -> sources: rows or documents, with what they are hashed by.

A mixture is `glob,weight;glob,weight`: of grain_train_files, grain_eval_files and eval_sets.
"""

import dataclasses
import glob
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.data import tokenizers
from maxramp.data.chats.chats import ChatEncoder, Chats
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.data.files import formats, prepared
from maxramp.data.files.megatron import TokenStream
from maxramp.data.files.records import WHOLE, RecordFile
from maxramp.data.hub import HubSet
from maxramp.data.keys import MARK_KEYS, DataKeys
from maxramp.data.rows import Chain, Documents, StreamRows, SyntheticRows, TokenRecords
from maxramp.data.texts import open_texts
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.keys.section import refuse

_SAMPLED = 64  # items of a part that are read at the start, for its hash
# The keys of what is trained on and what is held out, by dataset_type.
_NAMES = {
    "grain": ("grain_train_files", "grain_eval_files"),
    "hf": ("train_split", "hf_eval_split"),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One entry of a mixture: `sets` are the manifests of prepared sets by their folders."""

    name: str
    weight: float
    kind: str
    files: list[RecordFile]
    sets: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def are_documents(self) -> bool:
        if self.kind == "prepared":
            return self.are_chats
        are_rows = self.kind == "arrayrecord" and self.files[0].tokens
        return self.kind != "megatron" and not are_rows

    @property
    def are_chats(self) -> bool:
        return any("chats" in manifest for manifest in self.sets.values())


def open_sources(keys: DataKeys, later: Sequence[str] = ()) -> Corpus:
    """`later` are values of grain_train_files after the first. A part is the same in all that name
    it; nothing is held out of parts that the first does not have.
    """
    if keys.dataset_type == "text":
        return open_texts(keys)
    if keys.dataset_type == "synthetic":
        return _open_synthetic(keys)
    train, evaluated = _find_all(keys, later)
    entries = [*train, *itertools.chain(*evaluated.values())]
    noun, has_tokenizer = _check_kinds(keys, entries), _check_sets(keys, entries)
    encodes = noun != "rows" and keys.tokenize_train_data
    tokenizer = _open_tokenizer(keys) if encodes else None
    encoder = ChatEncoder(tokenizer, keys) if keys.reads_chats else None
    opened = [_open_entry(keys, entry, noun, tokenizer, encoder) for entry in entries]
    parts, others = opened[: len(train)], iter(opened[len(train) :])
    held_out, length = [], keys.max_target_length
    for name, of in evaluated.items():
        chosen = list(itertools.islice(others, len(of)))
        digest = hash_of([length, [part.hash for part in chosen]])
        held_out.append(_hold_out(name, chosen, length, digest))
    if not held_out:  # the end of every part of the first mixture
        ends = []
        for i, part in enumerate(parts):
            if part.weight:
                cut = len(part.items) - round(len(part.items) * keys.eval_fraction)
                ends.append(dataclasses.replace(part, items=part.items[cut:]))
                parts[i] = dataclasses.replace(part, items=part.items[:cut])
        held_out = [_hold_out("", ends, length)]
    _check_counts(keys, parts, held_out)
    parts = [dataclasses.replace(x, hash=hash_of([length, len(x.items), x.hash])) for x in parts]
    note, path = "", keys.tokenizer_path
    if path and not (tokenizer or has_tokenizer):
        note = f"; tokenizer_path={path} is not used, the files hold tokens"
    packed = any(map(_is_separate, opened))
    return Corpus(parts, held_out, note, packed)


def _hold_out(name: str, parts: Sequence[Part], length: int, digest: str = "") -> Part:
    items = Chain([part.items for part in parts])
    rows = [[part.hash, len(part.items), _is_separate(part)] for part in parts]
    return Part(name, 1.0, items, digest, parts[0].noun, repr([length, rows]))


def _is_separate(part: Part) -> bool:
    return getattr(part.items, "separate", False)


def _open_synthetic(keys: DataKeys) -> Corpus:
    seed, sizes = keys.data_shuffle_seed, (keys.vocab_size, keys.max_target_length)
    train = SyntheticRows(2**31 - 1, *sizes, 2 * seed)
    held_out = SyntheticRows(1024, *sizes, 2 * seed + 1)
    note = "; random tokens"
    if keys.tokenizer_path:
        note += f"; tokenizer_path={keys.tokenizer_path} is not used"
    digest = f"{seed}, {sizes}"
    evaluated = Part("", 1.0, held_out, rows_id=digest)
    return Corpus([Part("synthetic", 1.0, train, digest)], [evaluated], note)


def _find_all(keys: DataKeys, later: Sequence[str]) -> tuple[list[_Entry], dict[str, list[_Entry]]]:
    train_key, eval_key = _NAMES[keys.dataset_type]
    train = _find_entries(keys, train_key, getattr(keys, train_key))
    others = [_find_entries(keys, train_key, value) for value in later]
    for mixture in [train, *others] if others else ():
        names = [entry.name for entry in mixture]
        refuse(
            (
                names.count(name) > 1,
                f"{train_key}: {name} stands there twice, and where phases change the mixture a "
                "part is known by its name; give it once, with the sum of its weights",
            )
            for name in names
        )
    known = {entry.name for entry in train}
    new = {x.name: dataclasses.replace(x, weight=0.0) for x in itertools.chain(*others)}
    train += (entry for name, entry in new.items() if name not in known)
    sets = {name: (f"eval_sets.{name}", of) for name, of in sorted(keys.eval_sets.items())}
    if alone := getattr(keys, eval_key):
        sets = {"": (eval_key, alone)}
    return train, {name: _find_entries(keys, *of) for name, of in sets.items()}


def _find_entries(keys: DataKeys, name: str, value: str) -> list[_Entry]:
    (column,), tokens = keys.train_data_columns, not keys.tokenize_train_data
    column = WHOLE if keys.reads_chats else column  # a chat's messages may be in several
    found = []
    if keys.dataset_type == "hf":
        file = HubSet(keys.hf_path, keys.hf_name, value, column, tokens)
        return [_Entry(file.path, 1.0, "hf", [file])]
    for pattern, weight in parse_mixture(name, value):
        kind, paths = find_files(name, pattern, keys.grain_file_type)
        sets = {}
        if kind == "prepared":
            manifests, files = zip(*map(prepared.open_set, paths), strict=True)
            sets, files = dict(zip(paths, manifests, strict=True)), list(itertools.chain(*files))
        else:
            files = [formats.READERS[kind](path, column, tokens) for path in paths]
        found.append(_Entry(pattern, weight, kind, files, sets))
    return found


def parse_mixture(key: str, value: str) -> list[tuple[str, float]]:
    """(glob, weight) of every entry; a single one needs no weight."""
    entries = value.split(";")
    parsed = []
    for entry in entries:
        pattern, comma, text = (part.strip() for part in entry.rpartition(","))
        if not comma and len(entries) == 1:
            pattern, text = text, "1"
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not pattern or not 0 < weight < math.inf:
            lacks = "has no weight" if entry.strip() else "is empty"
            what = f'has the weight "{text}", which is not a number above 0' if pattern else lacks
            raise ConfigError(
                f'{key}={value}: the entry "{entry}" {what}; write glob,weight;glob,weight'
            )
        parsed.append((pattern, weight))
    return parsed


def escape_path(key: str, path: str) -> str:
    """The value of grain_train_files that stands for a path, whatever characters it has."""
    if ";" in path:
        raise ConfigError(
            f"{key} {path}: a ; ends an entry of grain_train_files; give a path without it"
        )
    return f"{glob.escape(path)},1" if "," in path else glob.escape(path)


def find_files(key: str, pattern: str, file_type: str) -> tuple[str, list[str]]:
    """The format and, in order, the files that a path, glob or URL (`pattern`) stands for: of
    prepared sets the folders, of Megatron's files the names without .bin and .idx.
    """
    paths = storage.find(pattern) or storage.find(f"{pattern}.idx")
    if not paths:
        raise ConfigError(f"{key}: {pattern}: no such file, and no glob that matches one")
    are_sets = all(storage.exists(f"{path}/{prepared.NAME}") for path in paths)
    if are_sets and file_type in ("", "prepared"):
        return "prepared", paths
    refuse(
        (
            file_type == "prepared" or os.path.isdir(path),
            f"{key}: {path} is not a prepared set (it has no {prepared.NAME}), or is not finished; "
            "name the files in a folder by a glob, such as folder/*.parquet",
        )
        for path in paths
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


def _open_entry(
    keys: DataKeys,
    entry: _Entry,
    noun: str,
    tokenizer: Tokenizer | None,
    encoder: ChatEncoder | None,
) -> Part:
    files, length, size = entry.files, keys.max_target_length, keys.vocab_size
    for file in () if entry.sets else files:
        file.check()
    if encoder:
        for folder, manifest in entry.sets.items():
            _check_made_by(folder, manifest["chats"]["made_by"], encoder.made_by)
        items = Chats(files, encoder, length, keys.long_chats == "cut")
    elif tokenizer:
        items = Documents(files, tokenizer)
    elif entry.are_documents or entry.kind == "arrayrecord":
        items = TokenRecords(files, size, None if entry.are_documents else length)
    else:
        stream = TokenStream(files)
        separate = keys.separate_documents and sum(map(len, files)) > 1
        items = StreamRows(stream, length, size, separate)
    if not len(items):
        raise ConfigError(
            f"{entry.name} has not one row of max_target_length + 1 = {length + 1} tokens; give "
            "more data or shorter rows"
        )
    made_by = f" {encoder.made_by['template']} {keys.long_chats}" if encoder else ""
    if entry.sets:
        known = (f"{of_set['hash']}{of_set['sample']}" for of_set in entry.sets.values())
        digest = "+".join(known) + made_by
    else:
        digest = _hash_files(files, items, made_by)
    return Part(entry.name, entry.weight, items, digest, noun)


def _hash_files(files: Sequence[RecordFile], items: Sequence[Any], made_by: str) -> str:
    """Of the sizes, where documents begin, and of evenly spaced items: all would take hours."""
    text = f"{len(items)} {sum(file.num_bytes for file in files)}{made_by}"
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for file in files:
        digest.update(file.index)
    for index in np.unique(np.linspace(0, len(items) - 1, _SAMPLED).astype(np.int64)):
        item = items[int(index)]
        digest.update(f"{len(item.tokens)} ".encode() + item.tokens.tobytes())
        if item.is_target is not None:
            digest.update(item.is_target.tobytes())
    return digest.hexdigest()


def _check_kinds(keys: DataKeys, entries: list[_Entry]) -> str:
    """Returns a noun for the entries' items."""
    for entry in entries:
        if keys.reads_chats and not entry.are_documents:
            raise ConfigError(
                f"{keys.reads_chats} reads chats, and {entry.name} holds rows or tokens; give "
                "files of JSON lines or Parquet, or prepare those with the same key"
            )
        if entry.are_chats and not keys.reads_chats:
            raise ConfigError(f"{entry.name} is a prepared set of chats; give use_sft=True")
    kinds = {entry.are_documents: entry.name for entry in entries}
    if len(kinds) > 1:
        raise ConfigError(
            f"{kinds[False]} holds rows or a stream of tokens and {kinds[True]} documents, which "
            "do not mix; prepare the documents with maxramp.prepare"
        )
    if keys.reads_chats:
        return "chats" if keys.use_sft else "pairs"
    return "documents" if True in kinds else "rows"


def _check_counts(keys: DataKeys, train: list[Part], held_out: list[Part]) -> None:
    for part in train:
        if not len(part.items):
            raise ConfigError(
                f"{_NAMES[keys.dataset_type][0]}: {part.name} has no {part.noun} left to train on; "
                "give more data, or a smaller eval_fraction"
            )
    if keys.eval_interval > 0 and not any(len(part.items) for part in held_out):
        most = max(len(part.items) for part in train if part.weight)
        digits = len(str(most - 1))
        least = -(-(10**digits) // most) / 10**digits  # of which the largest part holds one out
        larger = f", eval_fraction={least:g}" if most > 1 else ""
        raise ConfigError(
            f"eval_interval={keys.eval_interval}, but eval_fraction={keys.eval_fraction} of "
            f"{sum(len(part.items) for part in train)} {train[0].noun} holds none out; give "
            f"grain_eval_files{larger}, or eval_interval=-1"
        )


def _check_made_by(folder: str, there: dict[str, Any], here: dict[str, Any]) -> None:
    for name, value in there.items():
        if value == here[name]:
            continue
        if name == "template":
            raise ConfigError(
                f"{folder} was prepared with another chat_template, or another date or switches "
                f"of it (hash {value}, not {here[name]}); give those, or prepare the chats again"
            )
        raise ConfigError(
            f"{name}={here[name]}: {folder} was prepared with {name}={value}; give that, or "
            "prepare the chats again"
        )


def _check_sets(keys: DataKeys, entries: list[_Entry]) -> bool:
    """Returns whether a set has a tokenizer."""
    sets = [one for entry in entries for one in entry.sets.items()]
    known = [(folder, manifest["tokenizer"]) for folder, manifest in sets if manifest["tokenizer"]]
    for folder, tokenizer in known:
        if tokenizer["hash"] != known[0][1]["hash"]:
            raise ConfigError(
                f"{known[0][0]} was prepared with {_describe_tokenizer(known[0][1])} and {folder} "
                f"with {_describe_tokenizer(tokenizer)}; prepare both with one tokenizer"
            )
    for folder, tokenizer in known[:1]:
        kind, path = keys.tokenizer_type, keys.tokenizer_path
        given = Tokenizer(kind, path, **{name: tokenizer[name] for name in MARK_KEYS})
        other = f"tokenizer_type={kind} tokenizer_path={path}"
        if tokenizer["split_special_tokens"] and not keys.split_special_tokens:
            other = "split_special_tokens=False"
        elif kind == "bytes" or (kind == tokenizer["type"] and given.hash == tokenizer["hash"]):
            continue  # bytes also where neither key is given
        raise ConfigError(
            f"{other} is not what {folder} was prepared with, {_describe_tokenizer(tokenizer)}; "
            "leave it out, or prepare the set again"
        )
    for folder, manifest in sets:
        if manifest["max_token"] >= keys.vocab_size:
            raise ConfigError(
                f"{folder}: its largest token id is {manifest['max_token']}, not below vocab_size="
                f"{keys.vocab_size}; use {prepared.vocab_size_for(manifest)} or more"
            )
    return bool(known)


def _open_tokenizer(keys: DataKeys) -> Tokenizer:
    tokenizer = tokenizers.load(keys.tokenizer_type, keys.tokenizer_path, **keys.mark_keys)
    if tokenizer.vocab_size > keys.vocab_size:
        raise ConfigError(
            f"vocab_size={keys.vocab_size} is below the {tokenizer.vocab_size} ids of "
            f"tokenizer_type={keys.tokenizer_type} tokenizer_path={keys.tokenizer_path}; raise it "
            "to a multiple of 64"
        )
    return tokenizer


def _describe_tokenizer(tokenizer: dict[str, Any]) -> str:
    marks = "".join(f" {name}={tokenizer[name]}" for name in MARK_KEYS)
    size = f"{tokenizer['vocab_size']:,} ids"
    return f"{tokenizer['type']} of {size}{marks} (hash {tokenizer['hash']})"
