"""The picture of a run: batch size, loss or reward, and whatever else its objective shows."""

import pathlib
from typing import TYPE_CHECKING

from maxramp.run.metrics import OF_SET, TASK, Record, numbers_of, tag_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Not of the objective, or drawn in the large panel.
_NOT_SMALL = ("grad_norm", "learning_rate", "bad_steps")
_RESULTS = {
    "reward": ("reward", "mean reward", "reward on held-out prompts"),
    "loss": ("loss", "loss (nats per token)", "loss on held-out text"),
    "pairs": ("loss", "loss (per pair)", "loss on held-out pairs"),
}


def draw_run(records: list[Record], path: pathlib.Path, run_name: str) -> None:
    """Draws the records of metrics.jsonl; nothing without a step."""
    if figure := figure_of(records, run_name):
        figure.savefig(path, dpi=130)


def figure_of(records: list[Record], run_name: str) -> "Figure | None":
    """None without a step. The large panel has the batch and the mean reward, or the loss where
    there are no rewards; a small one below it every other number of the steps' objective, and each
    number of tasks has one.
    """
    steps = [record for record in records if record.get("loss") is not None]
    if not steps:
        return None
    # The object interface and its file backend: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    result = "reward" if any("reward" in record for record in steps) else "loss"
    small = [name for name in _objective_names(steps) if name != result]
    if len({r["row_length"] for r in steps if "row_length" in r}) > 1:
        small.insert(0, "row_length")
    tasks = _names_with(records, TASK)
    heights = [4.5, *[0.9] * (len(small) + len(tasks))]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    result_axes = panels[0].twinx()
    result_axes.patch.set_visible(False)
    _draw_batch(panels[0], steps)
    _draw_result(result_axes, records, steps, result)
    figure.legend(handles=result_axes.lines, loc="outside upper right", ncols=2, frameon=False)
    for name, axes in zip(small, panels[1:], strict=False):
        axes.plot(*_curve(steps, name), color="tab:orange", linewidth=1)
    for name, axes in zip(tasks, panels[1 + len(small) :], strict=True):
        curve = _curve(_records_with(records, name), name)
        axes.plot(*curve, color="tab:red", linewidth=1, marker="o", clip_on=False)
    for name, axes in zip([*small, *tasks], panels[1:], strict=True):
        axes.set_title(name, loc="left", fontsize="medium", parse_math=False)
        axes.grid(alpha=0.3)
        axes.spines["right"].set_visible(False)
    for axes in (*panels, result_axes):
        axes.spines["top"].set_visible(False)
    panels[-1].set_xlabel("consumed samples")
    # A run may be named $x$.
    panels[0].set_title(f"{run_name}: batch size and {result}", loc="left", parse_math=False)
    return figure


def _draw_batch(axes: "Axes", steps: list[Record]) -> None:
    starts = [r["consumed_samples"] - r["global_batch_size"] for r in steps]
    sizes = [r["global_batch_size"] for r in steps]
    x, y = [*starts, steps[-1]["consumed_samples"]], [*sizes, sizes[-1]]
    axes.fill_between(x, y, step="post", color="tab:blue", alpha=0.15, linewidth=0)
    axes.step(x, y, where="post", color="tab:blue", linewidth=1.8)
    axes.set_ylim(0, max(y) * 1.15)
    axes.set_xlim(0, x[-1])
    axes.set_ylabel("global batch size (samples)", color="tab:blue")
    axes.tick_params(axis="y", colors="tab:blue")


def _draw_result(axes: "Axes", records: list[Record], steps: list[Record], result: str) -> None:
    has_pairs = any("rewards/margins" in record for record in steps)
    label, axis_label, held_out = _RESULTS["pairs" if has_pairs else result]
    axes.plot(*_curve(steps, result), color="tab:orange", linewidth=1, label=label)
    for i, name in enumerate([f"eval_{result}", *_names_with(records, OF_SET)]):
        if not (evaluations := _records_with(records, name)):
            continue
        axes.plot(
            *_curve(evaluations, name),
            color=f"C{(3 + i) % 10}",  # of the first, red
            linestyle="none",
            marker="osD^v"[i % 5],
            markersize=5,
            clip_on=False,
            label=name.removeprefix(OF_SET) if i else held_out,
        )
    axes.set_ylabel(axis_label, color="tab:orange")
    axes.tick_params(axis="y", colors="tab:orange")


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
