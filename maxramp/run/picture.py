"""The pictures: a run's batch size and loss, a policy's rewards, a plan's batch size and nodes."""

import io
import pathlib
from typing import Any

from maxramp.commandline import short
from maxramp.folders.place import Place
from maxramp.run.metrics import Record
from maxramp.run.noise import Block


def draw_run(records: list[Record], path: pathlib.Path, title: str) -> None:
    """Draws the records of metrics.jsonl; does nothing without a step."""
    steps = [record for record in records if "loss" in record and record["loss"] is not None]
    if not steps:
        return
    # The object interface and its file backend: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    batch_axes = figure.add_subplot()
    loss_axes = batch_axes.twinx()
    loss_axes.patch.set_visible(False)

    starts = [r["consumed_samples"] - r["global_batch_size"] for r in steps]
    sizes = [r["global_batch_size"] for r in steps]
    x = [*starts, steps[-1]["consumed_samples"]]
    y = [*sizes, sizes[-1]]
    batch_axes.fill_between(x, y, step="post", color="tab:blue", alpha=0.15, linewidth=0)
    batch_axes.step(x, y, where="post", color="tab:blue", linewidth=1.8)
    batch_axes.set_ylim(0, max(y) * 1.15)
    batch_axes.set_xlim(0, x[-1])
    batch_axes.set_xlabel("consumed samples")
    batch_axes.set_ylabel("global batch size (samples)", color="tab:blue")
    batch_axes.tick_params(axis="y", colors="tab:blue")

    ends = [r["consumed_samples"] for r in steps]
    loss_axes.plot(ends, [r["loss"] for r in steps], color="tab:orange", linewidth=1, label="loss")
    evals = [r for r in records if "eval_loss" in r]
    if evals:
        loss_axes.plot(
            [r["consumed_samples"] for r in evals],
            [r["eval_loss"] for r in evals],
            color="tab:red",
            linestyle="none",
            marker="o",
            markersize=5,
            clip_on=False,
            label="loss on held-out text",
        )
    loss_axes.set_ylabel("loss (nats per token)", color="tab:orange")
    loss_axes.tick_params(axis="y", colors="tab:orange")
    figure.legend(handles=loss_axes.lines, loc="outside upper right", ncols=2, frameon=False)
    for axes in (batch_axes, loss_axes):
        axes.spines["top"].set_visible(False)
    batch_axes.set_title(title, loc="left", parse_math=False)  # a run may be named $x$
    figure.savefig(path, dpi=130)


def draw_policy(records: list[Record], path: pathlib.Path, title: str) -> None:
    """Draws the records of reinforcement learning over prompts; does nothing without a step."""
    steps = [record for record in records if "reward" in record]
    if not steps:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    diverges = any(record.get("kl") is not None for record in steps)
    labels = {
        "reward": "mean reward",
        "answer_length": "length\n(tokens)",
        "kl": "KL\n(nats)",
        "entropy": "entropy\n(nats)",
        "global_batch_size": "batch\n(prompts)",
    }
    if not diverges:
        del labels["kl"]
    panels = figure.subplots(len(labels), sharex=True, height_ratios=[3, *[1] * (len(labels) - 1)])
    ends = [record["consumed_samples"] for record in steps]
    starts = [r["consumed_samples"] - r["global_batch_size"] for r in steps]
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        values = [float("nan") if r.get(name) is None else r[name] for r in steps]
        if name == "global_batch_size":
            x, y = [*starts, ends[-1]], [*values, values[-1]]
            axes.fill_between(x, y, step="post", color="tab:blue", alpha=0.15, linewidth=0)
            axes.step(x, y, where="post", color="tab:blue", linewidth=1.8)
            axes.set_ylim(0, max(y) * 1.15)
        else:
            axes.plot(ends, values, color="tab:orange", linewidth=1.2)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("consumed prompts")
    panels[-1].set_xlim(0, ends[-1])
    panels[0].set_title(title, loc="left", parse_math=False)
    figure.align_ylabels()
    figure.savefig(path, dpi=130)


def draw_noise(curves: dict[str, list[Block]], path: Place) -> None:
    """Draws noise scales with their intervals, by name, and the batch that was used.

    Raises:
      OSError: the picture cannot be written.
      ValueError: the suffix names no format of pictures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    colors = ("tab:orange", "tab:green", "tab:red", "tab:purple")
    for color, (name, curve) in zip(colors, curves.items(), strict=False):
        per_row = curve[0].batch_tokens / curve[0].batch_rows
        known = [block for block in curve if block.noise_scale is not None]
        x = [(block.first_sample + block.last_sample) / 2 for block in known]
        y = [block.noise_scale / per_row for block in known]
        most = 10 * max(
            [*y, *(block.batch_rows for block in curve)]
        )  # where an interval has no end
        low = [block.low / per_row for block in known]
        high = [most if block.high is None else block.high / per_row for block in known]
        axes.plot(x, y, color=color, marker="o", markersize=4, label=f"noise scale, {name}")
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    longest = max(curves.values(), key=len)
    edges = [*(block.first_sample for block in longest), longest[-1].last_sample]
    sizes = [block.batch_rows for block in longest]
    axes.step(edges, [*sizes, sizes[-1]], where="post", color="tab:blue", label="batch")
    axes.set_xlabel("consumed samples")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, position: short(number)))
    axes.set_ylabel("rows")
    tokens = axes.secondary_yaxis(
        "right", functions=(lambda rows: rows * per_row, lambda tokens: tokens / per_row)
    )
    tokens.set_ylabel("tokens")
    axes.grid(alpha=0.3)
    axes.spines["top"].set_visible(False)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format=path.suffix[1:] or None)
    path.write_bytes(drawn.getvalue())


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
