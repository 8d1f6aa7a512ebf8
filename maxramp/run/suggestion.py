"""From what was measured to a ramp: the largest batch at each place that costs nothing.

Places and batches are in tokens, as a run with rows of another length may have been measured.
Nothing is assumed where nothing was measured: before the first place the batch is the smallest,
after the last one it stays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxramp.run.noise import Block


@dataclasses.dataclass(frozen=True)
class Place:
    """What was measured over some tokens of a run.

    Attributes:
      first, last: tokens consumed before and after.
      batch: the batch, in tokens, that surely costs nothing there.
    """

    first: float
    last: float
    batch: float


def from_branches(results: Sequence[dict[str, Any]]) -> list[Place]:
    """The places of `maxramp.branch`; each holds up to the next, and the last to its window's end.

    Of an interval its lower end counts.
    """
    found = sorted(results, key=lambda r: r["first_sample"] * r["row_tokens"])
    starts = [r["first_sample"] * r["row_tokens"] for r in found]
    end = starts[-1] + found[-1]["samples"] * found[-1]["row_tokens"]
    return [
        Place(start, last, (r["surely"] or r["largest"]) * r["row_tokens"])
        for r, start, last in zip(found, starts, [*starts[1:], end], strict=True)
    ]


def from_noise(curve: Sequence[Block], factor: float) -> list[Place]:
    """The places of a noise scale's blocks: `factor` times the lower end of the interval.

    One block in twenty is too high, so a block counts for what the next one, too, allows; the last
    for what the one before does.
    """
    lows = [block.low for block in curve]
    others = [*lows[1:], *lows[-2:-1]] or lows
    tokens = [block.batch_tokens / block.batch_rows for block in curve]
    return [
        Place(block.first_sample * row, block.last_sample * row, factor * min(low, other))
        for block, row, low, other in zip(curve, tokens, lows, others, strict=True)
    ]


def ramp_of(places: Sequence[Place], sizes: Sequence[int]) -> list[tuple[float, int]]:
    """The ramp that follows the places: (tokens from which on, batch in tokens).

    A size is taken where a place allows it, and never given back.

    Args:
      places: in order.
      sizes: that the batch may take, in tokens, the smallest first.
    """
    found: list[tuple[float, int]] = [(0, sizes[0])]
    for place in places:
        allowed = max((size for size in sizes if size <= place.batch), default=0)
        if allowed <= found[-1][1]:
            continue
        if place.first <= found[-1][0]:
            found.pop()
        found.append((place.first, allowed))
    return found
