"""The plan of a run and its picture: stages with cost and memory, beside constant batches."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxramp.commandline import short
from maxramp.config.keys import Config
from maxramp.config.resolve import meshes_of
from maxramp.model.adapters import without_adapters
from maxramp.model.decoder import num_parameters
from maxramp.model.size import pass_bytes, pipeline_bubble
from maxramp.parallel.mesh import abstract_mesh, bytes_per_device
from maxramp.planning.stages import PlannedRun, price, with_nodes
from maxramp.rampup import adaptive, ladder
from maxramp.rampup.schedule import RampupBatchManager, Stage, Start
from maxramp.stage import StageSpec
from maxramp.training import moving
from maxramp.training.device_memory import GIB
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import abstract_state

SMALL_BUBBLE = 0.1  # of a pipeline, that a plan finds small enough


def make_plan(config: Config) -> dict[str, Any]:
    """plan.json's content for the nodes of a loaded config (default: this machine): stages with
    their part of the run, node-time and memory; totals, also of constant-batch runs over the same
    samples; and the learning rate over samples."""
    config = with_nodes(config)
    run = PlannedRun.from_config(config, meshes_of(config))
    ramp, config = run.ramp, run.config
    program, rate = config.run.program, config.learning_rate
    other = f"program={program}: times and memory are those of maxramp.train for the same keys"
    warnings = ("" if program in ("", "train") else other, *ramp.warnings)
    model = abstract_state(config.recipe, abstract_mesh(run.stages[-1].spec.mesh.sizes)).model
    return ramp.to_json() | {
        "model": {
            "name": config.run.model_name,
            "weights": num_parameters(without_adapters(model)),
        },
        "num_nodes": config.batch.num_nodes,
        "devices_per_node": config.batch.devices_per_node,
        "max_target_length": run.stages[-1].spec.tokens,
        "restart_minutes": config.planning.restart_minutes,
        "warnings": [line for line in warnings if line],
        "stages": [
            stage.to_json() | _part_of_run(run, stage) | {"move_gib": _move(run, before, stage)}
            for before, stage in zip([None, *run.stages], run.stages, strict=False)
        ],
        "totals": _totals(run),
        "adaptive": _bounds_of_ramp(ramp) if config.batch.rampup_policy == "noise" else None,
        "smaller_bubble": _smaller_bubble(config, run.stages),
        "learning_rate": None
        if rate.learning_rate is None
        else _curve(LearningRate.from_keys(rate, ramp), ramp),
    }


def _part_of_run(run: PlannedRun, stage: Stage) -> dict[str, Any]:
    keys, cost, time = run.config.batch, run.cost, run.time(stage)
    steps = run.ramp.run_steps(stage)
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
        "memory_gib": estimate(run.config.recipe, stage.spec),
        "pipeline_bubble": pipeline_bubble(run.config.model, stage.spec),
    }


def _move(run: PlannedRun, before: Stage | None, stage: Stage) -> float | None:
    """Peak GiB per device while the state moves to a stage's mesh; None if it does not move."""
    if not before or before.devices != stage.devices or before.spec.mesh == stage.spec.mesh:
        return None
    meshes = (abstract_mesh(of.spec.mesh.sizes) for of in (before, stage))
    states = (jax.tree.leaves(abstract_state(run.config.recipe, mesh)) for mesh in meshes)
    return moving.peak_bytes(*states) / GIB


def _bytes_as(dtype: Any, tree: Any) -> int:
    return bytes_per_device(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)
    )


def estimate(recipe: Recipe, spec: StageSpec) -> dict[str, float]:
    """GiB per device in a stage: `weights` and `optimizer` exactly; `gradients`, float32 sums and
    copies of weights in the arithmetic's dtype; `activations`, an estimate of what a pass keeps for
    its backward pass plus a block of logits; `total`."""
    sizes, model = spec.mesh.sizes, recipe.model
    state = abstract_state(recipe, abstract_mesh(sizes))
    weights = bytes_per_device(state.model)
    others = [x for x in jax.tree.leaves(state.model) if x.dtype != model.dtype]
    parts = {
        "weights": weights,
        "optimizer": bytes_per_device(state.opt_state),
        "gradients": _bytes_as(jnp.float32, state.trained) + _bytes_as(model.dtype, others),
        "activations": pass_bytes(model, spec, recipe.objective.loss_block_tokens),
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
    """The same samples, in rows as long, at one batch size throughout, on all nodes."""
    keys, cost = run.config.batch, run.cost
    steps = run.ramp.steps_of_constant(batch)
    counts = [run.ramp.run_steps(stage) * stage.global_batch_size for stage in run.stages]
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
    hours, devices = run.cost.hours(node_time), run.config.batch.devices_per_node
    return {"node_hours": hours, "price": price(run.config.planning, hours and hours * devices)}


def _bounds_of_ramp(expected: RampupBatchManager) -> dict[str, Any]:
    keys = expected.keys

    def bound(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        ramp = RampupBatchManager(keys, 1, Start(decided=pairs))
        stages = ramp.stages_between(0, ramp.total_steps)
        batches = [[stage.first_sample, stage.global_batch_size] for stage in stages]
        return {"batches": batches, "steps": ramp.total_steps}

    return {
        "period_samples": ladder.period(keys),
        "earliest": bound(adaptive.simulate(keys, noise=math.inf)),
        "expected": bound(ladder.plan_rungs(keys)),
        "latest": bound(adaptive.simulate(keys, noise=0.0)),
    }


def _smaller_bubble(config: Config, stages: Sequence[Stage]) -> dict[str, Any] | None:
    """How many micro batches make the bubble small: the fewest whose share of a stage divides the
    rows of all passes, else the fewest. None if it is small, or without a pipeline."""
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
    points = np.linspace(0, ramp.total_samples - 1, 200).astype(np.int64)
    steps = sorted({ramp.step_at_sample(int(n)) for n in points})
    starts = [ramp.samples_before(step) for step in steps]
    return {
        "samples": starts,
        "rate": [float(rate(n, ramp.stage_at_sample(n).global_batch_size)) for n in starts],
    }


def draw_plan(plan: dict[str, Any], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    stages, rate = plan["stages"], plan["learning_rate"]
    x = [*(s["first_sample"] for s in stages), plan["total_samples"]]
    panels_of = [
        ("global_batch_size", "tab:blue", "global batch size\n(samples)"),
        ("nodes", "tab:green", "nodes"),
    ]
    if any(s["row_length"] != plan["max_target_length"] for s in stages):
        panels_of.append(("row_length", "tab:purple", "row length\n(tokens)"))
    ratios = (2, *[1] * (len(panels_of) - 1 + bool(rate)))
    figure = Figure(figsize=(7, 1.3 * sum(ratios)), layout="constrained")
    panels = figure.subplots(len(ratios), sharex=True, height_ratios=ratios)
    for axes, (key, color, label) in zip(panels, panels_of, strict=False):
        y = [*(s[key] for s in stages), stages[-1][key]]
        axes.fill_between(x, y, step="post", color=color, alpha=0.15, linewidth=0)
        axes.step(x, y, where="post", color=color, linewidth=1.8)
        axes.set(ylim=(0, max(y) * 1.15), ylabel=label)
    if rate:
        panels[-1].plot(rate["samples"], rate["rate"], color="tab:orange", linewidth=1.8)
        panels[-1].set(ylim=(0, None), ylabel="learning rate")
        panels[-1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    panels[-1].set(xlabel="consumed samples", xlim=(0, plan["total_samples"]))
    panels[-1].xaxis.set_major_formatter(lambda number, place: short(number))
    length = plan["max_target_length"]
    tokens = panels[0].secondary_xaxis(
        "top", functions=(lambda n: n * length, lambda n: n / length)
    )
    tokens.set_xlabel("consumed tokens")
    tokens.xaxis.set_major_formatter(lambda number, place: short(number))
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)
