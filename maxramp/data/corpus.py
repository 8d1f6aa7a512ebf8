"""What a run trains on and what it holds out: parts of items, and a hash of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
    """One entry of a mixture: `weight` is its share of the items, relative to the others'."""

    name: str
    weight: float
    items: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What to train on and what is held out, with what identifies them.

    An item is a row of max_target_length + 1 tokens or, with `documents`, a document of any length
    (which may be 0). Items are read when they are asked for, and the same whoever asks. A process
    that reads nothing has ranges in their place, which have a length.
    """

    train: tuple[Part, ...]
    held_out: Sequence[Any]
    description: str  # one line for a person
    hash: str  # of the tokens and their order: equal hash, equal items
    documents: bool = False
    packed: bool = False  # rows say where documents begin, which do not see each other

    def summary(self) -> dict[str, Any]:
        """All but the items, as JSON: what a process that reads nothing has to know."""
        train = [[part.name, part.weight, len(part.items)] for part in self.train]
        return vars(self) | {"train": train, "held_out": len(self.held_out)}

    @classmethod
    def from_summary(cls, summary: dict[str, Any]) -> "Corpus":
        """The corpus of a process that reads nothing: its items have a length and no tokens."""
        train = tuple(Part(name, weight, range(n)) for name, weight, n in summary["train"])
        return cls(**summary | {"train": train, "held_out": range(summary["held_out"])})
