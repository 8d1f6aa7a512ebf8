"""Documents -> a prepared set, on all cores, in a way that may be killed at any moment.

The inputs are cut into pieces and pieces joined to shards before anything is read, always in the
same way. A shard is one task: its files get their names when they are whole, and last of all comes
SHARD.json with what it was made from. A later start keeps the shards whose SHARD.json says what it
would make itself, and makes the others.

The folder may hold files of other people. It is ours from the first start to the manifest by a mark
in it; a folder without one is refused if it holds a file that we would write, and nothing is
removed but what a SHARD.json of ours vouches for and files with names that only we give.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxramp.data.files import prepared, storage
from maxramp.data.files.megatron import MegatronWriter
from maxramp.data.files.records import Record, RecordFile
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import EXIT_FAILED, ConfigError, TrainingError
from maxramp.parallel.locking import lock

# Documents encoded together: so many characters or tokens, or so many documents.
_BATCH_SIZE, _BATCH_COUNT = 1 << 20, 1024

_MARK = ".preparing"  # locked by the process at work; stays until the set is finished
_WRITTEN = re.compile(
    r"shard-\d{5,}\.(bin|idx|json)|bpe-[0-9a-f]{16}\.json|manifest\.json|"
    r"tokenizer(_config)?\.json|tokenizer\.(model|tiktoken)"
)
_LEFT_OVER = re.compile(rf"bpe-[0-9a-f]{{16}}\.json|\.?({_WRITTEN.pattern})(\.\d+)?\.tmp")
_FIELDS = {"version", "source", "documents", "tokens", "max_token", "hash"}  # of a SHARD.json


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
class Job:
    """What is to be prepared."""

    output: pathlib.Path
    tokenizer: Tokenizer | None  # None where the inputs hold tokens
    trained: str  # what the tokenizer was trained from, as `bpe_name` says; "" = it was given
    dtype: str
    shards: tuple[Shard, ...]

    @property
    def source(self) -> str:
        """Hash of everything that decides the set."""
        return _hash("".join(shard.source for shard in self.shards))

    def finished(self) -> dict[str, dict[str, Any]]:
        """The counts and hashes of the shards that are whole, by name.

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
) -> Job:
    """The shards of a set: about `shard_size` bytes of input each, the same at every start.

    Args:
      output: folder of the set.
      inputs: in order.
      tokenizer: of texts; None for tokens.
      trained: `bpe_name` of a tokenizer that was trained here; "" for another.
      shard_size: in bytes.

    Raises:
      ConfigError: an input that is missing, torn or of another kind.
    """
    dtype = "uint16" if tokenizer is not None and tokenizer.vocab_size <= 2**16 else "int32"
    how = (tokenizer.hash if tokenizer is not None else None, dtype)
    groups, held = [[]], 0
    for file in inputs:
        stamp = _stamp(file)
        for start, stop, size in file.split(shard_size):
            if groups[-1] and held + size > shard_size:
                groups.append([])
                held = 0
            groups[-1].append(((file, start, stop, size), stamp))
            held += size
    shards = []
    for group in filter(None, groups):
        source = _hash(repr((how, [(stamp, piece[1:]) for piece, stamp in group])))
        pieces = tuple(piece for piece, _ in group)
        shards.append(Shard(f"shard-{len(shards):05d}", pieces, source))
    return Job(output, tokenizer, trained, dtype, tuple(shards))


def _stamp(file: RecordFile) -> tuple[Any, ...]:
    """What changes when a file does, or what is read of it."""
    path = file.data_path
    return os.path.basename(path), storage.size_of(path), storage.changed_at(path), file.column


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
    if not isinstance(record, dict):
        return None
    record = {"version": 1} | record  # version 1 did not write its number
    return record if record.keys() == _FIELDS else None


def _check_folder(output: pathlib.Path) -> None:
    """Refuses a folder with a file of somebody else that a preparation would write over."""
    names = sorted(path.name for path in output.iterdir())
    if _MARK in names or prepared.NAME in names:
        return
    taken = [name for name in names if _WRITTEN.fullmatch(name)]
    # An unfinished set of version 1 had no mark.
    if taken and not any(_read_record(output / name) for name in taken):
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


def make(job: Job, workers: int, show: Callable[[int, int, int], None]) -> dict[str, Any]:
    """Makes the shards that are not there, and the manifest.

    Args:
      job: from `plan`.
      workers: processes at work.
      show: called several times a second with the documents and tokens made, and the bytes read.

    Raises:
      ConfigError: an input is wrong; no manifest is written.
      TrainingError: a worker was killed.
    """
    done = job.finished()
    missing = [shard for shard in job.shards if shard.name not in done]
    # Documents, tokens and bytes of the pieces that are read; whether the workers are to leave.
    counts = multiprocessing.get_context("spawn").Array("q", 4)
    mine = counts.get_obj()  # without the lock, which a worker may have when it is killed
    mine[2] = sum(shard.size for shard in job.shards if shard.name in done)
    with concurrent.futures.ProcessPoolExecutor(
        max(1, min(workers, len(missing))),
        multiprocessing.get_context("spawn"),
        _start_worker,
        (job, counts),
    ) as pool:
        pending = {pool.submit(_make_shard, shard) for shard in missing}
        try:
            while pending:
                finished, pending = concurrent.futures.wait(
                    pending, 0.2, concurrent.futures.FIRST_EXCEPTION
                )
                show(*mine[:3])
                for task in finished:
                    task.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise TrainingError(
                "a worker was killed, for want of memory perhaps (--workers takes fewer); start "
                "again to go on"
            ) from None
        finally:
            mine[3] = 1
            pool.shutdown(cancel_futures=True)
    done = job.finished()
    shards = [{"name": shard.name, **done[shard.name]} for shard in job.shards]
    manifest = prepared.make_manifest(shards, _describe(job), job.dtype, job.source)
    if not manifest["tokens"]:
        raise ConfigError(f"the inputs hold {manifest['documents']} documents and no tokens")
    storage.write_whole(job.output / prepared.NAME, json.dumps(manifest, indent=1).encode())
    clean(job)
    return manifest


def _describe(job: Job) -> dict[str, Any] | None:
    """The tokenizer as the manifest has it, its file copied into the set."""
    tokenizer = job.tokenizer
    if tokenizer is None:
        return None
    name = tokenizer.copy_to(job.output)
    trained = {"trained": job.trained} if job.trained else {}
    return trained | {
        "type": tokenizer.type,
        "file": name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "add_bos": tokenizer.add_bos,
        "add_eos": tokenizer.add_eos,
    }


def clean(job: Job) -> None:
    """Removes what the manifest has made superfluous, of what preparations wrote."""
    kept = {f"{shard.name}.{suffix}" for shard in job.shards for suffix in ("bin", "idx")}
    for path in list(job.output.iterdir()):
        if _LEFT_OVER.fullmatch(path.name):
            path.unlink(missing_ok=True)
        elif _WRITTEN.fullmatch(path.name) and path.suffix == ".json" and _read_record(path):
            # Last of all what vouches for the others, for a kill in between.
            for file in (path.with_suffix(".bin"), path.with_suffix(".idx"), path):
                if file.name not in kept:
                    file.unlink(missing_ok=True)


def _start_worker(*given: Any) -> None:
    global _job, _counts
    _job, _counts = given
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees it and asks us to leave


def _follow_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(EXIT_FAILED)  # it was killed, and nobody would ever ask for anything again


def _count(documents: int, tokens: int, size: int) -> None:
    with _counts:
        for index, more in enumerate((documents, tokens, size)):
            _counts[index] += more


def _make_shard(shard: Shard) -> None:
    try:
        _write_shard(shard)
    except OSError as error:
        raise TrainingError(
            f"--output {_job.output}: cannot write {error.filename or shard.name}: "
            f"{error.strerror or error}; make room, and start again to go on"
        ) from None


def _write_shard(shard: Shard) -> None:
    digest = prepared.DocumentsHash()
    with MegatronWriter(str(_job.output / shard.name), np.dtype(_job.dtype)) as writer:
        for file, start, stop, size in shard.pieces:
            for batch in _batches(_read(file, start, stop)):
                if _counts[3]:
                    return
                documents = batch if file.tokens else _job.tokenizer.encode(batch)
                writer.add(documents)
                digest.add(documents)
                _count(len(documents), sum(map(len, documents)), 0)
            _count(0, 0, size)
        record = writer.finish()
    record |= {"hash": digest.hex(), "source": shard.source, "version": prepared.VERSION}
    storage.write_whole(_job.output / f"{shard.name}.json", json.dumps(record).encode())


def _read(file: RecordFile, start: int, stop: int) -> Iterator[Record]:
    """The records of a piece; a read that fails names the file."""
    try:
        yield from file.read(start, stop)
    except OSError as error:
        raise ConfigError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += len(record)
        if size >= _BATCH_SIZE or len(batch) >= _BATCH_COUNT:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def sample_texts(inputs: Sequence[RecordFile], most: int) -> Iterator[str]:
    """Texts from all over the inputs, about `most` bytes of them."""
    pieces = [(file, piece) for file in inputs for piece in file.split(1 << 24)]
    total = sum(size for _, (*_, size) in pieces)
    for file, (start, stop, size) in pieces:
        left = size * min(1.0, most / max(1, total))
        for text in _read(file, start, stop):
            yield text
            left -= len(text)
            if left <= 0 and total > most:
                break
