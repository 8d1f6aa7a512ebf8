"""The picture of a run: batch size, loss or reward, and whatever else its objective shows."""

import pathlib
from typing import TYPE_CHECKING

import numpy as np

from maxramp.commandline import count
from maxramp.drawing import (
    BLUE,
    COLORS,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    draw_steps,
    make_panels,
    name_consumption,
)
from maxramp.model.parts.routing import LOAD
from maxramp.run.metrics import OF_SET, TASK, Record, numbers_of, tag_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Not of the objective, or drawn in the large panel.
_NOT_SMALL = ("grad_norm", "learning_rate", "bad_steps")
_CHANGING = {"row_length": (PURPLE, "row length\n(tokens)"), "devices": (GREEN, "devices")}
_WIDE_RANGE = 10.0  # a loss that falls to less than a share of this has a logarithmic axis
_RESULTS = {
    "reward": ("reward", "mean reward", "reward on held-out prompts"),
    "loss": ("loss", "loss (nats per token)", "loss on held-out text"),
    "pairs": ("loss", "loss (per pair)", "loss on held-out pairs"),
}

_LAST = 10  # recorded steps at most, and a quarter of all, that the table is the mean of
_LEAST = 1 / 64  # times the mean load: where curves end
_MOST = 16.0  # times the mean load: colors range at most from 1 / 16 to this
_CELLS = 12, 16  # layers and experts: a table of more has no numbers in its cells


def draw_run(records: list[Record], folder: pathlib.Path, run_name: str) -> None:
    """Draws the records of metrics.jsonl; nothing without a step."""
    for name, make_figure in (("ramp.png", make_run_figure), ("experts.png", make_expert_figure)):
        if figure := make_figure(records, run_name):
            figure.savefig(folder / name, dpi=150)


def make_run_figure(records: list[Record], run_name: str) -> "Figure | None":
    """Draws panels of the batch and of the mean reward, or the loss where there are no rewards, and
    below small ones for every other number of the steps' objective and of tasks. Returns None
    without a step; `records` are in the order of their steps.
    """
    steps = [record for record in records if record.get("loss") is not None]
    if not steps:
        return None
    result = "reward" if any("reward" in record for record in steps) else "loss"
    tasks = _names_with(records, TASK)
    small = [*(name for name in _objective_names(steps) if name != result), *tasks]
    changing = [n for n in _CHANGING if len({r[n] for r in steps if n in r}) > 1]
    heights = [1.6, *[1.2] * len(changing), 3.0, *[0.9] * len(small)]
    figure, panels = make_panels(heights, f"{run_name}: batch size and {result}")
    starts = [r["consumed_samples"] - r["global_batch_size"] for r in steps]
    ends = [*starts, steps[-1]["consumed_samples"]]
    large, below = panels[: 2 + len(changing)], panels[2 + len(changing) :]
    batches = [record["global_batch_size"] for record in steps]
    draw_steps(large[0], ends, batches, BLUE, "global batch\n(samples)")
    for name, axes in zip(changing, large[1:], strict=False):
        draw_steps(axes, ends, [r.get(name, 0) for r in steps], *_CHANGING[name])
    _draw_result(large[-1], records, steps, result)
    _draw_skipped(large[-1], records)
    handles = [*large[-1].lines, *_draw_restarts(large, starts, steps)]
    figure.legend(handles=handles, loc="outside lower right", ncols=4, frameon=False)
    for name, axes in zip(small, below, strict=True):
        style = {"color": RED, "marker": "o", "clip_on": False} if name in tasks else {}
        curve = _curve(_records_with(records, name) if name in tasks else steps, name)
        axes.plot(*curve, **{"color": ORANGE, "linewidth": 1} | style)
        axes.set_title(name, loc="left", fontsize="medium", parse_math=False)
    panels[-1].set_xlim(0, ends[-1] * 1.01)  # the last evaluation lies at the end
    ratios = {r["consumed_tokens"] / r["consumed_samples"] for r in steps if "consumed_tokens" in r}
    name_consumption(panels, ratios.pop() if len(ratios) == 1 else 0)
    figure.align_ylabels()
    return figure


def _draw_restarts(panels: list["Axes"], starts: list[int], steps: list[Record]) -> list["Line2D"]:
    """Draws lines where the run was continued, in red where it has fewer devices from there on;
    returns one of each kind, for the legend."""
    lines: dict[str, Line2D] = {}
    for start, before, record in zip(starts, [steps[0], *steps], steps, strict=False):
        if record.get("restarted"):
            is_smaller = record.get("devices", 0) < before.get("devices", 0)
            label = "restart on fewer devices" if is_smaller else "restart"
            style = {"color": RED if is_smaller else "0.4", "linestyle": ":", "label": label}
            lines[label] = [axes.axvline(start, linewidth=1, **style) for axes in panels][0]
    return [*lines.values()]


def _draw_skipped(axes: "Axes", records: list[Record]) -> None:
    """Marks below the upper edge, as what was skipped may have no finite loss."""
    if skipped := [r["consumed_samples"] for r in records if r.get("bad_steps")]:
        style = {"color": RED, "linestyle": "none", "marker": "v", "label": "skipped step"}
        axes.plot(skipped, [0.97] * len(skipped), transform=axes.get_xaxis_transform(), **style)


def _draw_result(axes: "Axes", records: list[Record], steps: list[Record], result: str) -> None:
    has_pairs = any("rewards/margins" in record for record in steps)
    label, axis_label, held_out = _RESULTS["pairs" if has_pairs else result]
    samples, values = _curve(steps, result)
    axes.plot(samples, values, color=ORANGE, linewidth=1, label=label)
    if label == "loss" and not has_pairs and max(values) > _WIDE_RANGE * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter(lambda loss, position: f"{loss:g}")
        axes.yaxis.set_minor_formatter("")
    for i, name in enumerate([f"eval_{result}", *_names_with(records, OF_SET)]):
        if not (evaluations := _records_with(records, name)):
            continue
        axes.plot(
            *_curve(evaluations, name),
            color=COLORS[i % len(COLORS)],
            linestyle="none",
            marker="osD^v"[i % 5],
            markersize=5,
            clip_on=False,
            label=name.removeprefix(OF_SET) if i else held_out,
        )
    axes.set_ylabel(axis_label)


def _objective_names(steps: list[Record]) -> list[str]:
    names = dict.fromkeys(name for record in steps for name in numbers_of(record))
    others = ("batch", "speed", "noise")
    learning = [name for name in names if tag_of(name).partition("/")[0] not in others]
    return [name for name in learning if name not in _NOT_SMALL]


def _names_with(records: list[Record], prefix: str) -> list[str]:
    return [*dict.fromkeys(n for record in records for n in record if n.startswith(prefix))]


def _records_with(records: list[Record], name: str) -> list[Record]:
    return [record for record in records if record.get(name) is not None]


def _curve(records: list[Record], name: str) -> tuple[list[int], list[float]]:
    values = [float("nan") if r.get(name) is None else r[name] for r in records]
    return [r["consumed_samples"] for r in records], values


def make_expert_figure(records: list[Record], run_name: str) -> "Figure | None":
    """Draws the loads of the most and the least loaded expert over the run, and below a table of
    every expert's at its end. Returns None if no record has loads.

    `records` are in the order of their steps, of one model: layers and experts stay.

    Shapes: R records, L layers of experts, E experts.
    """
    shown = [record for record in records if LOAD in record]
    if not shown:
        return None
    loads_RLE = np.array([record[LOAD] for record in shown], float)
    layers, experts = loads_RLE.shape[1:]
    loads_RLE *= experts
    height = min(4.0, 1.8 + 0.16 * layers)  # room for the label of the colors
    figure, (curves, table) = make_panels(
        [2.6, height], f"{run_name}: load of experts", share_x=False
    )
    x = [record["consumed_samples"] for record in shown]
    extremes = ((loads_RLE.max(2), RED, "most loaded"), (loads_RLE.min(2), BLUE, "least loaded"))
    for loads_RL, color, label in extremes:
        loads_RL = np.maximum(loads_RL, _LEAST)  # a log axis has no 0
        curves.fill_between(
            x, loads_RL.min(1), loads_RL.max(1), color=color, alpha=0.2, linewidth=0
        )
        curves.plot(x, np.median(loads_RL, 1), color=color, linewidth=1.5, label=label)
    curves.axhline(1, color="0.4", linewidth=1)
    curves.set_yscale("log", base=2)
    curves.yaxis.set_major_formatter(lambda load, position: _show(load))
    curves.set(xlim=(0, x[-1] * 1.01), ylabel="load over the mean\n(line: median layer, area: all)")
    curves.legend(frameon=False, fontsize="small", ncols=2, loc="center right")
    name_consumption([curves], 0)
    number = min(_LAST, -(-len(loads_RLE) // 4))
    mean_LE = np.maximum(loads_RLE[-number:].mean(0), 1e-9)  # its logarithm is shown
    most = np.clip(np.ceil(np.abs(np.log2(mean_LE)).max()), 1, np.log2(_MOST))
    colors = {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    image = table.imshow(np.log2(mean_LE), aspect="auto", interpolation="nearest", **colors)
    if layers <= _CELLS[0] and experts <= _CELLS[1]:
        for (layer, expert), load in np.ndenumerate(mean_LE):
            style = {"color": "white" if abs(np.log2(load)) > 0.6 * most else "black"}
            style |= {"ha": "center", "va": "center", "fontsize": "small"}
            table.text(expert, layer, f"{load:.2g}", **style)
    table.grid(visible=False)
    last = f"expert (mean of the last {count(number, 'recorded step')})"
    table.set(xlabel=last, ylabel="layer of experts")
    for axis in (table.xaxis, table.yaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    ticks = np.linspace(-most, most, 5 if most % 2 == 0 else 3)
    form = {"extend": "both", "ticks": ticks, "format": lambda x, position: _show(2.0**x)}
    figure.colorbar(image, ax=table, label="load over the mean", **form)
    return figure


def _show(load: float) -> str:
    below = f"1/{1 / load:g}" if load > _LEAST else f"1/{1 / _LEAST:g} or less"
    return f"{load:g}" if load >= 1 else below
