"""Documents -> a prepared set, on all cores; it may be killed at any moment and continued. Each
maker is a process that makes shards, one after another; its threads encode batches of documents, as
tokenizers release the lock.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION
from typing import Any

import numpy as np

from maxramp.commandline import count
from maxramp.data.files import prepared
from maxramp.data.files.megatron import MegatronWriter
from maxramp.data.files.records import BadRecord, Record, RecordFile, attempt
from maxramp.data.packing import fit_to_row
from maxramp.data.rows import MARKED, UNANSWERED
from maxramp.data.shards import LIST, Preparation, Shard
from maxramp.errors import ConfigError, TrainingError
from maxramp.files import place
from maxramp.processes.workers import delay_signals, stay_with_parent

_SIZE = 16  # bytes of a hash


def _hash_record(record: Record) -> bytes:
    data = record.encode() if isinstance(record, str) else record.tobytes()
    return hashlib.blake2b(data, digest_size=_SIZE).digest()


def find_duplicates(paths: Sequence[pathlib.Path]) -> list[np.ndarray]:
    """Returns the numbers, in each file of hashes (at least one), of documents that repeat an
    earlier one of any file."""
    hashes = [np.fromfile(path, f"S{_SIZE}") for path in paths]
    repeated = np.ones(sum(map(len, hashes)), bool)
    repeated[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    parts = np.split(repeated, np.cumsum([len(part) for part in hashes])[:-1])
    return [np.flatnonzero(part) for part in parts]


# What the makers count together: documents, tokens and bytes read; whether they are to leave, and
# bad records.
_SHOWN, _LEAVE, _BAD = slice(0, 3), 3, 4
# A batch of documents ends at this many characters or tokens, or documents.
_BATCH_SIZE, _BATCH_COUNT = 1 << 20, 1024
_HASHED_TOGETHER = 1 << 14  # bytes of hashes after which a maker looks whether it is to leave
_AHEAD = 2  # batches that wait for each thread
Show = Callable[[int, int, int], None]


def prepare(work: Preparation, beat: Callable[[], None], publishes: bool = False) -> None:
    """Makes a set, or waits for another process that does; `beat` is called meanwhile. Where hosts
    share sets in a storage, it is fetched from there or, if this process `publishes`, copied there.
    A ConfigError if a file has no records or too many bad ones, a TrainingError on a full disk or
    if a worker is killed.
    """
    if work.is_prepared and (work.is_shared or not publishes):
        return
    done, show_progress = (), lambda *counts: None

    def show(*counts: int) -> None:
        nonlocal done
        if counts != done:  # what hangs is not kept alive
            done = counts
            beat()
        show_progress(*counts)

    with work.lock(beat), contextlib.ExitStack() as closing:
        if not work.is_prepared and work.shared and work.is_shared:
            print(f"data     {work.name}: fetching {work.shared}", flush=True)
            work.fetch(beat)
        elif not work.is_prepared:
            for file in work.files:
                if file.is_empty:
                    raise ConfigError(f"{file.path}: holds no records; leave it out")
            if work.processes:
                print(
                    f"data     {work.name}: preparing {work.size / 1e6:,.0f} MB, once", flush=True
                )
                show_progress = closing.enter_context(progress(work.size))
            make(work, show)
        if publishes and not work.is_shared:
            work.publish(beat)


@contextlib.contextmanager
def progress(size: int) -> Iterator[Show]:
    """Yields what shows documents, tokens and the bytes done of `size`, each in all so far: by a
    bar on a terminal, elsewhere by a line at every tenth."""
    from rich.progress import BarColumn, Progress, TimeRemainingColumn  # most starts show none

    start, tenths = time.perf_counter(), 0
    columns = (BarColumn(30), "{task.description}", TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("starting", total=size)

        def show(documents: int, tokens: int, done: int) -> None:
            nonlocal tenths
            rate = tokens / (time.perf_counter() - start)
            line = f"{count(documents, 'document')}, {tokens:,} tokens, {rate:,.0f} tokens/s"
            bar.update(task, completed=done, description=line)
            read = min(done * 10 // max(1, size), 9)  # ahead of what is made; `done` has the rest
            if bar.disable and documents and read > tenths:
                tenths = read
                print(f"{tenths:>3}0%       {line}", flush=True)

        yield show


def make(work: Preparation, show: Show) -> dict[str, Any]:
    """Makes the missing shards and the manifest, inside `work.lock`; returns the manifest. `show`
    gets the documents and tokens made and the bytes read so far, several times a second, or without
    processes after each shard. Raises as `prepare`.
    """
    work.remove_others()
    done = work.finished_shards()
    bad = [one for record in done.values() for one in record["bad"]]
    if len(bad) > work.allowed:
        _refuse(f"{bad[0]['file']}: {bad[0]['reason']}", work.allowed)
    left_out = [np.empty(0, np.int64)] * len(work.shards)
    if work.deduplicate and work.shards:
        unhashed = [(shard,) for shard in work.shards if not work.hashes_of(shard).exists()]
        _run(work, _Maker.hash_shard, unhashed, [0] * 5, lambda *counts: None)
        left_out = find_duplicates([work.hashes_of(shard) for shard in work.shards])
    bytes_done = sum(shard.size for shard in work.shards if shard.name in done)
    both = zip(work.shards, left_out, strict=True)
    tasks = [(shard, numbers) for shard, numbers in both if shard.name not in done]
    _run(work, _Maker.make_shard, tasks, [0, 0, bytes_done, 0, len(bad)], show)
    return _finish(work, sum(map(len, left_out)))


def _refuse(bad: str, allowed: int) -> None:
    raise ConfigError(bad + (f"; more are bad than --max_bad_records {allowed}" if allowed else ""))


def _finish(work: Preparation, repeated: int) -> dict[str, Any]:
    """Writes the manifest, once all shards are made, and returns it; a ConfigError if they hold no
    tokens."""
    done = work.finished_shards()
    bad = [one for shard in work.shards for one in done[shard.name].pop("bad")]
    shards = [{"name": shard.name, **done[shard.name]} for shard in work.shards]
    documents, tokens = (sum(shard[name] for shard in shards) for name in ("documents", "tokens"))
    if not tokens:
        raise ConfigError(f"{work.name}: no records with tokens, of {count(documents, 'document')}")
    whole = 0
    for shard in shards:
        whole = prepared.join(whole, int(shard["hash"], 16), shard["documents"])
    files = work.tokenizer.files() if work.tokenizer else {}
    for name, data in files.items():
        place.write_whole(work.folder / name, data)
    manifest = {
        "format": prepared.FORMAT,
        "version": prepared.VERSION,
        "source": work.source,
        "tokenizer": work.tokenizer
        and {
            "type": work.tokenizer.type,
            "file": next(iter(files), ""),
            "hash": work.tokenizer.hash,
            "vocab_size": work.tokenizer.vocab_size,
            **work.tokenizer.mark_keys,
        },
        "dtype": work.dtype,
        "documents": documents,
        "tokens": tokens,
        "max_token": max(shard["max_token"] for shard in shards),
        "hash": hashlib.blake2b(f"{whole:032x} {documents}".encode(), digest_size=8).hexdigest(),
        "shards": shards,
    }
    if bad:
        lines = "".join(f"{json.dumps(one)}\n" for one in bad)
        place.write_whole(work.folder / LIST, lines.encode())
        manifest["bad_records"] = len(bad)
    if work.encoder:
        noted = (MARKED, UNANSWERED, "targets")
        left_out = {name: sum(shard.pop(name) for shard in shards) for name in noted}
        targets = left_out.pop("targets")
        made_by = work.encoder.made_by
        manifest["chats"] = {"made_by": made_by, "targets": targets, "left_out": left_out}
    if work.deduplicate:
        manifest["duplicates"] = repeated
    data = json.dumps(manifest, indent=1).encode()
    place.write_whole(work.folder / prepared.NAME, data)
    return manifest


def _run(
    work: Preparation,
    task: Callable[..., None],
    arguments: Sequence[tuple],
    counted: Sequence[int],
    show: Show,
) -> None:
    """Calls a method of makers with each of the arguments, in processes or in this one; a
    TrainingError if one is killed. Their counts begin at `counted` (`_SHOWN`, `_LEAVE`, `_BAD`)."""
    if not work.processes:
        counts = list(counted)
        maker = _Maker(work, counts, contextlib.nullcontext(), os.cpu_count() or 1)
        for values in arguments:
            task(maker, *values)
            show(*counts[_SHOWN])
        return
    context = multiprocessing.get_context("spawn")
    counts = context.RawArray("q", counted)
    makers = max(1, min(work.processes, len(arguments)))
    start = work, counts, context.Lock(), max(1, work.processes // makers)
    with concurrent.futures.ProcessPoolExecutor(makers, context, _start_worker, start) as pool:
        try:
            with delay_signals():
                pending = {pool.submit(_call, task, values) for values in arguments}
            while pending:
                finished, pending = concurrent.futures.wait(pending, 0.2, FIRST_EXCEPTION)
                # Without the lock, which a worker may have when it is killed.
                show(*counts[_SHOWN])
                for future in finished:
                    future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise TrainingError(
                "a worker was killed, perhaps for lack of memory (give maxramp.prepare fewer "
                "--workers); start again to continue"
            ) from None
        finally:
            counts[_LEAVE] = 1
            pool.shutdown(cancel_futures=True)


def _start_worker(*arguments: Any) -> None:
    global _maker
    _maker = _Maker(*arguments)
    stay_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which a pool ends what is left of it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads are the parallelism


def _call(task: Callable[..., None], values: tuple) -> None:
    task(_maker, *values)


class _Maker:
    """Makes shards, one after another."""

    def __init__(self, work: Preparation, counts: Any, lock: Any, threads: int):
        """Takes `counts` and their `lock`, which all makers share."""
        self._work, self._counts, self._lock, self._threads = work, counts, lock, threads

    def make_shard(self, shard: Shard, left_out: np.ndarray) -> None:
        """Writes the files of a shard without the documents `left_out`, by their numbers in it (bad
        records have none), then its record; both only if it is not told to leave before. A
        ConfigError for more bad records than allowed."""
        work, digest, bad, noted = self._work, 0, [], collections.Counter()
        path = str(work.folder / shard.name)
        with contextlib.ExitStack() as closing:
            writer = closing.enter_context(MegatronWriter(path, np.dtype(work.dtype)))
            if work.encoder:
                beside = MegatronWriter(f"{path}{prepared.TARGETS}", np.dtype("u1"))
                closing.enter_context(beside)
            encoded = self._encode_ahead(self._batches(shard, left_out, bad))
            closing.callback(encoded.close)
            for batch, documents, value in encoded:
                if self._counts[_LEAVE]:
                    return
                writer.add(documents)
                if work.encoder:
                    beside.add([prepared.targets_of(chat) for chat in batch])
                    noted.update(fit_to_row(chat, math.inf, cut=False).left_out for chat in batch)
                    targets = (int(x.is_target.sum()) for x in batch if not x.left_out)
                    noted["targets"] += sum(targets)
                digest = prepared.join(digest, value, len(documents))
                self._count(len(documents), sum(map(len, documents)), 0)
            record = writer.finish()
            if work.encoder:
                record["targets_index"] = beside.finish()["index"]
                record |= {name: noted[name] for name in (MARKED, UNANSWERED, "targets")}
        record |= {"hash": f"{digest:032x}", "source": shard.source, "bad": bad}
        place.write_whole(work.work / f"{shard.name}.json", json.dumps(record).encode())

    def hash_shard(self, shard: Shard) -> None:
        """Writes the hashes of a shard's documents, unless it is told to leave before."""
        hashes = bytearray()
        for file, start, stop, _ in shard.pieces:
            for _, record in _read(file, start, stop):
                if not isinstance(record, BadRecord):
                    hashes += _hash_record(record)
                if len(hashes) % _HASHED_TOGETHER == 0 and self._counts[_LEAVE]:
                    return
        place.write_whole(self._work.hashes_of(shard), bytes(hashes))

    def _count(self, documents: int, tokens: int, size: int, bad: int = 0) -> int:
        """Tells the parent what was made, and returns all bad records so far."""
        with self._lock:
            for index, more in enumerate((documents, tokens, size, 0, bad)):
                self._counts[index] += more
            return self._counts[_BAD]

    def _batches(
        self, shard: Shard, left_out: np.ndarray, bad: list[dict]
    ) -> Iterator[list[Record]]:
        """Yields documents of about `_BATCH_SIZE` in all; adds bad records to `bad`, a ConfigError
        if there are more than allowed."""
        encoder, allowed = self._work.encoder, self._work.allowed
        skipped, number = set(left_out.tolist()), -1
        batch, held = [], 0
        for file, start, stop, size in shard.pieces:
            for position, record in _read(file, start, stop):
                if encoder and not isinstance(record, BadRecord):
                    record = attempt(encoder.encode, record)
                if isinstance(record, BadRecord):
                    # A line has its byte; its number would take a count.
                    bad.append({"file": file.path, file.unit: position, "reason": str(record)})
                    if self._count(0, 0, 0, bad=1) > allowed:
                        _refuse(f"{file.where(position)}: {record}", allowed)
                    continue
                number += 1
                if number in skipped:
                    continue
                batch.append(record)
                held += len(record.tokens if encoder else record)
                if held >= _BATCH_SIZE or len(batch) >= _BATCH_COUNT:
                    yield batch
                    batch, held = [], 0
            self._count(0, 0, size)
        if batch:
            yield batch

    def _encode_ahead(self, batches: Iterator[list[Any]]) -> Iterator[tuple]:
        """Yields what `_encode` returns of each batch, in order, from threads that work ahead."""
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            for batch in batches:
                waiting.append(pool.submit(self._encode, batch))
                if len(waiting) > _AHEAD * self._threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _encode(self, batch: list[Any]) -> tuple[list[Any], list[np.ndarray], int]:
        """Returns the batch, the ids of its documents, and the hash of these (with the targets of
        chats)."""
        if self._work.encoder:
            documents = [chat.tokens for chat in batch]
            both = [np.concatenate([chat.tokens, prepared.targets_of(chat)]) for chat in batch]
            return batch, documents, prepared.hash_documents(both)
        documents = self._work.tokenizer.encode(batch) if isinstance(batch[0], str) else batch
        return batch, documents, prepared.hash_documents(documents)


def _read(file: RecordFile, start: int, stop: int) -> Iterator[tuple[int, Record | BadRecord]]:
    """Yields records as `RecordFile.read`; a ConfigError for an error of the disk."""
    try:
        yield from file.read(start, stop)
    except OSError as error:
        raise ConfigError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def sample_texts(inputs: Sequence[RecordFile], most: int, allowed: int) -> Iterator[str]:
    """Yields texts from all over the inputs of text, about `most` bytes, without bad records; a
    ConfigError if it meets more of these than are `allowed`."""
    bad = 0
    pieces = [(file, piece) for file in inputs for piece in file.split(1 << 24)]
    total = sum(size for _, (*_, size) in pieces)
    for file, (start, stop, size) in pieces:
        left = size * min(1.0, most / max(1, total))
        for position, text in _read(file, start, stop):
            if isinstance(text, BadRecord):
                bad += 1
                if bad > allowed:
                    _refuse(f"{file.where(position)}: {text}", allowed)
            else:
                yield text
                left -= len(text.encode())
            if left <= 0 and total > most:
                break
