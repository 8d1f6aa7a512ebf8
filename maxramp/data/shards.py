"""What a prepared set is made of, decided before anything is read, and the folder it is made in.

Inputs are cut into pieces and pieces joined to shards, always in the same way. A shard's files get
their names in DIR when they are complete; then DIR/.preparing gets SHARD.json with what it was made
from, and a later start keeps the shards that it would make so itself. The manifest comes last: a
folder without one is not a set.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from maxramp.data.chats.chats import ChatEncoder
from maxramp.data.corpus import hash_of
from maxramp.data.files import prepared
from maxramp.data.files.records import RecordFile
from maxramp.data.keys import LOCAL_CACHE
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError, TrainingError
from maxramp.files.place import ObjectPath, lock, place, sizes
from maxramp.files.storage import map_in_threads

LIST = "bad_records.jsonl"  # in the folder of a set: what was left out of it, a line each
_WORK, _LOCK = ".preparing", ".lock"
_POLL = 0.2  # seconds
# Names of shards, and of files that have no name yet.
_OWN = re.compile(r"shard-\d{5,}\.|\.(shard-\d{5,}|manifest|bad_records)\..*\.tmp$")
# Bytes of input below which workers would take longer to start than to work.
_SMALL = 32_000_000


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
    """A set to be prepared."""

    folder: pathlib.Path  # DIR
    label: str  # what errors call the folder,
    name: str  # and the inputs
    files: Sequence[RecordFile]
    how: str  # they are read: equal words, equal tokens
    tokenizer: Tokenizer | None = None  # None where the inputs hold tokens
    encoder: ChatEncoder | None = None  # of chats
    deduplicate: bool = False  # whether a document that an earlier one equals is left out
    allowed: int = 0  # bad records
    shard_size: int = 128_000_000  # bytes of input
    workers: int | None = None  # processes; None = one per core, and none for small inputs
    shared: ObjectPath | None = None  # where hosts without a common disk find it

    @property
    def work(self) -> pathlib.Path:
        return self.folder / _WORK

    @property
    def dtype(self) -> str:
        return "uint16" if self.tokenizer and self.tokenizer.vocab_size <= 2**16 else "int32"

    @property
    def is_prepared(self) -> bool:
        return prepared.is_prepared(str(self.folder))

    @property
    def is_shared(self) -> bool:
        """Whether the storage has the set, where there is one for it."""
        return not self.shared or prepared.is_prepared(str(self.shared))

    def publish(self, beat: Callable[[], None]) -> None:
        """Copies the set to `shared`, inside `lock`, the manifest last: no other file makes a set.
        An OSError if the storage fails."""

        def copy(name: str) -> None:
            (self.shared / name).upload(self.folder / name)
            beat()

        names = {path.name for path in self.folder.iterdir() if path.name[0] != "."}
        map_in_threads(copy, [*names - {prepared.NAME}])
        copy(prepared.NAME)

    def fetch(self, beat: Callable[[], None]) -> None:
        """Copies a set that is not prepared here from `shared`, inside `lock`; a kill leaves
        nothing but unfinished work. An OSError if the storage or the disk fails."""

        def copy(name: str) -> None:
            (self.shared / name).ask("get_file", str(self.work / name))
            beat()

        names = [*sizes(self.shared)]
        map_in_threads(copy, names)
        for name in sorted(names, key=prepared.NAME.__eq__):
            os.replace(self.work / name, self.folder / name)

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Shards of about `shard_size`, the same at every start."""
        groups, held = [[]], 0
        for file in self.files:
            for start, stop, size in file.split(self.shard_size):
                if groups[-1] and held + size > self.shard_size:
                    groups.append([])
                    held = 0
                groups[-1].append((file, start, stop, size))
                held += size
        shards = []
        for pieces in filter(None, groups):
            stamps = [(file.stamp, piece) for file, *piece in pieces]
            source = hash_of((prepared.VERSION, self.how, stamps))
            if self.deduplicate:  # what a shard leaves out follows from all before it
                source = hash_of((shards[-1].source if shards else "deduplicated", source))
            shards.append(Shard(f"shard-{len(shards):05d}", tuple(pieces), source))
        return tuple(shards)

    @property
    def source(self) -> str:
        """Hash of everything that decides the set."""
        return hash_of(tuple(shard.source for shard in self.shards))

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(shard.size for shard in self.shards)

    @property
    def processes(self) -> int:
        """Processes that work for this one; 0 = it works itself."""
        if self.workers is None:
            return 0 if self.size < _SMALL else os.cpu_count() or 1
        return self.workers

    def hashes_of(self, shard: Shard) -> pathlib.Path:
        """Returns the file for the hashes of a shard's documents."""
        return self.work / f"{shard.source}.hashes"

    def finished_shards(self) -> dict[str, dict[str, Any]]:
        """Returns the records of the shards that are made, by their names; not those of other
        inputs, or read in another way."""
        done = {}
        for shard in self.shards:
            with contextlib.suppress(FileNotFoundError):
                record = json.loads((self.work / f"{shard.name}.json").read_text())
                if record.pop("source") == shard.source:
                    done[shard.name] = record
        return done

    def remove_others(self) -> None:
        """Removes what other preparations left in the folder, inside `lock`."""
        done = self.finished_shards()
        for path in [*self.work.glob("shard-*"), *self._files()]:  # SHARD.json first
            if path.name.partition(".")[0] not in done:
                path.unlink()
        (self.folder / LIST).unlink(missing_ok=True)

    def _files(self) -> list[pathlib.Path]:
        """Lists what preparations write into the folder, and nobody else: shards, whole or not."""
        return [path for path in self.folder.iterdir() if _OWN.match(path.name)]

    @contextlib.contextmanager
    def lock(self, wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Locks the folder against other preparations, one of which may have made the set meanwhile
        (`is_prepared`); a ConfigError if it is not one of ours or cannot be written, a
        TrainingError if the caller's writing fails.

        Args:
          wait: called while another process prepares it; without it that is an error.
        """
        with contextlib.ExitStack() as closing:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                names = {*os.listdir(self.folder)} - {_LOCK}
                if names and not names & {_WORK, prepared.NAME}:
                    raise ConfigError(
                        f"{self.label} holds {min(names)}, which maxramp.prepare did not write; "
                        "give another folder"
                    )
                file = closing.enter_context(open(self.folder / _LOCK, "w"))
                while not _try_lock(file):
                    if wait is None:
                        raise ConfigError(f"{self.label}: another process is preparing it; wait")
                    wait()
                    time.sleep(_POLL)
                if not self.is_prepared:
                    self.work.mkdir(exist_ok=True)
            except OSError as error:
                why = error.strerror or error
                raise ConfigError(
                    f"{self.label}: cannot write there: {why}; give another folder"
                ) from None
            try:
                yield
            except OSError as error:  # of a file that is read it would be a ConfigError
                raise TrainingError(
                    f"{self.label}: cannot write {error.filename or 'there'}: "
                    f"{error.strerror or error}; make room, and start again to continue"
                ) from None
            finally:
                if self.is_prepared:  # which whoever waits for the lock sees when he has it
                    shutil.rmtree(self.work, ignore_errors=True)
                    (self.folder / _LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for path in self._files():
                        if path.suffix == ".tmp":  # of a shard that was not finished
                            path.unlink()
                    self.work.rmdir()  # without a file of ours the folder is not ours


def plan_cached(
    name: str,
    cache: str,
    files: Sequence[RecordFile],
    tokenizer: Tokenizer | None,
    encoder: ChatEncoder | None = None,
) -> Preparation:
    """Returns the set for files, in a folder of data_cache_dir (`cache`, which `resolve` has filled
    in) that is named by a hash of the files' stamps and of how they are read. The others are as in
    `Preparation`."""
    stamps = map_in_threads(lambda file: file.stamp, files)
    how = describe_reading(tokenizer.hash if tokenizer else "", encoder)
    folder, shared = place(cache) / hash_of((prepared.VERSION, how, stamps)), None
    if isinstance(folder, ObjectPath):
        folder, shared = place(LOCAL_CACHE) / folder.name, folder
    label = f"data_cache_dir={cache}"
    return Preparation(folder, label, name, files, how, tokenizer, encoder, shared=shared)


def describe_reading(tokenizer: str, encoder: ChatEncoder | None) -> str:
    """Returns what decides, besides the files, the tokens of a set."""
    return f"{tokenizer} {encoder.made_by if encoder else ''}"


def _try_lock(file: IO) -> bool:
    """Tells whether this process has locked the file now; prints a warning where the disk has no
    locks."""
    try:
        warning = lock(file)
    except BlockingIOError:
        return False
    if warning:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return True
