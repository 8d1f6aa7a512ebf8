"""What a run trains on and is evaluated on: on every process of a job, whether it reads or not.

Processes that do not read learn the sizes from those that do. What is wrong in one process ends all
of them with the same line, before anything is trained.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxramp.commandline import count
from maxramp.data import packing
from maxramp.data.corpus import JOINED, Corpus, Part
from maxramp.data.keys import DataKeys, ReadingKeys
from maxramp.data.mixture import open_mixture
from maxramp.data.prefetch import ReadAhead
from maxramp.data.rows import SyntheticRows
from maxramp.data.texts import open_texts
from maxramp.errors import ConfigError
from maxramp.processes.agreement import all_gather_json, raise_everywhere

_LAYOUTS = {
    "concat_then_split": packing.concat_then_split,
    "best_fit": packing.best_fit,
}
_BLOCK = 256  # documents whose lengths are counted together
_ROUND = 4096  # blocks that a process counts between two words with the others


def open_corpus(keys: DataKeys) -> Corpus:
    """Opens the rows or documents that the keys name.

    Raises:
      ConfigError: files that are missing, torn, empty or of another kind than the keys say, or too
        short for one row.
    """
    if keys.dataset_type in ("grain", "hf"):
        return open_mixture(keys)
    return _synthetic(keys) if keys.dataset_type == "synthetic" else open_texts(keys)


def _synthetic(keys: DataKeys) -> Corpus:
    seed, vocab_size, length = keys.data_shuffle_seed, keys.vocab_size, keys.max_target_length
    unused = f"; tokenizer_path={keys.tokenizer_path} is not used" if keys.tokenizer_path else ""
    return Corpus(
        (Part("synthetic", 1.0, SyntheticRows(2**31 - 1, vocab_size, length, 2 * seed)),),
        SyntheticRows(1024, vocab_size, length, 2 * seed + 1),
        f"synthetic random tokens{unused}",
        f"synthetic-{seed}-{vocab_size}-{length}",
    )


def open_rows(
    data: DataKeys, reading: ReadingKeys, reads: bool, beat: Callable[[], None] = lambda: None
) -> Corpus:
    """Opens the rows that the keys name; called by all processes of the job.

    Documents are laid out in rows by their lengths, which takes a pass over the data. The reading
    processes share it.

    Args:
      data: which rows; of a resolved config.
      reading: how to read ahead in that pass.
      reads: whether this process opens the data. The others get rows with a number only.
      beat: called on every process whenever some of the data has been opened.

    Raises:
      ConfigError: on every process, what is wrong on one of them.
      TrainingError: the same for a document that could not be read.
    """
    corpus = raise_everywhere(lambda: open_corpus(data) if reads else None)
    beat()
    summaries = all_gather_json(corpus.summary() if corpus else None)
    for process, other in enumerate(summaries):
        if other is not None and other != summaries[0]:
            raise ConfigError(
                f"process {process} sees other data than process 0 (hash {other['hash']}, not "
                f"{summaries[0]['hash']}); give all processes the same files"
            )
    corpus = corpus or Corpus.from_summary(summaries[0])
    if not corpus.documents:
        return corpus
    readers = [process for process, other in enumerate(summaries) if other is not None]
    train, full = [], []
    for part in corpus.train:
        rows, used = _rows_of(data, reading, part.items, readers, beat)
        if not len(rows):
            raise ConfigError(f"{part.name}: no document has two tokens: nothing to predict")
        train.append(dataclasses.replace(part, items=rows))
        full.append((used, len(rows)))
    held_out: Sequence[np.ndarray] = ()
    if data.eval_interval > 0:
        held_out, _ = _rows_of(data, reading, corpus.held_out, readers, beat)
        if not len(held_out):
            source = (
                f"grain_eval_files={data.grain_eval_files}"
                if data.grain_eval_files
                else f"eval_fraction={data.eval_fraction}"
            )
            documents = count(len(corpus.held_out), "document")
            raise ConfigError(
                f"{source} holds out {documents} of fewer than two tokens: nothing to predict; "
                "hold out others, or use eval_interval=-1"
            )
    used, rows = (sum(numbers) for numbers in zip(*full, strict=True))
    layout = data.grain_packing_type if data.packing else "one_per_row"
    end = JOINED if data.packing and not data.separate_documents else ""
    return dataclasses.replace(
        corpus,
        train=tuple(train),
        held_out=held_out,
        documents=False,
        packed=data.packing and data.separate_documents,
        hash=f"{corpus.hash}-{layout}{end}",
        description=f"{corpus.description}, in {rows} rows, "
        f"{used / rows / (data.max_target_length + 1):.1%} full",
    )


def _rows_of(
    data: DataKeys,
    reading: ReadingKeys,
    documents: Sequence[np.ndarray],
    readers: list[int],
    beat: Callable[[], None],
) -> tuple[packing.PackedRows, int]:
    """The rows of documents, and the tokens in them."""
    lengths = _count_lengths(reading, documents, readers, beat)
    lay_out = _LAYOUTS[data.grain_packing_type] if data.packing else packing.one_per_row
    layout = lay_out(lengths, data.max_target_length)
    separate = data.packing and data.separate_documents
    rows = packing.PackedRows(documents, layout, data.max_target_length, separate)
    return rows, int(layout.size.sum())


class _Lengths:
    """Element n: the lengths of the n-th block of documents."""

    def __init__(self, documents: Sequence[np.ndarray]):
        self._documents = documents

    def __len__(self) -> int:
        return -(-len(self._documents) // _BLOCK)

    def __getitem__(self, index: int) -> np.ndarray:
        block = range(index * _BLOCK, min((index + 1) * _BLOCK, len(self._documents)))
        return np.array([len(self._documents[i]) for i in block], np.int32)

    def __repr__(self) -> str:
        return f"{self._documents}: block of {_BLOCK} documents"


def _count_lengths(
    reading: ReadingKeys,
    documents: Sequence[np.ndarray],
    readers: list[int],
    beat: Callable[[], None],
) -> np.ndarray:
    """Counts the tokens of all documents; each reading process counts a part of them.

    Works in rounds, so that every process learns that the others get on, or that one has failed.
    """
    if not len(documents):
        return np.empty(0, np.int32)
    blocks = _Lengths(documents)
    per_reader = -(-len(blocks) // len(readers))
    bounds = [min(i * per_reader, len(blocks)) for i in range(len(readers) + 1)]
    first = last = 0
    if jax.process_index() in readers:
        reader = readers.index(jax.process_index())
        first, last = bounds[reader : reader + 2]
    ahead = ReadAhead(blocks, first, last, reading, 4 * _BLOCK, reading.grain_worker_count)
    counts = [np.empty(0, np.int32)]
    with contextlib.closing(ahead):
        for _ in range(0, per_reader, _ROUND):
            counts += raise_everywhere(lambda: list(itertools.islice(ahead, _ROUND)))
            beat()
    counted = np.concatenate(counts)
    if jax.process_count() == 1:
        return counted
    padded = np.pad(counted, (0, per_reader * _BLOCK - len(counted)))
    everyone = multihost_utils.process_allgather(padded)
    return np.concatenate([everyone[reader] for reader in readers])[: len(documents)]
