"""How a global batch lies on devices: the split into passes, and how many nodes to take.

Glossary
  rank        the devices that together hold one row: model_parallel_size devices
  multiple    of which the rows of a rank in one pass are: its share of a pipeline's micro batches
  split       rows of a rank = micro batch (rows per rank in one pass) * accumulation (passes)
  node-time   nodes * time, both of a step or a stage; time is counted in passes of the largest
              micro batch (`pass_price`)

This module imports no jax.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from maxramp.errors import ConfigError
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.notations import Threshold
from maxramp.rampup.numbers import exact, show


@dataclasses.dataclass(frozen=True)
class Layout:
    """A global batch on some devices."""

    nodes: int
    devices: int
    per_device_batch_size: Fraction
    gradient_accumulation_steps: int


def rows_per_device_limit(config: Any) -> Fraction:
    """The most rows that a device may hold in one pass."""
    keys = BatchKeys.read(config)
    if keys.micro_batch_size != -1:
        return Fraction(keys.micro_batch_size, keys.model_parallel_size)
    if keys.per_device_batch_size <= 0:  # no size of a pass is given: any batch is one
        return Fraction(keys.global_batch_size, keys.model_parallel_size)
    return exact(keys.per_device_batch_size)


def whole_rows_per_device(config: Any) -> Fraction:
    """The same in rows of a rank that it can run: a size that any mesh of the job divides."""
    keys = BatchKeys.read(config)
    rows = max(keys.rows_multiple, _rows_per_rank_limit(keys, rows_per_device_limit(keys)))
    return Fraction(rows, keys.model_parallel_size)


def _rows_per_rank_limit(keys: BatchKeys, rows_per_device: Fraction | None) -> int:
    """The most rows of a rank in one pass; 0 where a pipeline's share is more than that."""
    per_device = rows_per_device or rows_per_device_limit(keys)
    rows = max(1, int(per_device * keys.model_parallel_size))
    return rows // keys.rows_multiple * keys.rows_multiple


def spread(keys: BatchKeys, threshold: Threshold, nodes: int, devices: int) -> Layout | None:
    """The largest micro batch up to the limit that divides; None where no split does.

    The split that a notation asks for by itself is taken as it is where it makes the batch.
    """
    batch, asked = threshold.global_batch_size, threshold.accumulation
    ranks, rest = divmod(devices, keys.model_parallel_size)
    if rest or not ranks or batch % ranks:
        return None
    rows = batch // ranks
    if asked and threshold.rows_per_device * devices * asked == batch:
        if rows % (asked * keys.rows_multiple):
            return None
        return Layout(nodes, devices, threshold.rows_per_device, asked)
    if rows % keys.rows_multiple:
        return None
    limit = min(rows, _rows_per_rank_limit(keys, threshold.rows_per_device))
    sizes = range(limit, 0, -keys.rows_multiple)
    micro = next((size for size in sizes if rows % size == 0), None)
    if micro is None:
        return None
    return Layout(nodes, devices, Fraction(micro, keys.model_parallel_size), rows // micro)


def uneven(keys: BatchKeys, threshold: Threshold, num_devices: int | None) -> Layout:
    """A batch that divides over no devices, on those of a job or on all nodes: for its refusal."""
    devices = num_devices or keys.num_devices
    nodes = -(-num_devices // keys.devices_per_node) if num_devices else keys.nodes
    passes = threshold.accumulation or 1
    size = Fraction(threshold.global_batch_size, devices * passes)
    return Layout(nodes, devices, size, passes)


def refusal(
    keys: BatchKeys, index: int, threshold: Threshold, num_devices: int | None
) -> ConfigError:
    """Why a stage cannot run, on the devices of a job or on any nodes, and what could."""
    pipeline = ""
    if keys.rows_multiple > 1:
        pipeline = (
            f" in multiples of {keys.rows_multiple} rows (num_pipeline_microbatches="
            f"{keys.num_pipeline_microbatches} / {keys.pipeline_stages} stages)"
        )
    stage = f"stage {index} with a global batch of {threshold.global_batch_size}"
    if not _rows_per_rank_limit(keys, threshold.rows_per_device) and not threshold.accumulation:
        return _too_little_for_pipeline(keys, stage, pipeline)
    of_all_devices = keys.rows_multiple > 1 and threshold.rows_per_device
    if num_devices is None and keys.node_schedule != "fixed" and not of_all_devices:
        return _no_nodes(keys, stage, threshold, pipeline)
    devices, parallel = num_devices or keys.num_devices, keys.model_parallel_size
    ranks, rest = divmod(devices, parallel)
    if rest or not ranks:
        return ConfigError(
            f"stage {index}: {devices} devices do not divide into groups of {parallel} "
            f"(ici_tensor_parallelism={keys.ici_tensor_parallelism}); use another number of devices"
        )
    axes = "data x stage x fsdp" if keys.pipeline_stages > 1 else "data x fsdp"
    groups = f" groups of {parallel}" if parallel > 1 else ""
    spread_over = f"{axes} = {ranks}{groups}{pipeline}"
    if threshold.rows_per_device:
        size, unit = threshold.rows_per_device, Fraction(keys.rows_multiple, parallel)
        rows, below = size * devices, size // unit * unit
        near = f"{show(below)} or {show(below + unit)}" if below else show(unit)
        remedy = "fewer micro batches" if pipeline else "more ici_tensor_parallelism"
        return ConfigError(
            f"per_device_batch_size {show(size)} (stage {index}) on {devices} "
            f"devices is {show(rows)} rows, which do not divide over {spread_over}; make "
            "per_device_batch_size, its start and its increment multiples of "
            f"{show(unit)} (the nearest are {near}), or use {remedy}"
        )
    unit = ranks * keys.rows_multiple
    below = threshold.global_batch_size // unit * unit
    near = f"{below} or {below + unit}" if below else f"{unit}"
    return ConfigError(
        f"{stage} does not divide over {spread_over}; the "
        f"nearest sizes that do are {near}, or use another number of devices"
    )


def _too_little_for_pipeline(keys: BatchKeys, stage: str, pipeline: str) -> ConfigError:
    """That a pass holds too few rows for the pipeline, whatever the devices."""
    given = f"per_device_batch_size={keys.per_device_batch_size:g}"
    least = Fraction(keys.rows_multiple, keys.model_parallel_size)
    enough = f"per_device_batch_size={show(least)}"
    if keys.micro_batch_size != -1:
        given = f"micro_batch_size={keys.micro_batch_size}"
        enough = f"micro_batch_size={keys.rows_multiple}"
    return ConfigError(
        f"{stage}: {given} is too little for a pipeline "
        f"that works{pipeline}; use {enough}, or fewer micro batches"
    )


def _no_nodes(keys: BatchKeys, stage: str, threshold: Threshold, pipeline: str) -> ConfigError:
    """That no number of nodes divides a batch, and the nearest batches that one does."""
    batch, rows = threshold.global_batch_size, keys.rows_multiple
    unit = Fraction(keys.devices_per_node, keys.model_parallel_size)
    ranks = f"{show(unit)} data-parallel {'rank' if unit == 1 else 'ranks'} a node"
    what = f"divides it over {ranks}{pipeline}"
    fewest = min(keys.min_nodes, keys.nodes)
    other = "fewer devices_per_node" if keys.devices_per_node > 1 else "other num_nodes"
    other = "fewer micro batches" if pipeline else other
    if keys.node_schedule == "nemo":
        rows = _rows_per_rank_limit(keys, threshold.rows_per_device)
        what = f"gives each of {ranks} whole micro batches of {rows}"
        fewest, other = 1, "a smaller micro_batch_size, or node_schedule=best"
    numbers = [n for n in range(fewest, keys.nodes + 1) if rows and n * unit % 1 == 0]
    units = [int(n * unit) * rows for n in numbers]
    least = min(units, default=max(Fraction(1), unit) * rows)
    remedy = f"use a multiple of {show(least)}"
    below = max((batch // size * size for size in units), default=0)
    if units and below < batch:
        above = min(-(-batch // size) * size for size in units)
        nearest = f"are {below} and {above}" if below else f"is {above}"
        remedy += f" (the nearest {nearest})"
    return ConfigError(
        f"{stage}: no number of nodes from "
        f"{fewest} to num_nodes={keys.nodes} {what}; {remedy}, or {other}"
    )


def pass_price(keys: BatchKeys, rows_per_device: Fraction) -> Fraction:
    """What a pass with so many rows per device takes, in passes of the largest micro batch.

    Linear in the rows with a fixed part, planned_pass_overhead rows' worth: the one reason why
    small micro batches cost more per row, and so why fewer nodes are cheaper for a small batch.
    """
    overhead = exact(keys.planned_pass_overhead)
    return (rows_per_device + overhead) / (rows_per_device_limit(keys) + overhead)


def schedule_nodes(
    keys: BatchKeys,
    thresholds: Sequence[Threshold],
    steps: Sequence[int],
    usable: Callable[[int], bool],
    restart_passes: float,
) -> list[Layout | None]:
    """The nodes of every stage by `node_schedule`: fixed (all of them), nemo or best.

    Args:
      keys: the batch keys.
      thresholds: the batch size of each stage.
      steps: how many the run takes of each stage; 0 where it ends before.
      usable: whether the mesh and the model's weights divide over so many devices; `best` and
        `nemo` take no other numbers.
      restart_passes: how long a change of nodes takes, in passes of the largest micro batch.

    Returns:
      A layout per stage; None where no number of nodes divides its batch.
    """
    nodes, devices = keys.nodes, keys.num_devices
    if keys.node_schedule == "nemo":
        return _nemo_schedule(keys, thresholds, usable)
    if keys.node_schedule == "best":
        options = [_options(keys, threshold, usable) for threshold in thresholds]
        end = next((i for i, count in enumerate(steps) if not count), len(steps))
        # Stages behind the end of the run have no say in those before it.
        reached = _cheapest(keys, options[:end], steps[:end], restart_passes)
        return reached + _cheapest(keys, options[end:], [1] * len(steps[end:]), restart_passes)
    return [spread(keys, threshold, nodes, devices) for threshold in thresholds]


def _options(keys: BatchKeys, threshold: Threshold, usable: Callable[[int], bool]) -> list[Layout]:
    found = []
    for nodes in range(min(keys.min_nodes, keys.nodes), keys.nodes + 1):
        devices = nodes * keys.devices_per_node
        layout = spread(keys, threshold, nodes, devices)
        if layout and usable(devices):
            found.append(layout)
    return found


class _Plan(NamedTuple):
    """A choice for the stages so far. Choices that end on the same nodes compete by their cost."""

    cost: tuple[int, float, float]  # how often nodes shrink; weighted node-time; time
    nodes: int  # of the last stage; 0 before the first
    layout: Layout | None
    before: "_Plan | None"


def _cheapest(
    keys: BatchKeys, options: Sequence[list[Layout]], steps: Sequence[int], restart_passes: float
) -> list[Layout | None]:
    """The cheapest choice of a layout for every stage, by dynamic programming over (stage, nodes).

    Nodes shrink only where the stages cannot run otherwise. Then the node-time of the run decides,
    in which every change of nodes costs all nodes a restart. It is weighted so that twice the nodes
    may take node_time_tolerance more of it: of near-equal choices the shortest run is taken.
    """

    def weighted(time: float, nodes: int) -> float:
        return time * nodes / (1 + keys.node_time_tolerance) ** math.log2(nodes)

    restart = weighted(restart_passes, keys.nodes)
    plans = [_Plan((0, 0.0, 0.0), 0, None, None)]
    for layouts, count in zip(options, steps, strict=True):
        if not layouts:  # it is refused elsewhere, if it is to run
            plans = [plan._replace(layout=None, before=plan) for plan in plans]
            continue
        following = []
        for layout in layouts:
            passes = count * layout.gradient_accumulation_steps
            time = passes * float(pass_price(keys, layout.per_device_batch_size))
            stage, ways = weighted(time, layout.nodes), []
            for plan in plans:
                changes = plan.nodes not in (0, layout.nodes)
                shrinks, node_time, time_before = plan.cost
                cost = (
                    shrinks + (layout.nodes < plan.nodes),
                    node_time + stage + changes * restart,
                    time_before + time + changes * restart_passes,
                )
                ways.append(_Plan(cost, layout.nodes, layout, plan))
            following.append(min(ways, key=_cost))
        plans = following
    plan, chosen = min(plans, key=_cost), []
    while plan.before:
        chosen.append(plan.layout)
        plan = plan.before
    return chosen[::-1]


def _cost(plan: _Plan) -> tuple[int, float, float]:
    return plan.cost


def _nemo_schedule(
    keys: BatchKeys, thresholds: Sequence[Threshold], usable: Callable[[int], bool]
) -> list[Layout | None]:
    """NeMo's rule, from the largest batch down.

    The final size gets all nodes. A smaller one gets the largest number, up to that of the next
    larger one, that gives whole micro batches to every rank. Numbers of which the model's mesh
    cannot be made are passed over.
    """
    most, layouts = keys.nodes, []
    for threshold in reversed(thresholds):
        layout = None
        for nodes in range(most, 0, -1):
            devices = nodes * keys.devices_per_node
            ranks, rest = divmod(devices, keys.model_parallel_size)
            rows = _rows_per_rank_limit(keys, threshold.rows_per_device)
            unit = 0 if rest else rows * ranks
            if unit and threshold.global_batch_size % unit == 0 and usable(devices):
                layout = spread(keys, threshold, nodes, devices)
                most = nodes
                break
        layouts.append(layout)
    return layouts[::-1]
