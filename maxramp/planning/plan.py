"""The plan of a run and its picture: stages with cost and memory, beside constant batches."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxramp.commandline import amount, count, short
from maxramp.config.keys import Config
from maxramp.config.load import MAXTEXT, load
from maxramp.config.resolve import meshes_of
from maxramp.data.mixtures import missing_files
from maxramp.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    draw_steps,
    make_panels,
    name_consumption,
    name_values,
    save_plot,
)
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.keys.base import CONFIGS, base
from maxramp.model.adapters import without_adapters
from maxramp.model.decoder import num_active_parameters, num_parameters
from maxramp.model.size import describe_weights, pass_bytes, pipeline_bubble
from maxramp.parallel.mesh import abstract_mesh, bytes_per_device
from maxramp.planning.machine import planned_platform, usable_memory
from maxramp.planning.stages import PlannedRun, price, with_nodes
from maxramp.rampup import ladder
from maxramp.rampup.schedule import RampupBatchManager, ResumePoint, Stage
from maxramp.stage import StageSpec
from maxramp.training import moving
from maxramp.training.device_memory import GIB
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import abstract_state

SMALL_BUBBLE = 0.1  # of a pipeline, that a plan finds small enough


# Keys that matter to a run and that a plan names where its own config does not give them, and those
# of which one gives the length.
_NAMED = ("learning_rate", "opt_type", "remat_policy", "dtype", "weight_dtype", "max_target_length")
_LENGTHS = ("steps", "total_samples", "total_tokens", "num_epoch")


def make_plan(config: Config, sources: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Makes the content of plan.json for a loaded config and its nodes (default: this machine).

    It has the stages with their part of the run, node-time and memory; totals, also of runs of
    constant batch over the same samples; the learning rate over samples; and the keys that matter
    and that `sources` (`config.load.find_sources`) does not name, none of them with sources=None. A
    ConfigError if the devices cannot run a stage.
    """
    config = with_nodes(config)
    run = PlannedRun.from_config(config, meshes_of(config))
    ramp, config = run.ramp, run.config
    program, rate = config.run.program, config.learning_rate
    other = f"program={program}: times and memory are those of maxramp.train for the same keys"
    limit = usable_memory(config.planning)
    is_cpu = config.backend.hardware == "cpu" and not config.planning.compile_topology
    state = abstract_state(config.recipe, abstract_mesh(run.stages[-1].spec.mesh.sizes))
    model = without_adapters(state.model)
    weights, active = num_parameters(model), num_active_parameters(model, config.model)
    stages = [
        stage.to_json() | _part_of_run(run, stage) | {"move_gib": _move(run, before, stage)}
        for before, stage in zip([None, *run.stages], run.stages, strict=False)
    ]
    warnings = (
        "" if program in ("", "train") else other,
        *ramp.warnings,
        "" if sources is None else _default_rate_warning(config, sources, weights),
        _memory_warning(stages, *limit),
    )
    return ramp.to_json() | {
        "run_name": config.run.run_name,
        "model": {"name": config.run.model_name, "weights": weights, "active": active},
        "num_nodes": config.batch.num_nodes,
        "devices_per_node": config.batch.devices_per_node,
        "max_target_length": run.stages[-1].spec.tokens,
        "restart_minutes": config.planning.restart_minutes,
        "warnings": [line for line in warnings if line],
        "devices_sharing_memory": config.batch.devices_per_node if is_cpu else 1,
        "memory_limit": dict(zip(("gib", "of"), limit, strict=True)) if limit[0] else None,
        "stages": stages,
        "totals": _totals(run),
        "missing_files": missing_files(config.data),
        "defaults": [] if sources is None else _defaults(config, sources),
        "adaptive": _bounds_of_ramp(ramp) if config.batch.rampup_policy == "noise" else None,
        "smaller_bubble": _smaller_bubble(config, run.stages),
        "learning_rate": None
        if rate.learning_rate is None
        else _curve(LearningRate.from_keys(rate, ramp), ramp),
    }


def _defaults(config: Config, sources: Mapping[str, str]) -> list[dict[str, str]]:
    """Lists keys that matter and come from base.yml, MaxText's or the model's file, by source;
    `config` is loaded or resolved, and `sources` name the files of keys that others set."""
    files = (str(CONFIGS / "models"), str(MAXTEXT))
    own = {name for name, source in sources.items() if not source.startswith(files)}
    defaults = []
    for name in (*_NAMED, *([] if own & {*_LENGTHS} else ["steps"])):
        if name not in own:
            source = sources.get(name, "configs/base.yml").replace(str(CONFIGS), "configs")
            defaults.append({"key": f"{name}={config.values[name]}", "source": source})
    return sorted(defaults, key=lambda one: one["source"])


def _default_rate_warning(config: Config, sources: Mapping[str, str], weights: int) -> str:
    """Returns a warning if a model of other sizes has base.yml's learning rate, else ""."""
    has_other_sizes = any(
        name.startswith("base_") and config.values[name] != base()[name]
        for name in sources.keys() & {*config.model.names()}
    )
    if not has_other_sizes or "learning_rate" in sources:
        return ""
    return (
        f"learning_rate={config.values['learning_rate']:g} is that of base.yml's model of 0.87M "
        f"weights, and this one has {short(weights)}; give its own"
    )


def _memory_warning(stages: Sequence[dict[str, Any]], gib: float, source: str) -> str:
    """Returns a warning if a stage is estimated above the memory of a program, else "". `gib` is
    that memory, 0 where unknown, and `source` says where it comes from."""
    needs = {stage["index"]: stage["memory_gib"]["total"] for stage in stages}
    largest = max(needs, key=needs.__getitem__)
    if not gib or needs[largest] <= gib:
        return ""
    return (
        f"stage {largest} is estimated at {needs[largest]:.3g} GiB per device, and a program can "
        f"use {gib:.3g} ({source}); a larger fsdp or tensor axis, smaller passes "
        "(micro_batch_size), or remat_policy=full takes less, and --fit asks the compiler"
    )


def _part_of_run(run: PlannedRun, stage: Stage) -> dict[str, Any]:
    """Returns a stage's part of the run: what plan.json has beside `Stage.to_json`."""
    keys, cost, time = run.config.batch, run.cost, run.time(stage)
    platform = planned_platform(run.config.planning, run.config.backend.hardware)
    steps = run.ramp.steps_in_run(stage)
    samples = steps * stage.global_batch_size
    time_of_all = steps * cost.step_time(stage.global_batch_size / keys.num_devices)
    time_of_all *= run.share(stage)
    return {
        "run_steps": steps,
        "run_samples": samples,
        "run_tokens": samples * stage.spec.tokens,
        "share_of_node_time": time * stage.nodes / run.node_time,
        "hours": cost.hours(time),
        "node_hours": cost.hours(time * stage.nodes),
        "hours_against_all_nodes": time / time_of_all,
        "node_hours_against_all_nodes": time * stage.nodes / (time_of_all * keys.nodes),
        "rows_per_rank": stage.spec.rows * stage.spec.rows_of_sample / stage.spec.mesh.ranks,
        "remat_policy": stage.spec.remat_policy,
        "memory_gib": estimate(run.config.recipe, stage.spec, platform),
        "pipeline_bubble": pipeline_bubble(run.config.model, stage.spec),
    }


def _move(run: PlannedRun, before: Stage | None, stage: Stage) -> float | None:
    """Returns the peak GiB per device while the state moves to a stage's mesh; None if it stays."""
    if not before or before.devices != stage.devices or before.spec.mesh == stage.spec.mesh:
        return None
    meshes = (abstract_mesh(one.spec.mesh.sizes) for one in (before, stage))
    states = (jax.tree.leaves(abstract_state(run.config.recipe, mesh)) for mesh in meshes)
    return moving.peak_bytes(*states) / GIB


def _bytes_as(dtype: Any, tree: Any) -> int:
    return bytes_per_device(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)
    )


def estimate(recipe: Recipe, spec: StageSpec, platform: str | None = None) -> dict[str, float]:
    """Estimates the GiB per device of a platform (None: of any) in a stage, with resolved keys.

    Returns `weights` and `optimizer`, exactly; `gradients`, float32 sums and copies of weights in
    the arithmetic's dtype; `activations`, what a pass keeps for its backward pass, roughly, plus a
    block of logits; `total`.
    """
    sizes, model = spec.mesh.sizes, recipe.model
    state = abstract_state(recipe, abstract_mesh(sizes))
    weights = bytes_per_device(state.model)
    others = [x for x in jax.tree.leaves(state.model) if x.dtype != model.dtype]
    parts = {
        "weights": weights,
        "optimizer": bytes_per_device(state.opt_state),
        "gradients": _bytes_as(jnp.float32, state.trained) + _bytes_as(model.dtype, others),
        "activations": pass_bytes(model, spec, recipe.loss.loss_block_tokens, platform),
    }
    parts["total"] = sum(parts.values())
    return {name: size / GIB for name, size in parts.items()}


def _totals(run: PlannedRun) -> dict[str, Any]:
    stages, cost = run.stages, run.cost
    return {
        "node_changes": sum(a.nodes != b.nodes for a, b in itertools.pairwise(stages)),
        "node_time": run.node_time,
        "hours": cost.hours(sum(map(run.time, stages))),
        **_paid(run, run.node_time),
        "constant_first_batch": _constant(run, stages[0].global_batch_size),
        "constant_final_batch": _constant(run, stages[-1].global_batch_size),
    }


def _constant(run: PlannedRun, batch: int) -> dict[str, Any]:
    """Plans the same samples, in rows of the same length, at one global batch size on all nodes;
    node_time is in the time of a pass of the largest micro batch."""
    keys, cost = run.config.batch, run.cost
    steps = run.ramp.steps_of_constant(batch)
    counts = [run.ramp.steps_in_run(stage) * stage.global_batch_size for stage in run.stages]
    share = np.average([run.share(stage) for stage in run.stages], weights=counts)
    time = steps * cost.step_time(batch / keys.num_devices) * float(share)
    return {
        "global_batch_size": batch,
        "steps": steps,
        "node_time": time * keys.nodes,
        "hours": cost.hours(time),
        **_paid(run, time * keys.nodes),
    }


def _paid(run: PlannedRun, node_time: float) -> dict[str, float | None]:
    """Returns what a node-time costs; None where the time of a pass or the price is unknown."""
    hours, devices = run.cost.hours(node_time), run.config.batch.devices_per_node
    return {"node_hours": hours, "price": price(run.config.planning, hours and hours * devices)}


def _bounds_of_ramp(expected: RampupBatchManager) -> dict[str, Any]:
    """Returns a ramp that is decided by the noise scale as it would be at the earliest, as
    expected, and at the latest, in samples."""
    keys = expected.keys

    def bound(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        ramp = RampupBatchManager(keys, 1, ResumePoint(rungs=pairs))
        stages = ramp.stages_between(0, ramp.total_steps)
        batches = [[stage.first_sample, stage.global_batch_size] for stage in stages]
        return {"batches": batches, "steps": ramp.total_steps}

    return {
        "period_samples": ladder.period(keys),
        "earliest": bound(ladder.simulate(keys, lambda rung: 0)),
        "expected": bound(ladder.expected_rungs(keys)),
        "latest": bound(ladder.simulate(keys, lambda rung: math.inf)),
    }


def _smaller_bubble(config: Config, stages: Sequence[Stage]) -> dict[str, Any] | None:
    """Finds how many micro batches make the last stage's bubble small (`pipeline_bubble`) on a
    resolved config: the fewest whose share of a pipeline's stage divides the rows of all passes,
    else the fewest. None if it is small, or without a pipeline."""
    spec, model = stages[-1].spec, config.model
    if pipeline_bubble(model, spec) <= SMALL_BUBBLE:
        return None
    count = spec.mesh.pipeline_stages
    fewest = (count - 1) * (1 / SMALL_BUBBLE - 1) / model.num_pipeline_repeats
    least = math.ceil(fewest / count - 1e-9)
    rows = [stage.spec.rows // stage.spec.mesh.ranks for stage in stages]
    common = math.gcd(*rows)
    share = next((n for n in range(least, common + 1) if common % n == 0), least)
    return {
        "num_pipeline_microbatches": share * count,
        "rows_multiple": share,
        "not_in_stages": [s.index for s, n in zip(stages, rows, strict=True) if n % share],
    }


def _curve(rate: LearningRate, ramp: RampupBatchManager) -> dict[str, list]:
    """Returns the learning rate at about 400 samples, half of them evenly apart and half by their
    logarithm, all of them where a step begins."""
    last = ramp.total_samples - 1
    points = [*np.linspace(0, last, 200), *np.geomspace(1, max(1, last), 200)]
    steps = sorted({ramp.step_at_sample(int(n)) for n in points})
    starts = [ramp.samples_before(step) for step in steps]
    return {
        "samples": starts,
        "rate": [float(rate(n, ramp.stage_at_sample(n).global_batch_size)) for n in starts],
    }


def find_published(names: str) -> list[dict[str, Any]]:
    """Finds runs by their names, which commas separate, a ConfigError for another name; returns
    each as `summarize_ramp` does."""
    files = {path.stem: path for path in sorted((CONFIGS / "schedules").glob("*.yml"))}
    runs = []
    for name in names.split(","):
        if name not in files:
            raise ConfigError(f"--beside {name}: no such run; there are {', '.join(files)}")
        keys = load([str(files[name])], note=lambda line: None).batch
        ramp = RampupBatchManager(keys, 1)
        stages = ramp.stages_between(0, ramp.total_steps)
        pairs = [(stage.first_sample, stage.global_batch_size) for stage in stages]
        runs.append(summarize_ramp(name, pairs, ramp.total_samples, keys.max_target_length))
    return runs


def summarize_ramp(
    name: str, stages: list[tuple[int, int]], end: int, sample_tokens: int
) -> dict[str, Any]:
    """Converts a ramp to tokens, from the (first sample, global batch size) of its stages, at least
    one.

    Returns `name`; `starts` and `batches` where the batch changes; `end` of the run.
    """
    changes = (next(same) for _, same in itertools.groupby(stages, key=lambda pair: pair[1]))
    starts, batches = ([n * sample_tokens for n in x] for x in zip(*changes, strict=True))
    return {"name": name, "starts": starts, "batches": batches, "end": end * sample_tokens}


def _draw_beside(axes: Any, plan: dict[str, Any], end: int) -> None:
    """Draws published ramps, `beside` of the plan, in grey over samples of this run up to `end`."""
    length, top, styles = plan["max_target_length"], axes.get_ylim()[1], ("--", ":", "-.", "-")
    for run, style in zip(plan["beside"], itertools.cycle(styles), strict=False):
        starts, sizes = [*run["starts"], run["end"]], [*run["batches"], run["batches"][-1]]
        x, y = ([n / length for n in numbers] for numbers in (starts, sizes))
        axes.step(x, y, style, where="post", color="0.5", linewidth=1, label=run["name"])
        top = max(top, *(1.15 * b for a, b in zip(x, y, strict=True) if a < end))
    axes.set_ylim(0, top)
    name_values(axes, [s["global_batch_size"] for s in plan["stages"]])
    axes.legend(frameon=False, fontsize="small", loc="upper left")


def draw_plan(plan: dict[str, Any], path: Place) -> None:
    """Draws batch, nodes, row length and learning rate of a `make_plan` over the samples, on a log
    axis if the ramp takes less than a quarter of them; raises as `save_plot`."""
    stages, rate, end = plan["stages"], plan["learning_rate"], plan["total_samples"]
    numbers = (
        ("global_batch_size", BLUE, "global batch\n(samples)"),
        ("nodes", GREEN, "nodes"),
        ("row_length", PURPLE, "row length\n(tokens)"),
    )
    shown = [x for i, x in enumerate(numbers) if not i or len({s[x[0]] for s in stages}) > 1]
    names = dict.fromkeys([plan["run_name"], plan["model"]["name"]])
    weights = plan["model"]["weights"], plan["model"]["active"]
    model = f"{': '.join(names)}, {describe_weights(*weights, short)}"
    nodes, devices = count(plan["num_nodes"], "node"), count(plan["devices_per_node"], "device")
    title = f"{model}\n{short(plan['total_tokens'])} tokens on {nodes} of {devices}"
    if hours := plan["totals"]["node_hours"]:
        title += f", {amount(hours)} node-hours"
    if cost := plan["totals"]["price"]:
        title += f", a price of {amount(cost)}"
    figure, panels = make_panels((2.6, *[1.3] * (len(shown) - 1 + bool(rate))), title)
    x = [*(s["first_sample"] for s in stages), end]
    if is_log := len(stages) > 1 and x[-2] < end / 4:
        x[0] = max(stages[0]["global_batch_size"], x[1] // 10)  # a log axis has no 0
        panels[-1].set_xscale("log")
    for axes, (key, color, label) in zip(panels, shown, strict=False):
        draw_steps(axes, x, [s[key] for s in stages], color, label)
    if "beside" in plan:
        _draw_beside(panels[0], plan, end)
    if rate:
        panels[-1].plot(rate["samples"], rate["rate"], color=ORANGE, linewidth=1.8)
        panels[-1].set(ylim=(0, max(rate["rate"]) * 1.15), ylabel="learning\nrate")
        name_values(panels[-1], [0, max(rate["rate"]), rate["rate"][-1]])
    panels[-1].set_xlim(x[0] if is_log else 0, end)
    name_consumption(panels, plan["max_target_length"])
    figure.align_ylabels()
    save_plot(figure, path)
