"""grain_train_files, grain_eval_files and eval_sets, or hf_path -> the parts of a corpus."""

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
from maxramp.data.chats.chats import ChatEncoder, Chats, open_encoder
from maxramp.data.files import formats, prepared
from maxramp.data.files.megatron import TokenStream
from maxramp.data.files.records import WHOLE, RecordFile
from maxramp.data.hub import HubSet
from maxramp.data.keys import MARK_KEYS, DataKeys
from maxramp.data.rows import Chain, Corpus, Documents, Part, StreamRows, TokenRecords, hash_of
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.keys.section import refuse

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
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not pattern or not 0 < weight < math.inf:
            lacks = "has no weight" if entry.strip() else "is empty"
            what = f'has the weight "{text}", which is no number above 0' if pattern else lacks
            raise ConfigError(
                f'{key}={value}: the entry "{entry}" {what}; write glob,weight;glob,weight'
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


def find(key: str, pattern: str, file_type: str) -> tuple[str, list[str]]:
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
    paths = storage.find(pattern) or storage.find(f"{pattern}.idx")
    if not paths:
        raise ConfigError(f"{key}: {pattern}: no such file, and no glob that matches one")
    are_sets = all(storage.exists(f"{path}/{prepared.NAME}") for path in paths)
    if are_sets and file_type in ("", "prepared"):
        return "prepared", paths
    refuse(
        (
            file_type == "prepared" or os.path.isdir(path),
            f"{key}: {path} is no prepared set (it has no {prepared.NAME}), or was not finished; "
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


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One entry of a mixture: `sets` are the manifests of prepared sets by their folders."""

    name: str
    weight: float
    kind: str
    files: list[RecordFile]
    sets: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def documents(self) -> bool:
        """Whether it holds documents, and not rows or a stream of tokens."""
        if self.kind == "prepared":
            return self.are_chats
        are_rows = self.kind == "arrayrecord" and self.files[0].tokens
        return self.kind != "megatron" and not are_rows

    @property
    def are_chats(self) -> bool:
        """Whether it is of prepared sets of chats."""
        return any("chats" in manifest for manifest in self.sets.values())


def open_mixture(keys: DataKeys, later: Sequence[tuple[int, str]] = ()) -> Corpus:
    """Opens the corpus of dataset_type=grain or hf.

    Args:
      keys: what it is.
      later: (first row, grain_train_files) of the mixtures after the first. A part is the same in
        all that name it. Nothing is held out of parts that the first does not have.

    Raises:
      ConfigError: files that are missing, torn, empty or of another kind than the keys say.
    """
    files, splits = ("grain_train_files", "grain_eval_files"), ("train_split", "hf_eval_split")
    names = files if keys.dataset_type == "grain" else splits
    train = _find(keys, names[0], getattr(keys, names[0]))
    first, mixtures = len(train), []
    for row, value in later:
        there = _find(keys, names[0], value)
        known = {entry.name for entry in train}
        train += (dataclasses.replace(x, weight=0.0) for x in there if x.name not in known)
        mixtures.append((row, {entry.name: entry.weight for entry in there}))
        _check_names(names[0], there)
    _check_names(names[0], train if later else ())
    sets = {name: (f"eval_sets.{name}", of) for name, of in sorted(keys.eval_sets.items())}
    if alone := getattr(keys, names[1]):
        sets = {"": (names[1], alone)}
    evaluated = {name: _find(keys, *of) for name, of in sets.items()}
    entries = [*train, *itertools.chain(*evaluated.values())]
    _check_chats(keys, entries)
    kinds = {entry.documents: entry.name for entry in entries}
    if len(kinds) > 1:
        raise ConfigError(
            f"{kinds[False]} holds rows or a stream of tokens and {kinds[True]} documents, which "
            "do not mix; prepare the documents with maxramp.prepare"
        )
    (documents,) = kinds
    is_used = _check_sets(keys, entries)
    tokenizer = _open_tokenizer(keys) if documents and keys.tokenize_train_data else None
    encoder = open_encoder(tokenizer, keys) if keys.reads_chats else None
    opened = (_open(keys, entry, tokenizer, encoder) for entry in entries)
    items, hashes = zip(*opened, strict=True)
    cuts = [len(x) for x in items[: len(train)]]
    others = zip(items[len(train) :], hashes[len(train) :], strict=True)
    most = max(cuts[:first])
    held_out = []
    for name, of in evaluated.items():
        chosen = list(itertools.islice(others, len(of)))
        digest = hash_of([keys.max_target_length, [digest for _, digest in chosen]])
        held_out.append(Part(name, 1.0, Chain([x for x, _ in chosen]), digest))
    if not held_out:  # the end of every part
        ends = [round(count * keys.eval_fraction) for count in cuts[:first]]
        cuts = [n - end for n, end in itertools.zip_longest(cuts, ends, fillvalue=0)]
        ends = [x[cut:] for x, cut in zip(items, cuts[:first], strict=False)]
        held_out.append(Part("", 1.0, Chain(ends)))
    noun = "documents" if documents else "rows"
    if keys.reads_chats:
        noun = "chats" if keys.use_sft else "pairs"
    count, held_count = sum(cuts), sum(len(part.items) for part in held_out)
    if 0 in cuts:
        raise ConfigError(
            f"{names[0]}: {train[cuts.index(0)].name} has no {noun} left to train on; give more "
            "data, or a smaller eval_fraction"
        )
    if keys.eval_interval > 0 and not held_count:
        digits = len(str(most - 1))
        least = -(-(10**digits) // most) / 10**digits  # of which the largest part holds one out
        larger = f", eval_fraction={least:g}" if most > 1 else ""
        raise ConfigError(
            f"eval_interval={keys.eval_interval}, but eval_fraction={keys.eval_fraction} of "
            f"{count} {noun} holds none out; give grain_eval_files{larger}, or eval_interval=-1"
        )
    in_sets = f" in {', '.join(sorted(keys.eval_sets))}" if keys.eval_sets else ""
    parts = [
        Part(entry.name, entry.weight, x[:cut], hash_of([keys.max_target_length, cut, digest]))
        for entry, x, cut, digest in zip(train, items, cuts, hashes, strict=False)
    ]
    shares = _shares({part.name: part.weight for part in parts[:first]})
    changes = "".join(f"; from row {row} on {_shares(of)}" for row, of in mixtures)
    unused = "" if tokenizer or is_used or not keys.tokenizer_path else keys.tokenizer_path
    return Corpus(
        tuple(parts),
        tuple(held_out),
        f"{shares}{changes}: {count} {noun} to train on and {held_count} held out{in_sets}"
        + (f"; tokenizer_path={unused} is not used, the files hold tokens" if unused else ""),
        documents,
        any(getattr(x, "separate", False) for x in items),
        tuple((row, [of.get(part.name, 0.0) for part in parts]) for row, of in mixtures),
    )


def _shares(weights: dict[str, float]) -> str:
    """The parts of a mixture with their shares, in a line."""
    total = sum(weights.values())
    shown = [f"{name} {weight / total:.3g}" for name, weight in weights.items()]
    return ", ".join(shown) if len(shown) > 1 else next(iter(weights))


def _check_names(key: str, entries: Sequence[_Entry]) -> None:
    """Refuses two entries of one name, by which a part is known where the mixture changes."""
    names = [entry.name for entry in entries]
    refuse(
        (
            names.count(name) > 1,
            f"{key}: {name} stands there twice, and where phases change the mixture a part goes on "
            "by its name; give it once, with the sum of its weights",
        )
        for name in names
    )


def _find(keys: DataKeys, name: str, value: str) -> list[_Entry]:
    """The entries that the value of a key names."""
    (column,), tokens = keys.train_data_columns, not keys.tokenize_train_data
    column = WHOLE if keys.reads_chats else column  # a chat's messages may be in several
    found = []
    if keys.dataset_type == "hf":
        file = HubSet(keys.hf_path, keys.hf_name, value, column, tokens)
        return [_Entry(file.path, 1.0, "hf", [file])]
    for pattern, weight in parse(name, value):
        kind, paths = find(name, pattern, keys.grain_file_type)
        if kind == "prepared":
            manifests, files = zip(*map(prepared.open_set, paths), strict=True)
            sets = dict(zip(paths, manifests, strict=True))
            found.append(_Entry(pattern, weight, kind, list(itertools.chain(*files)), sets))
        else:
            files = [formats.READERS[kind](path, column, tokens) for path in paths]
            found.append(_Entry(pattern, weight, kind, files))
    return found


def _open(
    keys: DataKeys, entry: _Entry, tokenizer: Tokenizer | None, encoder: ChatEncoder | None
) -> tuple[Any, str]:
    """The items of an entry, and their hash."""
    files, length, size = entry.files, keys.max_target_length, keys.vocab_size
    if not entry.sets:
        for file in files:
            file.check()
    if encoder:
        for folder, manifest in entry.sets.items():
            _check_made_by(folder, manifest["chats"]["made_by"], encoder.made_by)
        items = Chats(files, encoder, length, keys.long_chats == "cut")
    elif tokenizer:
        items = Documents(files, tokenizer)
    elif entry.documents or entry.kind == "arrayrecord":
        items = TokenRecords(files, size, None if entry.documents else length)
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
        return items, "+".join(manifest["hash"] for manifest in entry.sets.values()) + made_by
    # Of the count, the bytes and evenly spaced items: reading terabytes would take hours.
    # Where documents begin is looked through anyway, and hashed whole.
    text = f"{len(items)} {sum(file.num_bytes for file in files)}"
    digest = hashlib.blake2b(f"{text}{made_by}".encode(), digest_size=8)
    for file in files:
        digest.update(file.index)
    for index in np.unique(np.linspace(0, len(items) - 1, _SAMPLED).astype(np.int64)):
        item = items[int(index)]
        digest.update(f"{len(item.tokens)} ".encode() + item.tokens.tobytes())
        if item.is_target is not None:
            digest.update(item.is_target.tobytes())
    return items, digest.hexdigest()


def _check_chats(keys: DataKeys, entries: list[_Entry]) -> None:
    """Refuses entries without chats where chats are read, and prepared chats where they are not."""
    for entry in entries:
        if keys.reads_chats and not entry.documents:
            raise ConfigError(
                f"{keys.reads_chats} reads chats, and {entry.name} holds rows or tokens; give "
                "files of JSON lines or Parquet, or prepare those with the same key"
            )
        if entry.are_chats and not keys.reads_chats:
            raise ConfigError(f"{entry.name} is a prepared set of chats; give use_sft=True")


def _check_made_by(folder: str, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses a prepared set of chats that other keys made than those of the run."""
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
    """Refuses prepared sets of another vocabulary, or with another tokenizer than the keys name.

    Returns:
      Whether a set has a tokenizer.
    """
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
    """A manifest's tokenizer, for a person."""
    marks = "".join(f" {name}={tokenizer[name]}" for name in MARK_KEYS)
    size = f"{tokenizer['vocab_size']:,} ids"
    return f"{tokenizer['type']} of {size}{marks} (hash {tokenizer['hash']})"
