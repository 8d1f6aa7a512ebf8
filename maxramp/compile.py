"""Compiles the step of every stage, and the moves between their meshes, for a TPU pod or a GPU
cluster, on a machine without one.

python -m maxramp.compile CONFIG.yml compile_topology=MACHINE [key=value ...] [options]

compile_topology names the machine, such as v5p:8x8x16 or h200:16x8. The result is also saved in the
run's folder as compiled.json, for maxramp.plan --compiled FILE. It needs no accelerator, only the
compiler: '.[tpu]' for TPUs, '.[cuda13-compiler]' for GPUs (docs/pods.md).
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from maxramp.commandline import (
    amount,
    command,
    config_parser,
    count,
    print_note,
    print_progress,
    print_table,
    run_time,
    shell_quote,
    show_keys,
)
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.errors import ConfigError, reason_of
from maxramp.files.place import Place, write_whole
from maxramp.parallel.mesh import format_sizes
from maxramp.planning.compile_target import least_rows, open_machine
from maxramp.planning.compiled import compile_stages, compile_ways
from maxramp.planning.meshes import MeshSearch
from maxramp.planning.run_length import with_length

_FILE = "compiled.json"


@command
def main(arguments: list[str]) -> int:
    parser = config_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    text = "compile the last stage with each remat_policy and its largest micro batches, and list "
    text += "what fits, fastest first"
    parser.add_argument("--best", action="store_true", help=text)
    text = "compile the last stage (of a ramp the first, too) on the N meshes (6) that a model of "
    text += "their products, transfers and memory expects to be fastest; print the fastest's keys"
    parser.add_argument("--meshes", type=int, nargs="?", const=6, metavar="N", help=text)
    options = parser.parse_intermixed_args(arguments)
    if options.meshes is not None and (options.meshes < 1 or options.best):
        raise ConfigError(
            f"--meshes {options.meshes}: give 1 or more, without --best, whose remat policies and "
            "passes it tries on each mesh"
        )
    config = load(options.arguments, "compile")
    if not config.planning.compile_topology:
        raise ConfigError(
            "compile_topology is not given: the machine to compile for, such as v5p:8x8x16, "
            "v5p-2048 or h200:16x8"
        )
    config = with_length(config, print_progress)
    if options.meshes:
        return _compare_meshes(config, options.meshes, options.json)
    work, show = (compile_ways, print_ways) if options.best else (compile_stages, print_stages)
    result = work(config, print_progress)
    text = json.dumps(result, indent=2)
    print(text) if options.json else show(result)
    if not options.best:
        path = _save(config.run.folder, f"{text}\n".encode())
        if not options.json:
            line = shell_quote([*options.arguments, "--compiled", path])
            print(f"see       {path}; python -m maxramp.plan {line}")
    return 0


def _compare_meshes(config: Config, number: int, as_json: bool) -> int:
    """Compares `number` meshes for a loaded config; called in the main thread. They are compiled in
    another one, as a compiler does not notice Ctrl-C: that prints the compiled ones and ends the
    process. A ConfigError as `open_machine` and `MeshSearch`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    search = None
    try:
        search = MeshSearch(config, open_machine(config), print_progress)
        ThreadPoolExecutor(1).submit(search.compile_stages, number).result()
    except KeyboardInterrupt:
        compiled = sum(map(len, search.compiled.values())) if search else 0
        if compiled:
            _print_comparison(search.result(), as_json)
        planned = f" of {search.planned}" if search else ""
        print(f"stopped: {compiled}{planned} meshes are compiled", file=sys.stderr)
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)  # without waiting for the compiler
    _print_comparison(search.result(), as_json)
    return 0


def _print_comparison(result: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(result, indent=2)) if as_json else print_meshes(result)


def _save(folder: Place, content: bytes) -> Place:
    """Writes the result into a folder, or into the current one if that cannot be written; returns
    the file, an OSError if both fail."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _FILE, content)
    except (ConfigError, OSError) as error:
        print_note(f"{reason_of(error)}; {_FILE} goes into the folder that you are in")
        folder = pathlib.Path()
        write_whole(folder / _FILE, content)
    return folder / _FILE


def _cells_of_batch(s: dict[str, Any]) -> list[str]:
    memory = [s["memory_gib"][name] for name in ("peak", "temporaries")]
    shape = [f"{s['per_device_batch_size']:g}", str(s["gradient_accumulation_steps"])]
    return shape + ["-" if gib is None else f"{gib:.2f} GiB" for gib in memory]


def _cells_of_step(s: dict[str, Any]) -> list[str]:
    return [f"{s['step_seconds']:.3g} s", f"{s['mfu']:.1%}", f"{s['tokens_per_second']:,.0f}"]


def print_ways(result: dict[str, Any]) -> None:
    columns = "remat_policy|context|per device|accum.|peak memory|of it temporary|step|MFU|tokens/s"
    print_table(
        columns.split("|"),
        (
            [w["remat_policy"], str(w["ici_context_parallelism"])]
            + [*_cells_of_batch(w), *_cells_of_step(w)]
            for w in result["ways"]
        ),
    )
    print(f"times     {result['times']}")


# Columns that a narrow terminal goes without, the first first.
_EXPENDABLE = ("of it temporary", "tokens/s", "accum.", "per device", "price", "estimate")
_EXPENDABLE += ("waits for transfers",)


def print_meshes(result: dict[str, Any]) -> None:
    columns = "mesh|remat_policy|per device|accum.|peak memory|of it temporary|estimate|step|MFU"
    columns += "|tokens/s|waits for transfers|price"

    def row(m: dict[str, Any]) -> list[str]:
        own = " = the config's" if m["is_own"] else ""
        cells = [m["mesh"] + own, m["remat_policy"], *_cells_of_batch(m)]
        cells += [f"{m['estimated_seconds']:.3g} s"]
        if not m["fits"]:
            return [*cells, "does not fit", "", "", "", ""]
        waits = m["collective_seconds"] + (m["network_seconds"] or 0)
        gib, kind = max((n, kind) for kind, n in {"": 0, **m["collective_gib"]}.items())
        largest = f", {kind} {gib:.3g} GiB" if kind else ""
        price = "-" if m["price"] is None else amount(m["price"])
        return [*cells, *_cells_of_step(m), f"{waits:.2g} s{largest}", price]

    for stage in result["stages"]:
        batch = stage["meshes"][0]["global_batch_size"]
        print(f"stage {stage['index']}, a batch of {batch:,}")
        print_table(columns.split("|"), map(row, stage["meshes"]), _EXPENDABLE)
    best, *others = result["stages"][-1]["meshes"]
    for own in (m for m in others if m["is_own"] and m["fits"]):
        shown = (
            f"{m['mesh']} {m['step_seconds']:.3g} s (estimated {m['estimated_seconds']:.3g} s)"
            for m in (own, best)
        )
        print(f"own mesh  {', the fastest '.join(shown)}")
    fastest = show_keys(result["keys"]) or "those that the config has"
    if not result["stages"][-1]["meshes"][0]["fits"]:
        fastest = "none of these meshes fits; a larger N tries more"
    print(f"keys      {fastest}")
    if result["gain"]:
        gain = f"{result['gain']:.0%} less than on the last stage's mesh"
        print(f"phase     the first stage begins on a mesh of its own: a step takes {gain}")
    if result["refusal"]:
        print(f"but       a run with these keys is refused: {result['refusal']}")
    print(f"times     {result['times']}")


def print_stages(result: dict[str, Any]) -> None:
    columns = "stage|steps|global batch|per device|accum.|peak memory|of it temporary|fits|step"
    columns += f"|MFU|tokens/s|time|{result['device']}-hours"

    def row(s: dict[str, Any]) -> list[str]:
        left = s["memory_gib"]["limit"] - s["memory_gib"]["peak"]
        cells = [str(s["index"]), f"{s['run_steps']:,}", f"{s['global_batch_size']:,}"]
        cells += _cells_of_batch(s)
        if not s["fits"]:
            return [*cells, f"no, {-left:.1f} over"]
        cells += [f"{left:.1f} GiB left", *_cells_of_step(s)]
        return [*cells, run_time(s["hours"]), amount(s["device_hours"])]

    print_table(columns.split("|"), map(row, result["stages"]))
    for label, text in _remarks(result):
        print(f"{label:<10}{text}")


def _remarks(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    device, totals = result["device"], result["totals"]
    meshes = (
        " x ".join(f"{axis} {size}" for axis, size in stage["mesh"].items())
        for stage in result["stages"]
    )
    mesh = ", then ".join(dict.fromkeys(meshes))
    slices = f" in {result['num_slices']} slices" if result["num_slices"] > 1 else ""
    number = count(result["devices"], device)
    yield "machine", f"{result['compile_topology']}{slices}: {number}, mesh {mesh}"
    if result["grouped_matmul"]:
        yield "experts", f"by grouped_matmul={result['grouped_matmul']}"
    for s in (stage for stage in result["stages"] if not stage["fits"]):
        near, memory = s["nearest_fit"], s["memory_gib"]
        remedy = (
            f"per_device_batch_size={near['per_device_batch_size']:g} with "
            f"{near['gradient_accumulation_steps']} accumulation fits ({near['peak_gib']:.1f} GiB)"
            if near
            else f"not even {least_rows(result['rows_multiple'])} a group of devices would fit: "
            "use remat_policy=full, more devices or more ici_tensor_parallelism"
        )
        yield (
            "too big",
            f"stage {s['index']} needs at least {memory['peak']:.1f} of {memory['limit']:.1f} GiB; "
            f"{remedy}",
        )
    for s in (stage for stage in result["stages"] if stage["fits"]):
        inside, outside = _traffic(s)
        if s["collective_gib"]:
            yield (
                "moves",
                f"stage {s['index']}: {inside} GiB a step into each {device}, "
                f"{s['collective_seconds']:.3g} s of the step wait for transfers",
            )
        if s["network_gib"]:
            seconds = s["network_seconds"]
            beside = "" if seconds is None else f", {seconds:.3g} s if nothing runs beside it"
            yield (
                "network",
                f"stage {s['index']}: {outside} GiB a step into each {device} from other "
                f"{result['groups']}{beside}",
            )
    for s in (stage for stage in result["stages"] if stage["move"]):
        (inside, outside), move = _traffic(s["move"]), s["move"]
        limit = s["memory_gib"]["limit"]
        over = "" if move["fits"] else f", of {limit:.1f}: too much; give the phases one mesh"
        network = f", {outside} GiB from other {result['groups']}" if outside != "0" else ""
        yield (
            "mesh",
            f"stage {s['index']} begins with a move of the state to {format_sizes(s['mesh'])}: "
            f"{inside} GiB into each {device}{network}; it holds at most "
            f"{move['peak_gib']:.3g} GiB{over}",
        )
    if totals["fits"]:
        constant, beside = totals["constant_final_batch"], ""
        if len(result["stages"]) > 1:
            beside = f"; a constant batch of {constant['global_batch_size']:,} takes "
            beside += f"{constant['steps']:,} steps, {_paid(constant, device)}"
        yield "run", f"{totals['steps']:,} steps, {_paid(totals, device)}{beside}"
    yield "times", f"{result['times']}; starts, evaluations and saves come on top"


def _traffic(work: dict[str, Any]) -> tuple[str, str]:
    inside, outside = (
        ", ".join(f"{kind} {gib:.3g}" for kind, gib in work[name].items()) or "0"
        for name in ("collective_gib", "network_gib")
    )
    return inside, outside


def _paid(totals: dict[str, Any], device: str) -> str:
    price = "" if totals["price"] is None else f", a price of {amount(totals['price'])}"
    hours = f"{run_time(totals['hours'])}, {amount(totals['device_hours'])} {device}-hours"
    return hours + price


if __name__ == "__main__":
    sys.exit(main())
