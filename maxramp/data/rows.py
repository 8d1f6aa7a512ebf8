"""Sequences of rows and of documents: item i is the same tokens whoever asks.

A row is `max_target_length` tokens and the one after them (what the last token predicts), so row i
of a stream is its tokens [i * T, i * T + T]. What comes from files has `where(i)`, which names the
file and the record of an item.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.data.files.megatron import TokenStream
from maxramp.data.files.records import RecordFile
from maxramp.data.marks import START
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError


class StreamRows:
    """Rows of fixed length cut from one stream of tokens."""

    def __init__(self, tokens: Any, length: int):
        """
        Args:
          tokens: an array, or a TokenStream.
          length: tokens that a row predicts.
        """
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)

    def where(self, index: int, position: int = 0) -> str:
        """The file and the document of a token of a row."""
        return self._tokens.where(index * self._length + position)

    def __repr__(self) -> str:
        return f"StreamRows({len(self)} rows of {self._length} tokens)"


class SeparateRows:
    """Rows of a stream in which a document's first token carries START."""

    def __init__(self, rows: Any, stream: TokenStream, length: int):
        """
        Args:
          rows: of the stream, as from StreamRows.
          stream: which says where documents begin.
          length: tokens that a row predicts.
        """
        self._rows, self._stream, self._length = rows, stream, length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray:
        row, start = self._rows[index], index * self._length
        row[self._stream.document_starts(start, start + len(row)) - start] += START
        return row

    def __repr__(self) -> str:
        return repr(self._rows)


class SyntheticRows:
    """Uniformly random tokens, a function of the seed and the row alone: nothing to learn."""

    def __init__(self, count: int, vocab_size: int, length: int, seed: int):
        self._count, self._vocab_size, self._length, self._seed = count, vocab_size, length, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        random = np.random.default_rng([self._seed, index])
        return random.integers(0, self._vocab_size, self._length + 1, dtype=np.int32)

    def __repr__(self) -> str:
        return f"SyntheticRows({self._count} rows of {self._length} tokens)"


class Chain:
    """The items of several sequences, one after another."""

    def __init__(self, parts: Sequence[Any]):
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        part, number = self._find(index)
        return part[number]

    def where(self, index: int, position: int = 0) -> str:
        """The file and the record of an item."""
        part, number = self._find(index)
        return part.where(number)

    def _find(self, index: int) -> tuple[Any, int]:
        which = int(np.searchsorted(self._starts, index, "right")) - 1
        return self._parts[which], index - int(self._starts[which])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items of {len(self._parts)} files)"


class Documents(Chain):
    """The texts of several files, tokenized when they are asked for."""

    def __init__(self, files: Sequence[RecordFile], tokenizer: Tokenizer):
        super().__init__(files)
        self._tokenizer = tokenizer

    def __getitem__(self, index: int) -> np.ndarray:
        return self._tokenizer.encode([super().__getitem__(index)])[0]


class RecordRows(Chain):
    """Records of token ids that are rows already."""

    def __init__(self, files: Sequence[RecordFile], length: int):
        super().__init__(files)
        self._length = length

    def __getitem__(self, index: int) -> np.ndarray:
        row = super().__getitem__(index)
        if len(row) != self._length + 1:
            raise ConfigError(
                f"{self.where(index)}: has {len(row)} tokens, but a row takes max_target_length + "
                f"1 = {self._length + 1}; use max_target_length={len(row) - 1}, or prepare the "
                "files with maxramp.prepare, which takes any length"
            )
        return row


class Checked:
    """Items whose token ids are below the vocabulary's size."""

    def __init__(self, items: Any, vocab_size: int):
        self._items, self._vocab_size = items, vocab_size

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> np.ndarray:
        item = self._items[index]
        if item.size and not 0 <= item.min() <= item.max() < self._vocab_size:
            position = int(np.argmax((item < 0) | (item >= self._vocab_size)))
            raise ConfigError(
                f"{self._items.where(index, position)}: token id {item[position]} is not below "
                f"vocab_size={self._vocab_size}; use the vocab_size of its tokenizer"
            )
        return item

    def __repr__(self) -> str:
        return repr(self._items)


class Span:
    """Items [start, stop) of a sequence."""

    def __init__(self, items: Any, start: int, stop: int):
        self._items, self._start, self._stop = items, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> np.ndarray:
        return self._items[self._start + index]

    def __repr__(self) -> str:
        return f"{self._items}[{self._start}:{self._stop}]"
