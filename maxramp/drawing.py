"""Panels over the samples that a run consumes, for the pictures of plans and of runs."""

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from maxramp.commandline import short
from maxramp.errors import ConfigError
from maxramp.files.place import Place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
COLORS = (RED, GREEN, PURPLE, BLUE, "#56B4E9")
_TICK_DISTANCE = 0.22  # inches between two ticks, at least


def make_panels(
    heights: Sequence[float], title: str, share_x: bool = True
) -> tuple["Figure", list["Axes"]]:
    """Makes a figure of panels of these heights in inches, which share the horizontal axis. It uses
    the object interface and its file backend: no window system, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [
        *figure.subplots(len(heights), sharex=share_x, height_ratios=heights, squeeze=False)[:, 0]
    ]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    panels[0].set_title(title, loc="left", parse_math=False)  # a run may be named $x$
    return figure, panels


def draw_steps(
    axes: "Axes", x: Sequence[float], y: Sequence[float], color: str, label: str
) -> None:
    """Draws numbers `y`, not negative, that hold from each `x` to the next, with ticks at their
    values; `x` has one more, the end. Fills the area below if they differ.
    """
    y = [*y, y[-1]]
    axes.step(x, y, where="post", color=color, linewidth=1.8)
    if len({*y}) > 1:
        axes.fill_between(x, y, step="post", color=color, alpha=0.15, linewidth=0)
    axes.set(ylim=(0, max(y) * 1.15), ylabel=label)
    name_values(axes, y)


def name_values(axes: "Axes", values: Iterable[float]) -> None:
    """Sets ticks at the values that occur (at least one), the largest and the smallest first, if
    they fit; `axes` is a panel of `make_panels` that has its limits, from 0 on."""
    first, *others = sorted({*values}, reverse=True)
    spot = axes.get_subplotspec()
    height = spot.get_gridspec().get_height_ratios()[spot.rowspan.start]
    ticks, room = [first], axes.get_ylim()[1] * _TICK_DISTANCE / height
    for value in [*others[-1:], *others[:-1]]:
        if all(abs(value - tick) >= room for tick in ticks):
            ticks.append(value)
    axes.set_yticks(ticks, [f"{tick:,}" if tick == int(tick) else f"{tick:g}" for tick in ticks])


def name_consumption(panels: Sequence["Axes"], tokens_per_sample: float) -> None:
    """Labels consumed samples below the panels, and tokens above, but not with 0
    `tokens_per_sample`. Call it once the axis has its scale."""
    scale = ", logarithmic" if panels[-1].get_xscale() == "log" else ""
    panels[-1].set_xlabel(f"consumed samples{scale}")
    panels[-1].xaxis.set_major_formatter(lambda number, position: short(number))
    if tokens_per_sample:
        n = tokens_per_sample
        above = panels[0].secondary_xaxis("top", functions=(lambda x: x * n, lambda x: x / n))
        above.set_xlabel("consumed tokens")
        above.xaxis.set_major_formatter(lambda number, position: short(number))


def save_plot(figure: "Figure", path: Place) -> None:
    """Writes the picture that somebody asked for with --plot, in the format of its suffix; a
    ConfigError for an unknown one, or a path that cannot be written."""
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=150, format=path.suffix[1:] or None)
        path.write_bytes(drawn.getvalue())
    except (OSError, ValueError) as error:  # no such folder; an unknown format
        raise ConfigError(f"--plot {path}: cannot write the picture: {error}") from None
