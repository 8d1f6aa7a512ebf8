"""Counts what is lost where a phase cuts samples into shorter rows (`row_length`)."""

from collections.abc import Iterator, Sequence

import numpy as np

from maxramp.data.batch import stack
from maxramp.data.row import PADDING, Row
from maxramp.rampup.schedule import Stage
from maxramp.stage import text_fields

_SAMPLES = 64  # that are looked at, of each length of rows


def lines(rows: Sequence[Row], stages: Sequence[Stage]) -> Iterator[str]:
    told: set[int] = set()
    for stage in stages:
        length, count = stage.spec.row_length, stage.spec.rows_of_sample
        if count == 1 or length in told:
            continue
        told.add(length)
        first = stage.first_sample
        looked_at = [rows[first + n] for n in range(min(_SAMPLES, len(rows) - first))]
        documents, cut, empty = count_losses(looked_at, length)
        yield (
            f"stage {stage.index} cuts samples of {stage.spec.tokens} tokens into {count} rows of "
            f"{length}: of its first {len(looked_at)} samples, {cut:,} of {documents:,} documents "
            f"are cut, and {empty:,} of {count * len(looked_at):,} rows have no target"
        )


def count_losses(rows: Sequence[Row], length: int) -> tuple[int, int, int]:
    """Documents (a row read as one text is one), those cut into rows of `length`, and rows without
    a target.
    """
    tokens = len(rows[0].tokens) - 1
    batch = stack(rows, text_fields(tokens, separate=True))
    segments_NT = np.where(batch.tokens == PADDING, PADDING, batch.segments)
    before, behind = segments_NT[:, length - 1 : -1 : length], segments_NT[:, length::length]
    documents = [{*of_row} - {PADDING} for of_row in segments_NT]
    cut = [{*b[(b == a) & (b != PADDING)]} for b, a in zip(before, behind, strict=True)]
    has_target = (batch.targets.reshape(len(rows), -1, length) != PADDING).any(-1)
    return sum(map(len, documents)), sum(map(len, cut)), int((~has_target).sum())
