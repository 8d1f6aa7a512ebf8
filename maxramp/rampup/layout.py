"""Spreads a global batch over devices: the split into passes, and how many nodes. Imports no JAX.

The rows of a rank are its micro batch (rows in one pass, in multiples of its share of a pipeline's
micro batches) times the accumulation (passes). Node-time is nodes * time, of a step or a stage,
with time in passes of the largest micro batch (`pass_price`).
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from maxramp.errors import ConfigError
from maxramp.keys.numbers import exact, nearest_multiples, show
from maxramp.parallel.axes import ROW_AXES
from maxramp.rampup.keys import BatchKeys, Meshes
from maxramp.rampup.notations import Threshold


@dataclasses.dataclass(frozen=True)
class Layout:
    """A global batch on some devices."""

    nodes: int
    devices: int
    per_device_batch_size: Fraction
    gradient_accumulation_steps: int


Layouts = list[Layout | None]  # of stages; None where a batch does not divide


def rows_per_device_limit(keys: BatchKeys) -> Fraction:
    """Returns the most rows that a device may hold in one pass."""
    if keys.micro_batch_size != -1:
        return Fraction(keys.micro_batch_size, keys.model_parallel_size)
    if keys.per_device_batch_size <= 0:  # no size of a pass: any batch fits in one
        return Fraction(keys.global_batch_size, keys.model_parallel_size)
    return exact(keys.per_device_batch_size)


def _rows_per_rank_limit(keys: BatchKeys, rows_per_device: Fraction | None) -> int:
    """Returns the most rows of a rank in one pass, 0 if a pipeline's share is more than that."""
    per_device = rows_per_device or rows_per_device_limit(keys)
    rows = max(1, int(per_device * keys.model_parallel_size))
    return rows // keys.rows_multiple * keys.rows_multiple


def spread(keys: BatchKeys, threshold: Threshold, nodes: int, devices: int) -> Layout | None:
    """Spreads a batch over all `devices`, which the `nodes` have together: by the split of its
    notation if that makes the batch, else in the largest micro batch that divides it. None if no
    split does.
    """
    keys, batch = keys.keys_at(threshold.first_sample), threshold.global_batch_size
    asked = threshold.accumulation
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
    """Returns what stands for the layout of a batch that does not divide; `refusal` says why."""
    devices = num_devices or keys.num_devices
    nodes, passes = -(-devices // keys.devices_per_node), threshold.accumulation or 1
    return Layout(nodes, devices, Fraction(threshold.global_batch_size, devices * passes), passes)


def refusal(
    keys: BatchKeys, index: int, threshold: Threshold, num_devices: int | None
) -> ConfigError:
    """Returns the error of a stage that `spread` cannot lay on the devices (None: any nodes)."""
    phase = keys.phase_at(threshold.first_sample)
    keys = phase.keys
    batch, size = threshold.global_batch_size, threshold.rows_per_device
    parallel, multiple = keys.model_parallel_size, keys.rows_multiple
    micro = f"num_pipeline_microbatches={keys.num_pipeline_microbatches}"
    shares = f" in multiples of {multiple} rows ({micro} / {keys.pipeline_stages} stages)"
    shares = shares if multiple > 1 else ""
    in_phase = f" ({phase})" if phase.first_sample else ""
    stage = f"stage {index}{in_phase} with a global batch of {batch}"
    rows = _rows_per_rank_limit(keys, size)
    if not rows and not threshold.accumulation:
        name, least = "per_device_batch_size", Fraction(multiple, parallel)
        if keys.micro_batch_size != -1:
            name, least = "micro_batch_size", Fraction(multiple)
        return ConfigError(
            f"{stage}: {name}={show(getattr(keys, name))} is too little for a pipeline that "
            f"works{shares}; use {name}={show(least)}, or fewer micro batches"
        )
    fixed = num_devices or keys.node_schedule == "fixed" or bool(size and shares)
    fewest = 1 if keys.node_schedule == "nemo" else min(keys.min_nodes, keys.nodes)
    jobs = [n * keys.devices_per_node for n in range(fewest, keys.nodes + 1)]
    jobs = [num_devices or keys.num_devices] if fixed else jobs
    ranks = [devices // parallel for devices in jobs if devices % parallel == 0]
    if not ranks:
        return ConfigError(
            f"stage {index}: {jobs[-1]} devices do not divide into groups of {parallel} "
            f"(ici_context_parallelism={keys.ici_context_parallelism} x ici_tensor_parallelism="
            f"{keys.ici_tensor_parallelism}); use another number of devices"
        )
    over = f"any number of nodes from {fewest} to num_nodes={keys.nodes}{shares}"
    if fixed:
        has_stages = keys.pipeline_stages > 1
        named = {"stage": has_stages, "expert": keys.sizes["expert"] > 1}
        axes = " x ".join(axis for axis in ROW_AXES if named.get(axis, True))
        groups = f" groups of {parallel}" if parallel > 1 else ""
        over = f"{axes} = {ranks[0]}{groups}{shares}"
    other = "fewer micro batches" if shares else "another number of devices"
    if size:
        unit, devices = Fraction(multiple, parallel), jobs[-1]
        return ConfigError(
            f"per_device_batch_size {show(size)} (stage {index}) on {devices} devices is "
            f"{show(size * devices)} rows, which do not divide over {over}; make "
            f"per_device_batch_size, its start and its increment multiples of {show(unit)} (the "
            f"nearest are {nearest_multiples(size, unit)}), or use "
            f"{other if shares else 'more ici_context_parallelism or ici_tensor_parallelism'}"
        )
    units = [n * (rows if keys.node_schedule == "nemo" and not fixed else multiple) for n in ranks]
    return ConfigError(
        f"{stage} does not divide over {over}; use "
        f"{nearest_multiples(batch, *units)}, or another multiple of {min(units)}, or {other}"
    )


def pass_price(keys: BatchKeys, rows_per_device: Fraction) -> Fraction:
    """Returns the time of a pass, in passes of the largest micro batch: linear in the rows, with a
    fixed part of planned_pass_overhead rows, which makes fewer nodes cheaper for a small batch.
    """
    overhead = exact(keys.planned_pass_overhead)
    return (rows_per_device + overhead) / (rows_per_device_limit(keys) + overhead)


def schedule_nodes(
    keys: BatchKeys,
    thresholds: Sequence[Threshold],
    steps: Sequence[int],
    meshes: Meshes,
    restart_passes: float,
) -> Layouts:
    """Chooses the nodes of every stage by node_schedule=nemo or best, among those with a mesh; None
    where a batch divides over none. `steps` are those of each stage in the run, 0 behind its end;
    `restart_passes` is the time of a change of nodes, in passes of the largest micro batch.
    """
    if keys.node_schedule == "nemo":
        return _nemo_schedule(keys, thresholds, meshes)
    numbers = range(min(keys.min_nodes, keys.nodes), keys.nodes + 1)
    options = [list(_layouts(keys, one, numbers, meshes)) for one in thresholds]
    end = next((i for i, count in enumerate(steps) if not count), len(steps))
    # Stages behind the end of the run have no say in those before it.
    reached = _cheapest(keys, options[:end], steps[:end], restart_passes)
    return reached + _cheapest(keys, options[end:], [1] * len(steps[end:]), restart_passes)


def _layouts(
    keys: BatchKeys, threshold: Threshold, nodes: Iterable[int], meshes: Meshes
) -> Iterator[Layout]:
    for number in nodes:
        layout = spread(keys, threshold, number, number * keys.devices_per_node)
        if layout and meshes(layout.devices, threshold.first_sample):
            yield layout


def fit(
    keys: BatchKeys, threshold: Threshold, planned: int, available: int, meshes: Meshes
) -> Layout | None:
    """Lays a batch on the available nodes, up to those planned. If it divides over none of these
    numbers, it waits for the fewest nodes that it can have; None if it divides over none at all.
    """
    fewest = min(keys.min_nodes, planned)
    layouts = list(_layouts(keys, threshold, range(fewest, planned + 1), meshes))
    fitting = [one for one in layouts if one.nodes <= available]
    return next(iter(fitting[-1:] or layouts), None)


def _cheapest(
    keys: BatchKeys, options: Sequence[list[Layout]], steps: Sequence[int], restart_passes: float
) -> Layouts:
    """Chooses the cheapest layouts for all stages, by dynamic programming over (stage, nodes).

    Nodes shrink only where the stages cannot run otherwise. Then the node-time of the run decides,
    in which every change of nodes costs all nodes a restart. It is weighted: twice the nodes may
    take node_time_tolerance more of it, so of near-equal choices the shortest run wins.
    """

    def weigh(time: float, nodes: int) -> float:
        return time * nodes / (1 + keys.node_time_tolerance) ** math.log2(nodes)

    cost, restart = operator.itemgetter(0), weigh(restart_passes, keys.nodes)
    # By the nodes of the last stage, 0 before the first: what the best choice so far costs (how
    # often nodes shrink, weighted node-time, time), its last layout, and the choice before that.
    best: dict[int, tuple] = {0: ((0, 0.0, 0.0), None, None)}
    for layouts, count in zip(options, steps, strict=True):
        if not layouts:  # it is refused elsewhere, if it is to run
            best = {nodes: (choice[0], None, choice) for nodes, choice in best.items()}
            continue
        following = {}
        for layout in layouts:
            passes = count * layout.gradient_accumulation_steps
            time = passes * float(pass_price(keys, layout.per_device_batch_size))
            node_time, ways = weigh(time, layout.nodes), []
            for nodes, choice in best.items():
                changes, before = nodes not in (0, layout.nodes), choice[0]
                costs = (
                    before[0] + (layout.nodes < nodes),
                    before[1] + node_time + changes * restart,
                    before[2] + time + changes * restart_passes,
                )
                ways.append((costs, layout, choice))
            following[layout.nodes] = min(ways, key=cost)
        best = following
    (_, layout, before), chosen = min(best.values(), key=cost), []
    while before:
        chosen.append(layout)
        _, layout, before = before
    return chosen[::-1]


def _nemo_schedule(keys: BatchKeys, thresholds: Sequence[Threshold], meshes: Meshes) -> Layouts:
    """Chooses nodes by NeMo's rule, from the last batch back. The last one gets all nodes, each one
    before it the largest number that gives whole micro batches to every rank and is no more than
    that of its successor; None where no number does.
    """
    most, chosen = keys.nodes, []
    for threshold in reversed(thresholds):
        held = keys.keys_at(threshold.first_sample)
        rows = _rows_per_rank_limit(held, threshold.rows_per_device)
        whole = Fraction(rows, held.model_parallel_size)
        layouts = _layouts(keys, threshold, range(most, 0, -1), meshes)
        layout = next((one for one in layouts if one.per_device_batch_size == whole), None)
        most = layout.nodes if layout else most
        chosen.append(layout)
    return chosen[::-1]
