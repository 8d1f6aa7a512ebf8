"""The rows of a run: its sources opened, their documents counted and laid out.

Every process of a job calls this; those that do not read learn the sizes from those that do. An
error in one ends all with the same line, before anything is trained.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxramp.commandline import count
from maxramp.data import packing
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.data.keys import DataKeys, ReadingKeys
from maxramp.data.prefetch import ReadAhead
from maxramp.data.rows import LEFT_OUT, Document
from maxramp.data.sources import open_sources, parse_mixture
from maxramp.errors import ConfigError
from maxramp.keys.section import refuse
from maxramp.processes.agreement import all_gather_json, raise_everywhere

Beat = Callable[[], None]
_BLOCK = 256  # documents whose lengths are counted together
_ROUND = 4096  # blocks that a process counts between two words with the others


def open_rows(
    data: DataKeys,
    reading: ReadingKeys,
    reads: bool,
    beat: Beat = lambda: None,
    later: Sequence[tuple[int, str]] = (),
) -> Corpus:
    """Opens the rows that the keys name; called by all processes of the job.

    Documents are laid out in rows by their lengths, which takes a pass that the reading processes
    share. A TrainingError says on every process that one could not read a document.

    Args:
      reads: whether this process opens the data. The others get rows with a number only.
      beat: called on every process whenever more lengths are to be counted.
      later: (first row, grain_train_files) of the phases that change the mixture. A part is the
        same in all mixtures that name it.
    """
    values = [value for _, value in later]
    opened = raise_everywhere(lambda: open_sources(data, values) if reads else None)
    known = all_gather_json(opened.summary if opened else None)
    readers = [process for process, sources in enumerate(known) if sources is not None]
    for process in readers:
        if known[process] != known[0]:
            raise ConfigError(
                f"process {process} sees other data than process 0 (hash "
                f"{hash_of(known[process])}, not {hash_of(known[0])}); give all processes the same "
                "files"
            )
    sources = opened or Corpus.from_summary(known[0])
    mixtures = [(row, dict(parse_mixture("grain_train_files", value))) for row, value in later]
    rows = sources
    if sources.train[0].noun != "rows":
        beat()
        rows = _lay_out(data, sources, lambda x: _count(reading, x.items, readers, beat))
    return dataclasses.replace(
        rows,
        description=f"{_describe(sources, mixtures)}{rows.description}",
        later=[(row, [of.get(part.name, 0.0) for part in rows.train]) for row, of in mixtures],
    )


def _describe(sources: Corpus, mixtures: Sequence[tuple[int, dict[str, float]]]) -> str:
    first = [(part.name, part.weight) for part in sources.train if part.weight]
    changes = "".join(f"; from row {row} on {_shares(of.items())}" for row, of in mixtures)
    parts = sources.train, sources.held_out
    train, held_out = (sum(len(part.items) for part in of) for of in parts)
    names = ", ".join(part.name for part in sources.held_out)
    return (
        f"{_shares(first)}{changes}: {train} {sources.train[0].noun} to train on and {held_out} "
        f"held out{f' in {names}' if names else ''}"
    )


def _shares(weights: Iterable[tuple[str, float]]) -> str:
    weights = list(weights)
    total = sum(weight for _, weight in weights)
    shown = [f"{name} {weight / total:.3g}" for name, weight in weights]
    return ", ".join(shown) if len(shown) > 1 else weights[0][0]


def _lay_out(
    data: DataKeys, sources: Corpus, count_documents: Callable[[Part], np.ndarray]
) -> Corpus:
    length, lay_out = data.max_target_length, packing.one_per_row
    separate = data.use_dpo or (data.packing and data.separate_documents)
    if data.packing:
        lay_out = packing.LAYOUTS[data.grain_packing_type]
    how = [length, separate, data.packing and data.grain_packing_type]
    if lay_out is packing.concat_then_split:
        lay_out = partial(lay_out, separate=separate)

    def make_rows(part: Part, counted: np.ndarray) -> Part:
        rows = packing.PackedRows(part.items, lay_out(counted[:, 0], length), length, separate)
        digest = hashlib.blake2b(part.hash.encode() + counted.tobytes(), digest_size=8).hexdigest()
        return Part(part.name, part.weight, rows, digest, rows_id=hash_of([digest, *how]))

    counts = [count_documents(part) for part in sources.train]
    documents = np.concatenate(counts)
    left_out = np.bincount(documents[:, 2], minlength=len(LEFT_OUT))
    left_out = [f"{n} {why}" for n, why in zip(left_out, LEFT_OUT, strict=True) if n and why]
    nothing = ", ".join(left_out) or "no document has two tokens"
    train = list(map(make_rows, sources.train, counts))
    refuse((not len(part.items), f"{part.name}: nothing to predict: {nothing}") for part in train)
    # Also where none is evaluated: the hash of the data does not depend on that.
    held_out = [make_rows(part, count_documents(part)) for part in sources.held_out]
    if data.eval_interval == -1:
        held_out = [dataclasses.replace(part, items=()) for part in held_out]
    else:
        for part, rows in zip(sources.held_out, held_out, strict=True):
            if not len(rows.items):
                raise ConfigError(
                    f"{_held_out_key(data, part.name)} holds out "
                    f"{count(len(part.items), 'document')} of fewer than two tokens: nothing to "
                    "predict; hold out others, or use eval_interval=-1"
                )
    rows = sum(len(part.items) for part in train)
    full = sum(part.items.num_tokens for part in train) / rows / (length + 1)
    layout = f", in {rows} rows, {full:.1%} full"
    if data.reads_chats:
        tokens, targets = documents[:, :2].sum(0, dtype=np.int64)
        layout += f", {targets / tokens:.1%} of the tokens are targets"
    layout += f"; left out: {', '.join(left_out)}" if left_out else ""
    return Corpus(train, held_out, f"{layout}{sources.description}", separate)


def _held_out_key(data: DataKeys, name: str) -> str:
    if name:
        return f"eval_sets.{name}={data.eval_sets[name]}"
    names = ("grain_eval_files", "hf_eval_split")
    given = (f"{name}={value}" for name in names if (value := getattr(data, name)))
    return next(given, f"eval_fraction={data.eval_fraction}")


def _measure_block(documents: Sequence[Document], index: int) -> np.ndarray:
    """int32 [documents, 4]: tokens, targets of them, number in LEFT_OUT, and a hash of it all."""
    block = range(len(documents))[index * _BLOCK : (index + 1) * _BLOCK]
    return np.array([_measure(documents[i]) for i in block], np.int32)


def _measure(document: Document) -> tuple[int, int, int, int]:
    tokens, is_target, left_out, begins = document
    targets = len(tokens) - 1 if is_target is None else int(is_target[1:].sum())
    digest = hashlib.blake2b(f"{begins}".encode() + tokens.tobytes(), digest_size=4)
    digest.update(b"" if is_target is None else is_target.tobytes())
    found = int.from_bytes(digest.digest(), "little", signed=True)
    return len(tokens), targets, LEFT_OUT.index(left_out), found


def _count(
    reading: ReadingKeys, documents: Sequence[Document], readers: list[int], beat: Beat
) -> np.ndarray:
    """Works in rounds, so that every process learns whether the others proceed."""
    nothing = np.empty((0, 4), np.int32)
    if not len(documents):
        return nothing
    blocks, me = range(-(-len(documents) // _BLOCK)), jax.process_index()
    per_reader = -(-len(blocks) // len(readers))
    first = readers.index(me) * per_reader if me in readers else len(blocks)
    what, read = f"{documents}: block of {_BLOCK} documents", partial(_measure_block, documents)
    ahead = ReadAhead(what, read, blocks[first : first + per_reader], reading, 4 * _BLOCK)
    counts = [nothing]
    with contextlib.closing(ahead):
        for _ in range(0, per_reader, _ROUND):
            counts += raise_everywhere(lambda: list(itertools.islice(ahead, _ROUND)))
            beat()
    counted = np.concatenate(counts)
    padded = np.pad(counted, ((0, per_reader * _BLOCK - len(counted)), (0, 0)))
    everyone = multihost_utils.process_allgather(padded).reshape(-1, *padded.shape)
    return np.concatenate([everyone[reader] for reader in readers])[: len(documents)]
