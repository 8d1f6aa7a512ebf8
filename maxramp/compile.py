"""Compiles the step of every stage for a TPU pod, on a machine without one.

python -m maxramp.compile CONFIG.yml compile_topology=v5p:8x8x16 [compile_topology_num_slices=N]
    [key=value ...] [--json]
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import functools
import json
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from maxramp.commandline import print_table, take_flag
from maxramp.config import load as config_lib
from maxramp.config.load import Config
from maxramp.errors import ConfigError, report
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel import topology as topology_lib
from maxramp.planning import hlo
from maxramp.planning.cost import training_flops_per_token
from maxramp.planning.memory import GIB, compiled_bytes
from maxramp.rampup.notations import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.training.optimizer import LearningRate
from maxramp.training.programs import lower_step

USAGE = """
  --json  print the result as JSON

compile_topology names the pod, such as v5p:8x8x16. The result is also saved in the output folder as
compiled.json, for maxramp.plan --compiled FILE. This needs libtpu (jax[tpu]) but no TPU.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        as_json = take_flag(arguments, "--json")
        config = config_lib.load(arguments, "compile", USAGE)
        if not config.compile_topology:
            raise ConfigError(
                "compile_topology is not given: the pod to compile for, such as v5p:8x8x16 or "
                "v5p-2048"
            )
        result = compile_stages(config, lambda line: print(line, file=sys.stderr, flush=True))
        folder = pathlib.Path(config.base_output_directory).expanduser()
        folder /= config.run_name or config.model_name
        path = folder / "compiled.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"base_output_directory={config.base_output_directory}: cannot write to {path}: "
                f"{error.strerror}"
            ) from None
        if as_json:
            print(json.dumps(result, indent=2))
        else:
            _print(result)
            print(f"see       {path}; maxramp.plan --compiled {path}")
        return 0
    except (ConfigError, jax.errors.JaxRuntimeError, MemoryError) as error:
        return report(error)


def compile_stages(config: Any, say: Any = lambda line: None) -> dict[str, Any]:
    """Compiles the step of every stage, each batch shape once.

    Args:
      config: loaded, with `compile_topology`.
      say: takes a line of progress.

    Returns:
      `stages`: those of plan.json on the pod, each with what the compiler says of its step:
      `memory_gib` (`arguments`, `temporaries`, `peak`, `limit`), `fits`, `nearest_fit`,
      `flops_per_device`, `compute_seconds`, `collective_seconds`, `step_seconds`, `mfu`,
      `tokens_per_second`, `hours`, `chip_hours`, `collective_gib`, `compile_seconds`; and `totals`.

    Raises:
      ConfigError: the pod does not exist, or the mesh or a stage does not fill it.
    """
    topology = topology_lib.parse(config.compile_topology)
    slices = config.compile_topology_num_slices
    jax.config.update("jax_platforms", "cpu")  # nothing runs; the pod is libtpu's description of it
    devices = topology_lib.describe(topology, slices).devices
    target = config_lib.resolve(config, len(devices), slices, 1)
    ramp = RampupBatchManager(target, len(devices))
    stages = ramp.stages_between(0, ramp.total_steps)
    ramp.check(stages)
    pod = _Pod(target, ramp, mesh_lib.make_mesh(target, devices), topology)
    entries = []
    for stage in stages:
        entry = stage.to_json() | pod.step(
            stage.gradient_accumulation_steps, stage.micro_batch_size
        )
        end = ramp.total_steps
        if stage.steps is not None:
            end = min(end, stage.first_step + stage.steps)
        entry["run_steps"] = end - stage.first_step
        say(
            f"stage {stage.index}: global batch {stage.global_batch_size}, compiled in "
            f"{entry['compile_seconds']:.0f} s"
        )
        if not entry["fits"]:
            entry["nearest_fit"] = pod.nearest_fit(stage)
        entries.append(entry | _over_the_run(entry, entry["run_steps"], len(devices), target))
    last, total = entries[-1], ramp.total_samples
    fit = all(entry["fits"] for entry in entries)
    constant = -(-total // last["global_batch_size"])
    return {
        "compile_topology": str(topology),
        "num_slices": slices,
        "devices": len(devices),
        "mesh": config_lib.mesh_sizes(target),
        "max_target_length": target.max_target_length,
        "peak_tflops_per_device": topology.chip.peak_tflops,
        "stages": entries,
        "totals": {
            "fits": fit,
            "steps": ramp.total_steps,
            "samples": total,
            "hours": sum(entry["hours"] for entry in entries) if fit else None,
            "chip_hours": sum(entry["chip_hours"] for entry in entries) if fit else None,
            "constant_final_batch": {"global_batch_size": last["global_batch_size"]}
            | {"steps": constant}
            | _over_the_run(last, constant, len(devices), target),
        },
    }


def _over_the_run(
    entry: dict[str, Any], steps: int, devices: int, config: Config
) -> dict[str, float | None]:
    """What so many of a stage's steps take."""
    if not entry["fits"]:
        return dict.fromkeys(("tokens_per_second", "mfu", "hours", "chip_hours"))
    tokens = entry["global_batch_size"] * config.max_target_length
    rate = tokens / entry["step_seconds"]
    peak = devices * entry["peak_tflops_per_device"] * 1e12
    hours = steps * entry["step_seconds"] / 3600
    return {
        "tokens_per_second": rate,
        "mfu": rate * training_flops_per_token(config) / peak,
        "hours": hours,
        "chip_hours": hours * devices,
    }


class _Pod:
    """A pod's compiler."""

    def __init__(
        self,
        config: Config,
        ramp: RampupBatchManager,
        mesh: Mesh,
        topology: topology_lib.Topology,
    ):
        self._config, self._mesh, self._chip = config, mesh, topology.chip
        self._limit = topology.chip.memory_gib
        if config.device_memory_gib != -1:
            self._limit = config.device_memory_gib
        self._parallel = BatchKeys.of(config).model_parallel_size
        # Setting a mesh of devices that are not there fails as soon as anything runs.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            self._lower = lower_step(config, mesh, LearningRate.of(config, ramp))

    @functools.cache  # noqa: B019
    def step(self, accumulation: int, rows: int) -> dict[str, Any]:
        """What the compiler says of the step of a batch shape."""
        start = time.perf_counter()
        limit = {"peak_tflops_per_device": self._chip.peak_tflops}
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            lowered = self._lower(accumulation, rows)
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if not (sizes := _too_big(str(error))):
                    raise
                memory = {"arguments": None, "temporaries": None, "peak": sizes[0]}
                return limit | {
                    "memory_gib": memory | {"limit": min(sizes[1], self._limit)},
                    "fits": False,
                    "compile_seconds": time.perf_counter() - start,
                }
        seconds = time.perf_counter() - start
        analysis, peak = compiled.memory_analysis(), compiled_bytes(compiled) / GIB
        work = hlo.count(compiled.as_text())
        compute = work.cycles / (self._chip.clock_ghz * 1e9)
        compute += work.kernel_flops / (self._chip.peak_tflops * 1e12)
        waited = work.waited_bytes / (self._chip.interconnect_gbytes * 1e9)
        return limit | {
            "memory_gib": {
                "arguments": analysis.argument_size_in_bytes / GIB,
                "temporaries": analysis.temp_size_in_bytes / GIB,
                "peak": peak,
                "limit": self._limit,
            },
            "fits": peak <= self._limit,
            "flops_per_device": work.flops,
            "compute_seconds": compute,
            "collective_seconds": waited,
            "step_seconds": compute + waited,
            "collective_gib": {k: v / GIB for k, v in sorted(work.collective_bytes.items())},
            "compile_seconds": seconds,
        }

    def nearest_fit(self, stage: Stage) -> dict[str, Any] | None:
        """The same global batch in the largest micro batches that fit; None if one row does not."""
        ranks = stage.devices // self._parallel
        rows = stage.global_batch_size // ranks
        now = stage.micro_batch_size // ranks
        sizes = [size for size in range(1, now) if rows % size == 0]
        fits, low = None, 0
        while low < len(sizes):  # bisects from above: sizes[:low] fit, what is cut off does not
            middle = (low + len(sizes)) // 2
            found = self.step(rows // sizes[middle], sizes[middle] * ranks)
            if found["fits"]:
                fits, low = (sizes[middle], found), middle + 1
            else:
                sizes = sizes[:middle]
        if fits is None:
            return None
        return {
            "per_device_batch_size": fits[0] / self._parallel,
            "gradient_accumulation_steps": rows // fits[0],
            "peak_gib": fits[1]["memory_gib"]["peak"],
        }


def _too_big(error: str) -> tuple[float, float] | None:
    """GiB that a refused program needs at least, and those there are; None if nothing is said."""
    used = re.search(r"Used ([0-9.]+[KMGT]) of ([0-9.]+[KMGT]) hbm", error)
    used = used or re.search(
        r"temporaries \(([0-9.]+[KMGT])\) exceeds available HBM \(([0-9.]+[KMGT])\)", error
    )
    if not used:
        return None
    return tuple(float(n[:-1]) * 1024.0 ** ("KMGT".index(n[-1]) - 2) for n in used.groups())


def _cells(s: dict[str, Any]) -> list[str]:
    memory = s["memory_gib"]
    left = memory["limit"] - memory["peak"]
    cells = [
        *(str(s["index"]), f"{s['run_steps']:,}", f"{s['global_batch_size']:,}"),
        *(_size(s["per_device_batch_size"]), str(s["gradient_accumulation_steps"])),
        *(_shown(memory["peak"]), _shown(memory["temporaries"])),
        f"{left:.1f} GiB left" if s["fits"] else f"no, {-left:.1f} over",
    ]
    if s["fits"]:
        cells += [f"{s['step_seconds']:.3g} s", f"{s['mfu']:.1%}"]
        cells += [f"{s['tokens_per_second']:,.0f}", f"{s['hours']:,.1f}"]
        cells += [f"{s['chip_hours']:,.0f}"]
    return cells


def _print(result: dict[str, Any]) -> None:
    """The result as a table and a few lines."""
    columns = "stage|steps|global batch|per device|accum.|peak memory|of it temporary|fits|step"
    columns += "|MFU|tokens/s|hours|chip-hours"
    print_table(columns.split("|"), map(_cells, result["stages"]))
    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    slices = f" in {result['num_slices']} slices" if result["num_slices"] > 1 else ""
    print(f"pod       {result['compile_topology']}{slices}: {result['devices']} chips, mesh {mesh}")
    for s in result["stages"]:
        if s["fits"]:
            continue
        near, memory = s["nearest_fit"], s["memory_gib"]
        remedy = (
            f"per_device_batch_size={_size(near['per_device_batch_size'])} with "
            f"{near['gradient_accumulation_steps']} accumulation fits ({near['peak_gib']:.1f} GiB)"
            if near
            else "not even one row a group of devices fits: use remat_policy=full, more devices or "
            "more ici_tensor_parallelism"
        )
        print(
            f"too big   stage {s['index']} needs at least {memory['peak']:.1f} of "
            f"{memory['limit']:.1f} GiB; {remedy}"
        )
    for s in result["stages"]:
        if s["fits"]:
            moved = ", ".join(f"{kind} {gib:.3g}" for kind, gib in s["collective_gib"].items())
            print(
                f"moves     stage {s['index']}: {moved or 'nothing'} GiB a step into each chip, "
                f"{s['collective_seconds']:.3g} s of the step wait for it"
            )
    totals = result["totals"]
    if totals["fits"]:
        constant = totals["constant_final_batch"]
        print(
            f"run       {totals['steps']:,} steps, {totals['hours']:,.1f} hours, "
            f"{totals['chip_hours']:,.0f} chip-hours; a constant batch of "
            f"{constant['global_batch_size']:,} takes {constant['steps']:,} steps, "
            f"{constant['hours']:,.1f} hours, {constant['chip_hours']:,.0f} chip-hours"
        )
    print(
        "times     the compiler's cycles at the chip's clock, attention kernels at its peak, "
        "and the waits at its published interconnect rate: a pod is slower, not faster"
    )


def _size(size: float | int) -> str:
    return f"{size:g}"


def _shown(gib: float | None) -> str:
    return "-" if gib is None else f"{gib:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
