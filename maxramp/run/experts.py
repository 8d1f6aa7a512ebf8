"""The picture of a run's experts: how evenly they share the tokens of their layers.

Shapes: R records, L layers of experts, E experts.
"""

import pathlib
from typing import TYPE_CHECKING

import numpy as np

from maxramp.drawing import BLUE, RED, make_panels, name_consumption
from maxramp.model.parts.routing import LOAD
from maxramp.run.metrics import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAST = 10  # recorded steps that the table of experts is the mean of
_LEAST = 1 / 64  # times the mean load: where curves end
_MOST = 16.0  # times the mean load: where colors end at the latest, and at one over it
_CELLS = 12, 16  # at most so many layers and experts have their loads written into the table


def draw_experts(records: list[Record], path: pathlib.Path, run_name: str) -> None:
    if figure := figure_of(records, run_name):
        figure.savefig(path, dpi=150)


def figure_of(records: list[Record], run_name: str) -> "Figure | None":
    """Draws the most and the least loaded expert of every layer, and below each expert at the end.
    Returns None if no record has loads.
    """
    shown = [record for record in records if LOAD in record]
    if not shown:
        return None
    loads_RLE = np.array([record[LOAD] for record in shown], float)
    layers, experts = loads_RLE.shape[1:]
    loads_RLE *= experts
    height = min(4.0, 1.8 + 0.16 * layers)  # room for the label of the colors
    figure, (curves, table) = make_panels([2.6, height], f"{run_name}: load of experts", False)
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
    mean_LE = np.maximum(loads_RLE[-_LAST:].mean(0), 1e-9)
    most = np.clip(np.ceil(np.abs(np.log2(mean_LE)).max()), 1, np.log2(_MOST))
    colors = {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    image = table.imshow(np.log2(mean_LE), aspect="auto", interpolation="nearest", **colors)
    if layers <= _CELLS[0] and experts <= _CELLS[1]:
        for (layer, expert), load in np.ndenumerate(mean_LE):
            table.text(expert, layer, f"{load:.2g}", ha="center", va="center", fontsize="small")
    table.grid(visible=False)
    last = f"expert (mean of the last {len(loads_RLE[-_LAST:])} recorded steps)"
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
