"""The data keys -> sources: rows or documents, with what they are hashed by.

A mixture is `glob,weight;glob,weight`: of grain_train_files, grain_eval_files and eval_sets.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxramp.data import tokenizers
from maxramp.data.cached import CachedSet
from maxramp.data.chats.chats import ChatEncoder
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.data.files import prepared
from maxramp.data.files.megatron import MegatronFile, TokenStream
from maxramp.data.inputs import find_files, open_files, parse_mixture
from maxramp.data.keys import MARK_KEYS, DataKeys
from maxramp.data.rows import Chain, Documents, StreamRows, SyntheticRows, WholeRows
from maxramp.data.texts import open_text, plan_text
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.keys.section import refuse

_SAMPLED = 64  # rows of Megatron's files that are read at the start, for their hash
# The keys of what is trained on and what is held out, by dataset_type.
_NAMES = {
    "grain": ("grain_train_files", "grain_eval_files"),
    "hf": ("train_split", "hf_eval_split"),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One entry of a mixture: paths of prepared sets or Megatron's files, or a set to be made."""

    name: str
    weight: float
    noun: str  # what its items are: rows, documents, chats or pairs
    paths: Sequence[str] = ()
    manifests: Sequence[dict[str, Any]] = ()  # of prepared sets
    cached: CachedSet | None = None


@dataclasses.dataclass(frozen=True)
class Mixtures:
    """What the keys name: the entries to train on, and those of each held-out set by its name."""

    keys: DataKeys
    train: Sequence[_Entry] = ()
    evaluated: Mapping[str, Sequence[_Entry]] = dataclasses.field(default_factory=dict)

    @property
    def entries(self) -> list[_Entry]:
        return [*self.train, *itertools.chain(*self.evaluated.values())]

    @property
    def cached_sets(self) -> list[CachedSet]:
        """The sets that have to be there before `open`."""
        return [entry.cached for entry in self.entries if entry.cached]

    def open(self) -> Corpus:
        """Opens sources; documents are still to be laid out."""
        keys, length = self.keys, self.keys.max_target_length
        if keys.dataset_type == "text":
            return open_text(keys, self.cached_sets[0])
        if keys.dataset_type == "synthetic":
            return _open_synthetic(keys)
        parts = [_open_entry(keys, entry) for entry in self.train]
        held_out = []
        for name, entries in self.evaluated.items():
            chosen = [_open_entry(keys, entry) for entry in entries]
            digest = hash_of([length, [part.hash for part in chosen]])
            held_out.append(_hold_out(name, chosen, length, digest))
        separate = any(map(_is_separate, (*parts, *held_out)))
        if not held_out:  # the end of every part of the first mixture
            ends = []
            for i, part in enumerate(parts):
                if part.weight:
                    cut = len(part.items) - round(len(part.items) * keys.eval_fraction)
                    ends.append(dataclasses.replace(part, items=part.items[cut:]))
                    parts[i] = dataclasses.replace(part, items=part.items[:cut])
            held_out = [_hold_out("", ends, length)]
        _check_counts(keys, parts, held_out)
        parts = [
            dataclasses.replace(x, hash=hash_of([length, len(x.items), x.hash])) for x in parts
        ]
        note, path = "", keys.tokenizer_path
        has_tokenizer = any(m["tokenizer"] for entry in self.entries for m in entry.manifests)
        if path and not (has_tokenizer or any(one.tokenizer for one in self.cached_sets)):
            note = f"; tokenizer_path={path} is not used, the files hold tokens"
        return Corpus(parts, held_out, note, separate)


def find_mixtures(keys: DataKeys, later: Sequence[str] = ()) -> Mixtures:
    """Finds the files and checks what can be known without reading them.

    Args:
      later: values of grain_train_files after the first. A part is the same in all that name it;
        nothing is held out of parts that the first does not have.
    """
    if keys.dataset_type == "text":
        cached = plan_text(keys)
        return Mixtures(keys, [_Entry(cached.name, 1.0, "rows", cached=cached)])
    if keys.dataset_type == "synthetic":
        return Mixtures(keys)
    train_key, eval_key = _NAMES[keys.dataset_type]
    finder = _Finder(keys)
    train = finder.find(train_key, getattr(keys, train_key))
    others = [finder.find(train_key, value) for value in later]
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
    sets = {name: (f"eval_sets.{name}", value) for name, value in sorted(keys.eval_sets.items())}
    if alone := getattr(keys, eval_key):
        sets = {"": (eval_key, alone)}
    evaluated = {name: finder.find(*key_and_value) for name, key_and_value in sets.items()}
    mixtures = Mixtures(keys, train, evaluated)
    _check_kinds(mixtures.entries)
    _check_sets(keys, mixtures.entries)
    return mixtures


class _Finder:
    """Finds the entries of mixtures, which have one tokenizer."""

    def __init__(self, keys: DataKeys):
        self._keys = keys

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return _open_tokenizer(self._keys)

    @functools.cached_property
    def _encoder(self) -> ChatEncoder | None:
        return ChatEncoder(self._tokenizer, self._keys) if self._keys.reads_chats else None

    def find(self, name: str, value: str) -> list[_Entry]:
        keys = self._keys
        if keys.dataset_type == "hf":
            return [self._plan_set("hf", [value], 1.0)]
        entries = []
        for pattern, weight in parse_mixture(name, value):
            kind, paths = find_files(name, pattern, keys.grain_file_type)
            if kind == "prepared":
                entries.append(self._find_sets(pattern, weight, paths))
            elif kind == "megatron":
                refuse([(keys.reads_chats, _no_chats(keys, pattern))])
                entries.append(_Entry(pattern, weight, "rows", paths))
            else:
                entries.append(self._plan_set(kind, paths, weight, pattern))
        return entries

    def _find_sets(self, pattern: str, weight: float, paths: Sequence[str]) -> _Entry:
        keys, manifests = self._keys, list(map(prepared.read_manifest, paths))
        are_chats = ["chats" in manifest for manifest in manifests]
        refuse(
            [
                (keys.reads_chats and not all(are_chats), _no_chats(keys, pattern)),
                (
                    any(are_chats) and not keys.reads_chats,
                    f"{pattern} is a prepared set of chats; give use_sft=True",
                ),
            ]
        )
        for folder, manifest in zip(paths, manifests, strict=True) if any(are_chats) else ():
            _check_made_by(folder, manifest["chats"]["made_by"], self._encoder.made_by)
        return _Entry(pattern, weight, _noun(keys) if any(are_chats) else "rows", paths, manifests)

    def _plan_set(self, kind: str, paths: Sequence[str], weight: float, name: str = "") -> _Entry:
        keys = self._keys
        files = open_files(keys, kind, paths)
        tokenizer = self._tokenizer if keys.tokenize_train_data else None
        name = name or files[0].path
        cached = CachedSet(name, keys.data_cache_dir, files, tokenizer, self._encoder)
        are_rows = kind == "arrayrecord" and not keys.tokenize_train_data
        refuse([(are_rows and keys.reads_chats, _no_chats(keys, name))])
        return _Entry(name, weight, "rows" if are_rows else _noun(keys), cached=cached)


def _noun(keys: DataKeys) -> str:
    return keys.objective.noun if keys.reads_chats else "documents"


def _no_chats(keys: DataKeys, name: str) -> str:
    return (
        f"{keys.reads_chats} reads chats, and {name} holds rows or tokens; give files of JSON "
        "lines or Parquet, or prepare those with the same key"
    )


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


def _open_entry(keys: DataKeys, entry: _Entry) -> Part:
    length, made_by = keys.max_target_length, ""
    folders = [str(entry.cached.folder)] if entry.cached else entry.paths
    if entry.manifests or entry.cached:
        manifests, shards = zip(*map(prepared.open_set, folders), strict=True)
        files = list(itertools.chain(*shards))
        if entry.cached:
            _check_ids(keys, entry.name, manifests[0], files)
        digest = "+".join(f"{manifest['hash']}{manifest['sample']}" for manifest in manifests)
    else:
        manifests, files = (), list(map(MegatronFile, folders))
        for file in files:
            file.check()
    if entry.noun != "rows":
        if keys.reads_chats:
            template = manifests[0]["chats"]["made_by"]["template"]
            made_by = f" {template} {keys.long_chats}"
        items = Documents(files, length, keys.long_chats == "cut")
    elif entry.cached:
        _check_lengths(entry.name, files, length)
        items = WholeRows(files)
    else:
        separate = keys.separate_documents and sum(map(len, files)) > 1
        items = StreamRows(TokenStream(files), length, keys.vocab_size, separate)
    if not len(items):
        raise ConfigError(
            f"{entry.name} has not one row of max_target_length + 1 = {length + 1} tokens; give "
            "more data or shorter rows"
        )
    digest = f"{digest}{made_by}" if manifests else _hash_files(files, items)
    return Part(entry.name, entry.weight, items, digest, entry.noun)


def _hash_files(files: Sequence[MegatronFile], rows: StreamRows) -> str:
    """Of the sizes, where documents begin, and of evenly spaced rows: all would take hours."""
    text = f"{len(rows)} {sum(file.num_bytes for file in files)}"
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for file in files:
        digest.update(file.index)
    for index in np.unique(np.linspace(0, len(rows) - 1, _SAMPLED).astype(np.int64)):
        tokens = rows[int(index)].tokens
        digest.update(f"{len(tokens)} ".encode() + tokens.tobytes())
    return digest.hexdigest()


def _check_lengths(name: str, files: Sequence[MegatronFile], length: int) -> None:
    lengths = np.concatenate([file.lengths() for file in files])
    for record in np.flatnonzero(lengths != length + 1)[:1]:
        raise ConfigError(
            f"{name}: record {record} has {lengths[record]} tokens, but a row takes "
            f"max_target_length + 1 = {length + 1}; use max_target_length={lengths[record] - 1}, "
            "or prepare the files with maxramp.prepare, which takes any length"
        )


def _check_ids(
    keys: DataKeys, name: str, manifest: dict[str, Any], files: Sequence[MegatronFile]
) -> None:
    if (largest := manifest["max_token"]) < keys.vocab_size:
        return
    documents = Chain(files)
    record = next(i for i in range(len(documents)) if largest in documents[i])
    raise ConfigError(
        f"{name}: record {record} has token id {largest}, which is not below "
        f"vocab_size={keys.vocab_size}; use the vocab_size of its tokenizer"
    )


def _check_kinds(entries: Sequence[_Entry]) -> None:
    kinds = {entry.noun == "rows": entry.name for entry in entries}
    if len(kinds) > 1:
        raise ConfigError(
            f"{kinds[True]} holds rows or a stream of tokens and {kinds[False]} documents, which "
            "do not mix; prepare the documents with maxramp.prepare"
        )


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


def _check_sets(keys: DataKeys, entries: Sequence[_Entry]) -> None:
    sets = [pair for x in entries for pair in zip(x.paths, x.manifests, strict=False)]
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


def _open_tokenizer(keys: DataKeys) -> Tokenizer:
    marks = keys.mark_keys
    if keys.reads_chats:  # which have their template's
        marks |= {"add_bos": False, "add_eos": False}
    tokenizer = tokenizers.load(keys.tokenizer_type, keys.tokenizer_path, **marks)
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
