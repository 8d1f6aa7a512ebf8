"""Random access to rows of tokens: row i is the same tokens whoever asks.

A row is `max_target_length` tokens and the one after them (what the last token predicts), so row i
of a text is tokens [i * T, i * T + T] of its stream.
"""

import dataclasses
import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.config import Config
from maxramp.errors import ConfigError

BEGIN, END = 256, 257  # marks around a document, after the 256 bytes


class StreamRows:
    """Rows of fixed length cut from one stream of tokens."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"StreamRows({len(self)} rows of {self._length} tokens)"


class SyntheticRows:
    """Uniformly random tokens, a function of the seed and the row alone: nothing to learn."""

    def __init__(self, count: int, vocab_size: int, length: int, seed: int):
        self._count, self._vocab_size, self._length, self._seed = count, vocab_size, length, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        random = np.random.default_rng([self._seed, index])
        return random.integers(0, self._vocab_size, self._length + 1, dtype=np.int32)

    def __repr__(self) -> str:
        return f"SyntheticRows({self._count} rows of {self._length} tokens)"


class Absent:
    """So many items that another process holds: a length, and nothing to read."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        raise RuntimeError(f"item {index} was asked of a process that opened no data")

    def __repr__(self) -> str:
        return f"Absent({self._count} items)"


@dataclasses.dataclass(frozen=True)
class Part:
    """One entry of a mixture: `weight` is its share of the items, relative to the others'."""

    name: str
    weight: float
    items: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What to train on and what is held out, with what identifies them.

    An item is a row of max_target_length + 1 tokens or, with `documents`, a document of any length
    (which may be 0). Items are int32, read when they are asked for, and the same whoever asks.
    """

    train: tuple[Part, ...]
    held_out: Sequence[np.ndarray]
    description: str  # one line for a person
    hash: str  # of the tokens and their order: equal hash, equal items
    documents: bool = False

    def summary(self) -> dict[str, Any]:
        """All but the items, as JSON: what a process that reads nothing has to know."""
        return {
            "train": [[part.name, part.weight, len(part.items)] for part in self.train],
            "held_out": len(self.held_out),
            "description": self.description,
            "hash": self.hash,
            "documents": self.documents,
        }

    @classmethod
    def from_summary(cls, summary: dict[str, Any]) -> "Corpus":
        """The corpus of a process that reads nothing: its items have a length and no tokens."""
        train = tuple(Part(name, weight, Absent(n)) for name, weight, n in summary["train"])
        return cls(**summary | {"train": train, "held_out": Absent(summary["held_out"])})


def open_corpus(config: Config) -> Corpus:
    """The rows that a resolved config names.

    Raises:
      ConfigError: files that are missing, empty or no text, or too short for one row.
    """
    length = config.max_target_length
    if config.dataset_type == "synthetic":
        seed, vocab_size = config.data_shuffle_seed, config.vocab_size
        return Corpus(
            (Part("synthetic", 1.0, SyntheticRows(2**31 - 1, vocab_size, length, 2 * seed)),),
            SyntheticRows(1024, vocab_size, length, 2 * seed + 1),
            "synthetic random tokens",
            f"synthetic-{seed}-{vocab_size}-{length}",
        )
    files, name = _find_files(config.text_files)
    tokens = _read_documents(files)
    # Documents stand in an order that is random but the same everywhere, so the tail of the stream
    # is a fair sample; of a single file it is the file's end.
    cut = len(tokens) - round(len(tokens) * config.eval_fraction)
    train, held_out = StreamRows(tokens[:cut], length), StreamRows(tokens[cut:], length)
    for rows, part, wanted in (
        (train, "training", True),
        (held_out, "held-out", config.eval_interval > 0),
    ):
        if wanted and not len(rows):
            size = cut if rows is train else len(tokens) - cut
            raise ConfigError(
                f"text_files={config.text_files}: the {part} text has {size} tokens, but one "
                f"row takes max_target_length + 1 = {length + 1}; give more text or shorter rows"
                + ("" if rows is train else ", a larger eval_fraction, or eval_interval=-1")
            )
    digest = hashlib.blake2b(tokens.data, digest_size=8).hexdigest()
    megabytes = len(tokens) / 1e6
    return Corpus(
        (Part(name, 1.0, train),),
        held_out,
        f"{name}: {len(files)} files, {megabytes:.1f} MB, {len(train)} rows to train on and "
        f"{len(held_out)} held out",
        digest,
    )


def _find_files(pattern: str) -> tuple[list[tuple[str, pathlib.Path]], str]:
    """(name, path) of every file, in the corpus's order, and what to call them."""
    if not pattern:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        paths = [
            p for p in root.rglob("*.py") if not skipped.intersection(p.relative_to(root).parts)
        ]
        title = "sources of the Python standard library"
        if not paths:
            raise ConfigError(f"text_files= : no Python sources in {root}; give text_files=FOLDER")
    else:
        root = pathlib.Path(os.path.expanduser(pattern))
        if root.is_dir():
            paths = [p for p in root.rglob("*") if p.is_file()]
            paths = [p for p in paths if not any(x[0] == "." for x in p.relative_to(root).parts)]
        else:
            paths = [pathlib.Path(p) for p in glob.glob(str(root), recursive=True)]
            paths = [p for p in paths if p.is_file()]
            root = pathlib.Path(os.path.commonpath([p.parent for p in paths] or ["/"]))
        title = f"text_files={pattern}"
        if not paths:
            raise ConfigError(f"{title}: no such file, and no folder or glob that holds files")
    named = [(p.relative_to(root).as_posix(), p) for p in paths]
    return sorted(named, key=lambda item: hashlib.sha256(item[0].encode()).digest()), title


def _read_documents(files: list[tuple[str, pathlib.Path]]) -> np.ndarray:
    """The stream of all documents: BEGIN, its bytes, END; uint16."""
    parts = []
    for _, path in files:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"text_files: {path} cannot be read: {error.strerror}") from None
        if b"\0" in text:
            raise ConfigError(
                f"text_files: {path} is not text (it holds a zero byte at {text.index(0)}); "
                "name text files only"
            )
        if text:
            parts += [[BEGIN], np.frombuffer(text, np.uint8), [END]]
    if not parts:
        raise ConfigError(f"text_files: all {len(files)} files are empty, {files[0][1]} for one")
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe")
