"""Compiles the stages of a run for a machine that need not be here; adds the result to a plan."""

import json
from collections.abc import Callable
from typing import Any

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.model.parts import grouped
from maxramp.model.size import training_flops_per_token
from maxramp.planning.compile_target import CompileTarget, least_rows
from maxramp.planning.keys import PlanKeys
from maxramp.planning.stages import price
from maxramp.stage import ROPE_KEYS, StageSpec


def compile_stages(
    config: Config, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Compiles the step of every stage of a loaded config with compile_topology, each batch shape
    once, and the moves of the state from mesh to mesh. A ConfigError as `CompileTarget.from_config`
    and `RampupBatchManager.check`.

    Returns `stages`, those of plan.json on the target, each with `memory_gib` (`arguments`,
    `temporaries`, `peak`, `limit`), `fits`, `nearest_fit`, `mfu`, `tokens_per_second`, `hours`,
    `device_hours`, `price` (None without price_per_device_hour), `compile_seconds`, the work of a
    step (`hlo.StepCost.to_json`), and `move` (of `CompileTarget.move`, None where the mesh stays);
    and `totals`.
    """
    target = CompileTarget.from_config(config, say)
    ramp, machine = target.ramp, target.machine
    stages = ramp.stages_between(0, ramp.total_steps)
    ramp.check(stages)
    entries = []
    for before, stage in zip([stages[0], *stages], stages, strict=False):
        entry = stage.to_json() | target.step(stage.spec) | {"run_steps": ramp.steps_in_run(stage)}
        if not entry["fits"]:
            entry["nearest_fit"] = _nearest_fit(target, stage.spec)
        meshes = before.spec.mesh, stage.spec.mesh
        entry["move"] = None if meshes[0] == meshes[1] else target.move(*meshes)
        entries.append(entry | run_totals(target, entry, stage.spec, entry["run_steps"]))
    last, spec = entries[-1], stages[-1].spec
    moves = [entry["move"] for entry in entries if entry["move"]]
    fit = all(entry["fits"] for entry in (*entries, *moves))
    hours, device_hours = (
        sum(entry[name] for entry in entries) if fit else None for name in ("hours", "device_hours")
    )
    constant = ramp.steps_of_constant(last["global_batch_size"])
    return {
        "compile_topology": machine.name,
        "device": machine.device,
        "num_slices": machine.slices,
        "devices": len(machine.devices),
        "mesh": spec.mesh.sizes,
        "max_target_length": spec.tokens,
        "rows_multiple": spec.rows_multiple,
        "peak_tflops_per_device": machine.peak_tflops,
        "groups": machine.groups,
        "grouped_matmul": grouped.select_for(target.config.model, machine.devices[0].platform),
        "times": machine.times,
        "stages": entries,
        "totals": {
            "fits": fit,
            "steps": ramp.total_steps,
            "samples": ramp.total_samples,
            "hours": hours,
            "device_hours": device_hours,
            "price": price(target.config.planning, device_hours),
            "constant_final_batch": {"global_batch_size": last["global_batch_size"]}
            | {"steps": constant}
            | run_totals(target, last, spec, constant),
        },
    }


def compile_ways(config: Config, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Compiles the last stage's step, for a loaded config as `compile_stages`, in the ways that may
    fit. Returns `ways`: entries as those of that with `remat_policy`, the fastest first; a
    ConfigError if none fits."""
    target = CompileTarget.from_config(config, say)
    ramp, machine = target.ramp, target.machine
    stage = ramp.stages_between(0, ramp.total_steps)[-1]
    ramp.check([stage])
    ways = target.fastest_ways(stage.spec)
    if not ways:
        raise ConfigError(
            f"compile_topology={machine.name}: not even {least_rows(stage.spec.rows_multiple)} a "
            "group of devices would fit under remat_policy=full; use more devices or more "
            "ici_tensor_parallelism"
        )
    steps = ramp.steps_in_run(stage)
    return {
        "compile_topology": machine.name,
        "device": machine.device,
        "times": machine.times,
        "ways": [way | run_totals(target, way, stage.spec, steps) for way in ways],
    }


def _nearest_fit(target: CompileTarget, spec: StageSpec) -> dict[str, Any] | None:
    """Finds the largest micro batches of the same global batch that fit; None if no row fits."""
    names = ("per_device_batch_size", "gradient_accumulation_steps")
    ways = target.largest_fits(spec, 1, spec.rows // spec.mesh.ranks - 1)
    if not ways:
        return None
    return {n: ways[0][n] for n in names} | {"peak_gib": ways[0]["memory_gib"]["peak"]}


def run_totals(
    target: CompileTarget, entry: dict[str, Any], spec: StageSpec, steps: int
) -> dict[str, float | None]:
    """Returns the speed of an entry of `CompileTarget.step`, with its `global_batch_size`, and what
    `steps` of it take, on a machine by name; all None if it does not fit, `price` also without a
    rate."""
    if not entry["fits"]:
        return dict.fromkeys(("tokens_per_second", "mfu", "hours", "device_hours", "price"))
    devices, config = len(target.machine.devices), target.config
    model = config.recipe.with_spec(spec).model
    rate = entry["global_batch_size"] * spec.tokens / entry["step_seconds"]
    peak = devices * entry["peak_tflops_per_device"] * 1e12
    hours = steps * entry["step_seconds"] / 3600
    return {
        "tokens_per_second": rate,
        "mfu": rate * training_flops_per_token(model, spec.row_length) / peak,
        "hours": hours,
        "device_hours": hours * devices,
        "price": price(config.planning, hours * devices),
    }


def add_compiled(plan: dict[str, Any], path: Place, keys: PlanKeys) -> None:
    """Adds `compiled` to every stage whose batch shape and devices a file of maxramp.compile holds,
    and to the plan's totals where it holds all of them and they fit; None and a warning where it
    holds none. A ConfigError if it is not such a file."""
    try:
        result = json.loads(path.read_bytes())
        machine = f"{result['num_slices']} x {result['compile_topology']}"
        same = {"machine": machine, "device": result["device"]}
        fields = ("fits", "memory_gib", "step_seconds", "mfu", "tokens_per_second")
        by_shape = {
            _shape(entry, result["max_target_length"]): {f: entry.get(f) for f in fields} | same
            for entry in result["stages"]
        }
        devices = result["devices"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file of maxramp.compile"
        raise ConfigError(f"--compiled {path}: {reason}") from None
    for entry in plan["stages"]:
        compiled = entry["compiled"] = by_shape.get(_shape(entry, plan["max_target_length"]))
        if compiled is None:
            fixed = f", on {devices:,}; node_schedule=fixed plans every stage on all of them"
            plan["warnings"].append(
                f"stage {entry['index']}, a batch of {entry['global_batch_size']:,} on "
                f"{count(entry['devices'], 'device')}, is not one that {path} compiled"
                f"{fixed if entry['devices'] < devices else ''}"
            )
        elif compiled["fits"]:
            hours = entry["run_steps"] * compiled["step_seconds"] / 3600
            compiled |= {"hours": hours, "device_hours": hours * entry["devices"]}
    times = [stage["compiled"] or {} for stage in plan["stages"]]
    if all("hours" in stage for stage in times):
        sums = {name: sum(stage[name] for stage in times) for name in ("hours", "device_hours")}
        plan["totals"]["compiled"] = same | sums | {"price": price(keys, sums["device_hours"])}


def _shape(entry: dict[str, Any], length: int) -> tuple:
    names = ("global_batch_size", "gradient_accumulation_steps", "devices", "row_length")
    names += ROPE_KEYS
    return (*(entry[name] for name in names), *entry["mesh"].values(), length)
