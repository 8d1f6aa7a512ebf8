"""Shows where the wall time of runs went, and what they cost: steps, waiting, lost work.

python -m maxramp.report RUN [RUN ...] [price_per_device_hour=P] [--plot FILE] [--json]

RUN is the folder of a run, finished or running. One run is shown with its stages and jobs, several
side by side (docs/running.md).
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from maxramp.commandline import Parser, amount, command, duration, print_table, short
from maxramp.config.load import load
from maxramp.drawing import COLORS, make_panels, save_plot
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys.yamlfile import read_yaml
from maxramp.measuring.wall_time import KINDS, wall_time

_PRICE = "price_per_device_hour"
_CONFIGS = "config.resolved.yml", "config.yml"
_SHADES = (COLORS[3], *COLORS[:3], COLORS[4], "#E69F00", "#F0E442", "0.55", "0.75", "0.2", "0.9")


@command
def main(arguments: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("words", nargs="+", metavar="RUN", help="a folder, or an address in an object storage")
    add("--plot", metavar="FILE", help="draw a picture, too")
    add("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_intermixed_args(arguments)
    keys = [word for word in options.words if "=" in word and "/" not in word.split("=")[0]]
    if others := [word for word in keys if not word.startswith(f"{_PRICE}=")]:
        raise ConfigError(f"{others[0]}: a report reads {_PRICE} alone of all keys; leave it out")
    price = load(["configs/base.yml", *keys]).planning.price_per_device_hour if keys else -1
    runs = [place(word) for word in options.words if word not in keys]
    if not runs:
        raise ConfigError("no RUN is given; give the folder of a run")
    reports = [wall_time(run, _find_price(run) if price == -1 else price) for run in runs]
    for report in reports:
        for warning in report["warnings"]:
            print(f"warning: {report['run']}: {warning}", file=sys.stderr)
    if options.plot:
        draw(reports, place(options.plot))
    if options.json:
        print(json.dumps({"runs": reports}))
        return 0
    print_runs(reports)
    if len(reports) == 1:
        print_parts(reports[0]["stages"], _STAGE)
        print_parts(reports[0]["jobs"], _JOB)
    for report in reports:
        if (last := report["jobs"][-1])["status"] is None:
            age = duration(max(0.0, time.time() - last["end"]))
            print(
                f"open      {report['run']}: its last job runs, or was killed; its time counts "
                f"up to its last record, {age} ago"
            )
    if options.plot:
        print(f"picture   {options.plot}")
    return 0


def _find_price(run: Place) -> float | None:
    """Reads the price in a run's config; None if it has none."""
    for name in _CONFIGS:
        if (run / name).is_file():
            price = read_yaml(run / name).get(_PRICE)
            return price if isinstance(price, int | float) and price > 0 else None
    return None


def print_runs(runs: Sequence[dict[str, Any]]) -> None:
    """Prints runs, as `wall_time` returns them, side by side: a column of each."""
    names = [run["run"].rstrip("/").rpartition("/")[2] for run in runs]
    rows = [["wall time", *(duration(run["wall_seconds"]) for run in runs)]]
    for kind in KINDS:
        if any(run["seconds"][kind] for run in runs):
            cells = (f"{duration(run['seconds'][kind])} {_share(run, kind):>6}" for run in runs)
            rows.append([kind, *cells])
    for name, show in _TOTALS.items():
        if any(run[name] is not None for run in runs):
            cells = ("-" if run[name] is None else show(run[name]) for run in runs)
            rows.append([name.replace("_hours", "-hours").replace("_", " "), *cells])
    print_table(["", *names], rows)


_TOTALS: dict[str, Callable[[Any], str]] = {
    "goodput": "{:.1%}".format,
    "steps": "{:,}".format,
    "lost_steps": "{:,}".format,
    "tokens": short,
    "node_hours": amount,
    "device_hours": amount,
    "cost": amount,
}


def _share(part: dict[str, Any], kind: str) -> str:
    return f"{part['seconds'][kind] / (sum(part['seconds'].values()) or 1):.1%}"


_STAGE: dict[str, Callable[[dict[str, Any]], str]] = {
    "stage": lambda stage: f"{stage['stage']}",
    "steps": lambda stage: f"{stage['steps']:,}",
    "tokens": lambda stage: "-" if stage["tokens"] is None else short(stage["tokens"]),
}
_JOB: dict[str, Callable[[dict[str, Any]], str]] = {
    "job": lambda job: f"from {job['first_step']:,}",
    "state": lambda job: job["from"],
    "nodes": lambda job: f"{job['nodes']:,}",
    "exit\nstatus": lambda job: "-" if job["status"] is None else f"{job['status']}",
    "steps": lambda job: f"{job['steps']:,}",
    "lost\nsteps": lambda job: f"{job['lost_steps']:,}",
}


def print_parts(parts: Sequence[dict[str, Any]], columns: dict[str, Callable[[Any], str]]) -> None:
    """Prints a row of each of the `parts` of a run, stages or jobs: `columns`, time and cost."""
    kinds = [kind for kind in KINDS if any(part["seconds"][kind] for part in parts)]
    costs = [x for x in ("node_hours", "cost") if any(part[x] is not None for part in parts)]
    rows = [
        [
            *(show(part) for show in columns.values()),
            duration(sum(part["seconds"].values())),
            *(_share(part, kind) for kind in kinds),
            *(amount(part[x]) for x in costs),
        ]
        for part in parts
    ]
    heads = [*columns, "time", *kinds, *(x.replace("_", "-") for x in costs)]
    print_table(heads, rows, [kind for kind in reversed(kinds) if kind not in ("steps", "lost")])


def draw(runs: Sequence[dict[str, Any]], path: Place) -> None:
    """Draws bars of where the time of `runs` (of `wall_time`, at least one) went, and their goodput
    since their first starts; raises as `save_plot`."""
    figure, (bars, curves) = make_panels([0.8 + 0.45 * len(runs), 2.4], "wall time", share_x=False)
    names = [run["run"].rstrip("/").rpartition("/")[2] for run in runs]
    longest = max(run["wall_seconds"] for run in runs)
    unit, seconds = ("hours", 3600) if longest >= 5400 else ("minutes", 60)
    lefts = [0.0] * len(runs)
    for kind, shade in zip(KINDS, _SHADES, strict=True):
        widths = [run["seconds"][kind] / seconds for run in runs]
        if any(widths):
            drawn = bars.barh(range(len(runs)), widths, left=lefts, color=shade, label=kind)
            is_wide = [width * seconds > 0.06 * longest for width in widths]
            shares = [_share(run, kind) * wide for run, wide in zip(runs, is_wide, strict=True)]
            bars.bar_label(drawn, shares, label_type="center", fontsize="small")
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    bars.set_yticks(range(len(runs)), names, parse_math=False)
    bars.invert_yaxis()
    bars.set_xlabel(unit)
    lines = []
    for run in runs:
        hours, shares = zip(*run["goodput_by_hours"] or [(0, 0)], strict=True)
        lines += curves.plot([hour * 3600 / seconds for hour in hours], shares)
    curves.set(
        xlabel=f"{unit} since the first start", ylabel="goodput", ylim=(0, 1), xlim=(0, None)
    )
    if len(runs) > 1:
        for text in curves.legend(lines, names, frameon=False).get_texts():
            text.set_parse_math(False)
    handles = bars.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    save_plot(figure, path)


if __name__ == "__main__":
    sys.exit(main())
