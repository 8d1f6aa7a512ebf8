"""What a run trains on and is evaluated on: on every process of a job, whether it reads or not.

Processes that do not read learn the sizes from those that do. What is wrong in one process ends all
of them with the same line, before anything is trained. Synthetic rows and text files are opened
here, the others in `mixture`.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxramp.commandline import count
from maxramp.data import packing
from maxramp.data.files.records import UTF16, is_utf16
from maxramp.data.keys import DataKeys, ReadingKeys
from maxramp.data.mixture import open_mixture
from maxramp.data.prefetch import ReadAhead
from maxramp.data.rows import LEFT_OUT, Corpus, Document, Part, StreamRows, SyntheticRows
from maxramp.data.tokenizers import BEGIN, END
from maxramp.errors import ConfigError
from maxramp.keys.section import refuse
from maxramp.processes.agreement import all_gather_json, raise_everywhere

_BLOCK = 256  # documents whose lengths are counted together
_ROUND = 4096  # blocks that a process counts between two words with the others


def open_corpus(keys: DataKeys, later: Sequence[tuple[int, str]] = ()) -> Corpus:
    """Opens the rows or documents that the keys name; `later` as of `open_mixture`.

    Raises:
      ConfigError: files that are missing, torn, empty or of another kind than the keys say, or too
        short for one row.
    """
    if keys.dataset_type != "synthetic":
        return open_texts(keys) if keys.dataset_type == "text" else open_mixture(keys, later)
    seed, sizes = keys.data_shuffle_seed, (keys.vocab_size, keys.max_target_length)
    unused = f"; tokenizer_path={keys.tokenizer_path} is not used" if keys.tokenizer_path else ""
    return Corpus(
        (Part("synthetic", 1.0, SyntheticRows(2**31 - 1, *sizes, 2 * seed), f"{seed}, {sizes}"),),
        (Part("", 1.0, SyntheticRows(1024, *sizes, 2 * seed + 1)),),
        f"synthetic random tokens{unused}",
    )


def open_rows(
    data: DataKeys,
    reading: ReadingKeys,
    reads: bool,
    beat: Callable[[], None] = lambda: None,
    later: Sequence[tuple[int, str]] = (),
) -> Corpus:
    """Opens the rows that the keys name; called by all processes of the job.

    Documents are laid out in rows by their lengths, which takes a pass over the data. The reading
    processes share it.

    Args:
      data: which rows; of a resolved config.
      reading: how to read ahead in that pass.
      reads: whether this process opens the data. The others get rows with a number only.
      beat: called on every process whenever more of the documents' lengths are to be counted.
      later: (first row, grain_train_files) of the phases that change the mixture.

    Raises:
      ConfigError: on every process, what is wrong on one of them.
      TrainingError: the same for a document that could not be read.
    """
    corpus = raise_everywhere(lambda: open_corpus(data, later) if reads else None)
    summaries = all_gather_json(corpus.summary if corpus else None)
    read = {process: other for process, other in enumerate(summaries) if other is not None}
    for process, other in read.items():
        if other != summaries[0]:
            hashes = [Corpus.from_summary(summary).hash for summary in (other, summaries[0])]
            raise ConfigError(
                f"process {process} sees other data than process 0 (hash {hashes[0]}, not "
                f"{hashes[1]}); give all processes the same files"
            )
    corpus = corpus or Corpus.from_summary(summaries[0])
    if not corpus.documents:
        return corpus
    beat()
    lay_out = packing.LAYOUTS[data.grain_packing_type if data.packing else "one_per_row"]
    separate = data.use_dpo or (data.packing and data.separate_documents)
    if lay_out is packing.concat_then_split:
        lay_out = functools.partial(lay_out, separate=separate)

    counted = [_count(reading, part.items, list(read), beat) for part in corpus.train]
    left_out = sum((np.bincount(each[:, 2], minlength=len(LEFT_OUT)) for each in counted), 0)
    left_out = [f"{n} {why}" for n, why in zip(left_out, LEFT_OUT, strict=True) if n and why]
    nothing = ", ".join(left_out) or "no document has two tokens"

    def lay_out_part(part: Part, counted: np.ndarray) -> Part:
        length = data.max_target_length
        rows = packing.PackedRows(part.items, lay_out(counted[:, 0], length), length, separate)
        return dataclasses.replace(part, items=rows, hash=_hash(part.hash, counted))

    train = list(map(lay_out_part, corpus.train, counted))
    refuse((not len(part.items), f"{part.name}: nothing to predict: {nothing}") for part in train)
    # Also where none is evaluated: the hash of the data does not depend on that.
    counted_held_out = [_count(reading, x.items, list(read), beat) for x in corpus.held_out]
    held_out = list(map(lay_out_part, corpus.held_out, counted_held_out))
    if data.eval_interval == -1:
        held_out = [dataclasses.replace(part, items=()) for part in held_out]
    refuse(
        (
            data.eval_interval != -1 and not len(part.items),
            f"{_source(data, part.name)} holds out {count(len(documents.items), 'document')} of "
            "fewer than two tokens: nothing to predict; hold out others, or use eval_interval=-1",
        )
        for documents, part in zip(corpus.held_out, held_out, strict=True)
    )
    rows = sum(len(part.items) for part in train)
    full = sum(part.items.num_tokens for part in train) / rows / (data.max_target_length + 1)
    shown = f"; left out: {', '.join(left_out)}" if left_out else ""
    if data.reads_chats:
        tokens, targets = np.concatenate(counted)[:, :2].sum(0, dtype=np.int64)
        shown = f", {targets / tokens:.1%} of the tokens are targets{shown}"
    return dataclasses.replace(
        corpus,
        train=tuple(train),
        held_out=tuple(held_out),
        documents=False,
        packed=separate,
        description=f"{corpus.description}, in {rows} rows, {full:.1%} full{shown}",
    )


def _source(data: DataKeys, held_out: str) -> str:
    """The key that a held-out set is from, with its value."""
    if held_out:
        return f"eval_sets.{held_out}={data.eval_sets[held_out]}"
    names = ("grain_eval_files", "hf_eval_split")
    given = (f"{name}={value}" for name in names if (value := getattr(data, name)))
    return next(given, f"eval_fraction={data.eval_fraction}")


class _Counts:
    """Element n: what there is to know of the n-th block of documents for their layout, int32
    [documents, 4]: tokens, targets among them, the number in LEFT_OUT, and a hash of it all."""

    def __init__(self, documents: Sequence[Document]):
        self._documents = documents

    def __len__(self) -> int:
        return -(-len(self._documents) // _BLOCK)

    def __getitem__(self, index: int) -> np.ndarray:
        last = min((index + 1) * _BLOCK, len(self._documents))
        block = (self._documents[i] for i in range(index * _BLOCK, last))
        return np.array([_measure(document) for document in block], np.int32)

    def __repr__(self) -> str:
        return f"{self._documents}: block of {_BLOCK} documents"


def _measure(document: Document) -> tuple[int, int, int, int]:
    tokens, is_target, left_out, begins = document
    targets = len(tokens) - 1 if is_target is None else int(is_target[1:].sum())
    digest = hashlib.blake2b(f"{begins}".encode() + tokens.tobytes(), digest_size=4)
    digest.update(b"" if is_target is None else is_target.tobytes())
    found = int.from_bytes(digest.digest(), "little", signed=True)
    return len(tokens), targets, LEFT_OUT.index(left_out), found


def _hash(value: str, counted: np.ndarray) -> str:
    """A hash of what was known by one, and of all documents of a part, in their order."""
    return hashlib.blake2b(value.encode() + counted.tobytes(), digest_size=8).hexdigest()


def _count(
    reading: ReadingKeys,
    documents: Sequence[Document],
    readers: list[int],
    beat: Callable[[], None],
) -> np.ndarray:
    """Counts the tokens of all documents (`_Counts`); each reading process counts a part of them.

    Works in rounds, so that every process learns that the others get on, or that one has failed.
    """
    nothing = np.empty((0, 4), np.int32)
    if not len(documents):
        return nothing
    blocks, me = _Counts(documents), jax.process_index()
    per_reader = -(-len(blocks) // len(readers))
    first = last = 0
    if me in readers:
        first = min(readers.index(me) * per_reader, len(blocks))
        last = min(first + per_reader, len(blocks))
    ahead = ReadAhead(blocks, first, last, reading, 4 * _BLOCK, reading.grain_worker_count)
    counts = [nothing]
    with contextlib.closing(ahead):
        for _ in range(0, per_reader, _ROUND):
            counts += raise_everywhere(lambda: list(itertools.islice(ahead, _ROUND)))
            beat()
    counted = np.concatenate(counts)
    padded = np.pad(counted, ((0, per_reader * _BLOCK - len(counted)), (0, 0)))
    everyone = multihost_utils.process_allgather(padded).reshape(-1, *padded.shape)
    return np.concatenate([everyone[reader] for reader in readers])[: len(documents)]


def open_texts(keys: DataKeys) -> Corpus:
    """Opens the corpus of dataset_type=text.

    Raises:
      ConfigError: files that are missing, empty, no text, or too short for one row.
    """
    length = keys.max_target_length
    files, name = _find_files(keys.text_files)
    tokens = _read_documents(files)
    # Documents stand in an order that is random but the same everywhere, so the tail of the stream
    # is a fair sample; of a single file it is the file's end.
    cut = len(tokens) - round(len(tokens) * keys.eval_fraction)
    train, held_out = StreamRows(tokens[:cut], length), StreamRows(tokens[cut:], length)
    for rows, part, size, remedy in (
        (train, "training", cut, ""),
        (held_out, "held-out", len(tokens) - cut, ", a larger eval_fraction, or eval_interval=-1"),
    ):
        if not len(rows) and (rows is train or keys.eval_interval > 0):
            raise ConfigError(
                f"text_files={keys.text_files}: the {part} text has {size} tokens, but one "
                f"row takes max_target_length + 1 = {length + 1}; give more text or shorter "
                f"rows{remedy}"
            )
    digest = hashlib.blake2b(tokens.data, digest_size=8).hexdigest()
    return Corpus(
        (Part(name, 1.0, train, digest),),
        (Part("", 1.0, held_out),),
        f"{name}: {len(files)} files, {len(tokens) / 1e6:.1f} MB, {len(train)} rows to train on "
        f"and {len(held_out)} held out",
    )


def _find_files(pattern: str) -> tuple[list[tuple[str, pathlib.Path]], str]:
    """(name, path) of every file, in the corpus's order, and what to call them."""
    if not pattern:
        title, paths = "sources of the Python standard library", []
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in skipped]
            paths += [pathlib.Path(folder, name) for name in names if name.endswith(".py")]
    else:
        title, root = f"text_files={pattern}", pathlib.Path(os.path.expanduser(pattern))
        if root.is_dir():
            paths = [p for p in root.rglob("*") if p.is_file()]
            paths = [p for p in paths if not any(x[0] == "." for x in p.relative_to(root).parts)]
        else:
            paths = [pathlib.Path(p) for p in glob.glob(str(root), recursive=True)]
            paths = [p for p in paths if p.is_file()]
            root = pathlib.Path(os.path.commonpath([p.parent for p in paths] or ["/"]))
    if not paths:
        raise ConfigError(f"text_files={pattern}: no such file, and no folder or glob that has any")
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
        if is_utf16(text):
            raise ConfigError(f"text_files: {path} {UTF16}")
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
