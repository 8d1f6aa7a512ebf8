"""Compiles the stages of a run for a machine that is not here, and adds that to a plan."""

import json
from collections.abc import Callable
from typing import Any

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.model.parts import grouped
from maxramp.model.size import training_flops_per_token
from maxramp.planning.keys import PlanKeys
from maxramp.planning.pod import Pod, least_rows
from maxramp.planning.stages import price
from maxramp.stage import ROPE_KEYS, StageSpec


def compile_stages(
    config: Config, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Compiles the step of every stage of a loaded config, each batch shape once, and the moves of
    the state from mesh to mesh.

    Returns `stages`, those of plan.json on the pod, each with `memory_gib` (`arguments`,
    `temporaries`, `peak`, `limit`), `fits`, `nearest_fit`, `mfu`, `tokens_per_second`, `hours`,
    `device_hours`, `price` (None without price_per_device_hour), `compile_seconds`, the work of a
    step (`hlo.Work.to_json`), and `move` (of `Pod.move`, None where the mesh stays); and `totals`.
    """
    pod = Pod.from_config(config, say)
    ramp, machine = pod.ramp, pod.machine
    stages = ramp.stages_between(0, ramp.total_steps)
    ramp.check(stages)
    entries = []
    for before, stage in zip([stages[0], *stages], stages, strict=False):
        entry = stage.to_json() | pod.step(stage.spec) | {"run_steps": ramp.run_steps(stage)}
        if not entry["fits"]:
            entry["nearest_fit"] = _nearest_fit(pod, stage.spec)
        meshes = before.spec.mesh, stage.spec.mesh
        entry["move"] = None if meshes[0] == meshes[1] else pod.move(*meshes)
        entries.append(entry | _run_totals(pod, entry, stage.spec, entry["run_steps"]))
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
        "grouped_matmul": grouped.select_for(pod.config.model, machine.devices[0].platform),
        "times": machine.times,
        "stages": entries,
        "totals": {
            "fits": fit,
            "steps": ramp.total_steps,
            "samples": ramp.total_samples,
            "hours": hours,
            "device_hours": device_hours,
            "price": price(pod.config.planning, device_hours),
            "constant_final_batch": {"global_batch_size": last["global_batch_size"]}
            | {"steps": constant}
            | _run_totals(pod, last, spec, constant),
        },
    }


def compile_ways(config: Config, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Compiles the last stage's step in the ways that may fit. Returns `ways`: entries as those of
    `compile_stages` with `remat_policy`, the fastest first."""
    pod = Pod.from_config(config, say)
    ramp, machine = pod.ramp, pod.machine
    stage = ramp.stages_between(0, ramp.total_steps)[-1]
    ramp.check([stage])
    ways = pod.fastest_ways(stage.spec)
    if not ways:
        raise ConfigError(
            f"compile_topology={machine.name}: not even {least_rows(stage.spec.rows_multiple)} a "
            "group of devices would fit under remat_policy=full; use more devices or more "
            "ici_tensor_parallelism"
        )
    steps = ramp.run_steps(stage)
    return {
        "compile_topology": machine.name,
        "device": machine.device,
        "times": machine.times,
        "ways": [way | _run_totals(pod, way, stage.spec, steps) for way in ways],
    }


def _nearest_fit(pod: Pod, spec: StageSpec) -> dict[str, Any] | None:
    """The same global batch in the largest micro batches that fit; None if one row does not."""
    names = ("per_device_batch_size", "gradient_accumulation_steps")
    ways = pod.largest_fits(spec, 1, spec.rows // spec.mesh.ranks - 1)
    found = ({n: w[n] for n in names} | {"peak_gib": w["memory_gib"]["peak"]} for w in ways)
    return next(found, None)


def _run_totals(
    pod: Pod, entry: dict[str, Any], spec: StageSpec, steps: int
) -> dict[str, float | None]:
    if not entry["fits"]:
        return dict.fromkeys(("tokens_per_second", "mfu", "hours", "device_hours", "price"))
    devices, config = len(pod.machine.devices), pod.config
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
    and to the plan's totals where it holds all of them and they fit."""
    try:
        found = json.loads(path.read_bytes())
        machine = f"{found['num_slices']} x {found['compile_topology']}"
        same = {"machine": machine, "device": found["device"]}
        fields = ("fits", "memory_gib", "step_seconds", "mfu", "tokens_per_second")
        kept = {
            _shape(entry, found["max_target_length"]): {f: entry.get(f) for f in fields} | same
            for entry in found["stages"]
        }
        devices = found["devices"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file of maxramp.compile"
        raise ConfigError(f"--compiled {path}: {reason}") from None
    for entry in plan["stages"]:
        made = entry["compiled"] = kept.get(_shape(entry, plan["max_target_length"]))
        if made is None:
            fixed = f", on {devices:,}; node_schedule=fixed plans every stage on all of them"
            plan["warnings"].append(
                f"stage {entry['index']}, a batch of {entry['global_batch_size']:,} on "
                f"{count(entry['devices'], 'device')}, is not one that {path} compiled"
                f"{fixed if entry['devices'] < devices else ''}"
            )
        elif made["fits"]:
            hours = entry["run_steps"] * made["step_seconds"] / 3600
            made |= {"hours": hours, "device_hours": hours * entry["devices"]}
    times = [stage["compiled"] or {} for stage in plan["stages"]]
    if all("hours" in made for made in times):
        sums = {name: sum(made[name] for made in times) for name in ("hours", "device_hours")}
        plan["totals"]["compiled"] = same | sums | {"price": price(keys, sums["device_hours"])}


def _shape(entry: dict[str, Any], length: int) -> tuple:
    names = ("global_batch_size", "gradient_accumulation_steps", "devices", "row_length")
    names += ROPE_KEYS
    return (*(entry[name] for name in names), *entry["mesh"].values(), length)
