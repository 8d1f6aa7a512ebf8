"""Draws the ramps of configs/schedules: tokens of a batch against tokens consumed.

python benchmarks/schedules.py [--plot docs/schedules.png]
"""

import argparse
import math
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from maxramp.commandline import short
from maxramp.config.load import load
from maxramp.rampup.schedule import RampupBatchManager

ROOT = pathlib.Path(__file__).resolve().parent.parent
_GAP = 0.07  # of two names, in decades of the batch


def ramp_of(path: pathlib.Path) -> tuple[list[int], list[int]]:
    """Where the stages of a file begin and the last one ends, and their batches, in tokens."""
    batch = load([str(path)], note=lambda line: None).batch
    ramp, row = RampupBatchManager(batch, 1), batch.max_target_length
    stages = ramp.stages_between(0, ramp.total_steps)
    starts = [stage.first_sample * row for stage in stages]
    sizes = [stage.global_batch_size * row for stage in stages]
    return [*starts, ramp.total_samples * row], sizes


def apart(heights: list[float]) -> list[float]:
    """Heights of names in order, the lowest first: as near to these as the gap allows."""
    blocks: list[list[float]] = []  # [middle, names] of those that touch
    for height in heights:
        blocks.append([height, 1])
        while len(blocks) > 1:
            (below, n), (above, m) = blocks[-2:]
            if above - below >= _GAP * (n + m) / 2:
                break
            blocks[-2:] = [[(below * n + above * m) / (n + m), n + m]]
    return [middle + _GAP * (i - (n - 1) / 2) for middle, n in blocks for i in range(int(n))]


def draw(files: list[pathlib.Path], path: pathlib.Path) -> None:
    """One line a file, from its first batch to its end, with its name there."""
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ramps = sorted(((*ramp_of(file), file.stem) for file in files), key=lambda r: (r[1][-1], r[0]))
    right = 1.25 * max(places[-1] for places, _, _ in ramps)
    names = apart([math.log10(sizes[-1]) for _, sizes, _ in ramps])
    for index, ((places, sizes, name), height) in enumerate(zip(ramps, names, strict=True)):
        x = [max(places[0], sizes[0]), *places[1:]]  # the first step's end: there is no log of 0
        color = f"C{index % 10}"
        style = "-" if len(sizes) < 12 else (0, (4, 1))
        axes.step(x, [*sizes, sizes[-1]], where="post", color=color, linewidth=1.3, linestyle=style)
        end, label = (places[-1], sizes[-1]), (right, 10**height)
        axes.plot(*zip(end, label, strict=True), color=color, linewidth=0.5, alpha=0.6)
        axes.annotate(name, label, color=color, fontsize=7, va="center", annotation_clip=False)
    axes.set(xscale="log", yscale="log", xlim=(2e7, right))
    axes.set(xlabel="tokens consumed", ylabel="tokens of a batch")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda number, place: short(number))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--plot", type=pathlib.Path, default=ROOT / "docs" / "schedules.png")
    draw(sorted((ROOT / "configs" / "schedules").glob("*.yml")), options.parse_args().plot)


if __name__ == "__main__":
    main()
