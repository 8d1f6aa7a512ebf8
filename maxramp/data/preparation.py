"""Documents -> a prepared set, on all cores, in a way that may be killed at any moment.

Glossary
  maker    a process that makes shards, one after another: it reads, and writes in order
  helper   a process that encodes for a maker, where there are fewer shards to make than cores
  batch    documents encoded together
"""

import collections
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxramp.data import duplicates
from maxramp.data.bad_records import LIST, BadRecords, entry, listed
from maxramp.data.files import prepared
from maxramp.data.files.megatron import MegatronWriter
from maxramp.data.files.records import BadRecord, Record, RecordFile
from maxramp.data.shards import Preparation, Shard, clean
from maxramp.errors import EXIT_FAILED, ConfigError, TrainingError
from maxramp.files import storage

# Documents of a batch: so many characters or tokens, or so many documents.
_BATCH_SIZE, _BATCH_COUNT = 1 << 20, 1024
_WORTH_A_HELPER = 1 << 23  # bytes of a shard, for each process that helps to encode it
_HASHED_TOGETHER = 1 << 14  # bytes of hashes after which a maker looks whether it is to leave
_AHEAD = 2  # batches that wait for each helper


def make(
    work: Preparation, workers: int, allowed: BadRecords, show: Callable[[int, int, int], None]
) -> dict[str, Any]:
    """Makes the shards that are not there, and the manifest.

    Args:
      work: from `shards.plan`.
      workers: processes at work.
      allowed: bad records.
      show: called several times a second with the documents and tokens made, and the bytes read.

    Raises:
      ConfigError: an input is wrong; no manifest is written.
      TrainingError: a worker was killed.
    """
    done = work.finished()
    bad = [one for record in done.values() for one in record["bad"]]
    if bad and not allowed.share:
        allowed.check(len(bad), 0, listed(bad[0]))
    left_out = [np.empty(0, np.int64)] * len(work.shards)
    if work.deduplicate:
        unhashed = [(shard,) for shard in work.shards if not _hashes(work, shard).exists()]
        _run(work, workers, allowed, _hash_shard, unhashed, [0] * 5, lambda *counts: None)
        left_out = duplicates.find([_hashes(work, shard) for shard in work.shards])
    there = sum(shard.size for shard in work.shards if shard.name in done)
    tasks = [
        (shard, numbers)
        for shard, numbers in zip(work.shards, left_out, strict=True)
        if shard.name not in done
    ]
    _run(work, workers, allowed, _make_shard, tasks, [0, 0, there, 0, len(bad)], show)
    return _finish(work, allowed, sum(map(len, left_out)))


def _finish(work: Preparation, allowed: BadRecords, repeated: int) -> dict[str, Any]:
    """Writes the list of bad records and the manifest of shards that are all there."""
    done = work.finished()
    bad = [one for shard in work.shards for one in done[shard.name].pop("bad")]
    if bad:
        lines = "".join(f"{json.dumps(one)}\n" for one in bad)
        storage.write_whole(work.output / LIST, lines.encode())
    else:
        (work.output / LIST).unlink(missing_ok=True)
    shards = [{"name": shard.name, **done[shard.name]} for shard in work.shards]
    manifest = prepared.make_manifest(shards, _describe(work), work.dtype, work.source)
    if bad:
        records = manifest["documents"] + repeated + len(bad)
        allowed.check(len(bad), records, listed(bad[0]))
        manifest["bad_records"] = len(bad)
    if work.deduplicate:
        manifest["duplicates"] = repeated
    if not manifest["tokens"]:
        raise ConfigError(f"the inputs hold {manifest['documents']} documents and no tokens")
    storage.write_whole(work.output / prepared.NAME, json.dumps(manifest, indent=1).encode())
    clean(work)
    return manifest


def _describe(work: Preparation) -> dict[str, Any] | None:
    """The tokenizer as the manifest has it, its file copied into the set."""
    tokenizer = work.tokenizer
    if tokenizer is None:
        return None
    name = tokenizer.copy_to(work.output)
    trained = {"trained": work.trained} if work.trained else {}
    return (
        trained
        | {
            "type": tokenizer.type,
            "file": name,
            "hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
        }
        | tokenizer.mark_keys
    )


def _run(
    work: Preparation,
    workers: int,
    allowed: BadRecords,
    task: Callable[..., None],
    given: Sequence[tuple],
    counted: Sequence[int],
    show: Callable[[int, int, int], None],
) -> None:
    """Calls `task` in processes, for everything that is given, until all is done or one fails."""
    # Documents, tokens and bytes of the pieces that are read; whether the workers are to leave; and
    # bad records.
    counts = multiprocessing.get_context("spawn").Array("q", list(counted))
    mine = counts.get_obj()  # without the lock, which a worker may have when it is killed
    makers = max(1, min(workers, len(given)))
    largest = max((shard.size for shard, *_ in given), default=0)
    helpers = min(workers // makers, largest // _WORTH_A_HELPER) if work.tokenizer else 0
    with concurrent.futures.ProcessPoolExecutor(
        makers,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (work, counts, allowed, helpers),
    ) as pool:
        try:
            with _starting():
                pending = {pool.submit(task, *one) for one in given}
            while pending:
                finished, pending = concurrent.futures.wait(
                    pending, 0.2, concurrent.futures.FIRST_EXCEPTION
                )
                show(*mine[:3])
                for future in finished:
                    future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise TrainingError(
                "a worker was killed, for want of memory perhaps (--workers takes fewer); start "
                "again to go on"
            ) from None
        finally:
            mine[3] = 1
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Around what starts processes."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"no more processes can be started: {error.strerror or error}; give fewer --workers, "
            "and start again to go on"
        ) from None


# --- In a maker and its helpers ------------------------------------------------------------------


def _start_worker(*given: Any) -> None:
    global _job, _counts, _allowed, _helpers
    _job, _counts, _allowed, _helpers = given
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees it and asks us to leave


def _follow_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(EXIT_FAILED)  # it was killed, and nobody would ever ask for anything again


def _count(documents: int, tokens: int, size: int, bad: int = 0) -> int:
    """Tells the parent what was made, and returns all bad records so far."""
    with _counts:
        for index, more in enumerate((documents, tokens, size, 0, bad)):
            _counts[index] += more
        return _counts[4]


def _make_shard(shard: Shard, left_out: np.ndarray) -> None:
    """Makes a shard without those of its good documents, by their numbers, that are left out."""
    try:
        _write_shard(shard, left_out)
    except OSError as error:
        raise _cannot_write(error, shard) from None


def _cannot_write(error: OSError, shard: Shard) -> TrainingError:
    return TrainingError(
        f"--output {_job.output}: cannot write {error.filename or shard.name}: "
        f"{error.strerror or error}; make room, and start again to go on"
    )


def _write_shard(shard: Shard, left_out: np.ndarray) -> None:
    digest, bad = prepared.DocumentsHash(), []
    with MegatronWriter(str(_job.output / shard.name), np.dtype(_job.dtype)) as writer:
        with contextlib.closing(_encode_ahead(_batches(shard, left_out, bad))) as encoded:
            for tokens, sizes, value in encoded:
                if _counts[3]:
                    return
                writer.extend(tokens, sizes)
                digest.join(value, len(sizes))
                _count(len(sizes), len(tokens), 0)
        record = writer.finish()
    record |= {"hash": digest.hex(), "source": shard.source, "version": prepared.VERSION}
    record |= {"bad": bad}
    storage.write_whole(_job.output / f"{shard.name}.json", json.dumps(record).encode())


def _batches(shard: Shard, left_out: np.ndarray, bad: list[dict]) -> Iterator[list[Record]]:
    """The good documents of a shard; notes the bad ones in `bad`."""
    skipped = iter(left_out.tolist())
    number, skip = -1, next(skipped, None)
    for file, start, stop, size in shard.pieces:
        batch, held = [], 0
        for record in _read(file, start, stop):
            if isinstance(record, BadRecord):
                bad.append(entry(file, record))
                total = _count(0, 0, 0, bad=1)
                if not _allowed.share and total > _allowed.most:
                    _allowed.check(total, 0, f"{file.where_place(record.place)}: {record}")
                continue
            number += 1
            if number == skip:
                skip = next(skipped, None)
                continue
            batch.append(record)
            held += len(record)
            if held >= _BATCH_SIZE or len(batch) >= _BATCH_COUNT:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch
        _count(0, 0, size)


def _encode(batch: list[Record]) -> tuple[np.ndarray, np.ndarray, int]:
    """The tokens of documents, their lengths and their hash."""
    documents = _job.tokenizer.encode(batch) if _job.tokenizer else batch
    digest = prepared.DocumentsHash()
    digest.add(documents)
    sizes = np.fromiter(map(len, documents), np.int32, len(documents))
    return np.concatenate(documents).astype(_job.dtype), sizes, digest.value


def _encode_ahead(batches: Iterator[list[Record]]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """`_encode` of every batch, in order; by helpers where there are some."""
    if _helpers < 2:
        yield from map(_encode, batches)
        return
    context = multiprocessing.get_context("spawn")
    given = (_job, None, _allowed, 0)
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    # Where there are helpers, a maker has one shard to make.
    with _starting():
        pool = concurrent.futures.ProcessPoolExecutor(_helpers, context, _start_worker, given)
    try:
        for batch in batches:
            with _starting():
                waiting.append(pool.submit(_encode, batch))
            if len(waiting) > _AHEAD * _helpers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _hashes(work: Preparation, shard: Shard) -> Any:
    """The file of the hashes of a shard's documents."""
    return work.output / f"{shard.name}.{shard.source}.hashes"


def _hash_shard(shard: Shard) -> None:
    """Writes the hash of every good document of a shard."""
    hashes = bytearray()
    for file, start, stop, _ in shard.pieces:
        for record in _read(file, start, stop):
            if not isinstance(record, BadRecord):
                hashes += duplicates.hash_of(record)
            if len(hashes) % _HASHED_TOGETHER == 0 and _counts[3]:
                return
    try:
        storage.write_whole(_hashes(_job, shard), bytes(hashes))
    except OSError as error:
        raise _cannot_write(error, shard) from None


def _read(file: RecordFile, start: int, stop: int) -> Iterator[Record | BadRecord]:
    """The records of a piece; a read that fails names the file."""
    try:
        yield from file.read(start, stop)
    except OSError as error:
        raise ConfigError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def sample_texts(inputs: Sequence[RecordFile], most: int, allowed: BadRecords) -> Iterator[str]:
    """Texts from all over the inputs, about `most` bytes of them, without bad records.

    Raises:
      ConfigError: a record is bad, and none may be.
    """
    pieces = [(file, piece) for file in inputs for piece in file.split(1 << 24)]
    total = sum(size for _, (*_, size) in pieces)
    for file, (start, stop, size) in pieces:
        left = size * min(1.0, most / max(1, total))
        for text in _read(file, start, stop):
            if isinstance(text, BadRecord):
                if not allowed.most:
                    raise ConfigError(f"{file.where_place(text.place)}: {text}")
                continue
            yield text
            left -= len(text)
            if left <= 0 and total > most:
                break
