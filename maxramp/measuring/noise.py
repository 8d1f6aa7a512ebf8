"""The noise scale of a run over its samples, from what its steps have logged.

A quotient of noisy numbers has no mean and no variance; one of means over a block of steps has an
interval, Fieller's (Fieller, 1954, "Some problems in interval estimation"), which has no upper end
where the signal's mean cannot be told from zero.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from maxramp.commandline import short
from maxramp.drawing import make_panels, save_plot
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.run.metrics import Record, read_records

# The estimates that steps log (`training/noise_scale.py`): the prefix of their keys, and a name.
KINDS = {"": "weights", "adam_": "weights as Adam sees them", "norms_": "norms' scales"}
_Z = 1.645  # standard deviations that hold a normal variable with probability 0.9
_FEWEST_STEPS = 8  # of a block: fewer say too little about their own spread


@dataclasses.dataclass(frozen=True)
class Block:
    """The noise scale over a run of steps, in targets: tokens that are predicted."""

    first_sample: int  # samples consumed before the steps
    last_sample: int  # and after
    steps: int  # that have an estimate
    batch_rows: float  # of the mean batch that they used
    batch_target_tokens: float
    noise_scale: float | None  # None where the mean signal is not above zero
    low: float  # of the interval that holds it in 9 of 10 cases
    high: float | None  # None where that has no end

    @property
    def row_target_tokens(self) -> float:
        return self.batch_target_tokens / self.batch_rows

    @property
    def rows(self) -> list[float | None]:
        """The noise scale and the ends of its interval in rows."""
        ends = self.noise_scale, self.low, self.high
        return [None if end is None else end / self.row_target_tokens for end in ends]


def run_records(run: Place) -> list[Record]:
    """Reads the records of a run, and refuses a folder that has none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run} holds no metrics.jsonl; give the folder of a run")
    return read_records(path)


def noise_curves(run: Place, blocks: int) -> dict[str, list[Block]]:
    """Returns the noise scale of a run by kind, over `blocks` shares of its samples; kinds without
    one are left out. A ConfigError if none has one, or `blocks` is below 1."""
    if blocks < 1:
        raise ConfigError(f"--blocks {blocks} must be 1 or more")
    records = run_records(run)
    curves = {kind: curve for kind in KINDS if (curve := noise_blocks(records, kind, blocks))}

    def has_blocks(number: int) -> bool:
        return any(noise_blocks(records, kind, number) for kind in KINDS)

    if not curves:
        has_scale = any("norms_noise_signal" in record for record in records)
        most = min(blocks - 1, len(records) // _FEWEST_STEPS)
        if blocks > 1 and has_blocks(1):  # else no number of blocks has one
            fewer = next(n for n in (*range(most, 1, -1), 1) if has_blocks(n))
            remedy = f"use --blocks {fewer}"
        elif has_scale:
            remedy = "train more steps, of more than 1 row, as one row has none"
        else:
            remedy = "train with log_gradient_noise_scale=true"
        what = f" of {_FEWEST_STEPS} steps or more in one of {blocks} blocks" if has_scale else ""
        raise ConfigError(f"{run} holds no noise scale{what}; {remedy}")
    return curves


def noise_blocks(records: Sequence[Record], kind: str, count: int) -> list[Block]:
    """Returns the noise scale of a kind of KINDS over `count` equal shares of the samples.

    A share is cut where the length of rows changes, as an estimate holds for one length. Shares in
    which fewer than 8 steps have an estimate are left out, and so are skipped steps.
    """
    names = f"{kind}noise_signal", f"{kind}noise_variance"
    steps = [record for record in records if _has_estimate(record, names)]
    steps.sort(key=lambda record: record["consumed_samples"])
    if not steps:
        return []
    first = steps[0]["consumed_samples"] - steps[0]["global_batch_size"]
    length = steps[-1]["consumed_samples"] - first

    def share_of(record: Record) -> tuple[int, int | None]:
        number = (record["consumed_samples"] - first - 1) * count // length
        return number, record.get("row_length")

    shares = [list(share) for _, share in itertools.groupby(steps, share_of)]
    return [_block(share, *names) for share in shares if len(share) >= _FEWEST_STEPS]


def _has_estimate(record: Record, estimates: Sequence[str]) -> bool:
    counts = [record.get(n) for n in ("global_batch_size", "consumed_samples", "target_tokens")]
    known = all(isinstance(record.get(name), float) for name in estimates)
    known = known and not record.get("bad_steps")
    return known and all(type(n) is int for n in counts) and 0 < counts[0] <= counts[1]


def _block(steps: list[Record], signal: str, variance: str) -> Block:
    """Estimates the noise scale of steps of one row length, at least two."""

    def column(name: str) -> np.ndarray:
        return np.array([record[name] for record in steps], float)

    rows = column("global_batch_size")
    return Block(
        int(steps[0]["consumed_samples"] - rows[0]),
        steps[-1]["consumed_samples"],
        len(steps),
        rows.mean(),
        float(column("target_tokens").mean()),
        # A step of more rows knows more: it counts by its rows, as steps of one row each would.
        *ratio_of_means(column(variance), column(signal), rows),
    )


def student(freedom: int, z: float = _Z) -> float:
    """Approximates the quantile of Student's t with `freedom` degrees, for that of a normal z."""
    return z * (1 + (z**2 + 1) / (4 * freedom))


def ratio_of_means(
    y: np.ndarray, x: np.ndarray, weights: np.ndarray, z: float = _Z
) -> tuple[float | None, float, float | None]:
    """Estimates mean(y) / mean(x) of two positive means, from pairs that scatter around them.

    Fieller's interval: the ratios r for which mean(y) - r * mean(x) is within z of its standard
    deviations from zero.

    Args:
      y, x: pairs, two or more, independent of each other.
      weights: of each pair.
      z: half the interval, in standard deviations.

    Returns:
      The ratio (None where a mean is not above zero), and the ends of its interval (the upper one
      None if it is open).
    """
    share = weights / weights.sum()
    means = np.array([(share * y).sum(), (share * x).sum()])
    deviations = share * (np.stack([y, x]) - means[:, None])
    scale = student(len(y) - 1, z) ** 2 * len(y) / (len(y) - 1)
    (yy, xy), (_, xx) = np.outer(means, means) - scale * (deviations @ deviations.T)
    # The interval is where xx r^2 - 2 xy r + yy <= 0.
    root = math.sqrt(max(0.0, xy**2 - xx * yy))
    ratio = means[0] / means[1] if min(means) > 0 else None
    low = max(0.0, yy / (xy + root)) if xy + root > 0 else 0.0
    return ratio, low, (xy + root) / xx if xx > 0 and xy > 0 else None


def draw_noise(curves: dict[str, list[Block]], path: Place) -> None:
    """Draws noise scales with their intervals, by name, and the batch that was used. `curves` are
    one to three, and none is empty; raises as `save_plot`."""
    figure, (axes,) = make_panels([4.5], "")
    axes.set(yscale="log", xlabel="consumed samples", ylabel="rows")
    colors = "tab:orange", "tab:green", "tab:red"
    for color, (name, curve) in zip(colors, curves.items(), strict=False):
        per_row = curve[0].row_target_tokens
        known = [block for block in curve if block.noise_scale is not None]
        x = [(block.first_sample + block.last_sample) / 2 for block in known]
        y, low, high = zip(*(block.rows for block in known), strict=True) if known else [()] * 3
        most = 10 * max([*y, *(block.batch_rows for block in curve)])  # where there is no end
        high = [most if end is None else end for end in high]
        axes.plot(x, y, color=color, marker="o", markersize=4, label=f"noise scale, {name}")
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    longest = max(curves.values(), key=len)
    edges = [*(block.first_sample for block in longest), longest[-1].last_sample]
    sizes = [block.batch_rows for block in (*longest, longest[-1])]
    axes.step(edges, sizes, where="post", color="tab:blue", label="batch")
    axes.xaxis.set_major_formatter(lambda number, position: short(number))
    both_ways = (lambda rows: rows * per_row), (lambda tokens: tokens / per_row)
    axes.secondary_yaxis("right", functions=both_ways).set_ylabel("targets")
    axes.spines["right"].set_visible(True)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize="small")
    save_plot(figure, path)
