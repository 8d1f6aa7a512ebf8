"""Sequences of rows and of documents. Those from files have `where(i)`, which names file and
record. Imports no JAX.

A row is T = `max_target_length` tokens and the one after them, which the last predicts: row i of a
stream is its tokens [i * T, i * T + T].
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxramp.errors import ConfigError

# Why a document is left out, and counted; of most there is nothing to say.
LEFT_OUT = (
    "",
    LONG := "longer than a row",
    MARKED := "with special tokens in their messages",
    UNANSWERED := "without an answer to train on",
)


PADDING = -1  # no token: never a target
NO_TOKENS = np.empty(0, np.int32)


class Row(NamedTuple):
    """What a file holds of a row: S = T + 1 tokens."""

    tokens: np.ndarray  # int32 ids [S]; PADDING is not a token
    begins: np.ndarray | None = None  # of documents, ascending; None: the row is read as one text
    is_target: np.ndarray | None = None  # bool [S], which tokens are to be predicted; None = all
    # float32 [2], of the two answers of a pair under the weights to stay near to; None = not known
    reference_log_probs: np.ndarray | None = None


class Document(NamedTuple):
    """What a file holds of a document."""

    tokens: np.ndarray  # int32 ids
    is_target: np.ndarray | None = None  # bool, which of them are to be predicted; None = all
    left_out: str = ""  # why it has no tokens: one of LEFT_OUT
    begins: tuple[int, ...] = (0,)  # of texts in it that do not see each other


class Items:
    """Numbered items of a data set, all or a slice of them; subclasses have `_item(number)`."""

    def __init__(self, count: int):
        self._numbers = range(count)  # in the data set

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return self._item(self._numbers[index])
        part = copy.copy(self)
        part._numbers = self._numbers[index]
        return part


class StreamRows(Items):
    """Rows of fixed length cut from one stream of tokens."""

    def __init__(
        self,
        tokens: Any,
        length: int,
        vocab_size: int | None = None,
        separate: bool = False,
        span: tuple[int, int] | None = None,
    ):
        """Cuts tokens into rows.

        Args:
          tokens: an array, or a TokenStream.
          vocab_size: bound of a TokenStream's ids; None = they are not checked.
          separate: whether rows say where documents begin; of a TokenStream.
          span: the tokens [start, stop) that count, if not all.
        """
        self._first, stop = span or (0, len(tokens))
        super().__init__(max(0, (stop - self._first - 1) // length))
        self._tokens, self._length, self._vocab_size = tokens, length, vocab_size
        self.separate = separate

    def _item(self, number: int) -> Row:
        start = self._first + number * self._length
        stop = start + self._length + 1
        tokens, begins = self._tokens[start:stop].astype(np.int32, copy=False), None
        if self._vocab_size is not None:
            _check(tokens, self._vocab_size, lambda n: self._tokens.where(start + n))
        if self.separate:
            begins = self._tokens.document_starts(start, stop) - start
        return Row(tokens, begins)


class SyntheticRows(Items):
    """Uniformly random tokens, a function of the seed and the row alone: nothing to learn."""

    def __init__(self, count: int, vocab_size: int, length: int, seed: int):
        super().__init__(count)
        self._vocab_size, self._length, self._seed = vocab_size, length, seed

    def _item(self, number: int) -> Row:
        random = np.random.default_rng([self._seed, number])
        return Row(random.integers(0, self._vocab_size, self._length + 1, dtype=np.int32))


class Chain(Items):
    """The items of several sequences, one after another."""

    def __init__(self, parts: Sequence[Any]):
        self._parts, self._starts = parts, np.cumsum([0, *map(len, parts)])
        super().__init__(int(self._starts[-1]))

    def _item(self, number: int) -> Any:
        which = int(np.searchsorted(self._starts, number, "right")) - 1
        return self._parts[which][number - int(self._starts[which])]

    def counts(self) -> np.ndarray:
        """Returns int32 [documents, 3]: tokens, targets among them, and number in LEFT_OUT."""
        counts = np.concatenate([self._counts_of(part) for part in self._parts])
        return counts[self._numbers.start : self._numbers.stop]

    def _counts_of(self, part: Any) -> np.ndarray:
        return part.counts()


class WholeRows(Chain):
    """The documents of prepared sets, each of which is a row."""

    def _item(self, number: int) -> Row:
        return Row(super()._item(number))


def _check(tokens: np.ndarray, vocab_size: int, where: Callable[[int], str]) -> None:
    if tokens.size and tokens.max() >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        raise ConfigError(
            f"{where(position)}: token id {tokens[position]} is not below "
            f"vocab_size={vocab_size}; use the vocab_size of its tokenizer"
        )
