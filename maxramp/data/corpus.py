"""What a run trains on and what it holds out: parts of items, and a hash of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# How a hash ends where that does not follow from the layout: whether the documents of a row see
# each other. Hashes without an end are from before that was a choice.
APART, JOINED = "-apart", "-joined"


def hash_of_tokens(digest: str) -> str:
    """A corpus's hash without its end: equal for equal tokens in equal rows."""
    return digest.removesuffix(APART).removesuffix(JOINED)


class Absent:
    """Items that another process holds: a length, and nothing to read."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        raise RuntimeError(f"item {index} was asked of a process that opened no data")

    def __repr__(self) -> str:
        return f"Absent({self._count} items)"


@dataclasses.dataclass(frozen=True)
class Part:
    """One entry of a mixture: `weight` is its share of the items, relative to the others'."""

    name: str
    weight: float
    items: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What to train on and what is held out, with what identifies them.

    An item is a row of max_target_length + 1 tokens or, with `documents`, a document of any length
    (which may be 0). Items are int32, read when they are asked for, and the same whoever asks.
    """

    train: tuple[Part, ...]
    held_out: Sequence[np.ndarray]
    description: str  # one line for a person
    hash: str  # of the tokens and their order: equal hash, equal items
    documents: bool = False
    packed: bool = False  # rows say where documents begin, which do not see each other

    def summary(self) -> dict[str, Any]:
        """All but the items, as JSON: what a process that reads nothing has to know."""
        return {
            "train": [[part.name, part.weight, len(part.items)] for part in self.train],
            "held_out": len(self.held_out),
            "description": self.description,
            "hash": self.hash,
            "documents": self.documents,
            "packed": self.packed,
        }

    @classmethod
    def from_summary(cls, summary: dict[str, Any]) -> "Corpus":
        """The corpus of a process that reads nothing: its items have a length and no tokens."""
        train = tuple(Part(name, weight, Absent(n)) for name, weight, n in summary["train"])
        return cls(**summary | {"train": train, "held_out": Absent(summary["held_out"])})
