"""What the compiler of a machine that is not here says of a run's stages, and of their plan."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError
from maxramp.model.keys import ModelKeys
from maxramp.model.size import training_flops_per_token
from maxramp.parallel.platform import take_hardware
from maxramp.planning import machine as machines
from maxramp.planning.fit import by_speed, least_rows, pods
from maxramp.planning.machine import Machine
from maxramp.planning.pod import Pod
from maxramp.rampup import ladder
from maxramp.rampup.schedule import RampupBatchManager


def compile_stages(
    config: Config, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Compiles the step of every stage, each batch shape once.

    Args:
      config: loaded, with `compile_topology`.
      say: takes a line of progress.

    Returns:
      `stages`: those of plan.json on the pod, each with what the compiler says of its step:
      `memory_gib` (`arguments`, `temporaries`, `peak`, `limit`), `fits`, `nearest_fit`,
      `flops_per_device`, `compute_seconds`, `collective_seconds`, `step_seconds`, `mfu`,
      `tokens_per_second`, `hours`, `chip_hours`, `collective_gib` (inside a slice, or a node of
      GPUs), `network_gib` (between slices, or nodes of GPUs), `compile_seconds`; and `totals`. For
      TPUs also `attention_seconds` (of `compute_seconds`) and `network_seconds`.

    Raises:
      ConfigError: the pod does not exist, or the mesh or a stage does not fill it.
    """
    target, ramp, machine = _resolved(config)
    devices, slices = machine.devices, machine.slices
    stages = ramp.stages_between(0, ramp.total_steps)
    ramp.check(stages)
    pod = Pod.of(target, ramp, machine)
    entries = []
    for stage in stages:
        entry = stage.to_json() | pod.step(
            stage.gradient_accumulation_steps, stage.micro_batch_size
        )
        entry["run_steps"] = ramp.run_steps(stage)
        say(
            f"stage {stage.index}: global batch {stage.global_batch_size}, compiled in "
            f"{entry['compile_seconds']:.0f} s"
        )
        if not entry["fits"]:
            entry["nearest_fit"] = pod.nearest_fit(stage)
        entries.append(entry | _over_the_run(entry, entry["run_steps"], len(devices), target.model))
    last, total = entries[-1], ramp.total_samples
    fit = all(entry["fits"] for entry in entries)
    constant = -(-total // last["global_batch_size"])
    return {
        "compile_topology": machine.name,
        "device": machine.device,
        "num_slices": slices,
        "devices": len(devices),
        "mesh": target.mesh.sizes,
        "max_target_length": target.model.max_target_length,
        "rows_multiple": target.batch.rows_multiple,
        "peak_tflops_per_device": machine.peak_tflops,
        "groups": machine.groups,
        "times": machine.times,
        "stages": entries,
        "totals": {
            "fits": fit,
            "steps": ramp.total_steps,
            "samples": total,
            "hours": sum(entry["hours"] for entry in entries) if fit else None,
            "chip_hours": sum(entry["chip_hours"] for entry in entries) if fit else None,
            "constant_final_batch": {"global_batch_size": last["global_batch_size"]}
            | {"steps": constant}
            | _over_the_run(last, constant, len(devices), target.model),
        },
    }


def compile_ways(config: Config) -> dict[str, Any]:
    """Compiles the last stage's step in the ways that may fit.

    Args:
      config: loaded, with `compile_topology`.

    Returns:
      `ways`: entries as of `compile_stages`, with `remat_policy`, the fastest first.

    Raises:
      ConfigError: the machine does not exist, the mesh or the batch does not fill it, or nothing
        fits.
    """
    target, ramp, machine = _resolved(config)
    stage = ramp.stages_between(0, ramp.total_steps)[-1]
    ramp.check([stage])
    ways = by_speed(pods(Pod.of(target, ramp, machine)), stage)
    if not ways:
        raise ConfigError(
            f"compile_topology={machine.name}: not even {least_rows(target.batch.rows_multiple)} a "
            "group of devices would fit under remat_policy=full; use more devices or more "
            "ici_tensor_parallelism"
        )
    devices = len(machine.devices)
    return {
        "compile_topology": machine.name,
        "device": machine.device,
        "times": machine.times,
        "ways": [
            way | _over_the_run(way, ramp.run_steps(stage), devices, target.model) for way in ways
        ],
    }


def _resolved(config: Config) -> tuple[Config, RampupBatchManager, Machine]:
    """A config for the machine that its compile_topology names, its ramp, and the machine."""
    take_hardware("cpu")  # nothing runs; the devices are only described
    machine = machines.find(config.planning)
    target = resolve(config, len(machine.devices), machine.slices, 1)
    expected = ladder.expected(target.batch)
    ramp = RampupBatchManager(target.batch, len(machine.devices), decided=expected)
    return target, ramp, machine


def _over_the_run(
    entry: dict[str, Any], steps: int, devices: int, model: ModelKeys
) -> dict[str, float | None]:
    """What so many of a stage's steps take."""
    if not entry["fits"]:
        return dict.fromkeys(("tokens_per_second", "mfu", "hours", "chip_hours"))
    tokens = entry["global_batch_size"] * model.max_target_length
    rate = tokens / entry["step_seconds"]
    peak = devices * entry["peak_tflops_per_device"] * 1e12
    hours = steps * entry["step_seconds"] / 3600
    return {
        "tokens_per_second": rate,
        "mfu": rate * training_flops_per_token(model) / peak,
        "hours": hours,
        "chip_hours": hours * devices,
    }


def add_compiled(plan: dict[str, Any], path: pathlib.Path) -> None:
    """Adds `compiled` to every stage whose batch shape and devices a file of maxramp.compile holds.

    Raises:
      ConfigError: it is no such file.
    """
    try:
        found = json.loads(path.read_text())
        pod = f"{found['num_slices']} x {found['compile_topology']}"
        shapes = {_shape(entry, found["max_target_length"]): entry for entry in found["stages"]}
        fields = ("fits", "memory_gib", "step_seconds", "mfu", "tokens_per_second")
        kept = {key: {f: entry.get(f) for f in fields} for key, entry in shapes.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file of maxramp.compile"
        raise ConfigError(f"--compiled {path}: {reason}") from None
    for entry in plan["stages"]:
        entry["compiled"] = kept.get(_shape(entry, plan["max_target_length"]))
        if entry["compiled"] is None:
            plan["warnings"].append(f"stage {entry['index']} is not one that {path} compiled")
        elif entry["compiled"]["fits"]:
            seconds = entry["compiled"]["step_seconds"]
            hours = entry["run_steps"] * seconds / 3600
            entry["compiled"] |= {"pod": pod, "hours": hours}
            entry["compiled"]["chip_hours"] = hours * entry["devices"]


def _shape(entry: dict[str, Any], length: int) -> tuple:
    names = ("global_batch_size", "gradient_accumulation_steps", "devices")
    return (*(entry[name] for name in names), length)
