"""Which batch size still costs nothing: branches of a run, compared on the same held-out rows.

The critical batch size as Merrill et al. measure it (arXiv 2505.23971): from a checkpoint, each
size k times the run's trains on a window of tokens at sqrt(k) times the learning rate; sizes are
fine as long as no loss is more than a tolerance above that of any smaller size. Here all branches
train on the same rows and are evaluated on the same batches of held-out rows, so that their losses
are compared in pairs.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.measuring.noise import student

_FEWEST_BATCHES = 8  # fewer say too little about their own spread


@dataclasses.dataclass(frozen=True)
class Branch:
    """One size.

    Attributes:
      rows: global batch size.
      steps: of the window.
      learning_rate: throughout.
      cross_entropy, tokens: sums over each batch of held-out rows, after the window.
    """

    rows: int
    steps: int
    learning_rate: float
    cross_entropy: np.ndarray
    tokens: np.ndarray

    @property
    def loss(self) -> float:
        """Nats per token on held-out rows; infinite where it is no number."""
        loss = float(self.cross_entropy.sum() / self.tokens.sum())
        return loss if math.isfinite(loss) else math.inf


def difference(branch: Branch, other: Branch) -> tuple[float, float | None, float | None]:
    """How much a branch's loss is above another's, and the 90% interval of that.

    The interval says how far the held-out rows could mislead: what it would be on all text. It is
    a ratio's, linearized, with Student's t over the batches.

    Returns:
      The difference and the ends of its interval, nats per token; no ends with fewer than eight
      batches. All are infinite where a loss is.
    """
    apart, tokens = branch.cross_entropy - other.cross_entropy, branch.tokens
    mean, count = float(apart.sum() / tokens.sum()), len(tokens)
    for one, far in ((branch, math.inf), (other, -math.inf)):
        if one.loss == math.inf:
            return (far, far, far) if count >= _FEWEST_BATCHES else (far, None, None)
    if count < _FEWEST_BATCHES:
        return mean, None, None
    residuals = apart - mean * tokens
    error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / float(tokens.sum())
    half = student(count - 1) * error
    return mean, mean - half, mean + half


def compare(branches: Sequence[Branch], tolerance: float) -> dict[str, Any]:
    """What the branches say.

    Args:
      branches: by size, the smallest first, at least two; the first with a finite loss.
      tolerance: nats per token.

    Returns:
      `sizes`, each with its loss, the largest of its differences to smaller sizes (`above`, and
      `low` and `high`) and whether it and all smaller sizes are `within` the tolerance; `largest`,
      the largest size within; and its interval: `surely`, the largest size that is within at the
      upper ends of the intervals, and `possibly`, at the lower ends. None where there are no ends.
    """
    sizes = []
    for index, branch in enumerate(branches):
        pairs = [difference(branch, smaller) for smaller in branches[:index]] or [(0.0, 0.0, 0.0)]
        above, low, high = (
            None if None in ends else max(ends) for ends in zip(*pairs, strict=True)
        )
        sizes.append(
            {
                "rows": branch.rows,
                "steps": branch.steps,
                "learning_rate": branch.learning_rate,
                "loss": branch.loss,
                "above": above,
                "low": low,
                "high": high,
            }
        )
    found = {
        name: _last_within(sizes, key, tolerance)
        for name, key in (("largest", "above"), ("surely", "high"), ("possibly", "low"))
    }
    for size in sizes:
        size["within"] = size["rows"] <= found["largest"]
    return {"sizes": sizes} | found


def _last_within(sizes: list[dict[str, Any]], key: str, tolerance: float) -> int | None:
    if any(size[key] is None for size in sizes):
        return None
    within = itertools.takewhile(lambda size: size[key] <= tolerance, sizes)
    return [size["rows"] for size in within][-1]  # the first is, with nothing above itself
