"""Draws the ramps of configs/schedules: tokens of a batch against tokens consumed.

python benchmarks/schedules.py [--plot docs/schedules.png]
"""

import argparse
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from maxramp.commandline import short
from maxramp.planning.plan import find_published

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Weights of the models, by the sources that the files name; those of all experts.
WEIGHTS = {
    "bloom-176b": 176e9,
    "deepseek-v2": 236e9,
    "deepseek-v3": 671e9,
    "deepseek-v4-flash": 284e9,
    "deepseek-v4-pro": 1.6e12,
    "falcon-180b": 180e9,
    "falcon-40b": 40e9,
    "falcon-7b": 7e9,
    "falcon-mamba-7b": 7e9,
    "glm-4.5": 355e9,
    "gpt3-175b": 175e9,
    "ling-plus": 290e9,
    "llama3-405b": 405e9,
    "lucie-7b": 7e9,
    "marin-32b": 32e9,
    "marin-8b": 8e9,
    "mimo-v2-flash": 309e9,
    "minimax-01": 456e9,
    "modded-nanogpt": 124e6,
    "nemo-gpt3-5b": 5e9,
    "nemotron-4-15b": 15e9,
    "nemotron-4-340b": 340e9,
    "olmo-1b": 1e9,
    "palm-540b": 540e9,
}


def draw(files: list[pathlib.Path], path: pathlib.Path) -> None:
    """Draws a panel for each file, from its first batch to its end, with all others in grey."""
    figure = Figure(figsize=(9.5, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(-(-len(files) // 4), 4, sharex=True, sharey=True).flat
    curves = {
        # From the end of the first step: a log axis has no 0.
        run["name"]: (
            [max(run["starts"][0], run["batches"][0]), *run["starts"][1:], run["end"]],
            [*run["batches"], run["batches"][-1]],
        )
        for run in find_published(",".join(file.stem for file in files))
    }
    for axes, name in zip(
        panels, sorted(curves, key=lambda name: (WEIGHTS[name], name)), strict=False
    ):
        for x, y in curves.values():
            axes.step(x, y, where="post", color="0.85", linewidth=0.7)
        x, y = curves[name]
        axes.step(x, y, where="post", color="#0072B2", linewidth=1.8)
        axes.plot(x[-1], y[-1], color="#D55E00", marker="|", markersize=9, markeredgewidth=1.8)
        axes.set_title(f"{name} ({short(WEIGHTS[name])})", loc="left", fontsize=9)
        axes.set(xscale="log", yscale="log", xlim=(2e7, 6e13))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        for axis, ticks in ((axes.xaxis, (1e8, 1e10, 1e12)), (axes.yaxis, (1e5, 1e6, 1e7, 1e8))):
            axis.set_ticks(ticks, map(short, ticks))
            axis.set_ticks((), minor=True)
    figure.supxlabel("tokens consumed")
    figure.supylabel("tokens of a batch")
    figure.savefig(path, dpi=110)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--plot", type=pathlib.Path, default=ROOT / "docs" / "schedules.png")
    draw(sorted((ROOT / "configs" / "schedules").glob("*.yml")), options.parse_args().plot)


if __name__ == "__main__":
    main()
