"""Shows what a run will do, before it costs anything: its stages with steps, nodes, cost, memory.

python -m maxramp.plan CONFIG.yml [key=value ...] [options]

  --json           print the plan as JSON
  --plot FILE      draw it
  --fit            find the cheapest remat_policy and the largest per_device_batch_size whose step
                   fits a device: of compile_topology, or of this machine
  --compiled FILE  add what maxramp.compile found for a pod
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

from maxramp.commandline import (
    amount,
    count,
    print_progress,
    print_table,
    short,
    take_flag,
    take_value,
)
from maxramp.config.load import load
from maxramp.errors import ConfigError, report
from maxramp.files.place import place
from maxramp.planning.compiled import add_compiled
from maxramp.planning.plan import SMALL_BUBBLE, draw_plan, make_plan
from maxramp.planning.pod import fit_devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        as_json, fit = (take_flag(arguments, flag) for flag in ("--json", "--fit"))
        plot = take_value(arguments, "--plot")
        compiled = take_value(arguments, "--compiled")
        config = load(arguments, "plan", __doc__)
        if fit:
            print(fit_devices(config, print_progress))
            return 0
        plan = make_plan(config)
        if compiled:
            add_compiled(plan, place(compiled), config.planning)
        if plot:
            try:
                draw_plan(plan, pathlib.Path(plot))
            except (OSError, ValueError) as error:  # no such folder; a format that is none
                raise ConfigError(f"--plot {plot}: cannot write the picture: {error}") from None
        print(json.dumps(plan, indent=2)) if as_json else print_plan(plan)
        return 0
    except (ConfigError, jax.errors.JaxRuntimeError, MemoryError, OSError) as error:
        return report(error)


def print_plan(plan: dict[str, Any]) -> None:
    """The plan as a table and a few lines."""
    _print_stages(plan)
    _print_run(plan)
    _print_savings(plan)
    _print_price(plan)
    _print_compiled(plan)
    _print_advice(plan)


def _print_stages(plan: dict[str, Any]) -> None:
    cells = [_cells(plan, stage) for stage in plan["stages"]]
    columns = list(cells[0])
    rows = [list(row.values()) for row in cells]
    if left_out := print_table(columns, rows, [name for name in _EXPENDABLE if name in columns]):
        names = "; ".join(" ".join(name.split()) for name in left_out)
        print(f"columns   left out on this narrow terminal: {names} (--json has all)")


def _print_run(plan: dict[str, Any]) -> None:
    """How long the run is and on what, and how far its ramp is open."""
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


def _print_savings(plan: dict[str, Any]) -> None:
    """What the ramp saves against constant batches, and the restarts that it takes."""
    totals = plan["totals"]
    first, final = totals["constant_first_batch"], totals["constant_final_batch"]
    if len(plan["stages"]) == 1:  # a constant batch: there is nothing to compare
        known = f"{totals['node_hours'] or 0:,.0f} node-hours in {totals['hours'] or 0:,.0f} hours"
        print(
            f"time      {known if totals['hours'] else 'planned_tflops_per_device=N gives hours'}"
        )
        return
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


def _print_price(plan: dict[str, Any]) -> None:
    """What the run costs, where hours and their price are known."""
    totals = plan["totals"]
    constant = totals["constant_final_batch"]
    if totals["price"]:
        print(
            f"price     {amount(totals['price'])} for {amount(totals['node_hours'])} node-hours "
            "(price_per_device_hour)"
            + (
                f"; {amount(constant['price'])} for a constant batch of "
                f"{constant['global_batch_size']:,}"
                if len(plan["stages"]) > 1
                else ""
            )
        )


def _print_compiled(plan: dict[str, Any]) -> None:
    """What maxramp.compile found for the stages and for the run."""
    for stage in plan["stages"]:
        if not (made := stage.get("compiled")):
            continue
        memory = made["memory_gib"]
        print(
            f"compiled  stage {stage['index']}: {memory['peak']:.1f} of {memory['limit']:.1f} GiB"
            + (
                f", {made['step_seconds']:.3g} s a step, {amount(made['hours'])} hours, "
                f"{amount(made['device_hours'])} {made['device']}-hours on {made['machine']}"
                if made["fits"]
                else ", which does not fit"
            )
        )
    if run := plan["totals"].get("compiled"):
        known = plan["totals"]["hours"]
        print(
            f"compiled  the run: {amount(run['hours'])} hours, {amount(run['device_hours'])} "
            f"{run['device']}-hours"
            + (f", a price of {amount(run['price'])}" if run["price"] else "")
            + (
                f"; the {amount(known)} hours above are at planned_tflops_per_device, these by the "
                "step times that the compiler gives"
                if known
                else ""
            )
        )


def _print_advice(plan: dict[str, Any]) -> None:
    """What is to be looked at: an idle pipeline, warnings, and the memory of the last stage."""
    last = plan["stages"][-1]
    if smaller := plan["smaller_bubble"]:
        others = ", ".join(map(str, smaller["not_in_stages"]))
        print(
            f"pipeline  its stages idle for {last['pipeline_bubble']:.1%} of a pass; "
            f"num_pipeline_microbatches={smaller['num_pipeline_microbatches']} makes it at most "
            f"{SMALL_BUBBLE:.0%}"
            + (
                f", but needs a multiple of {count(smaller['rows_multiple'], 'row')} a data-"
                f"parallel rank in each pass of stage {others}"
                if others
                else ""
            )
        )
    for warning in plan["warnings"]:
        print(f"warning   {warning}")
    memory = last["memory_gib"]
    print(
        f"memory    per device in the last stage, estimated: weights {memory['weights']:.3g}, "
        f"optimizer {memory['optimizer']:.3g}, gradients {memory['gradients']:.3g}, "
        f"activations {memory['activations']:.3g} GiB (--fit asks the compiler)"
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


def _cells(plan: dict[str, Any], s: dict[str, Any]) -> dict[str, str]:
    """Of a stage, by the heads of their columns; without those that say the same of every plan."""
    stages, several_nodes = plan["stages"], plan["num_nodes"] > 1
    several = several_nodes or plan["devices_per_node"] > 1
    passes = several or any(other["gradient_accumulation_steps"] > 1 for other in stages)
    idle = any(other["pipeline_bubble"] for other in stages)
    on_all = s["nodes"] == plan["num_nodes"]
    against = f"{s['node_hours_against_all_nodes']:.2f}x, {s['hours_against_all_nodes']:.2f}x"
    cells = (
        (True, "stage", str(s["index"])),
        (True, "first\nstep", f"{s['first_step']:,}"),
        (True, "steps", f"{s['run_steps']:,}"),
        (True, "samples", short(s["run_samples"])),
        (True, "tokens", short(s["run_tokens"])),
        (True, "global\nbatch", f"{s['global_batch_size']:,}"),
        (passes, "per\ndevice", f"{s['per_device_batch_size']:g}"),
        (passes, "accum.", str(s["gradient_accumulation_steps"])),
        (several_nodes, "nodes", str(s["nodes"])),
        (several, "devices", str(s["devices"])),
        (True, f"share of\n{'node-' * several_nodes}time", f"{s['share_of_node_time']:.1%}"),
        (several_nodes, "cost, time of\nall nodes", "-" if on_all else against),
        (True, "GiB per\ndevice", f"{s['memory_gib']['total']:.3g}"),
        (idle, "pipeline\nidle", f"{s['pipeline_bubble']:.1%}"),
    )
    return {head: cell for shown, head, cell in cells if shown}


def _change(value: float, reference: float, less: str = "fewer") -> str:
    change = value / reference - 1
    if abs(change) < 5e-4:
        return f"no {less}"
    return f"{abs(change):.1%} {less if change < 0 else 'more'}"


if __name__ == "__main__":
    sys.exit(main())
