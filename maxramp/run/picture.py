"""The pictures of a run: batch size and loss, or a policy's rewards."""

import pathlib

from maxramp.run.metrics import Record


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
