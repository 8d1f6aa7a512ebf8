"""Compiles the step of every stage for a TPU pod or a GPU cluster, on a machine without one.

python -m maxramp.compile CONFIG.yml compile_topology=MACHINE [key=value ...] [options]

  --json           print the result as JSON
  --best           instead of the stages as they are, list in which ways the last one's batch fits,
                   fastest first: under each remat_policy, in the largest micro batches

compile_topology names the machine, such as v5p:8x8x16 or h200:16x8. The result is also saved in the
run's folder as compiled.json, for maxramp.plan --compiled FILE. For TPUs this needs libtpu
('.[tpu]'), for GPUs the CUDA plugin ('.[cuda13-compiler]'), and no accelerator (docs/pods.md).
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from maxramp.commandline import amount, print_note, print_progress, print_table, quoted, take_flag
from maxramp.config.load import load
from maxramp.errors import ConfigError, reason_of, report
from maxramp.files.place import Place, check_writable, place, write_whole
from maxramp.planning.compiled import compile_stages, compile_ways
from maxramp.planning.pod import least_rows
from maxramp.run.keys import RunKeys

_FILE = "compiled.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        as_json, best = (take_flag(arguments, flag) for flag in ("--json", "--best"))
        config = load(arguments, "compile", __doc__)
        if not config.planning.compile_topology:
            raise ConfigError(
                "compile_topology is not given: the machine to compile for, such as v5p:8x8x16, "
                "v5p-2048 or h200:16x8"
            )
        if best:
            found = compile_ways(config, print_progress)
            print(json.dumps(found, indent=2)) if as_json else _print_ways(found)
            return 0
        folder = _folder(config.run)
        result = compile_stages(config, print_progress)
        print(json.dumps(result, indent=2)) if as_json else _print(result)
        path = _write(result, folder)
        if not as_json:
            line = quoted([*arguments, "--compiled", path])
            print(f"see       {path}; python -m maxramp.plan {line}")
        return 0
    except (ConfigError, jax.errors.JaxRuntimeError, MemoryError, OSError) as error:
        return report(error)


def _folder(keys: RunKeys) -> Place:
    """Where compiled.json goes: the run's folder, or this one if that cannot be had."""
    folder = place(keys.base_output_directory).expanduser() / (keys.run_name or keys.model_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
        folder.is_dir()  # asks a storage for an answer
    except (ConfigError, OSError) as error:
        print_note(f"{reason_of(error)}; {_FILE} goes into the folder that you are in")
        return pathlib.Path()
    return folder


def _write(result: dict[str, Any], folder: Place) -> Place:
    """Writes compiled.json to a folder, or to this one if the folder is lost; returns its path."""
    content = (json.dumps(result, indent=2) + "\n").encode()
    try:
        write_whole(folder / _FILE, content)
    except (ConfigError, OSError) as error:
        print_note(f"{folder / _FILE}: {reason_of(error)}; it goes into the folder that you are in")
        folder = pathlib.Path()
        write_whole(folder / _FILE, content)
    return folder / _FILE


def _print_ways(result: dict[str, Any]) -> None:
    """What fits, as a table."""
    columns = "remat_policy|per device|accum.|peak memory|of it temporary|step|MFU|tokens/s"
    print_table(
        columns.split("|"),
        [
            [
                way["remat_policy"],
                _size(way["per_device_batch_size"]),
                str(way["gradient_accumulation_steps"]),
                _shown(way["memory_gib"]["peak"]),
                _shown(way["memory_gib"]["temporaries"]),
                f"{way['step_seconds']:.3g} s",
                f"{way['mfu']:.1%}",
                f"{way['tokens_per_second']:,.0f}",
            ]
            for way in result["ways"]
        ],
    )
    print(f"times     {result['times']}")


def _cells(s: dict[str, Any]) -> list[str]:
    memory = s["memory_gib"]
    left = memory["limit"] - memory["peak"]
    cells = [
        str(s["index"]),
        f"{s['run_steps']:,}",
        f"{s['global_batch_size']:,}",
        _size(s["per_device_batch_size"]),
        str(s["gradient_accumulation_steps"]),
        _shown(memory["peak"]),
        _shown(memory["temporaries"]),
        f"{left:.1f} GiB left" if s["fits"] else f"no, {-left:.1f} over",
    ]
    if s["fits"]:
        cells += [f"{s['step_seconds']:.3g} s", f"{s['mfu']:.1%}"]
        cells += [f"{s['tokens_per_second']:,.0f}", amount(s["hours"]), amount(s["device_hours"])]
    return cells


def _print(result: dict[str, Any]) -> None:
    """The result as a table and a few lines."""
    columns = "stage|steps|global batch|per device|accum.|peak memory|of it temporary|fits|step"
    device = result["device"]
    columns += f"|MFU|tokens/s|hours|{device}-hours"
    print_table(columns.split("|"), map(_cells, result["stages"]))
    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    slices = f" in {result['num_slices']} slices" if result["num_slices"] > 1 else ""
    number = f"{result['devices']} {device}s"
    print(f"machine   {result['compile_topology']}{slices}: {number}, mesh {mesh}")
    for s in result["stages"]:
        if s["fits"]:
            continue
        near, memory = s["nearest_fit"], s["memory_gib"]
        remedy = (
            f"per_device_batch_size={_size(near['per_device_batch_size'])} with "
            f"{near['gradient_accumulation_steps']} accumulation fits ({near['peak_gib']:.1f} GiB)"
            if near
            else f"not even {least_rows(result['rows_multiple'])} a group of devices would fit: "
            "use remat_policy=full, more devices or more ici_tensor_parallelism"
        )
        print(
            f"too big   stage {s['index']} needs at least {memory['peak']:.1f} of "
            f"{memory['limit']:.1f} GiB; {remedy}"
        )
    for s in result["stages"]:
        if s["fits"]:
            stage = f"stage {s['index']}: "
            print(
                f"moves     {stage}{_moved(s['collective_gib'])} a step into each {device}, "
                f"{s['collective_seconds']:.3g} s of the step wait for transfers"
            )
            if s["network_gib"]:
                print(
                    f"network   {stage}{_moved(s['network_gib'])} a step into each {device} from "
                    f"other {result['groups']}"
                    + (
                        f", {s['network_seconds']:.3g} s if nothing runs beside it"
                        if "network_seconds" in s
                        else ""
                    )
                )
    totals = result["totals"]
    if totals["fits"]:
        constant = totals["constant_final_batch"]
        print(
            f"run       {totals['steps']:,} steps, {_paid(totals, device)}; a constant batch of "
            f"{constant['global_batch_size']:,} takes {constant['steps']:,} steps, "
            f"{_paid(constant, device)}"
        )
    print(f"times     {result['times']}")


def _paid(totals: dict[str, Any], device: str) -> str:
    """The hours of a run, and their price if it is known."""
    price = "" if totals["price"] is None else f", a price of {amount(totals['price'])}"
    hours = f"{amount(totals['hours'])} hours, {amount(totals['device_hours'])} {device}-hours"
    return hours + price


def _moved(sizes: dict[str, float]) -> str:
    return (", ".join(f"{kind} {gib:.3g}" for kind, gib in sizes.items()) or "0") + " GiB"


def _size(size: float | int) -> str:
    return f"{size:g}"


def _shown(gib: float | None) -> str:
    return "-" if gib is None else f"{gib:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
