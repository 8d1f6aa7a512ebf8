"""What a TPU's compiler says of each phase of a run on several meshes, and what one for all costs.

python benchmarks/phases.py [--json FILE] [RUN ...]  (needs libtpu: pip install -e '.[tpu]')

Two runs on v5p chips, weights in float32, arithmetic in bfloat16, AdamW, splash attention,
remat_policy=full, all rows of a chip in one pass:

  405b   4,096 chips: the schedule of configs/schedules/llama3-405b.yml, whole
  8b     64 chips: batches of 1M tokens in rows of 4,096 to 100B, of 4M to 1T, of 4M in rows of
         32,768 to 1.1T

A step cuts samples of the longest rows, so a batch of few samples fills the chips only where
`tensor` makes groups of several. Every phase is compiled on every mesh of `tensor` x `fsdp` on
which its batch divides. The time of a step is the compiler's cycles at the chip's clock, attention
at its peak, and 600 GB/s for the bytes that nothing runs beside; chip-hours are that time, the
phase's steps and the chips. The best mesh for all is the one that fits every phase in the fewest
chip-hours. The programs that move the state between the meshes of two phases are compiled as well.
A figure that the file holds is not taken again.
"""

import json
import pathlib
from typing import Any

from figures import ROOT, parser, save

from maxramp.commandline import print_note, print_table
from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.parallel.mesh import format_sizes
from maxramp.planning.compile_target import CompileTarget
from maxramp.rampup.schedule import Stage

_8B_PHASES = {
    "0": {"global_batch_tokens": 2**20, "row_length": 4096},
    "100B": {"global_batch_tokens": 2**22},
    "1T": {"row_length": 32768},
}
# The keys of a run, and the sizes of its axis `tensor` that are tried.
RUNS = {
    "405b": (
        ("configs/schedules/llama3-405b.yml", "model_name=llama3-405b")
        + ("compile_topology=v5p:16x16x16",),
        (4, 8),
    ),
    "8b": (
        ("configs/base.yml", "model_name=llama3-8b", "compile_topology=v5p:4x4x4")
        + ("max_target_length=32768", "total_tokens=1100000000000")
        + (f"phases={json.dumps(_8B_PHASES)}",),
        (1, 2),
    ),
}
COMMON = ("micro_batch_size=4", "remat_policy=full")


def target_for(name: str, tensor: int) -> CompileTarget:
    """Returns the compiler for a run on one mesh."""
    config, *keys = RUNS[name][0]
    mesh = f"ici_tensor_parallelism={tensor}"
    return CompileTarget.from_config(load([str(ROOT / config), *COMMON, *keys, mesh]), print_note)


def phases_of(target: CompileTarget) -> list[Stage]:
    """Returns the phases whose batches divide over a mesh."""
    stages = []
    for stage in target.ramp.stages:
        try:
            target.ramp.check([stage])
        except ConfigError:
            continue
        stages.append(stage)
    return stages


def step(target: CompileTarget, stage: Stage) -> dict[str, Any]:
    """Compiles the step of a phase on a mesh, and returns its figures."""
    compiled, steps, chips = (
        target.step(stage.spec),
        target.ramp.steps_in_run(stage),
        len(target.machine.devices),
    )
    result = {
        "row_length": stage.spec.row_length,
        "samples": stage.spec.samples,
        "passes": stage.spec.accumulation,
        "gib": compiled["memory_gib"]["peak"],
        "fits": compiled["fits"],
    }
    if compiled["fits"]:
        seconds = {name: compiled[f"{name}_seconds"] for name in ("step", "collective", "compile")}
        result |= seconds | {"chip_hours": chips * steps * compiled["step_seconds"] / 3600}
    return result


def compare(meshes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Finds the best mesh of each phase and the best for all, and their chip-hours."""
    hours = {
        mesh: {index: phase["chip_hours"] for index, phase in phases.items() if phase["fits"]}
        for mesh, phases in meshes.items()
    }
    indices = sorted({index for phases in meshes.values() for index in phases})
    best = [
        min((m for m in hours if index in hours[m]), key=lambda m, i=index: hours[m][i])
        for index in indices
    ]
    each = sum(hours[mesh][index] for index, mesh in zip(indices, best, strict=True))
    one = {
        mesh: sum(phase_hours.values())
        for mesh, phase_hours in hours.items()
        if len(phase_hours) == len(indices)
    }
    mesh = min(one, key=one.get)
    totals = {"chip_hours": each, "one_mesh": mesh, "chip_hours_of_one": one[mesh]}
    return {"best": best} | totals | {"ratio": one[mesh] / each}


def main() -> None:
    """Takes the figures that are not there, prints all, and writes them."""
    options = parser("phases", __doc__)
    options.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS)}; all by default")
    arguments = options.parse_args()
    path = pathlib.Path(arguments.json)
    figures = json.loads(path.read_text())["figures"] if path.exists() else {}
    for name in arguments.runs or RUNS:
        run = figures.setdefault(name, {"meshes": {}, "moves": {}})
        targets = {
            format_sizes((target := target_for(name, t)).config.mesh.sizes): target
            for t in RUNS[name][1]
        }
        todo = [(mesh, stage) for mesh, target in targets.items() for stage in phases_of(target)]
        for mesh, stage in sorted(todo, key=lambda item: -item[1].index):
            phases = run["meshes"].setdefault(mesh, {})
            if str(stage.index) not in phases:
                phases[str(stage.index)] = step(targets[mesh], stage)
                save(arguments.json, figures)
        run |= compare(run["meshes"])
        for before, after in zip(run["best"], run["best"][1:], strict=False):
            if before != after and (way := f"{before} to {after}") not in run["moves"]:
                sizes = targets[before].config.mesh, targets[after].config.mesh
                run["moves"][way] = targets[before].move(*sizes)
        save(arguments.json, figures)
        show(name, run)


def show(name: str, run: dict[str, Any]) -> None:
    """Prints the figures of a run as a table and a few lines."""
    rows = [
        [index, f"{p['row_length']:,}", f"{p['samples']:,}", mesh, f"{p['gib']:.1f} GiB"]
        + ([f"{p['step']:.3g} s", f"{p['chip_hours']:,.0f}"] if p["fits"] else ["", ""])
        for mesh, phases in run["meshes"].items()
        for index, p in sorted(phases.items())
    ]
    print_table(["phase", "rows of", "samples", "mesh", "memory", "step", "chip-hours"], rows)
    for way, move in run["moves"].items():
        moved = sum(move["collective_gib"].values())
        print(f"{way}: {moved:.2f} GiB into each chip, which holds at most {move['peak_gib']:.2f}")
    print(
        f"{name}: {run['chip_hours']:,.0f} chip-hours on {', '.join(run['best'])}; "
        f"{run['chip_hours_of_one']:,.0f} on {run['one_mesh']} alone, {run['ratio']:.3f} times"
    )


if __name__ == "__main__":
    main()
