"""From what was measured to a ramp: the largest batch that costs nothing, over a run.

Everything is in tokens of the run that is planned, as a run with rows of another length may have
been measured. Nothing is assumed where nothing was measured: before that the batch is the smallest,
after it the batch stays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxramp.measuring.noise import Block


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured over some tokens of a run.

    Attributes:
      first, last: tokens consumed before and after.
      batch: the batch, in tokens, that surely costs nothing there.
    """

    first: float
    last: float
    batch: float


def from_branches(results: Sequence[dict[str, Any]]) -> list[Measurement]:
    """What `maxramp.branch` measured: each holds up to the next, the last to its window's end.

    Of an interval its lower end counts, and of several windows from one step on the least. A batch
    is never given back, so at each place the least of those from there on counts.
    """
    found: list[Measurement] = []  # the last one first
    order = sorted(results, key=lambda r: (r["first_sample"] * r["row_tokens"], r["samples"]))
    for r in reversed(order):
        row = r["row_tokens"]
        first, batch = r["first_sample"] * row, (r["surely"] or r["largest"]) * row
        last = first + r["samples"] * row
        if found:
            batch = min(batch, found[-1].batch)
            last = found.pop().last if found[-1].first == first else found[-1].first
        found.append(Measurement(first, last, batch))
    return found[::-1]


def from_noise(curve: Sequence[Block], factor: float, row_tokens: float) -> list[Measurement]:
    """What a noise scale's blocks allow: `factor` times the lower end of the interval.

    One block in twenty is too high, so a block counts for what the next one, too, allows; the last
    for what the one before does.

    Args:
      curve: the blocks.
      factor: how far above the noise scale the batch may be.
      row_tokens: what a row that was measured counts for.
    """
    lows = [block.low / block.row_target_tokens for block in curve]
    others = [*lows[1:], *lows[-2:-1]] or lows
    return [
        Measurement(
            block.first_sample * row_tokens,
            block.last_sample * row_tokens,
            factor * min(low, other) * row_tokens,
        )
        for block, low, other in zip(curve, lows, others, strict=True)
    ]


def ramp_of(measured: Sequence[Measurement], sizes: Sequence[int]) -> list[tuple[float, int]]:
    """The ramp that follows the measurements: (tokens from which on, batch in tokens).

    A size is taken where a measurement allows it, and never given back.

    Args:
      measured: in order.
      sizes: that the batch may take, in tokens, the smallest first.
    """
    found: list[tuple[float, int]] = [(0, sizes[0])]
    for one in measured:
        allowed = max((size for size in sizes if size <= one.batch), default=0)
        if allowed <= found[-1][1]:
            continue
        if one.first <= found[-1][0]:
            found.pop()
        found.append((one.first, allowed))
    return found
