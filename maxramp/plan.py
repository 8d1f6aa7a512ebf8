"""Shows what a run will do, before it costs anything.

python -m maxramp.plan CONFIG.yml [key=value ...] [--json] [--plot FILE] [--fit]
    [--compiled FILE]
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import itertools
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxramp.commandline import count, print_table, short, take_flag, take_value
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.config.resolve import mesh_checker, resolve, resolve_planned
from maxramp.errors import ConfigError, report
from maxramp.model.size import pipeline_bubble
from maxramp.parallel import mesh as mesh_lib
from maxramp.planning import machine as machines
from maxramp.planning.cost import PassCost
from maxramp.planning.fit import largest_batch
from maxramp.planning.memory import estimate
from maxramp.rampup import adaptive, ladder
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.run.output import plan_json
from maxramp.run.picture import draw_plan
from maxramp.training.learning_rate import LearningRate

USAGE = """
  --json           print the plan as JSON
  --plot FILE      draw it
  --fit            find the cheapest remat_policy and the largest per_device_batch_size whose step
                   fits a device: of compile_topology, or of this machine
  --compiled FILE  add what maxramp.compile found for a pod
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        as_json, fit = (take_flag(arguments, flag) for flag in ("--json", "--fit"))
        plot = take_value(arguments, "--plot")
        compiled = take_value(arguments, "--compiled")
        config = load(arguments, "plan", USAGE)
        if fit:
            print(_fit(config))
            return 0
        plan = make_plan(config)
        if compiled:
            _merge(plan, pathlib.Path(compiled))
        if plot:
            try:
                draw_plan(plan, pathlib.Path(plot))
            except (OSError, ValueError) as error:  # no such folder; a format that is none
                raise ConfigError(f"--plot {plot}: cannot write the picture: {error}") from None
        print(json.dumps(plan, indent=2)) if as_json else print_plan(plan)
        return 0
    except (ConfigError, jax.errors.JaxRuntimeError, MemoryError, OSError) as error:
        return report(error)


def _fit(config: Config) -> str:
    """The lines that --fit prints, for compile_topology or the devices of this machine."""
    if config.planning.compile_topology:
        jax.config.update("jax_platforms", "cpu")  # nothing runs; the devices are only described
        machine = machines.find(config.planning)
    else:
        mesh_lib.start_backend(config.backend)
        machine = machines.here()
    config = resolve(config, len(machine.devices), machine.slices, 1)
    return largest_batch(
        config.recipe,
        config.batch,
        config.schedule,
        mesh_lib.make_mesh(config.mesh, machine.devices),
        machine,
        config.planning.device_memory_gib,
    )


def make_plan(config: Config) -> dict[str, Any]:
    """The plan of a loaded config for the nodes that it describes (default: this machine).

    Returns:
      plan.json's content with, for every stage, its part of the run, node-time and memory; totals,
      also of constant-batch runs over the same samples; and the learning rate over samples.

    Raises:
      ConfigError: the keys do not make a run, or a stage does not fit its nodes' devices.
    """
    if config.batch.devices_per_node == -1:
        config = config.replace(devices_per_node=jax.local_device_count())
    config = config.replace(num_nodes=config.batch.nodes)
    target = resolve_planned(config, config.batch.num_devices)
    keys, cost = target.batch, PassCost(target.batch, target.planning, target.model)
    ramp = RampupBatchManager(
        keys,
        decided=ladder.expected(keys),
        usable=mesh_checker(config),
        restart_passes=cost.restart,
    )
    stages = ramp.stages_between(0, ramp.total_steps)
    ramp.check(stages)
    plan = plan_json(ramp) | {
        "num_nodes": keys.num_nodes,
        "devices_per_node": keys.devices_per_node,
        "max_target_length": keys.max_target_length,
        "restart_minutes": target.planning.restart_minutes,
        "warnings": [ramp.cut_short] if ramp.cut_short else [],
    }
    plan["stages"] = plan["stages"][: len(stages)]
    times = [
        ramp.run_steps(s) * s.gradient_accumulation_steps * cost.of(float(s.per_device_batch_size))
        for s in stages
    ]
    node_time = sum(time * s.nodes for time, s in zip(times, stages, strict=True))
    for stage, entry, time in zip(stages, plan["stages"], times, strict=True):
        steps = ramp.run_steps(stage)
        entry |= {
            "run_steps": steps,
            "run_samples": steps * stage.global_batch_size,
            "run_tokens": steps * stage.global_batch_size * keys.max_target_length,
            "share_of_node_time": time * stage.nodes / node_time,
            "hours": cost.hours(time),
            "node_hours": cost.hours(time * stage.nodes),
            **_against_all_nodes(stage, steps, time, keys, cost),
        }
        try:
            here = resolve_planned(config, stage.devices)
            entry["memory_gib"] = estimate(here.recipe, here.mesh.sizes, stage)
            entry["pipeline_bubble"] = pipeline_bubble(here.model, here.batch.stages)
        except ConfigError as error:
            entry |= {"memory_gib": None, "pipeline_bubble": None}
            plan["warnings"].append(f"stage {stage.index} on {stage.devices} devices: {error}")
    plan["totals"] = {
        "node_changes": sum(a.nodes != b.nodes for a, b in itertools.pairwise(stages)),
        "node_time": node_time,
        "hours": cost.hours(sum(times)),
        "node_hours": cost.hours(node_time),
        "constant_first_batch": _constant(ramp, stages[0], cost),
        "constant_final_batch": _constant(ramp, stages[-1], cost),
    }
    plan["adaptive"] = _bounds_of_ramp(ramp) if keys.rampup_policy == "noise" else None
    plan["smaller_bubble"] = _smaller_bubble(target, stages)
    given = target.schedule.learning_rate is not None
    plan["learning_rate"] = _curve(LearningRate.of(target.schedule, ramp), ramp) if given else None
    return plan


def _bounds_of_ramp(expected: RampupBatchManager) -> dict[str, Any]:
    """The ramp that decides while it runs: as early and as late as it may, and as planned here."""
    keys = expected.keys
    found = {"period_samples": ladder.period(keys)}
    for name, pairs in (
        ("earliest", adaptive.simulate(keys, noise=math.inf)),
        ("expected", ladder.expected(keys)),
        ("latest", adaptive.simulate(keys, noise=0.0)),
    ):
        ramp = RampupBatchManager(keys, 1, decided=pairs)
        stages = ramp.stages_between(0, ramp.total_steps)
        found[name] = {
            "batches": [[stage.first_sample, stage.global_batch_size] for stage in stages],
            "steps": ramp.total_steps,
        }
    return found


_BUBBLE = 0.1  # of a pipeline, that a plan finds small enough


def _smaller_bubble(config: Config, stages: Sequence[Stage]) -> dict[str, Any] | None:
    """How many micro batches make the bubble small; None where it is, or there is no pipeline.

    The fewest whose share of a stage divides the rows of all passes; where none does, the fewest.
    """
    count, model = config.batch.stages, config.model
    if pipeline_bubble(model, count) <= _BUBBLE:
        return None
    fewest = (count - 1) * (1 / _BUBBLE - 1) / model.num_pipeline_repeats
    least = math.ceil(fewest / count - 1e-9)
    parallel = config.batch.model_parallel_size
    rows = [int(stage.per_device_batch_size * parallel) for stage in stages]
    common = math.gcd(*rows)
    share = next((n for n in range(least, common + 1) if common % n == 0), least)
    return {
        "num_pipeline_microbatches": share * count,
        "rows_multiple": share,
        "not_in_stages": [s.index for s, n in zip(stages, rows, strict=True) if n % share],
    }


def _curve(rate: LearningRate, ramp: RampupBatchManager) -> dict[str, list]:
    """The learning rate at 200 steps of the run."""
    points = np.linspace(0, ramp.total_samples - 1, 200).astype(np.int64)
    steps = sorted({ramp.step_at_sample(int(n)) for n in points})
    starts = [ramp.samples_before(step) for step in steps]
    return {
        "samples": starts,
        "rate": [float(rate(n, ramp.stage_at_sample(n).global_batch_size)) for n in starts],
    }


def _merge(plan: dict[str, Any], path: pathlib.Path) -> None:
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


def _against_all_nodes(
    stage: Stage, steps: int, time: float, keys: BatchKeys, cost: PassCost
) -> dict[str, float]:
    """What a stage's choice of nodes costs and saves, against all nodes (if its rows divided)."""
    rows = stage.global_batch_size / keys.num_devices
    time_of_all = steps * cost.of_step(rows)
    return {
        "hours_against_all_nodes": time / time_of_all,
        "node_hours_against_all_nodes": time * stage.nodes / (time_of_all * keys.nodes),
    }


def _constant(ramp: RampupBatchManager, stage: Stage, cost: PassCost) -> dict[str, Any]:
    """The same samples at the batch size of one stage throughout, on all nodes."""
    steps = -(-ramp.total_samples // stage.global_batch_size)
    nodes = ramp.keys.nodes
    time = steps * cost.of_step(stage.global_batch_size / ramp.keys.num_devices)
    return {
        "global_batch_size": stage.global_batch_size,
        "steps": steps,
        "node_time": time * nodes,
        "hours": cost.hours(time),
        "node_hours": cost.hours(time * nodes),
    }


def print_plan(plan: dict[str, Any]) -> None:
    """The plan as a table and a few lines."""
    cells = [_cells(plan, stage) for stage in plan["stages"]]
    noise = _same_for_all(plan)
    rows = [[row[name] for name in row if name not in noise] for row in cells]
    columns = [name for name in cells[0] if name not in noise]
    if left_out := print_table(columns, rows, [name for name in _EXPENDABLE if name in columns]):
        names = "; ".join(" ".join(name.split()) for name in left_out)
        print(f"columns   left out on this narrow terminal: {names} (--json has all)")
    last, totals = plan["stages"][-1], plan["totals"]
    memory = last["memory_gib"]
    print(
        f"run       {plan['total_steps']:,} steps, {plan['total_samples']:,} samples, "
        f"{short(plan['total_tokens'])} tokens on up to {count(plan['num_nodes'], 'node')} of "
        f"{count(plan['devices_per_node'], 'device')}"
    )
    most = max(stage["nodes"] for stage in plan["stages"])
    if most < plan["num_nodes"]:
        print(
            f"nodes     {most} of {plan['num_nodes']} at most: more do not divide the batches or "
            "the model, or node_schedule finds too little gain in them"
        )
    if adapts := plan["adaptive"]:
        for name, what in (
            ("earliest", "every rung as early as it may be"),
            ("expected", "as in the table, which knows no measurement"),
            ("latest", "every rung as late as it may be"),
        ):
            sizes = " ".join(f"{short(sample)}:{size}" for sample, size in adapts[name]["batches"])
            print(f"{name:<10}{adapts[name]['steps']:,} steps, {sizes} (samples): {what}")
    first, final = totals["constant_first_batch"], totals["constant_final_batch"]
    print(
        f"steps     {_change(plan['total_steps'], first['steps'])} than a constant batch of "
        f"{first['global_batch_size']:,} takes ({first['steps']:,}); "
        f"{_change(plan['total_steps'], final['steps'])} than one of "
        f"{final['global_batch_size']:,} ({final['steps']:,})"
    )
    print(
        f"{'node-time' if plan['num_nodes'] > 1 else 'time     '} "
        f"{_change(totals['node_time'], final['node_time'], 'less')} than a constant batch of "
        f"{final['global_batch_size']:,} {'on all nodes ' * (plan['num_nodes'] > 1)}takes"
        + (
            f": {totals['node_hours']:,.0f} node-hours in {totals['hours']:,.0f} hours"
            if totals["hours"]
            else " (planned_tflops_per_device=N gives hours)"
        )
    )
    if changes := totals["node_changes"]:
        print(
            f"restarts  {changes}, where the number of nodes changes, {plan['restart_minutes']:g} "
            "minutes each (restart_minutes), not counted above"
        )
    for s in plan["stages"]:
        if made := s.get("compiled"):
            memory = made["memory_gib"]
            print(
                f"compiled  stage {s['index']}: {memory['peak']:.1f} of {memory['limit']:.1f} GiB"
                + (
                    f", {made['step_seconds']:.3g} s a step, {made['hours']:,.1f} hours, "
                    f"{made['chip_hours']:,.0f} chip-hours on {made['pod']}"
                    if made["fits"]
                    else ", which does not fit"
                )
            )
    if smaller := plan["smaller_bubble"]:
        others = ", ".join(map(str, smaller["not_in_stages"]))
        print(
            f"pipeline  its stages idle for {last['pipeline_bubble']:.1%} of a pass; "
            f"num_pipeline_microbatches={smaller['num_pipeline_microbatches']} makes it at most "
            f"{_BUBBLE:.0%}"
            + (
                f", but needs a multiple of {count(smaller['rows_multiple'], 'row')} a data-"
                f"parallel rank in each pass of stage {others}"
                if others
                else ""
            )
        )
    memory = last["memory_gib"]
    for warning in plan["warnings"]:
        print(f"warning   {warning}")
    if memory is None:
        return
    print(
        f"memory    per device in the last stage, estimated: weights {memory['weights']:.3g}, "
        f"optimizer {memory['optimizer']:.3g}, gradients {memory['gradients']:.3g}, activations "
        f"{memory['activations']:.3g} GiB (--fit asks the compiler)"
    )


_EXPENDABLE = (
    "devices",
    "samples",
    "first\nstep",
    "cost, time of\nall nodes",
    "accum.",
    "per\ndevice",
    "tokens",
    "GiB per\ndevice",
    "pipeline\nidle",
)


def _same_for_all(plan: dict[str, Any]) -> set[str]:
    """Columns that say nothing: of nodes where there is one, of devices where there is one."""
    names: set[str] = set()
    if plan["num_nodes"] == 1:
        names |= {"nodes", "cost, time of\nall nodes", "share of\nnode-time"}
        if plan["devices_per_node"] == 1:
            names |= {"devices"}
            if all(s["gradient_accumulation_steps"] == 1 for s in plan["stages"]):
                names |= {"per\ndevice", "accum."}
    else:
        names |= {"share of\ntime"}
    if not any(s["pipeline_bubble"] for s in plan["stages"]):
        names |= {"pipeline\nidle"}
    return names


def _cells(plan: dict[str, Any], s: dict[str, Any]) -> dict[str, str]:
    memory, on_all = s["memory_gib"], s["nodes"] == plan["num_nodes"]
    against = f"{s['node_hours_against_all_nodes']:.2f}x, {s['hours_against_all_nodes']:.2f}x"
    return {
        "stage": str(s["index"]),
        "first\nstep": f"{s['first_step']:,}",
        "steps": f"{s['run_steps']:,}",
        "samples": short(s["run_samples"]),
        "tokens": short(s["run_tokens"]),
        "global\nbatch": f"{s['global_batch_size']:,}",
        "per\ndevice": f"{s['per_device_batch_size']:g}",
        "accum.": str(s["gradient_accumulation_steps"]),
        "nodes": str(s["nodes"]),
        "devices": str(s["devices"]),
        "share of\ntime": f"{s['share_of_node_time']:.1%}",
        "share of\nnode-time": f"{s['share_of_node_time']:.1%}",
        "cost, time of\nall nodes": "-" if on_all else against,
        "GiB per\ndevice": f"{memory['total']:.3g}" if memory else "-",
        "pipeline\nidle": "-" if s["pipeline_bubble"] is None else f"{s['pipeline_bubble']:.1%}",
    }


def _change(value: float, reference: float, less: str = "fewer") -> str:
    change = value / reference - 1
    if abs(change) < 5e-4:
        return f"no {less}"
    return f"{abs(change):.1%} {less if change < 0 else 'more'}"


if __name__ == "__main__":
    sys.exit(main())
