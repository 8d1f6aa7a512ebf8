"""The data keys -> entries of mixtures: open sets and Megatron's files, and sets to be prepared.

A mixture is `glob,weight;glob,weight`: of grain_train_files, grain_eval_files and eval_sets.
"""

import dataclasses
import functools
import glob
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from maxramp.data import tokenizers
from maxramp.data.chats.chats import ChatEncoder
from maxramp.data.files import formats, prepared
from maxramp.data.files.megatron import MegatronFile
from maxramp.data.files.prepared import PreparedSet
from maxramp.data.files.records import WHOLE, RecordFile
from maxramp.data.hub import HubSet
from maxramp.data.keys import MARK_KEYS, DataKeys
from maxramp.data.shards import Preparation, plan_cached
from maxramp.data.texts import plan_text
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage

# The keys of what is trained on and what is held out, by dataset_type.
NAMES = {"grain": ("grain_train_files", "grain_eval_files"), "hf": ("train_split", "hf_eval_split")}


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a mixture: prepared sets, Megatron's files, or a set to be prepared."""

    name: str
    weight: float
    are_rows: bool  # whether its items are rows; else documents, chats or pairs
    sets: Sequence[PreparedSet] = ()
    files: Sequence[MegatronFile] = ()
    cached: Preparation | None = None


@dataclasses.dataclass(frozen=True)
class Mixtures:
    """What the keys name to train on and to evaluate on."""

    train: Sequence[Entry] = ()  # of all mixtures; their weights are those in the first
    evaluated: Mapping[str, Sequence[Entry]] = dataclasses.field(default_factory=dict)  # by name
    # (first row, weight of each entry of `train`) of the mixtures after the first
    later: Sequence[tuple[int, Sequence[float]]] = ()

    @property
    def entries(self) -> list[Entry]:
        return [*self.train, *itertools.chain(*self.evaluated.values())]

    @property
    def cached_sets(self) -> list[Preparation]:
        """The sets that have to be prepared before the entries can be opened."""
        return [entry.cached for entry in self.entries if entry.cached]


def find_mixtures(keys: DataKeys, later: Sequence[tuple[int, str]] = ()) -> Mixtures:
    """Opens what is prepared, and checks what can be known of the other files; a ConfigError for
    what is missing or does not fit together.

    Args:
      later: (first row, grain_train_files) of the mixtures after the first. A part is the same in
        all that name it; nothing is held out of parts that the first does not have.
    """
    if keys.dataset_type == "synthetic":
        return Mixtures()
    if keys.dataset_type == "text":
        cached = plan_text(keys)
        return Mixtures([Entry(cached.name, 1.0, True, cached=cached)])
    train_key, eval_key = NAMES[keys.dataset_type]
    finder = _Finder(keys)
    train = finder.find(train_key, getattr(keys, train_key))
    others = [(row, finder.find(train_key, value)) for row, value in later]
    if later:
        for mixture in (train, *(mixture for _, mixture in others)):
            _refuse_doubles(train_key, [entry.name for entry in mixture])
    known = {entry.name for entry in train}
    new = {x.name: x for _, mixture in others for x in mixture if x.name not in known}
    train += (dataclasses.replace(entry, weight=0.0) for entry in new.values())
    weights = [(row, {x.name: x.weight for x in mixture}) for row, mixture in others]
    sets = {name: (f"eval_sets.{name}", value) for name, value in sorted(keys.eval_sets.items())}
    if alone := getattr(keys, eval_key):
        sets = {"": (eval_key, alone)}
    mixtures = Mixtures(
        train,
        {name: finder.find(key, value) for name, (key, value) in sets.items()},
        [(row, [by_name.get(x.name, 0.0) for x in train]) for row, by_name in weights],
    )
    _check_kinds(mixtures.entries)
    _check_tokenizers(keys, mixtures.entries)
    return mixtures


class _Finder:
    """Finds the entries of mixtures, which have one tokenizer."""

    def __init__(self, keys: DataKeys):
        self._keys = keys
        self._find_entry = functools.cache(self._open_or_plan)  # phases name the same ones

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of the data, without marks of its own for chats; a ConfigError if it has
        more ids than vocab_size."""
        keys, marks = self._keys, self._keys.mark_keys
        if keys.reads_chats:  # which have their template's
            marks |= {"add_bos": False, "add_eos": False}
        tokenizer = tokenizers.load(keys.tokenizer_type, keys.tokenizer_path, **marks)
        if tokenizer.vocab_size > keys.vocab_size:
            raise ConfigError(
                f"vocab_size={keys.vocab_size} is below the {tokenizer.vocab_size} ids of "
                f"tokenizer_type={keys.tokenizer_type} tokenizer_path={keys.tokenizer_path}; raise "
                "it to a multiple of 64"
            )
        return tokenizer

    @functools.cached_property
    def _encoder(self) -> ChatEncoder | None:
        return ChatEncoder(self._tokenizer, self._keys) if self._keys.reads_chats else None

    def find(self, key: str, value: str) -> list[Entry]:
        """Returns the entries of a mixture, opened or planned: with the hub the only one of the
        split `value`. A ConfigError for what is missing, or of another kind than the keys read."""
        keys = self._keys
        if keys.dataset_type == "hf":
            return [self._plan_set("", "hf", [value])]
        return [
            dataclasses.replace(self._find_entry(key, pattern), weight=weight)
            for pattern, weight in parse_mixture(key, value)
        ]

    def _open_or_plan(self, key: str, pattern: str) -> Entry:
        """Opens the tokens or prepared sets that a pattern names, and plans to prepare other files;
        a ConfigError if they are not of the kind, chats or documents, that the keys read."""
        keys = self._keys
        kind, paths = find_files(key, pattern, keys.grain_file_type)
        are_rows = kind == "arrayrecord" and not keys.tokenize_train_data
        if keys.reads_chats and (kind == "megatron" or are_rows):
            raise _not_chats(keys, pattern)
        if kind == "megatron":
            return Entry(pattern, 1.0, True, files=open_files(keys, kind, paths))
        if kind != "prepared":
            return self._plan_set(pattern, kind, paths, are_rows)
        sets = list(map(prepared.open_set, paths))
        with_chats = ["chats" in one.manifest for one in sets]
        if keys.reads_chats and not all(with_chats):
            raise _not_chats(keys, pattern)
        if any(with_chats) and not keys.reads_chats:
            raise ConfigError(f"{pattern} is a prepared set of chats; give use_sft=True")
        for one in sets if keys.reads_chats else ():
            _check_made_by(one.folder, one.manifest["chats"]["made_by"], self._encoder.made_by)
        return Entry(pattern, 1.0, not keys.reads_chats, sets)

    def _plan_set(
        self, name: str, kind: str, paths: Sequence[str], are_rows: bool = False
    ) -> Entry:
        """Plans to prepare the set of these files below data_cache_dir."""
        keys = self._keys
        files = open_files(keys, kind, paths)
        name = name or files[0].path
        tokenizer = self._tokenizer if keys.tokenize_train_data else None
        cached = plan_cached(name, keys.data_cache_dir, files, tokenizer, self._encoder)
        return Entry(name, 1.0, are_rows, cached=cached)


def parse_mixture(key: str, value: str) -> list[tuple[str, float]]:
    """Returns (glob, weight > 0) of every entry, else a ConfigError; one alone needs no weight."""
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


def missing_files(keys: DataKeys) -> list[str]:
    """Returns "KEY=GLOB" for globs of the data keys that match nothing on this machine's disks; no
    storage is asked. A ConfigError as `parse_mixture`."""
    files = [("text_files", keys.text_files)] if keys.dataset_type == "text" else []
    if keys.dataset_type == "grain":
        mixtures = [(name, getattr(keys, name)) for name in NAMES["grain"]]
        mixtures += [("eval_sets", value) for value in keys.eval_sets.values()]
        files = [
            (n, pattern) for n, value in mixtures if value for pattern, _ in parse_mixture(n, value)
        ]
    near = [
        (name, pattern) for name, pattern in files if pattern and not storage.is_remote(pattern)
    ]
    return [f"{name}={pattern}" for name, pattern in near if not _match(pattern)]


def _match(pattern: str) -> list[str]:
    """Lists what a path, glob or URL matches; Megatron's files are named without .bin and .idx."""
    return storage.find(pattern) or storage.find(f"{pattern}.idx")


def escape_path(key: str, path: str) -> str:
    """Returns the value of grain_train_files for a path; a ConfigError naming `key` for one with a
    semicolon."""
    if ";" in path:
        raise ConfigError(
            f"{key} {path}: a ; ends an entry of grain_train_files; give a path without it"
        )
    return f"{glob.escape(path)},1" if "," in path else glob.escape(path)


def find_files(key: str, pattern: str, file_type: str) -> tuple[str, list[str]]:
    """Returns the format and, in order, the files that a path, glob or URL stands for; a
    ConfigError for none, for a mere folder, for several formats, and without `file_type` ("" = by
    the names) for a name that tells none.

    Prepared sets are given by their folders, Megatron's files by their names without .bin and .idx.
    """
    paths = _match(pattern)
    if not paths:
        raise ConfigError(f"{key}: {pattern}: no such file, and no glob that matches one")
    are_sets = all(storage.exists(f"{path}/{prepared.NAME}") for path in paths)
    if are_sets and file_type not in ("", "prepared"):
        raise ConfigError(f"{key}: {pattern} is a prepared set, not {file_type}; give prepared")
    if are_sets:
        return "prepared", paths
    for path in paths:
        if file_type == "prepared" or os.path.isdir(path):
            raise ConfigError(
                f"{key}: {path} is not a prepared set (it has no {prepared.NAME}), or is not "
                "finished; name the files in a folder by a glob, such as folder/*.parquet"
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


def open_files(keys: DataKeys, kind: str, paths: Sequence[str]) -> list[RecordFile]:
    """Opens files of one format that `find_files` names (`kind`, not "prepared") or, with "hf",
    splits of the data set. Of them only Megatron's indexes are read, and checked."""
    (column,), tokens = keys.train_data_columns, not keys.tokenize_train_data
    column = WHOLE if keys.reads_chats else column  # a chat's messages may be in several
    if kind == "hf":
        return [HubSet(keys.hf_path, keys.hf_name, split, column, tokens) for split in paths]
    files = [formats.READERS[kind](path, column, tokens) for path in paths]
    for file in files if kind == "megatron" else ():
        file.check()
    return files


def _not_chats(keys: DataKeys, name: str) -> ConfigError:
    return ConfigError(
        f"{keys.reads_chats} reads chats, and {name} holds rows or tokens; give files of JSON "
        "lines or Parquet, or prepare those with the same key"
    )


def _check_made_by(folder: str, made_by: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuses a prepared set whose chats were `made_by` another template or other keys than
    `expected`."""
    for name, value in made_by.items():
        if value == expected[name]:
            continue
        if name == "template":
            raise ConfigError(
                f"{folder} was prepared with another chat_template, or another date or switches "
                f"of it (hash {value}, not {expected[name]}); give those, or prepare the chats "
                "again"
            )
        raise ConfigError(
            f"{name}={expected[name]}: {folder} was prepared with {name}={value}; give that, or "
            "prepare the chats again"
        )


def _refuse_doubles(key: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{key}: {name} is named twice, and where phases change the mixture a part is "
                "known by its name; give it once, with the sum of its weights"
            )


def _check_kinds(entries: Sequence[Entry]) -> None:
    kinds = {entry.are_rows: entry.name for entry in entries}
    if len(kinds) > 1:
        raise ConfigError(
            f"{kinds[True]} holds rows or a stream of tokens and {kinds[False]} documents, which "
            "do not mix; prepare the documents with maxramp.prepare"
        )


def _check_tokenizers(keys: DataKeys, entries: Sequence[Entry]) -> None:
    """Refuses prepared sets of another tokenizer than the keys', or with ids beyond vocab_size."""
    sets = [one for entry in entries for one in entry.sets]
    with_tokenizer = [(one.folder, one.manifest["tokenizer"]) for one in sets]
    with_tokenizer = [(folder, tokenizer) for folder, tokenizer in with_tokenizer if tokenizer]
    for folder, tokenizer in with_tokenizer:
        first_folder, first = with_tokenizer[0]
        if tokenizer["hash"] != first["hash"]:
            raise ConfigError(
                f"{first_folder} was prepared with {_describe_tokenizer(first)} and {folder} "
                f"with {_describe_tokenizer(tokenizer)}; prepare both with one tokenizer"
            )
    for folder, tokenizer in with_tokenizer[:1]:
        kind, path = keys.tokenizer_type, keys.tokenizer_path
        loaded = Tokenizer(kind, path, **{name: tokenizer[name] for name in MARK_KEYS})
        other = f"tokenizer_type={kind} tokenizer_path={path}"
        if tokenizer["split_special_tokens"] and not keys.split_special_tokens:
            other = "split_special_tokens=False"
        elif kind == "bytes" or (kind == tokenizer["type"] and loaded.hash == tokenizer["hash"]):
            continue  # bytes also where neither key is given
        raise ConfigError(
            f"{other} is not what {folder} was prepared with, {_describe_tokenizer(tokenizer)}; "
            "leave it out, or prepare the set again"
        )
    for one in sets:
        if one.manifest["max_token"] >= keys.vocab_size:
            raise ConfigError(
                f"{one.folder}: its largest token id is {one.manifest['max_token']}, not below "
                f"vocab_size={keys.vocab_size}; use {prepared.vocab_size_for(one.manifest)} or more"
            )


def _describe_tokenizer(tokenizer: dict[str, Any]) -> str:
    marks = "".join(f" {name}={tokenizer[name]}" for name in MARK_KEYS)
    size = f"{tokenizer['vocab_size']:,} ids"
    return f"{tokenizer['type']} of {size}{marks} (hash {tokenizer['hash']})"
