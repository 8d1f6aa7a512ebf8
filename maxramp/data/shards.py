"""What a prepared set is made of, decided before anything is read: shards, and files of ours.

The inputs are cut into pieces and pieces joined to shards before anything is read, always in the
same way. A shard is one task: its files get their names when they are whole, and last of all comes
SHARD.json with what it was made from. A later start keeps the shards whose SHARD.json says what it
would make itself, and makes the others.

The folder may hold files of other people. It is ours from the first start to the manifest by a mark
in it; a folder without one is refused if it holds a file that we would write, and nothing is
removed but what a SHARD.json of ours vouches for and files with names that only we give.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from maxramp.data.files import prepared
from maxramp.data.files.records import RecordFile
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files.locking import lock

_MARK = ".preparing"  # locked by the process at work; stays until the set is finished
_WRITTEN = re.compile(
    r"shard-\d{5,}\.(bin|idx|json)|bpe-[0-9a-f]{16}\.json|manifest\.json|"
    r"tokenizer(_config)?\.json|tokenizer\.(model|tiktoken)|bad_records\.jsonl|"
    r"shard-\d{5,}\.[0-9a-f]{16}\.hashes"
)
_LEFT_OVER = re.compile(  # unfinished files by their names from `write_whole` and MegatronWriter
    r"bpe-[0-9a-f]{16}\.json|shard-\d{5,}\.[0-9a-f]{16}\.hashes|"
    rf"\.({_WRITTEN.pattern})\.\d+\.tmp|shard-\d{{5,}}\.(bin|idx)\.\d+\.tmp"
)
# Of a SHARD.json.
_FIELDS = {"version", "source", "documents", "tokens", "max_token", "hash", "bad"}


@dataclasses.dataclass(frozen=True)
class Shard:
    """A pair of files to write, and the pieces (of `records.Piece`) of inputs that go into it."""

    name: str
    pieces: tuple[tuple[RecordFile, int, int, int], ...]
    source: str  # hash of the pieces and of how they are read

    @property
    def size(self) -> int:
        """Bytes of its pieces."""
        return sum(size for *_, size in self.pieces)


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What is to be prepared."""

    output: pathlib.Path
    tokenizer: Tokenizer | None  # None where the inputs hold tokens
    trained: str  # what the tokenizer was trained from, as `bpe_name` says; "" = it was given
    deduplicate: bool  # whether a document that an earlier one equals is left out
    dtype: str
    shards: tuple[Shard, ...]

    @property
    def source(self) -> str:
        """Hash of everything that decides the set."""
        return _hash("".join(shard.source for shard in self.shards))

    def finished(self) -> dict[str, dict[str, Any]]:
        """The counts, hashes and bad records of the shards that are whole, by name.

        Raises:
          ConfigError: a file has the name of a SHARD.json and is none.
        """
        done = {}
        for shard in self.shards:
            path = self.output / f"{shard.name}.json"
            record = _read_record(path)
            if record is None and path.exists():
                raise ConfigError(
                    f"--output {self.output}: {path.name} there is not of maxramp.prepare; give "
                    "another folder, or move it away"
                )
            made_from = (record.pop("version"), record.pop("source")) if record else None
            if made_from == (prepared.VERSION, shard.source):
                done[shard.name] = record
        return done


def plan(
    output: pathlib.Path,
    inputs: Sequence[RecordFile],
    tokenizer: Tokenizer | None,
    trained: str,
    shard_size: int,
    deduplicate: bool,
) -> Preparation:
    """The shards of a set: about `shard_size` bytes of input each, the same at every start.

    Args:
      output: folder of the set.
      inputs: in order.
      tokenizer: of texts; None for tokens.
      trained: `bpe_name` of a tokenizer that was trained here; "" for another.
      shard_size: in bytes.
      deduplicate: whether to leave out a document that an earlier one equals.

    Raises:
      ConfigError: an input that is missing, torn or of another kind.
    """
    dtype = "uint16" if tokenizer is not None and tokenizer.vocab_size <= 2**16 else "int32"
    how = (tokenizer.hash if tokenizer is not None else None, dtype)
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
        source = _hash(repr((how, [(stamp, piece[1:]) for piece, stamp in group])))
        if deduplicate:  # what a shard leaves out follows from all before it
            source = _hash(f"{shards[-1].source if shards else 'deduplicated'} {source}")
        pieces = tuple(piece for piece, _ in group)
        shards.append(Shard(f"shard-{len(shards):05d}", pieces, source))
    return Preparation(output, tokenizer, trained, deduplicate, dtype, tuple(shards))


def bpe_name(size: int, inputs: Sequence[RecordFile]) -> str:
    """What identifies a BPE that is trained here: its size, and the names of what it is trained on.

    An input that was mended between two starts keeps its name, and so the tokenizer is kept.
    """
    names = [(os.path.basename(file.data_path), file.column) for file in inputs]
    return f"bpe-{_hash(repr((size, names)))}"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read_record(path: pathlib.Path) -> dict[str, Any] | None:
    """What a SHARD.json of ours holds; None if the file is missing or not ours."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.keys() == _FIELDS else None


def _check_folder(output: pathlib.Path) -> None:
    """Refuses a folder with a file of somebody else that a preparation would write over."""
    names = sorted(path.name for path in output.iterdir())
    if _MARK in names or prepared.NAME in names:
        return
    if taken := [name for name in names if _WRITTEN.fullmatch(name)]:
        raise ConfigError(
            f"--output {output} holds {taken[0]}, which maxramp.prepare did not write and would "
            "write over; give another folder"
        )


@contextlib.contextmanager
def sole_writer(output: pathlib.Path) -> Iterator[None]:
    """Keeps other preparations out of a folder, until this process ends at the latest.

    Raises:
      ConfigError: one is at work there, or the folder cannot be written, or holds files of somebody
        else that would be written over.
    """
    with contextlib.ExitStack() as closing:
        try:
            output.mkdir(parents=True, exist_ok=True)
            _check_folder(output)
            mark = closing.enter_context(open(output / _MARK, "w"))
            if warning := lock(mark):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        except BlockingIOError:
            raise ConfigError(f"--output {output}: another process is preparing it; wait") from None
        except OSError as error:
            raise ConfigError(
                f"--output {output}: cannot write there: {error.strerror or error}"
            ) from None
        try:
            yield
        finally:
            # A mark over nothing of ours would make ours what somebody else puts there.
            ours = (_WRITTEN.fullmatch, _LEFT_OVER.fullmatch)
            begun = any(fits(name) for name in os.listdir(output) for fits in ours)
            if prepared.is_prepared(str(output)) or not begun:
                os.unlink(mark.name)


def clean(work: Preparation) -> None:
    """Removes what the manifest has made superfluous, of what preparations wrote."""
    kept = {f"{shard.name}.{suffix}" for shard in work.shards for suffix in ("bin", "idx")}
    for path in list(work.output.iterdir()):
        if _LEFT_OVER.fullmatch(path.name):
            path.unlink(missing_ok=True)
        elif _WRITTEN.fullmatch(path.name) and path.suffix == ".json" and _read_record(path):
            # Last of all what vouches for the others, for a kill in between.
            for file in (path.with_suffix(".bin"), path.with_suffix(".idx"), path):
                if file.name not in kept:
                    file.unlink(missing_ok=True)
