"""The picture of a run's noise scale."""

import io

from maxramp.commandline import short
from maxramp.files.place import Place
from maxramp.measuring.noise import Block


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
        per_row = curve[0].row_target_tokens
        known = [block for block in curve if block.noise_scale is not None]
        x = [(block.first_sample + block.last_sample) / 2 for block in known]
        y = [block.noise_scale / block.row_target_tokens for block in known]
        most = 10 * max(
            [*y, *(block.batch_rows for block in curve)]
        )  # where an interval has no end
        low = [block.low / block.row_target_tokens for block in known]
        high = [
            most if block.high is None else block.high / block.row_target_tokens for block in known
        ]
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
    tokens.set_ylabel("targets")
    axes.grid(alpha=0.3)
    axes.spines["top"].set_visible(False)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format=path.suffix[1:] or None)
    path.write_bytes(drawn.getvalue())
