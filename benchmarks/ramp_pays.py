"""Does a ramp pay? Held-out loss against optimizer steps, of tuned constants and of ramps.

The protocol, fixed before the runs. Every run trains on the same tokens, rows of 128 bytes of
Python's sources, with a cosine to a tenth of the peak after 5% of warm-up, and is evaluated on
every held-out row. The seed is that of the weights and of the order of rows.

  Pilot   Constants of 8, 16, 32 and 64 rows, seed 0. The learning rate of each is tuned on a grid
          of factors of 2 around 3e-3 * sqrt(rows / 16), extended until the best is inside it. B0
          is the largest constant within 0.005 nats of the best: the smallest sensible batch.
  A       the constant B0, at its tuned rate
  B       the constant with as many steps as F takes, its rate tuned in the same way
  C       the constant 4 B0, rate tuned
  D       a hand-made ramp: B0, doubled at 1/4, 1/2 and 3/4 of the samples
  E       rampup_policy=noise on B0, 2 B0, 4 B0, 8 B0; its factor is what maxramp.branch finds half
          way through A with seed 0, at its lower end, over the noise scale there
  F       rampup_policy=seesaw, ladder of factors of sqrt(2) from B0 to 8 B0

D, E and F take A's rate times sqrt(batch / B0). A, B and F run with all seeds, C, D and E with the
first three. Differences are paired by seed: same rows, same weights at the start.

Claims, made before the runs: F takes at least 40% fewer steps than A and is equal to it, which is
to say that the 90% t-interval of the mean difference lies within +-0.01 nats; and a ramp pays only
if it ends below the line through the tuned constants, that is if F is below B, of as many steps.

It is made for 2 quiet cores and 90 minutes; as many runs train at once as there are cores, each
bound to one. Stop it whenever you like: the same command continues.

python benchmarks/ramp_pays.py [--tokens 4M] [--seeds 5] [--constants 8,16,32,64] [--most_rates 6]
                               [--folder DIR] [--plot FILE] [--json FILE] [key=value ...]
"""

import json
import math
import pathlib
import sys
from typing import Any

import numpy as np
from experiment import ROW, Experiment, at_once, paired, tuned
from figures import ROOT, parser, save

from maxramp.keys.numbers import parse_count

FEW_SEEDS = 3
EQUAL = 0.01  # nats


def experiment_of(
    experiment: Experiment, constants: list[int], seeds: int, most_rates: int
) -> dict[str, Any]:
    """Runs the protocol; returns its figures."""

    def tune(rows: int) -> dict[str, Any]:
        return tuned(experiment, rows, most_rates)

    pilot = at_once(tune, constants)
    best = min(run["loss"] for run in pilot)
    a = max((run for run in pilot if run["loss"] <= best + 0.005), key=lambda run: run["rows"])
    b0, rate = a["rows"], a["rate"]
    print(f"B0 = {b0} rows at {rate:.3g}", flush=True)
    scaling = {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
    seesaw = {
        "rampup_policy": "seesaw",
        "rampup_ladder": str([round(b0 * 2 ** (i / 2)) for i in range(7)]),
    }
    quarter = experiment.samples // 4
    doubling = " ".join(f"{i * quarter}:{b0 * 2**i}" for i in range(4))

    few = min(FEW_SEEDS, seeds)
    by_hand = {"step_batch_size_schedule": doubling, "step_batch_size_unit": "samples"} | scaling
    arms: dict[str, list[dict[str, Any]]] = {}

    def one(run: tuple[str, int, float, dict[str, Any]]) -> dict[str, Any]:
        name, seed, rate, keys = run
        measured = {"log_gradient_noise_scale": (name, seed) == ("A", 0)}
        return experiment.run(name, seed, rate, measured | keys)

    def train(*several: tuple[str, int, float, dict[str, Any]]) -> None:
        """Runs arms: their names, seeds, learning rates and keys of the batch."""
        runs = [(name, seed, *rest) for name, count, *rest in several for seed in range(count)]
        for run, result in zip(runs, at_once(one, runs), strict=True):
            arms.setdefault(run[0], []).append(result)

    train(
        ("A", seeds, rate, {"global_batch_size": b0}),
        ("F", seeds, rate, seesaw),
        ("D", few, rate, by_hand),
    )
    larger, as_long = at_once(tune, (4 * b0, round(experiment.samples / arms["F"][0]["steps"])))
    factor = experiment.factor(arms["A"][0], [b0 * 2**i for i in range(4)])
    noise = {
        "rampup_policy": "noise",
        "rampup_ladder": str([b0 * 2**i for i in range(4)]),
        "rampup_noise_factor": repr(factor),
    }
    train(
        ("B", seeds, as_long["rate"], {"global_batch_size": as_long["rows"]}),
        ("C", few, larger["rate"], {"global_batch_size": larger["rows"]}),
        ("E", few, rate, noise),
    )

    against_a = {name: paired(runs, arms["A"]) for name, runs in arms.items() if name != "A"}
    f, f_b = against_a["F"], paired(arms["F"], arms["B"])
    fewer = 1 - arms["F"][0]["steps"] / arms["A"][0]["steps"]
    equal = f["low"] is not None and f["low"] > -EQUAL and f["high"] < EQUAL
    return {
        "tokens": experiment.samples * ROW,
        "B0": b0,
        "learning_rate": rate,
        "noise_factor": factor,
        "constants": sorted([*pilot, larger, as_long], key=lambda run: run["rows"]),
        "arms": arms,
        "against_A": against_a,
        "F_against_B": f_b,
        "claims": {
            "F: fewer steps than A": fewer,
            "F: at least 40% fewer steps, and equal to A": bool(fewer >= 0.4 and equal),
            "F is below B, at equal steps": f_b["high"] is not None and f_b["high"] < 0,
        },
    }


def draw(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws steps against held-out loss: a line through the tuned constants, ramps as points.

    All lie at A's loss with seed 0 plus their paired difference to A, with its 90% interval where
    there is more than one seed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    arms, base = figures["arms"], figures["arms"]["A"][0]["loss"]
    by_rows = {run["rows"]: run for run in figures["constants"]}
    arm_of_steps = {arms[name][0]["steps"]: name for name in "ABC"}

    def show(name: str, label: str, color: str, marker: str) -> tuple[float, float]:
        apart = figures["against_A"].get(name, {"mean": 0.0, "low": None, "high": None})
        half = 0.0 if apart["low"] is None else (apart["high"] - apart["low"]) / 2
        place = float(np.mean([run["steps"] for run in arms[name]])), base + apart["mean"]
        seeds = f"{len(arms[name])} seeds"
        label, style = f"{name}: {label} ({seeds})", {"fmt": marker, "color": color, "capsize": 3}
        axes.errorbar(*place, yerr=half or None, label=label, **style)
        return place

    b0, ladder = figures["B0"], f"{figures['B0']} to {8 * figures['B0']} rows"
    words = {
        "A": f"a constant batch of {b0} rows, the largest that costs nothing",
        "B": "a constant batch with as many steps as Seesaw ({} rows)",
        "C": f"a constant batch of {4 * b0} rows",
    }
    points = []
    for rows, run in sorted(by_rows.items()):
        if name := arm_of_steps.get(run["steps"]):
            points.append(show(name, words[name].format(rows), "black", "o"))
        else:
            points.append((run["steps"], run["loss"]))
            axes.plot(*points[-1], "o", color="black", fillstyle="none")
        axes.annotate(
            f"{rows} rows", points[-1], (6, 6), textcoords="offset points", fontsize="small"
        )
    show("D", f"{b0} rows, doubled at 1/4, 1/2 and 3/4 of the samples", "tab:green", "s")
    show("E", f"{ladder}, as the measured noise scale allows", "tab:blue", "s")
    show("F", f"Seesaw, {ladder}: grows where the rate would fall", "tab:red", "s")
    label = "line of the constant batches, each at its best rate; hollow: one seed"
    axes.plot(*zip(*points, strict=True), color="tab:gray", zorder=0, label=label)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss on held-out text (nats per byte)")
    axes.set_title("bars: 90% interval of the difference to A", loc="left", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    options = parser("ramp_pays", __doc__)
    options.add_argument("--tokens", default="4M", help="of every run (4M)")
    options.add_argument("--seeds", type=int, default=5, help="of arms A, B and F (5)")
    options.add_argument("--constants", default="8,16,32,64", help="rows of the pilot (8,16,32,64)")
    options.add_argument(
        "--most_rates", type=int, default=6, help="learning rates tried for a constant, at most (6)"
    )
    options.add_argument("--folder", type=pathlib.Path, default=ROOT / "output" / "ramp_pays")
    options.add_argument("--plot", type=pathlib.Path, default=ROOT / "docs" / "ramp_pays.png")
    options.add_argument("--redraw", action="store_true", help="draw the figures that are there")
    options.add_argument("keys", nargs="*", help="key=value of every run")
    arguments = options.parse_intermixed_args()
    if arguments.redraw:
        return draw(json.loads(pathlib.Path(arguments.json).read_text())["figures"], arguments.plot)
    tokens = parse_count(arguments.tokens)
    constants = sorted(int(rows) for rows in arguments.constants.split(","))
    # So that every constant of the pilot ends with the same row.
    unit = math.lcm(*constants)
    samples = (tokens or 0) // ROW // unit * unit
    if samples < 16 * constants[-1] or arguments.seeds < 1 or arguments.most_rates < 3:
        sys.exit("error: too few --tokens, --seeds or --most_rates")
    rates = min(4, arguments.most_rates)
    seeds = arguments.seeds + min(FEW_SEEDS, arguments.seeds)
    expected = (len(constants) + 2) * rates + 3 * seeds
    experiment = Experiment(arguments.folder.absolute(), samples, arguments.keys, expected)
    figures = experiment_of(experiment, constants, arguments.seeds, arguments.most_rates)
    for name, runs in sorted(figures["arms"].items()):
        losses = ", ".join(f"{run['loss']:.4f}" for run in runs)
        apart = figures["against_A"].get(name)
        ends = ""
        if apart and apart["low"] is not None:
            ends = f"; above A: {apart['mean']:+.4f} ({apart['low']:+.4f} to {apart['high']:+.4f})"
        print(f"{name}  {runs[0]['steps']:>6,} steps  {losses}{ends}")
    for claim, holds in figures["claims"].items():
        print(f"{claim}: {holds}")
    draw(figures, arguments.plot)
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
