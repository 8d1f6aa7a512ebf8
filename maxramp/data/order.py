"""Which rows a step trains on: pure functions of the row's number, with random access.

Row r of the run is what sample r is, for every batch size, host count and restart. Step k trains on
rows [samples_before(k), samples_before(k + 1)), in order; row r of the step is row r % B of micro
batch r // B. A group is the devices that hold the same rows of a micro batch: equal parts of it, in
order. A share is the groups whose rows a process reads; it reads no other row.

Shapes: A gradient accumulation steps, B rows of a micro batch, R those that a process reads.
"""

import bisect
import dataclasses
import functools
import hashlib
import heapq
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from grain.experimental import index_shuffle

from maxramp.data.batch import Batch, stack
from maxramp.data.rows import Row
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.stage import StageSpec

_LONGEST_PERIOD = 100_000


class Interleaving:
    """Which part item n of a mixture comes from, and which item of that part it is.

    Among the first n items, for every n, each part has its exact share to within one item: an item
    comes from the part that would fall behind first, among those that it does not put ahead of
    their share (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980). The
    choices repeat after a period, the smallest number of items that the shares divide.
    """

    def __init__(self, weights: Sequence[float]):
        """Takes one or more weights above 0 as the decimals they are written as; where their period
        would exceed 100,000 items, shares are rounded to that fraction, none of them to 0."""
        self._shares = _whole_shares(weights)
        period = sum(self._shares)
        self._picks = []  # the part of each item of a period
        self._items = [[] for _ in weights]  # the items of each part in a period
        # Parts by the first item that does not put them ahead; of those that it does not, by when
        # they would fall behind, in periods: floats tell such fractions apart.
        ahead, behind = [(0, part) for part in range(len(weights))], []
        for n in range(period):
            while ahead and ahead[0][0] <= n:
                _, part = heapq.heappop(ahead)
                heapq.heappush(behind, ((len(self._items[part]) + 1) / self._shares[part], part))
            _, part = heapq.heappop(behind)
            self._picks.append(part)
            self._items[part].append(n)
            heapq.heappush(ahead, (len(self._items[part]) * period // self._shares[part], part))

    def locate(self, item: int) -> tuple[int, int]:
        """Returns the part that an item comes from, and which item of that part it is."""
        period, rest = divmod(item, len(self._picks))
        part = self._picks[rest]
        return part, period * self._shares[part] + bisect.bisect_left(self._items[part], rest)

    def count(self, items: int) -> list[int]:
        """Counts the items of each part among the first ones."""
        periods, rest = divmod(items, len(self._picks))
        return [
            periods * share + bisect.bisect_left(part_items, rest)
            for share, part_items in zip(self._shares, self._items, strict=True)
        ]

    def length(self, available: Sequence[int]) -> tuple[int, int]:
        """Returns the items until a part is used up, and which part that is. `available`, at least
        0, is what each part has left."""
        ends = []
        for part, (count, share) in enumerate(zip(available, self._shares, strict=True)):
            periods, rest = divmod(count, share)
            ends.append((periods * len(self._picks) + self._items[part][rest], part))
        return min(ends)


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """Returns weights above 0 as integers without a common divisor, whose sum is 100,000 or hardly
    more."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    denominators = ((weight / total).denominator for weight in exact)
    period = min(math.lcm(*denominators), _LONGEST_PERIOD)
    shares = [max(1, round(weight / total * period)) for weight in exact]
    common = math.gcd(*shares)
    return [share // common for share in shares]


@functools.cache
def _seed_of_shuffle(seed: int, part: int, epoch: int) -> int:
    """Returns a seed of its own, of 32 bits, for every shuffle of every run."""

    def digest(*numbers: int) -> int:
        return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest())

    # The first shuffle of seed 0 is Grain's of seed 0.
    return digest(seed, part, epoch) ^ digest(0, 0, 0)


class _Stretch(NamedTuple):
    """Rows of the run in which one mixture holds; its parts continue where they were."""

    first: int  # row
    parts: list[int]  # those of the mixture
    mixture: Interleaving  # of these
    used: list[int]  # rows of all parts, before the first of these rows


class RunRows:
    """Row r of the run: the parts' rows, shuffled anew in each epoch, in their proportions. Those
    behind its length are of further epochs, and no error.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        num_epoch: int,
        seed: int | None,
        later: Sequence[tuple[int, Sequence[float]]] = (),
    ):
        """Puts parts, with `name`, `weight` and one or more `items`, in the order of the run.

        Args:
          seed: None = the data's own order.
          later: (first row, weight of each part) of other mixtures, in order; 0 = no rows in it.
        """
        self._parts, self._seed = parts, seed
        self._stretches: list[_Stretch] = []
        used = [0] * len(parts)
        for first, weights in [(0, [part.weight for part in parts]), *later]:
            if self._stretches:
                last, used = self._stretches[-1], [*used]
                counts = last.mixture.count(first - last.first)
                for part, count in zip(last.parts, counts, strict=True):
                    used[part] += count
            mixed = [number for number, weight in enumerate(weights) if weight]
            mixture = Interleaving([weights[number] for number in mixed])
            self._stretches.append(_Stretch(first, mixed, mixture, used))
        self._length, _ = self.length(num_epoch)

    def length(self, num_epoch: int) -> tuple[int, str]:
        """Returns the rows until a part was used `num_epoch` times, and the name of that part."""
        ends = [stretch.first for stretch in self._stretches[1:]] + [math.inf]
        for stretch, end in zip(self._stretches, ends, strict=True):
            left = [len(self._parts[p].items) * num_epoch - stretch.used[p] for p in stretch.parts]
            length, part = stretch.mixture.length(left)
            if stretch.first + length < end:
                break
        return stretch.first + length, self._parts[stretch.parts[part]].name

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Row:
        first = operator.attrgetter("first")
        stretch = self._stretches[bisect.bisect_right(self._stretches, row, key=first) - 1]
        number, index = stretch.mixture.locate(row - stretch.first)
        part = stretch.parts[number]
        items = self._parts[part].items
        epoch, index = divmod(index + stretch.used[part], len(items))
        if self._seed is not None:
            seed = _seed_of_shuffle(self._seed, part, epoch)
            index = index_shuffle(index, max_index=len(items) - 1, seed=seed, rounds=4)
        return items[index]


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of every micro batch that a process reads, and how it lays them out."""

    # Positions in the mesh of the devices whose rows this process reads: int [factor, devices].
    # Its own receive the first, and pass on the others.
    positions: np.ndarray

    def _groups(self, spec: StageSpec) -> tuple[np.ndarray, np.ndarray]:
        """Returns the groups whose rows are read, ascending, and which of them a position holds."""
        return np.unique(self.positions // spec.mesh.model_parallel_size, return_inverse=True)

    def rows(self, spec: StageSpec) -> list[int]:
        """Returns the numbers in a micro batch of the rows that are read."""
        size = spec.rows // spec.mesh.ranks
        return [row for g in self._groups(spec)[0] for row in range(g * size, (g + 1) * size)]

    def read(self, row: Callable[[int], Row], spec: StageSpec) -> Batch:
        """Reads this process's part of a batch: [A, R, ...], or with a factor above 1 [factor, A,
        devices x rows of a group, ...]. `row` gives a row by its number in the batch. Only for a
        process that reads.
        """
        A, B = spec.accumulation, spec.rows
        numbers = [a * B + number for a in range(A) for number in self.rows(spec)]
        groups, slots = self._groups(spec)

        def lay_out(x_N: np.ndarray) -> np.ndarray:
            leading = A, len(groups), B // spec.mesh.ranks
            x_AgR, suffix = x_N.reshape(*leading, *x_N.shape[1:]), x_N.shape[1:]
            if len(slots) == 1:
                return x_AgR.reshape(A, -1, *suffix)
            chosen = np.moveaxis(x_AgR[:, slots], 1, 0)  # [factor, A, devices, ...]
            return chosen.reshape(len(slots), A, -1, *suffix)

        return jax.tree.map(lay_out, stack([row(n) for n in numbers], spec.fields, numbers))


def read_step(rows: Sequence[Row], ramp: RampupBatchManager, share: Share, step: int) -> Batch:
    """Reads this process's part of a step's batch, from the first step of `ramp` on; for a process
    that reads."""
    spec, first = ramp.stage_at_step(step).spec, ramp.samples_before(step)
    return share.read(lambda number: rows[first + number], spec)
