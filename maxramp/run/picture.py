"""The picture of a run: batch size, loss or reward, and whatever else its objective shows."""

import pathlib
from typing import TYPE_CHECKING

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


def draw_run(records: list[Record], path: pathlib.Path, run_name: str) -> None:
    """Draws the records of metrics.jsonl; nothing without a step."""
    if figure := figure_of(records, run_name):
        figure.savefig(path, dpi=150)


def figure_of(records: list[Record], run_name: str) -> "Figure | None":
    """Draws panels of the batch and of the mean reward, or the loss where there are no rewards, and
    below small ones for every other number of the steps' objective and of tasks. Returns None
    without a step.
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
    """Draws lines where the run was continued; in red where it has fewer devices from there on."""
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
