"""The rows of a run: its data prepared where it has to be, opened, and documents laid out.

Every process of a job calls this; those that do not read learn the sizes from those that do. An
error in one ends all with the same line, before anything is trained.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import numpy as np

from maxramp.commandline import count
from maxramp.data import packing
from maxramp.data.cached import CachedSet
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.data.inputs import parse_mixture
from maxramp.data.keys import DataKeys
from maxramp.data.rows import LEFT_OUT
from maxramp.data.sources import find_mixtures
from maxramp.errors import ConfigError
from maxramp.keys.section import refuse
from maxramp.processes.agreement import all_gather_json, raise_everywhere, run_on

Beat = Callable[[], None]


def open_rows(
    data: DataKeys, reads: bool, beat: Beat = lambda: None, later: Sequence[tuple[int, str]] = ()
) -> Corpus:
    """Opens the rows that the keys name; called by all processes of the job.

    Text, chats and token ids are prepared once, into sets below data_cache_dir.

    Args:
      reads: whether this process opens the data. The others get rows with a number only.
      beat: called on every process now and then while a set is prepared.
      later: (first row, grain_train_files) of the phases that change the mixture. A part is the
        same in all mixtures that name it.
    """
    values = [value for _, value in later]
    mixtures = raise_everywhere(lambda: find_mixtures(data, values) if reads else None)
    _prepare(mixtures.cached_sets if reads else [], beat)
    weights = [(row, dict(parse_mixture("grain_train_files", value))) for row, value in later]
    opened = raise_everywhere(lambda: _open(data, mixtures.open(), weights) if reads else None)
    known = all_gather_json(opened.summary if opened else None)
    for process, summary in enumerate(known):
        if summary not in (None, known[0]):
            raise ConfigError(
                f"process {process} sees other data than process 0 (hash {hash_of(summary)}, not "
                f"{hash_of(known[0])}); give all processes the same files"
            )
    rows = opened or Corpus.from_summary(known[0])
    by_part = [(row, [of.get(part.name, 0.0) for part in rows.train]) for row, of in weights]
    return dataclasses.replace(rows, later=by_part)


def _prepare(cached: Sequence[CachedSet], beat: Beat) -> None:
    """Makes the sets that are not there. The first process begins, as the others may see what it
    writes; then each makes what it still lacks, where machines share no disk.
    """
    for is_first in (True, False):
        is_turn = (jax.process_index() == 0) is is_first
        missing = [one for one in cached if is_turn and not one.is_prepared]
        lacking = [process for process, n in enumerate(all_gather_json(len(missing))) if n]
        run_on(lacking, lambda missing=missing: [one.prepare(beat) for one in missing], beat)


def _open(
    data: DataKeys, sources: Corpus, weights: Sequence[tuple[int, dict[str, float]]]
) -> Corpus:
    rows = sources if sources.train[0].noun == "rows" else _lay_out(data, sources)
    description = f"{_describe(sources, weights)}{rows.description}"
    return dataclasses.replace(rows, description=description)


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


def _lay_out(data: DataKeys, sources: Corpus) -> Corpus:
    length, lay_out = data.max_target_length, packing.one_per_row
    separate = data.objective.chats > 1 or (data.packing and data.separate_documents)
    if data.packing:
        lay_out = packing.LAYOUTS[data.grain_packing_type]
    how = [length, separate, data.packing and data.grain_packing_type]
    if lay_out is packing.concat_then_split:
        lay_out = partial(lay_out, separate=separate)

    def make_rows(part: Part, counted: np.ndarray) -> Part:
        rows = packing.PackedRows(part.items, lay_out(counted[:, 0], length), length, separate)
        digest = hash_of([part.hash, part.rows_id])
        return Part(part.name, part.weight, rows, digest, rows_id=hash_of([digest, *how]))

    counts = [part.items.counts() for part in sources.train]
    documents = np.concatenate(counts)
    left_out = _describe_left_out(documents)
    train = list(map(make_rows, sources.train, counts))
    nothing = f"nothing to predict: {left_out or 'no document has two tokens'}"
    refuse((not len(part.items), f"{part.name}: {nothing}") for part in train)
    # Also where none is evaluated: the hash of the data does not depend on that.
    counts = [part.items.counts() for part in sources.held_out]
    held_out = list(map(make_rows, sources.held_out, counts))
    if data.eval_interval == -1:
        held_out = [dataclasses.replace(part, items=()) for part in held_out]
    else:
        for part, counted, rows in zip(sources.held_out, counts, held_out, strict=True):
            if not len(rows.items):
                number = count(len(counted), part.noun.removesuffix("s"))
                why = _describe_left_out(counted) or "none has two tokens"
                raise ConfigError(
                    f"{_held_out_key(data, part.name)} holds out {number}, and nothing to "
                    f"predict: {why}; hold out others, or use eval_interval=-1"
                )
    rows = sum(len(part.items) for part in train)
    full = sum(part.items.num_tokens for part in train) / rows / (length + 1)
    layout = f", in {rows} rows, {full:.1%} full"
    if data.reads_chats:
        tokens, targets = documents[:, :2].sum(0, dtype=np.int64)
        layout += f", {targets / tokens:.1%} of the tokens are targets"
    layout += f"; left out: {left_out}" if left_out else ""
    return Corpus(train, held_out, f"{layout}{sources.description}", separate)


def _describe_left_out(counts: np.ndarray) -> str:
    """Says how many documents are left out and why, from their counts (of `Documents.counts`)."""
    numbers = np.bincount(counts[:, 2], minlength=len(LEFT_OUT))
    return ", ".join(f"{n} {why}" for n, why in zip(numbers, LEFT_OUT, strict=True) if n and why)


def _held_out_key(data: DataKeys, name: str) -> str:
    if name:
        return f"eval_sets.{name}={data.eval_sets[name]}"
    names = ("grain_eval_files", "hf_eval_split")
    given = (f"{name}={value}" for name in names if (value := getattr(data, name)))
    return next(given, f"eval_fraction={data.eval_fraction}")
