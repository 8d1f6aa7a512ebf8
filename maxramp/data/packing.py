"""Documents -> rows of fixed length, laid out once, so that every row has random access.

The documents' lengths decide which pieces of which documents make row i; they are read when the row
is asked for. So rows do not depend on the number of hosts, and a restart needs no state.

A row of S = max_target_length + 1 tokens predicts all of its tokens but the first. A piece starts
with a document, or repeats the last token of the piece before it, so that every token of a document
but its first is predicted once. A document of fewer than two tokens predicts nothing and is left
out. The rest of a row is padding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.data.rows import LONG, NO_TOKENS, PADDING, UNANSWERED, Chain, Document, Row


class Documents(Chain):
    """The documents of prepared sets, as rows take them."""

    def __init__(self, shards: Sequence[Any], length: int = 0, cut: bool = False):
        """Chats longer than rows of `length` are left out or, with `cut`, keep their beginning;
        texts stay whole."""
        super().__init__(shards)
        self._length, self._cut = length, cut

    def _item(self, number: int) -> Document:
        document = super()._item(number)
        if isinstance(document, Document):
            return fit_to_row(document, self._length, self._cut)
        return Document(document)

    def _counts_of(self, part: Any) -> np.ndarray:
        return part.counts(self._length, self._cut)


def fit_to_row(document: Document, length: float, cut: bool) -> Document:
    """Returns a chat or pair as rows of `length` (math.inf = any) take it: whole, cut if it may be,
    or left out if it is too long or has no target left."""
    tokens, is_target, left_out, begins = document
    if left_out:
        return document
    if len(tokens) > length + 1:
        if not cut:
            return Document(NO_TOKENS, left_out=LONG)
        tokens, is_target = tokens[: length + 1], is_target[: length + 1]
    ends = (*begins[1:], len(tokens))
    if not all(is_target[a + 1 : b].any() for a, b in zip(begins, ends, strict=True)):
        return Document(NO_TOKENS, left_out=UNANSWERED)
    return Document(tokens, is_target, begins=begins)


class RowLayout:
    """Which pieces make which rows: pieces first[i] .. first[i + 1] - 1 make row i, in order."""

    def __init__(self, document: np.ndarray, start: np.ndarray, size: np.ndarray, row: np.ndarray):
        """Takes every piece's document, its start and size in that, in tokens, and its row."""
        order = np.argsort(row, kind="stable")
        rows = int(row.max()) + 1 if len(row) else 0
        self.first = np.searchsorted(row[order], np.arange(rows + 1))
        self.start, self.size = start[order].astype(np.int32), size[order].astype(np.int32)
        self.document = document[order]


class PackedRows:
    """Rows made of pieces of documents."""

    def __init__(
        self, documents: Sequence[Document], layout: RowLayout, length: int, separate: bool
    ):
        """Takes a layout of these documents in rows of `length`; `separate` rows say where
        documents begin."""
        self._documents, self._layout, self._length = documents, layout, length
        self._separate = separate
        self.num_tokens = int(layout.size.sum())

    def __len__(self) -> int:
        return len(self._layout.first) - 1

    def __getitem__(self, index: int) -> Row:
        tokens, begins = np.full((self._length + 1,), PADDING, np.int32), []
        is_target = None
        layout, at = self._layout, 0
        for piece in range(layout.first[index], layout.first[index + 1]):
            start, size = int(layout.start[piece]), int(layout.size[piece])
            document = self._documents[int(layout.document[piece])]
            tokens[at : at + size] = document.tokens[start : start + size]
            if document.is_target is not None:
                is_target = np.zeros(len(tokens), bool) if is_target is None else is_target
                is_target[at : at + size] = document.is_target[start : start + size]
            begins += [at + begin for begin in document.begins]
            at += size
        return Row(tokens, np.array(begins, np.int64) if self._separate else None, is_target)


def concat_then_split(lengths: np.ndarray, length: int, separate: bool = True) -> RowLayout:
    """Lays documents one after another and cuts them into rows that predict T = `length` tokens.

    Args:
      lengths: tokens of each document; those below 2 predict nothing and are left out.
      separate: a document predicts nothing in the next one, and a row whose document ends a token
        before it is padded there. Otherwise rows are one text: each begins with the last token of
        the row before.
    """
    document, lengths = _select_predicting(lengths)
    end = np.cumsum(lengths)
    begin = end - lengths
    # Row r predicts tokens r * T + 1 .. r * T + T of the stream.
    first_row, last_row = begin // length, (end - 2) // length
    if not separate:
        first_row = np.maximum(begin - 1, 0) // length
        last_row = np.minimum(end - 1, end[-1:] - 2) // length
    which, piece = _repeat(last_row - first_row + 1)
    row = first_row[which] + piece
    start = np.maximum(begin[which], row * length)
    stop = np.minimum(end[which], row * length + length + 1)
    return RowLayout(document[which], start - begin[which], stop - start, row)


def one_per_row(lengths: np.ndarray, length: int) -> RowLayout:
    """Lays every document into a row of its own, a longer one into several."""
    document, start, size = _cut(lengths, length)
    return RowLayout(document, start, size, np.arange(len(document)))


def best_fit(lengths: np.ndarray, length: int) -> RowLayout:
    """Cuts only documents longer than a row; rows are in the order of their first document. Takes
    `lengths` and `length` as `concat_then_split`.

    Each piece, the longest first, goes to the row with the least room that still takes it (best-fit
    decreasing; Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830).
    """
    document, start, size = _cut(lengths, length)
    row = np.empty(len(document), np.int64)
    rows_with_room: list[list[int]] = [[] for _ in range(length + 2)]
    rooms = rows = 0  # bit r of rooms: there is a row with room for r tokens
    for piece in np.argsort(-size, kind="stable"):
        wanted = int(size[piece])
        if enough := rooms >> wanted:
            room = wanted + (enough & -enough).bit_length() - 1
            chosen = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = length + 1, rows
            rows += 1
        row[piece] = chosen
        rows_with_room[room - wanted].append(chosen)
        rooms |= 1 << room - wanted
    first_piece = np.full(rows, len(document))
    np.minimum.at(first_piece, row, np.arange(len(document)))
    rank = np.argsort(np.argsort(first_piece))
    return RowLayout(document, start, size, rank[row])


def _select_predicting(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    document = np.flatnonzero(lengths >= 2)
    return document, lengths[document].astype(np.int64)


def _cut(lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns document, start and size of pieces of at most length + 1 tokens."""
    document, lengths = _select_predicting(lengths)
    which, piece = _repeat(-(-(lengths - 1) // length))
    start = piece * length
    return document[which], start, np.minimum(lengths[which] - start, length + 1)


def _repeat(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns every index as often as its count, and the numbers of each: for counts [2, 1]
    [0, 0, 1] and [0, 1, 0].
    """
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


LAYOUTS = {layout.__name__: layout for layout in (concat_then_split, best_fit, one_per_row)}
