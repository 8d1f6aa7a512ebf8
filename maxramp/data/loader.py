"""The batch of each step as arrays of all processes, read and placed ahead of the step."""

import bisect
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import numpy as np

from maxramp.data.batch import Batch, stack
from maxramp.data.corpus import Corpus
from maxramp.data.keys import DataKeys, EvalKeys, ReadingKeys
from maxramp.data.order import RunRows, read_step
from maxramp.data.relay import Expansion
from maxramp.data.rows import PADDING, Row
from maxramp.errors import ConfigError
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.stage import StageSpec, text_fields

_SAMPLES = 64  # of each row length that cuts samples, in which losses are counted


class Loader:
    """Hands out the batch of each step, in order from `first_step`, and whole evaluations; close
    it."""

    def __init__(
        self,
        data: DataKeys,
        reading: ReadingKeys,
        corpus: Corpus,
        ramp: RampupBatchManager,
        expansion: Expansion,
        first_step: int,
    ):
        """Starts to read, on all processes; a ConfigError says that the run needs more rows than
        there are."""
        seed = data.data_shuffle_seed if data.enable_data_shuffling else None
        rows = RunRows(corpus.train, data.num_epoch, seed, corpus.later)
        check_enough(corpus, rows, data.num_epoch, ramp)
        self._rows, self._reading = rows, reading
        self.corpus, self.expansion = corpus, expansion
        # In random order, so that the first eval_samples are a fair sample of all.
        self.held_out = {part.name: RunRows([part], 1, seed=0) for part in corpus.held_out}
        # Placed by a thread while the step before runs: the loop's own thread only takes it.
        self._placer = concurrent.futures.ThreadPoolExecutor(1, "place")
        self._read_from(first_step, ramp)

    def _read_from(self, step: int, ramp: RampupBatchManager) -> None:
        """Begins to read the steps from `step` to the end of `ramp`, which may be none, and to
        place the first. Before that an earlier reading is closed, and nothing is being placed."""
        # A run that is done may still have an evaluation to make.
        stages = ramp.stages_between(step, ramp.total_steps) or ramp.stages[:1]
        largest = max(stages, key=lambda stage: stage.global_batch_size)
        read = functools.partial(read_step, self._rows, ramp, self.expansion.share)
        steps = range(step, ramp.total_steps)
        self._batches = self.expansion.read_ahead(
            "the batch of step", read, steps, self._reading, largest.spec
        )
        self._ramp, self._next_step = ramp, step
        self._placed = self._place_next()

    def cuts(self, stages: Sequence[Stage]) -> Iterator[str]:
        """Yields a line for every row length that stages cut samples into: how many documents are
        cut there and rows without a target, by the first samples of the first stage of that length,
        which are read. Only where `expansion.reads`."""
        lengths: dict[int, Stage] = {}
        for stage in stages:
            lengths.setdefault(stage.spec.row_length, stage)
        for length, stage in lengths.items():
            first, count = stage.first_sample, stage.spec.rows_of_sample
            if count == 1:
                continue
            numbers = range(first, min(first + _SAMPLES, len(self._rows)))
            documents, cut, empty = count_losses([self._rows[n] for n in numbers], length)
            yield (
                f"stage {stage.index} cuts samples of {stage.spec.tokens} tokens into {count} rows "
                f"of {length}: of its first {len(numbers)} samples, {cut:,} of {documents:,} "
                f"documents are cut, and {empty:,} of {count * len(numbers):,} rows have no target"
            )

    def batch(self, step: int, ramp: RampupBatchManager | None = None) -> tuple[Batch, float]:
        """Returns the rows of `step` and the seconds waited for them; ask for steps in order, up to
        the run's end. A `ramp` that is not that of the steps before begins with this step. Raises
        a ConfigError or TrainingError if the data cannot be read."""
        start = time.perf_counter()
        assert step == self._next_step, f"asked for step {step}, next is {self._next_step}"
        if ramp not in (None, self._ramp):
            concurrent.futures.wait([self._placed] if self._placed else [])
            self._batches.close()
            self._read_from(step, ramp)
        batch = self._placed.result()
        waited = time.perf_counter() - start
        self._next_step += 1
        self._placed = self._place_next()
        return batch, waited

    def _place_next(self) -> concurrent.futures.Future | None:
        is_last = self._next_step == self._ramp.total_steps
        return None if is_last else self._placer.submit(self._place, self._next_step)

    def _place(self, step: int) -> Batch:
        abstract = self.expansion.abstract_batch(self._ramp.stage_at_step(step).spec)
        return self.expansion.place(next(self._batches), abstract)

    def eval_batches(self, stage: Stage, keys: EvalKeys, held_out: str = "") -> Iterator[Batch]:
        """Yields a held-out set once, or its first eval_samples, as batches with A = 1; not with
        eval_interval=-1."""
        rows, most = self.held_out[held_out], keys.eval_samples
        spec = stage.spec.single_pass(keys.rows(self.expansion.mesh.size))
        return read_all(rows, spec, self.expansion, self._reading, most)

    def close(self) -> None:
        self._placer.shutdown(cancel_futures=True)
        self._batches.close()


def read_all(
    rows: Sequence[Row], spec: StageSpec, expansion: Expansion, reading: ReadingKeys, most: int = -1
) -> Iterator[Batch]:
    """Yields all rows (`most` = -1) or the first `most` in batches on the devices of all processes,
    which all call it, the last filled up with padding. `spec` has one pass (A = 1), and the length
    of the rows."""
    count = len(rows) if most == -1 else min(most, len(rows))
    padding = Row(np.full(spec.tokens + 1, PADDING, np.int32))

    def read(index: int) -> Batch:
        def row(number: int) -> Row:
            number += index * spec.rows
            return rows[number] if number < count else padding

        return expansion.share.read(row, spec)

    numbers, abstract = range(-(-count // spec.rows)), expansion.abstract_batch(spec)
    in_threads = dataclasses.replace(reading, grain_worker_count=0)
    ahead = expansion.read_ahead("evaluation batch", read, numbers, in_threads, spec)
    with contextlib.closing(ahead):
        for local in ahead:
            yield expansion.place(local, abstract)


def count_losses(rows: Sequence[Row], length: int) -> tuple[int, int, int]:
    """Counts documents (one text is one), those that are cut, and rows without a target, where the
    rows, one or more, are cut into rows of `length`, which divides T."""
    tokens = len(rows[0].tokens) - 1
    batch = stack(rows, text_fields(tokens, separate=True))
    segments_NT = np.where(batch.tokens == PADDING, PADDING, batch.segments)
    before, behind = segments_NT[:, length - 1 : -1 : length], segments_NT[:, length::length]
    documents = [{*segments} - {PADDING} for segments in segments_NT]
    cut = [{*b[(b == a) & (b != PADDING)]} for b, a in zip(before, behind, strict=True)]
    has_target = (batch.targets.reshape(len(rows), -1, length) != PADDING).any(-1)
    return sum(map(len, documents)), sum(map(len, cut)), int((~has_target).sum())


def check_enough(corpus: Corpus, rows: RunRows, num_epoch: int, ramp: RampupBatchManager) -> None:
    """Refuses a run that needs more rows than there are; the error says what would do."""
    keys, available, needed, beyond = ramp.keys, len(rows), ramp.total_samples, 0
    if keys.rampup_policy == "noise":  # the last step begins before the run's end, with any rung
        beyond = keys.rampup_ladder[-1] - 1
        needed = max(needed, keys.samples_of_run + beyond)
    if needed <= available:
        return
    length = ramp.shown_length
    name = length.partition("=")[0]
    takes = f"{length} takes {needed} rows"
    if beyond and name != "steps":
        takes += f" ({beyond} more, as the last step may be one of {beyond + 1})"
    once, _ = rows.length(1)
    has = f"{once} x num_epoch={num_epoch} = {available}"
    if corpus.later:
        has = f"{available} with num_epoch={num_epoch}"
    if len(corpus.train) > 1:
        has += f", after which {rows.length(num_epoch)[1]} is used up"
    epochs = bisect.bisect_left(range(needed), needed, num_epoch, key=lambda n: rows.length(n)[0])
    remedy = f"use num_epoch={epochs}"
    if available > beyond:
        most = available - beyond
        if name == "steps":
            most = ramp.step_at_sample(available)
        elif not beyond:
            most = ramp.samples_before(ramp.step_at_sample(available))
        remedy += f", or at most {name}={ramp.tokens(most) if name == 'total_tokens' else most}"
    raise ConfigError(f"{takes}, but the data has {has}; {remedy}")
