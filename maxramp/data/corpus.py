"""What a run trains on and is evaluated on."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from maxramp.data.rows import Document, Row


@dataclasses.dataclass(frozen=True)
class Part:
    """An entry of a mixture, or a held-out set: rows, or documents that become rows. Items are read
    on access; in a process that reads nothing a range stands in for them.
    """

    name: str  # "" of the only held-out set
    weight: float  # its share of the items, relative to the others'; 0 = only in later mixtures
    items: Sequence[Row] | Sequence[Document]
    hash: str = ""  # of everything that its rows are made of; "" where the train parts' say it
    noun: str = "rows"  # what its items are
    rows_id: str = ""  # of a held-out set's rows as they are laid out: equal id, equal rows


def hash_of(value: Any) -> str:
    """Returns a hash of what `repr` shows of a value; not of sets, whose order varies."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class DataIdentity:
    """What identifies a run's data, as JSON."""

    hash: str  # equal hash, equal rows
    # Name, weight and hash of each part of the first mixture, and of what is held out.
    parts: Sequence[Any] = ()
    # Of the mixtures after the first: first row, and the same of each part that they have.
    mixtures: Sequence[Any] = ()
    # What the numbers of evaluations depend on but the weights, by the first word of their names
    # ("eval", "task"): those of equal hashes compare.
    evaluations: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What to train on and what is held out: rows, or documents until they are laid out."""

    train: Sequence[Part]
    held_out: Sequence[Part]  # without items where nothing is held out
    description: str  # one line for a person; of what is just opened, how that ends
    packed: bool = False  # rows say where documents begin, which do not see each other
    # (first row, weight of each part of `train`) of the mixtures after the first
    later: Sequence[tuple[int, Sequence[float]]] = ()

    @property
    def summary(self) -> dict[str, Any]:
        """What a process that reads nothing needs, as JSON: numbers stand for the items."""
        counted = {
            name: [dataclasses.replace(part, items=len(part.items)) for part in parts]
            for name, parts in (("train", self.train), ("held_out", self.held_out))
        }
        return dataclasses.asdict(dataclasses.replace(self, **counted))

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> "Corpus":
        """Returns a corpus in which ranges stand for the items."""
        parts = {
            name: [Part(**{**part, "items": range(part["items"])}) for part in summary[name]]
            for name in ("train", "held_out")
        }
        return cls(**{**summary, **parts})

    @property
    def hash(self) -> str:
        return self.identity({}).hash

    @property
    def held_out_hash(self) -> str:
        return hash_of([[part.name, part.rows_id] for part in self.held_out])

    def identity(self, evaluations: Mapping[str, str]) -> DataIdentity:
        """Returns what identifies the data; `evaluations` are as in `DataIdentity`."""
        train = [[part.name, part.weight, part.hash] for part in self.train]
        parts = [part for part in train if part[1]]
        parts += [[f"held out {x.name}".strip(), x.weight, x.hash] for x in self.held_out]
        hashed = [part[1:] for part in parts], [part.name for part in self.held_out]
        mixtures = []
        for first, weights in self.later:
            weighted = zip(train, weights, strict=True)
            mixtures.append([first, [[x[0], weight, x[2]] for x, weight in weighted if weight]])
        return DataIdentity(hash_of(hashed), parts, mixtures, evaluations)
