"""ramp.png: batch size and loss over the consumed samples."""

import pathlib

from maxramp.metrics import Record


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
            *("o",),
            color="tab:red",
            markersize=5,
            clip_on=False,
            label="loss on held-out text",
        )
    loss_axes.set_ylabel("loss (nats per token)", color="tab:orange")
    loss_axes.tick_params(axis="y", colors="tab:orange")
    loss_axes.legend(loc="upper center", frameon=False)
    for axes in (batch_axes, loss_axes):
        axes.spines["top"].set_visible(False)
    batch_axes.set_title(title)
    figure.savefig(path, dpi=130)
