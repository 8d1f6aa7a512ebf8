"""What keys and command lines name: mixtures of globs, the files that these stand for."""

import glob
import math
import os
from collections.abc import Sequence

from maxramp.data.files import formats, prepared
from maxramp.data.files.records import WHOLE, RecordFile
from maxramp.data.hub import HubSet
from maxramp.data.keys import DataKeys
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.keys.section import refuse


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


def open_files(keys: DataKeys, kind: str, paths: Sequence[str]) -> list[RecordFile]:
    """Readers of the files of one format, or with kind "hf" of splits of the data set."""
    (column,), tokens = keys.train_data_columns, not keys.tokenize_train_data
    column = WHOLE if keys.reads_chats else column  # a chat's messages may be in several
    if kind == "hf":
        return [HubSet(keys.hf_path, keys.hf_name, split, column, tokens) for split in paths]
    return [formats.READERS[kind](path, column, tokens) for path in paths]
