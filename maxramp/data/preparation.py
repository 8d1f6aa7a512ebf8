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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION
from typing import Any

import numpy as np

from maxramp.commandline import count
from maxramp.data.files import prepared
from maxramp.data.files.megatron import MegatronWriter
from maxramp.data.files.records import BadRecord, Record, RecordFile
from maxramp.data.rows import MARKED, UNANSWERED, fit_to_row
from maxramp.data.shards import Preparation, Shard, publish, source_of
from maxramp.errors import ConfigError, TrainingError
from maxramp.files import place
from maxramp.processes.workers import delay_signals, stay_with_parent

_SIZE = 16  # bytes of a hash


def hash_of(record: Record) -> bytes:
    data = record.encode() if isinstance(record, str) else record.tobytes()
    return hashlib.blake2b(data, digest_size=_SIZE).digest()


def find_duplicates(paths: Sequence[pathlib.Path]) -> list[np.ndarray]:
    """The numbers of the documents in each file of hashes that repeat an earlier one."""
    hashes = [np.fromfile(path, f"S{_SIZE}") for path in paths]
    repeated = np.ones(sum(map(len, hashes)), bool)
    repeated[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    parts = np.split(repeated, np.cumsum([len(part) for part in hashes])[:-1])
    return [np.flatnonzero(part) for part in parts]


LIST = "bad_records.jsonl"  # in the folder of a set: what was left out of it, a line each
# A batch of documents ends at this many characters or tokens, or documents.
_BATCH_SIZE, _BATCH_COUNT = 1 << 20, 1024
_HASHED_TOGETHER = 1 << 14  # bytes of hashes after which a maker looks whether it is to leave
_AHEAD = 2  # batches that wait for each thread
Show = Callable[[int, int, int], None]


def make(work: Preparation, show: Show) -> dict[str, Any]:
    """Makes the missing shards and the manifest; returns the manifest. `show` gets the documents
    and tokens made and the bytes read, several times a second.
    """
    work.remove_others()
    done = work.finished_shards()
    bad = [one for record in done.values() for one in record["bad"]]
    if len(bad) > work.allowed:
        _refuse(f"{bad[0]['file']}: {bad[0]['reason']}", work.allowed)
    left_out = [np.empty(0, np.int64)] * len(work.shards)
    if work.deduplicate:
        unhashed = [(shard,) for shard in work.shards if not work.hashes_of(shard).exists()]
        _run(work, _hash_shard, unhashed, [0] * 5, lambda *counts: None)
        left_out = find_duplicates([work.hashes_of(shard) for shard in work.shards])
    there = sum(shard.size for shard in work.shards if shard.name in done)
    both = zip(work.shards, left_out, strict=True)
    tasks = [(shard, numbers) for shard, numbers in both if shard.name not in done]
    _run(work, _make_shard, tasks, [0, 0, there, 0, len(bad)], show)
    return _finish(work, sum(map(len, left_out)))


def _refuse(bad: str, allowed: int) -> None:
    raise ConfigError(bad + (f"; more are bad than --max_bad_records {allowed}" if allowed else ""))


def _finish(work: Preparation, repeated: int) -> dict[str, Any]:
    done = work.finished_shards()
    bad = [one for shard in work.shards for one in done[shard.name].pop("bad")]
    shards = [{"name": shard.name, **done[shard.name]} for shard in work.shards]
    documents, tokens = (sum(shard[name] for shard in shards) for name in ("documents", "tokens"))
    if not tokens:
        raise ConfigError(
            f"{work.inputs}: no records with tokens, of {count(documents, 'document')}"
        )
    whole = 0
    for shard in shards:
        whole = prepared.join(whole, int(shard["hash"], 16), shard["documents"])
    files = work.tokenizer.files() if work.tokenizer else {}
    for name, data in files.items():
        place.write_whole(work.staging_folder / name, data)
    manifest = {
        "format": prepared.FORMAT,
        "version": prepared.VERSION,
        "source": source_of(work.shards),
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
        place.write_whole(work.staging_folder / LIST, lines.encode())
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
    place.write_whole(work.staging_folder / prepared.NAME, data)
    publish(work.work)
    return manifest


def _run(
    work: Preparation, task: Callable[..., None], given: list[tuple], counted: list[int], show: Show
) -> None:
    """Counts documents, tokens and bytes read; whether the workers are to leave; bad records."""
    if not work.workers:
        _use(work, _OwnCounts(counted), os.cpu_count() or 1)
        with _told_in_a_line(work):
            for one in given:
                task(*one)
                show(*_counts[:3])
        return
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", counted)
    mine = counts.get_obj()  # without the lock, which a worker may have when it is killed
    makers = max(1, min(work.workers, len(given)))
    start = (work, counts, max(1, work.workers // makers))
    with (
        _told_in_a_line(work),
        concurrent.futures.ProcessPoolExecutor(makers, context, _start_worker, start) as pool,
    ):
        try:
            with delay_signals():
                pending = {pool.submit(task, *one) for one in given}
            while pending:
                finished, pending = concurrent.futures.wait(pending, 0.2, FIRST_EXCEPTION)
                show(*mine[:3])
                for future in finished:
                    future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise TrainingError(
                "a worker was killed, for want of memory perhaps (maxramp.prepare takes fewer with "
                "--workers); start again to go on"
            ) from None
        finally:
            mine[3] = 1
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _told_in_a_line(work: Preparation) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # of a file that is read it would be a ConfigError
        raise TrainingError(
            f"{work.label}: cannot write {error.filename or 'there'}: "
            f"{error.strerror or error}; make room, and start again to continue"
        ) from None


class _OwnCounts(list):
    """Stands for the counts that processes share where one works alone."""

    __enter__ = __exit__ = lambda *_: None


def _use(*given: Any) -> None:
    """For a maker, like all that follows down to `_read`."""
    global _job, _counts, _threads
    _job, _counts, _threads = given


def _start_worker(*given: Any) -> None:
    _use(*given)
    stay_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which a pool ends what is left of it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads are the parallelism


def _count(documents: int, tokens: int, size: int, bad: int = 0) -> int:
    """Tells the parent what was made, and returns all bad records so far."""
    with _counts:
        for index, more in enumerate((documents, tokens, size, 0, bad)):
            _counts[index] += more
        return _counts[4]


def _make_shard(shard: Shard, left_out: np.ndarray) -> None:
    digest, bad, noted = 0, [], collections.Counter()
    path = str(_job.staging_folder / shard.name)
    with contextlib.ExitStack() as closing:
        writer, beside = closing.enter_context(MegatronWriter(path, np.dtype(_job.dtype))), None
        if _job.encoder:
            targets = MegatronWriter(f"{path}{prepared.TARGETS}", np.dtype("u1"))
            beside = closing.enter_context(targets)
        encoded = _encode_ahead(_batches(shard, left_out, bad))
        closing.callback(encoded.close)
        for batch, documents, value in encoded:
            if _counts[3]:
                return
            writer.add(documents)
            if beside:
                beside.add([prepared.targets_of(chat) for chat in batch])
                noted.update(fit_to_row(chat, math.inf, cut=False).left_out for chat in batch)
                noted["targets"] += sum(int(x.is_target.sum()) for x in batch if not x.left_out)
            digest = prepared.join(digest, value, len(documents))
            _count(len(documents), sum(map(len, documents)), 0)
        record = writer.finish()
        if beside:
            record["targets_index"] = beside.finish()["index"]
            record |= {name: noted[name] for name in (MARKED, UNANSWERED, "targets")}
    record |= {"hash": f"{digest:032x}", "source": shard.source, "bad": bad}
    place.write_whole(_job.work / f"{shard.name}.json", json.dumps(record).encode())


def _batches(shard: Shard, left_out: np.ndarray, bad: list[dict]) -> Iterator[list[Record]]:
    skipped, number = set(left_out.tolist()), -1
    for file, start, stop, size in shard.pieces:
        batch, held = [], 0
        file = file.with_maker(_job.encoder.encode) if _job.encoder else file
        for record in _read(file, start, stop):
            if isinstance(record, BadRecord):
                # A line has its byte; its number would take a count.
                bad.append({"file": file.path, file.unit: record.place, "reason": str(record)})
                if _count(0, 0, 0, bad=1) > _job.allowed:
                    _refuse(f"{file.where(record.place)}: {record}", _job.allowed)
                continue
            number += 1
            if number in skipped:
                continue
            batch.append(record)
            held += len(record.tokens if _job.encoder else record)
            if held >= _BATCH_SIZE or len(batch) >= _BATCH_COUNT:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch
        _count(0, 0, size)


def _encode(batch: list[Any]) -> tuple[list[Any], list[np.ndarray], int]:
    if _job.encoder:
        documents = [chat.tokens for chat in batch]
        both = [np.concatenate([chat.tokens, prepared.targets_of(chat)]) for chat in batch]
        return batch, documents, prepared.hash_documents(both)
    documents = _job.tokenizer.encode(batch) if isinstance(batch[0], str) else batch
    return batch, documents, prepared.hash_documents(documents)


def _encode_ahead(batches: Iterator[list[Any]]) -> Iterator[tuple]:
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(_threads) as pool:
        for batch in batches:
            waiting.append(pool.submit(_encode, batch))
            if len(waiting) > _AHEAD * _threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _hash_shard(shard: Shard) -> None:
    hashes = bytearray()
    for file, start, stop, _ in shard.pieces:
        for record in _read(file, start, stop):
            if not isinstance(record, BadRecord):
                hashes += hash_of(record)
            if len(hashes) % _HASHED_TOGETHER == 0 and _counts[3]:
                return
    place.write_whole(_job.hashes_of(shard), bytes(hashes))


def _read(file: RecordFile, start: int, stop: int) -> Iterator[Record | BadRecord]:
    try:
        yield from file.read(start, stop)
    except OSError as error:
        raise ConfigError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def sample_texts(inputs: Sequence[RecordFile], most: int, allowed: int) -> Iterator[str]:
    """Texts from all over the inputs, about `most` bytes of them, without bad records, of which
    there may be as many as are `allowed`.
    """
    bad = 0
    pieces = [(file, piece) for file in inputs for piece in file.split(1 << 24)]
    total = sum(size for _, (*_, size) in pieces)
    for file, (start, stop, size) in pieces:
        left = size * min(1.0, most / max(1, total))
        for text in _read(file, start, stop):
            if not isinstance(text, BadRecord):
                yield text
                left -= len(text)
            elif (bad := bad + 1) > allowed:
                _refuse(f"{file.where(text.place)}: {text}", allowed)
            if left <= 0 and total > most:
                break
