"""The picture of a plan: batch size, nodes and learning rate over the samples."""

import pathlib
from typing import Any

from maxramp.commandline import short


def draw_plan(plan: dict[str, Any], path: pathlib.Path) -> None:
    """Draws `maxramp.plan`'s plan: global batch size, nodes and, if given, the learning rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    stages, rate = plan["stages"], plan["learning_rate"]
    samples_or_tokens = FuncFormatter(lambda number, position: short(number))
    x = [*(s["first_sample"] for s in stages), plan["total_samples"]]
    ratios = (2, 1, 1) if rate else (2, 1)
    figure = Figure(figsize=(7, 1.3 * sum(ratios)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(ratios), sharex=True, height_ratios=ratios)
    batch, nodes = panels[:2]
    for axes, key, color, label in (
        (batch, "global_batch_size", "tab:blue", "global batch size\n(samples)"),
        (nodes, "nodes", "tab:green", "nodes"),
    ):
        y = [*(s[key] for s in stages), stages[-1][key]]
        axes.fill_between(x, y, step="post", color=color, alpha=0.15, linewidth=0)
        axes.step(x, y, where="post", color=color, linewidth=1.8)
        axes.set_ylim(0, max(y) * 1.15)
        axes.set_ylabel(label)
    if rate:
        panels[2].plot(rate["samples"], rate["rate"], color="tab:orange", linewidth=1.8)
        panels[2].set_ylim(0, None)
        panels[2].set_ylabel("learning rate")
        panels[2].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    panels[-1].set_xlabel("consumed samples")
    panels[-1].set_xlim(0, plan["total_samples"])
    panels[-1].xaxis.set_major_formatter(samples_or_tokens)
    length = plan["max_target_length"]
    tokens = batch.secondary_xaxis("top", functions=(lambda n: n * length, lambda n: n / length))
    tokens.set_xlabel("consumed tokens")
    tokens.xaxis.set_major_formatter(samples_or_tokens)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)
