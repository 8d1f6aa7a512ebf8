"""Shows what a run will do, before it costs anything: its stages with steps, nodes, cost, memory.

python -m maxramp.plan CONFIG.yml [key=value ...] [options]
python -m maxramp.plan FILE --trainer maxtext|megatron|nemo [key=value ...] [options]
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from maxramp.commandline import (
    amount,
    command,
    config_parser,
    count,
    print_progress,
    print_table,
    run_time,
    shell_quote,
    short,
)
from maxramp.config.load import find_sources, load
from maxramp.config.resolve import meshes_of, resolve
from maxramp.files.place import is_near, place
from maxramp.keys.numbers import show
from maxramp.measuring.batch_check import check_batches
from maxramp.model.size import describe_weights
from maxramp.parallel.axes import SHARD_AXES
from maxramp.parallel.mesh import format_sizes
from maxramp.planning.compile_target import CompileTarget
from maxramp.planning.compiled import add_compiled
from maxramp.planning.plan import SMALL_BUBBLE, draw_plan, find_published, make_plan, summarize_ramp
from maxramp.planning.run_length import with_length
from maxramp.planning.stages import with_nodes
from maxramp.planning.translation import TRAINERS, translate_file
from maxramp.stage import ROPE_KEYS


@command
def main(arguments: list[str]) -> int:
    parser = config_parser(__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", metavar="FILE", help="draw the plan as a picture")
    text = "find the cheapest remat_policy that fits and the largest per_device_batch_size under "
    add("--fit", action="store_true", help=text + "it, for compile_topology or this machine")
    text = "add memory and times from compiled.json, which maxramp.compile writes"
    add("--compiled", metavar="FILE", help=text)
    text = "show ramps of published runs too, by the names in configs/schedules: lucie-7b,falcon-7b"
    add("--beside", metavar="NAMES", help=text)
    text = "plan the run of another trainer's FILE (for Megatron a file with its command line): "
    add("--trainer", metavar="NAME", help=text + ", ".join(TRAINERS))
    options = parser.parse_intermixed_args(arguments)
    arguments, translation = options.arguments, []
    if options.trainer:
        arguments, left_out = translate_file(options.trainer, arguments)
        translation = [f"python -m maxramp.plan {shell_quote(arguments)}"]
        if left_out:
            translation.append(f"left out, without an equal here: {', '.join(left_out)}")
    config = with_length(load(arguments, "plan"), print_progress)
    if options.fit:
        target = CompileTarget.from_config(config, print_progress)
        print(*translation, target.largest_batch(), sep="\n")
        return 0
    plan = make_plan(config, find_sources(arguments))
    if options.trainer:
        plan |= {"arguments": arguments, "left_out": left_out}
    planned = with_nodes(config)
    resolved = resolve(planned, planned.batch.num_devices)
    folder = config.run.folder if is_near(config.run.folder) else None  # a storage may be away
    plan["warnings"] += check_batches(resolved, meshes_of(planned), folder)
    if options.beside is not None:
        plan["beside"] = find_published(options.beside)
    if options.compiled:
        add_compiled(plan, place(options.compiled), config.planning)
    if options.plot:
        draw_plan(plan, place(options.plot))
    if options.json:
        print(json.dumps(plan, indent=2))
        return 0
    for line in translation:
        print(line)
    print_plan(plan)
    return 0


def print_plan(plan: dict[str, Any]) -> None:
    several_nodes = plan["num_nodes"] > 1
    time = "node-time" if several_nodes else "time"
    several = several_nodes or plan["devices_per_node"] > 1
    passes = several or any(s["gradient_accumulation_steps"] > 1 for s in plan["stages"])
    short_rows = any(s["row_length"] != plan["max_target_length"] for s in plan["stages"])
    moves = any(s["move_gib"] for s in plan["stages"])
    idle = any(s["pipeline_bubble"] for s in plan["stages"])

    def relative_cost(s: dict[str, Any]) -> str:
        cost, time = s["node_hours_against_all_nodes"], s["hours_against_all_nodes"]
        return "-" if s["nodes"] == plan["num_nodes"] else f"{cost:.2f}x, {time:.2f}x"

    def rope_column(name: str) -> tuple[bool, str, Callable[[dict[str, Any]], str]]:
        changes = len({s[name] for s in plan["stages"]}) > 1
        head = "\n".join(name.replace("_", " ").rsplit(" ", 1))
        return changes, head, lambda s: s[name] if name == "rope_type" else show(s[name])

    columns = [  # whether to show it, head, cell: not one that is the same in every plan
        (True, "stage", lambda s: str(s["index"])),
        (True, "first\nstep", lambda s: f"{s['first_step']:,}"),
        (True, "steps", lambda s: f"{s['run_steps']:,}"),
        (True, "samples", lambda s: short(s["run_samples"])),
        (True, "tokens", lambda s: short(s["run_tokens"])),
        (True, "global\nbatch", lambda s: f"{s['global_batch_size']:,}"),
        (short_rows, "row\nlength", lambda s: f"{s['row_length']:,}"),
        *map(rope_column, ROPE_KEYS),
        (passes, "rows per\nrank", lambda s: f"{s['rows_per_rank']:g}"),
        (passes, "accum.", lambda s: str(s["gradient_accumulation_steps"])),
        (several_nodes, "nodes", lambda s: str(s["nodes"])),
        (several, "devices", lambda s: str(s["devices"])),
        (moves, "mesh", lambda s: format_sizes(s["mesh"])),
        (True, f"share of\n{time}", lambda s: f"{s['share_of_node_time']:.1%}"),
        (several_nodes, "cost, time of\nall nodes", relative_cost),
        (True, "GiB per\ndevice", lambda s: f"{s['memory_gib']['total']:.3g}"),
        (idle, "pipeline\nidle", lambda s: f"{s['pipeline_bubble']:.1%}"),
    ]
    cells = {head: cell for shown, head, cell in columns if shown}
    rows = [[cell(stage) for cell in cells.values()] for stage in plan["stages"]]
    if left_out := print_table(list(cells), rows, [name for name in _EXPENDABLE if name in cells]):
        names = "; ".join(" ".join(name.split()) for name in left_out)
        print(f"columns   left out on this narrow terminal: {names} (--json has all)")
    if "beside" in plan:
        _print_beside(plan)
    name, *weights = plan["model"].values()
    model = "model", f"{name}: {describe_weights(*weights)}"
    for label, text in (model, *_run_lines(plan), *_compiled_lines(plan), *_advice(plan)):
        print(f"{label:<10}{text}")


def _print_beside(plan: dict[str, Any]) -> None:
    """Prints the ramp and those of published runs, in tokens."""
    stages = [(s["first_sample"], s["global_batch_size"]) for s in plan["stages"]]
    own = summarize_ramp("this run", stages, plan["total_samples"], plan["max_target_length"])
    heads = (
        "run",
        "first\nbatch",
        "last\nbatch",
        "stages",
        "ramp\nends at",
        "run\nends at",
        "share",
    )
    print_table(
        heads,
        [
            [
                run["name"],
                *(short(run["batches"][i]) for i in (0, -1)),
                str(len(run["batches"])),
                short(run["starts"][-1]),
                short(run["end"]),
                f"{run['starts'][-1] / run['end']:.1%}",
            ]
            for run in (own, *plan["beside"])
        ],
    )


_EXPENDABLE = (
    *("devices", "samples", "first\nstep", "cost, time of\nall nodes", "accum."),
    *("rows per\nrank", "tokens", "GiB per\ndevice", "pipeline\nidle", "mesh"),
)
_BOUNDS = {
    "earliest": "every rung as early as it may be",
    "expected": "as in the table, which knows no measurement",
    "latest": "every rung as late as it may be",
}


def _run_lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    stages, totals, nodes = plan["stages"], plan["totals"], plan["num_nodes"]
    first, final = totals["constant_first_batch"], totals["constant_final_batch"]
    size, ramp = f"{final['global_batch_size']:,}", len(stages) > 1
    most = max(stage["nodes"] for stage in stages)
    hours, price = _cost(totals, size if ramp else "")
    and_so = ": " if totals["hours"] else "; "
    is_more = totals["node_time"] > 1.005 * final["node_time"]
    why = ", as smaller passes lose more (planned_pass_overhead)" if is_more else ""

    def ramp_text(bound: dict[str, Any]) -> str:
        sizes = " ".join(f"{short(sample)}:{size}" for sample, size in bound["batches"])
        return f"{bound['steps']:,} steps, {sizes} (samples)"

    lines = [
        (
            True,
            "run",
            f"{plan['total_steps']:,} steps, {plan['total_samples']:,} samples, "
            f"{short(plan['total_tokens'])} tokens on up to {count(nodes, 'node')} of "
            f"{count(plan['devices_per_node'], 'device')}",
        ),
        (
            most < nodes,
            "nodes",
            f"{most} of {nodes} at most: more do not divide the batches or the model, or "
            "node_schedule finds too little gain in them",
        ),
        *(
            (True, name, f"{ramp_text(plan['adaptive'][name])}: {what}")
            for name, what in (_BOUNDS.items() if plan["adaptive"] else ())
        ),
        (not ramp, "time", hours),  # a constant batch: there is nothing to compare
        (
            ramp,
            "steps",
            f"{_change(plan['total_steps'], first['steps'])} a constant batch of "
            f"{first['global_batch_size']:,} takes ({first['steps']:,})"
            + f"; {_change(plan['total_steps'], final['steps'])} one of {size} "
            f"({final['steps']:,})" * (first != final),
        ),
        (
            ramp,
            "node-time" if nodes > 1 else "time",
            f"{_change(totals['node_time'], final['node_time'], 'less')} a constant batch of "
            f"{size} {'on all nodes ' * (nodes > 1)}takes{why}{and_so}{hours}",
        ),
        (
            totals["node_changes"],
            "restarts",
            f"{totals['node_changes']}, where the number of nodes changes, "
            f"{plan['restart_minutes']:g} minutes each (restart_minutes), not counted above",
        ),
        *(
            (
                s["move_gib"],
                "mesh",
                f"stage {s['index']} begins with a move of the state to {format_sizes(s['mesh'])}, "
                f"in which a device holds at most {s['move_gib'] or 0:.3g} GiB of it",
            )
            for s in stages
        ),
        (price, "price", price),
    ]
    return [(label, text) for shown, label, text in lines if shown]


def _cost(totals: dict[str, Any], constant: str) -> tuple[str, str]:
    """Describes the run's hours, or how to get them; and its price, "" without one, beside that of
    a `constant` batch, its size as text, "" if the run's batch is constant."""
    if not totals["hours"]:
        return "planned_tflops_per_device=N gives the hours (docs/pods.md)", ""
    hours = f"{amount(totals['node_hours'])} node-hours in {run_time(totals['hours'])}"
    if not totals["price"]:
        return f"{hours}; price_per_device_hour=P gives the price", ""
    beside = amount(totals["constant_final_batch"]["price"])
    beside = f"; {beside} for a constant batch of {constant}" if constant else ""
    price, node_hours = amount(totals["price"]), amount(totals["node_hours"])
    return hours, f"{price} for {node_hours} node-hours (price_per_device_hour){beside}"


def _compiled_lines(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for stage in (s for s in plan["stages"] if s.get("compiled")):
        compiled, costs = stage["compiled"], ", which does not fit"
        if compiled["fits"]:
            costs = (
                f", {compiled['step_seconds']:.3g} s a step, {run_time(compiled['hours'])}, "
                f"{amount(compiled['device_hours'])} {compiled['device']}-hours on "
                f"{compiled['machine']}"
            )
        needs = "{peak:.1f} of {limit:.1f} GiB".format(**compiled["memory_gib"])
        yield "compiled", f"stage {stage['index']}: {needs}{costs}"
    if run := plan["totals"].get("compiled"):
        line = f"the run: {run_time(run['hours'])}, {amount(run['device_hours'])} "
        line += f"{run['device']}-hours"
        if run["price"]:
            line += f", a price of {amount(run['price'])}"
        if hours := plan["totals"]["hours"]:
            line += f"; the {run_time(hours)} above are at planned_tflops_per_device, these by "
            line += "the step times that the compiler gives"
        yield "compiled", line


def _advice(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    last, memory = plan["stages"][-1], plan["stages"][-1]["memory_gib"]
    if smaller := plan["smaller_bubble"]:
        others = ", ".join(map(str, smaller["not_in_stages"]))
        needs = (
            f", but needs a multiple of {count(smaller['rows_multiple'], 'row')} a data-parallel "
            f"rank in each pass of stage {others}"
        )
        yield (
            "pipeline",
            f"its stages idle for {last['pipeline_bubble']:.1%} of a pass; "
            f"num_pipeline_microbatches={smaller['num_pipeline_microbatches']} makes it at most "
            f"{SMALL_BUBBLE:.0%}{needs if others else ''}",
        )
    yield from (("warning", warning) for warning in plan["warnings"])
    limit, sharing = plan["memory_limit"], plan["devices_sharing_memory"]
    host = f", {memory['total'] * sharing:.3g} GiB together, as {sharing} devices share a host's"
    host *= sharing > 1
    available = "; device_memory_gib=N or compile_topology tells what a program can use"
    if limit:
        available = f", of {limit['gib']:.3g} GiB ({limit['of']})"
    yield (
        "memory",
        f"per device in the last stage, estimated: weights {memory['weights']:.3g}, "
        f"optimizer {memory['optimizer']:.3g}, gradients {memory['gradients']:.3g}, "
        f"activations {memory['activations']:.3g} GiB (remat_policy={last['remat_policy']})"
        f"{host}{available}; --fit asks the compiler",
    )
    if last["devices"] > 1 and not any(stage["move_gib"] for stage in plan["stages"]):
        yield "mesh", _mesh_text(last["mesh"])
    if last["devices"] > 1:
        yield "meshes", "maxramp.compile --meshes compares those that these devices can have"
    if plan["missing_files"]:
        missing = ", ".join(plan["missing_files"])
        yield "data", f"no such file on this machine, but the run needs it: {missing}"
    by_source = itertools.groupby(plan["defaults"], key=lambda one: one["source"])
    defaults = [f"{', '.join(x['key'] for x in group)} ({s})" for s, group in by_source]
    if defaults:
        yield "defaults", "; ".join(defaults)


def _mesh_text(sizes: dict[str, int]) -> str:
    """Describes a mesh of two devices or more, also in the words of Megatron."""
    fsdp = math.prod(sizes[axis] for axis in SHARD_AXES)  # of all but experts
    flags = {"tensor": "tensor-model", "stage": "pipeline-model", "expert": "expert-model"}
    flags |= {"context": "context"}
    words = [
        f"{name}-parallel-size {sizes[axis]}" for axis, name in flags.items() if sizes[axis] > 1
    ]
    if fsdp > 1:
        words.append(
            f"weights, gradients and the optimizer's state over {fsdp} ranks (ZeRO stage 3; its "
            "distributed optimizer is stage 1)"
        )
    if sizes["data"] > 1:
        whole = "" if fsdp > 1 else " of the optimizer's state too (no distributed optimizer)"
        words.append(f"{sizes['data']} copies{whole}")
    return f"{format_sizes(sizes)}; in Megatron's words: {', '.join(words)}"


def _change(value: float, reference: float, less: str = "fewer") -> str:
    change = value / reference - 1
    if abs(change) < 5e-4:
        return f"as {'many' if less == 'fewer' else 'much'} as"
    return f"{abs(change):.1%} {less if change < 0 else 'more'} than"


if __name__ == "__main__":
    sys.exit(main())
