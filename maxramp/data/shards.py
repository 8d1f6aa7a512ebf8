"""What a prepared set is made of, decided before anything is read, and the folder it is made in.

Inputs are cut into pieces and pieces joined to shards, always in the same way. A shard's files get
their names when they are complete, and last comes SHARD.json with what it was made from; a later
start keeps the shards that it would make so itself. All of that is in DIR/.preparing; the set moves
from its folder `set` to DIR when it is complete, the manifest last.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxramp.data.chats.chats import ChatEncoder
from maxramp.data.corpus import hash_of
from maxramp.data.files import prepared
from maxramp.data.files.records import RecordFile
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files.place import lock

_WORK, _LOCK = ".preparing", "lock"
_POLL = 0.2  # seconds


@dataclasses.dataclass(frozen=True)
class Shard:
    """A pair of files to write, and the pieces (of `records.Piece`) of inputs that go into it."""

    name: str
    pieces: tuple[tuple[RecordFile, int, int, int], ...]
    source: str  # hash of the pieces and of how they are read

    @property
    def size(self) -> int:
        return sum(size for *_, size in self.pieces)


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What is to be prepared."""

    work: pathlib.Path  # DIR/.preparing
    tokenizer: Tokenizer | None  # None where the inputs hold tokens
    deduplicate: bool  # whether a document that an earlier one equals is left out
    shards: tuple[Shard, ...]
    encoder: ChatEncoder | None  # of chats; None where the inputs hold documents
    workers: int  # processes; 0 = this one works
    allowed: int  # bad records
    inputs: str  # what errors call the inputs,
    label: str  # and the folder

    @property
    def staging_folder(self) -> pathlib.Path:
        return self.work / "set"

    @property
    def dtype(self) -> str:
        return "uint16" if self.tokenizer and self.tokenizer.vocab_size <= 2**16 else "int32"

    def hashes_of(self, shard: Shard) -> pathlib.Path:
        return self.work / f"{shard.source}.hashes"

    def finished_shards(self) -> dict[str, dict[str, Any]]:
        done = {}
        for shard in self.shards:
            with contextlib.suppress(FileNotFoundError):
                record = json.loads((self.work / f"{shard.name}.json").read_text())
                if record.pop("source") == shard.source:
                    done[shard.name] = record
        return done

    def remove_others(self) -> None:
        done = self.finished_shards()
        self.staging_folder.mkdir(exist_ok=True)
        # SHARD.json first
        for path in [*self.work.glob("shard-*"), *self.staging_folder.iterdir()]:
            if path.stem.removesuffix(prepared.TARGETS) not in done:
                path.unlink()


def plan(
    inputs: Sequence[RecordFile], tokenizer: str, shard_size: int, deduplicate: bool
) -> tuple[Shard, ...]:
    """About `shard_size` bytes of input each, the same at every start."""
    groups, held = [[]], 0
    for file in inputs:
        stamp = file.stamp
        for start, stop, size in file.split(shard_size):
            if groups[-1] and held + size > shard_size:
                groups.append([])
                held = 0
            groups[-1].append(((file, start, stop, size), stamp))
            held += size
    shards = []
    for group in filter(None, groups):
        stamps = [(stamp, piece[1:]) for piece, stamp in group]
        source = hash_of((prepared.VERSION, tokenizer, stamps))
        if deduplicate:  # what a shard leaves out follows from all before it
            source = hash_of((shards[-1].source if shards else "deduplicated", source))
        pieces = tuple(piece for piece, _ in group)
        shards.append(Shard(f"shard-{len(shards):05d}", pieces, source))
    return tuple(shards)


def source_of(shards: Sequence[Shard]) -> str:
    """Hash of everything that decides a set."""
    return hash_of(tuple(shard.source for shard in shards))


def bpe_name(size: int, inputs: Sequence[RecordFile]) -> str:
    """An input that was repaired between two starts keeps its name, so the tokenizer is kept."""
    names = [(os.path.basename(file.data_path), file.column) for file in inputs]
    return f"bpe-{hash_of((size, names))}"


@contextlib.contextmanager
def sole_writer(
    output: pathlib.Path, label: str, wait: Callable[[], None] | None = None
) -> Iterator[pathlib.Path]:
    """Gives DIR/.preparing, locked against other preparations until this process ends.

    Args:
      label: what errors call DIR.
      wait: called while another process prepares DIR; without it that is an error.
    """
    work = output / _WORK
    with contextlib.ExitStack() as closing:
        try:
            output.mkdir(parents=True, exist_ok=True)
            others = sorted(os.listdir(output))
            if others and _WORK not in others and prepared.NAME not in others:
                raise ConfigError(
                    f"{label} holds {others[0]}, which maxramp.prepare did not write; "
                    "give another folder"
                )
            while _lock(work, closing):
                if wait is None:
                    raise ConfigError(f"{label}: another process is preparing it; wait")
                wait()
                time.sleep(_POLL)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"{label}: cannot write there: {why}; give another folder") from None
        try:
            publish(work)  # where an earlier start was killed just before
            yield work
        finally:
            if prepared.is_prepared(str(output)) or os.listdir(work) == [_LOCK]:
                _remove(work)


def _remove(work: pathlib.Path) -> None:
    """The lock last: whoever waits for it may make the folder anew at once."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
    (work / _LOCK).unlink()
    with contextlib.suppress(OSError):
        work.rmdir()


def _lock(work: pathlib.Path, closing: contextlib.ExitStack) -> bool:
    """Whether another process has the lock of a folder; else this one has it from now on."""
    with contextlib.ExitStack() as opened:
        try:
            work.mkdir(exist_ok=True)
            file = opened.enter_context(open(work / _LOCK, "w"))
            if warning := lock(file):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(work / _LOCK)):
                return True
        except (BlockingIOError, FileNotFoundError):  # the other one removes it when it is done
            return True
        closing.push(opened.pop_all())
    return False


def publish(work: pathlib.Path) -> None:
    made = work / "set"
    if prepared.is_prepared(str(made)):
        for path in sorted(made.iterdir(), key=lambda path: path.name == prepared.NAME):
            path.replace(work.parent / path.name)
