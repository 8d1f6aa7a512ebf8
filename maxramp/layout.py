"""How a global batch lies on devices: the split into passes, and how many nodes to take.

Glossary
  rank        the devices that together hold one row: model_parallel_size devices
  split       rows of a rank = micro batch (rows per rank in one pass) * accumulation (passes)

This module imports no jax.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from maxramp.errors import ConfigError
from maxramp.notations import BatchKeys, Threshold, exact, show


@dataclasses.dataclass(frozen=True)
class Layout:
    """A global batch on some devices."""

    nodes: int
    devices: int
    per_device_batch_size: Fraction
    gradient_accumulation_steps: int


def rows_per_device_limit(config: Any) -> Fraction:
    """The most rows that a device may hold in one pass."""
    keys = BatchKeys.of(config)
    if keys.micro_batch_size != -1:
        return Fraction(keys.micro_batch_size, keys.model_parallel_size)
    return exact(keys.per_device_batch_size)


def whole_rows_per_device(config: Any) -> Fraction:
    """The same in whole rows of a rank, at least one: a size that any mesh of the job divides."""
    keys = BatchKeys.of(config)
    rows = max(1, int(rows_per_device_limit(keys) * keys.model_parallel_size))
    return Fraction(rows, keys.model_parallel_size)


def _rows_per_rank_limit(keys: BatchKeys, threshold: Threshold) -> int:
    per_device = threshold.rows_per_device or rows_per_device_limit(keys)
    return max(1, int(per_device * keys.model_parallel_size))


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
        if rows % asked:
            return None
        return Layout(nodes, devices, threshold.rows_per_device, asked)
    limit = min(rows, _rows_per_rank_limit(keys, threshold))
    micro = next(size for size in range(limit, 0, -1) if rows % size == 0)
    return Layout(nodes, devices, Fraction(micro, keys.model_parallel_size), rows // micro)


def refusal(
    keys: BatchKeys, index: int, threshold: Threshold, num_devices: int | None
) -> ConfigError:
    """Why a stage cannot run, on the devices of a job or on any nodes, and what could."""
    batch, parallel = threshold.global_batch_size, keys.model_parallel_size
    if num_devices is None and keys.node_schedule != "fixed":
        unit = Fraction(keys.devices_per_node, parallel)
        what = f"divides it over {show(unit)} data-parallel ranks a node"
        remedy = f"use a multiple of {show(max(Fraction(1), unit))}, or fewer devices_per_node"
        if keys.node_schedule == "nemo":
            rows = _rows_per_rank_limit(keys, threshold)
            what = f"gives each of {show(unit)} ranks a node whole micro batches of {rows}"
            remedy = (
                f"use a multiple of {show(max(Fraction(1), unit) * rows)}, a smaller "
                "micro_batch_size, or node_schedule=best"
            )
        return ConfigError(
            f"stage {index} with a global batch of {batch}: no number of nodes from "
            f"{keys.min_nodes} to num_nodes={keys.num_nodes} {what}; {remedy}"
        )
    devices = num_devices or keys.num_devices
    ranks, rest = divmod(devices, parallel)
    if rest or not ranks:
        return ConfigError(
            f"stage {index}: {devices} devices do not divide into groups of {parallel} "
            f"(ici_tensor_parallelism={keys.ici_tensor_parallelism}); use another number of devices"
        )
    spread_over = f"data x fsdp = {ranks}" + (f" groups of {parallel}" if parallel > 1 else "")
    if threshold.rows_per_device:
        rows = threshold.rows_per_device * devices
        return ConfigError(
            f"per_device_batch_size {show(threshold.rows_per_device)} (stage {index}) on {devices} "
            f"devices is {show(rows)} rows, which do not divide over {spread_over}; make "
            "per_device_batch_size, its start and its increment multiples of "
            f"{show(Fraction(1, parallel))}, or use more ici_tensor_parallelism"
        )
    below = batch // ranks * ranks
    near = f"{below} or {below + ranks}" if below else f"{ranks}"
    return ConfigError(
        f"stage {index} with a global batch of {batch} does not divide over {spread_over}; the "
        f"nearest sizes that do are {near}, or use another number of devices"
    )


def schedule_nodes(
    keys: BatchKeys, thresholds: list[Threshold], usable: Callable[[int], bool]
) -> list[Layout | None]:
    """The nodes of every stage by `node_schedule`: fixed (all of them), nemo or best.

    Args:
      keys: the batch keys.
      thresholds: the batch sizes.
      usable: whether the mesh and the model's weights divide over so many devices; `best` takes no
        other numbers.
    """
    nodes, devices = keys.num_nodes, keys.num_devices
    if keys.node_schedule == "nemo":
        return _nemo_schedule(keys, thresholds)
    if keys.node_schedule == "best":
        least = min(keys.min_nodes, nodes)
        candidates = [n for n in range(least, nodes + 1) if usable(n * keys.devices_per_node)]
        return [_best(keys, threshold, candidates) for threshold in thresholds]
    return [spread(keys, threshold, nodes, devices) for threshold in thresholds]


def node_passes(layout: Layout) -> int:
    """What a step costs in node-time: nodes times passes, a pass being one micro batch.

    A device is taken for a whole pass however few rows it holds, so this is least where micro
    batches are full.
    """
    return layout.nodes * layout.gradient_accumulation_steps


def _best(keys: BatchKeys, threshold: Threshold, candidates: list[int]) -> Layout | None:
    """The least node-time, and of equal ones the most nodes: the shortest wait."""
    found = []
    for nodes in candidates:
        if layout := spread(keys, threshold, nodes, nodes * keys.devices_per_node):
            found.append(layout)
    return min(found, key=lambda layout: (node_passes(layout), -layout.nodes), default=None)


def _nemo_schedule(keys: BatchKeys, thresholds: list[Threshold]) -> list[Layout | None]:
    """NeMo's rule, from the largest batch down: the final size gets all nodes, a smaller one the
    largest number up to that of the next larger one that gives whole micro batches to every
    rank."""
    most, layouts = keys.num_nodes, []
    for threshold in reversed(thresholds):
        layout = None
        for nodes in range(most, 0, -1):
            devices = nodes * keys.devices_per_node
            ranks, rest = divmod(devices, keys.model_parallel_size)
            rows = _rows_per_rank_limit(keys, threshold)
            if not rest and ranks and threshold.global_batch_size % (rows * ranks) == 0:
                layout = spread(keys, threshold, nodes, devices)
                most = nodes
                break
        layouts.append(layout)
    return layouts[::-1]
