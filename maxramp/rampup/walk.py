"""The walk over a run: thresholds -> when the batch changes, and how it then lies on the devices.

This module imports no jax.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxramp.rampup import ladder, layout, notations
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.layout import Layout
from maxramp.rampup.notations import Threshold
from maxramp.rampup.spec import Meshes


class Stretch(NamedTuple):
    """Steps of one global batch size; `steps` is None where it has no end."""

    threshold: Threshold
    first_step: int
    first_sample: int
    steps: int | None


def walk(thresholds: Sequence[Threshold], step: int, sample: int) -> Iterator[Stretch]:
    """The stretches of thresholds, from a step and a sample on.

    Each ends with the first step that reaches the next threshold. A threshold that is passed within
    a step of the stretch before gives none.
    """
    ends = [threshold.first_sample for threshold in thresholds[1:]]
    for threshold, end in zip(thresholds, [*ends, None], strict=True):
        steps = None
        if end is not None:
            steps = max(0, -(-(end - sample) // threshold.global_batch_size))
            if steps == 0:
                continue
        yield Stretch(threshold, step, sample, steps)
        if steps is not None:
            step, sample = step + steps, sample + steps * threshold.global_batch_size


def undecided(keys: BatchKeys, thresholds: Sequence[Threshold]) -> list[Stretch]:
    """The rungs above the last threshold, under rampup_policy=noise, from step -1 on."""
    if keys.rampup_policy != "noise":
        return []
    last = thresholds[-1].global_batch_size
    sizes = [size for size in keys.rampup_ladder if size > last]
    return [Stretch(Threshold(-1, size), -1, -1, None) for size in sizes]


def layouts(
    keys: BatchKeys,
    stretches: Sequence[Stretch],
    num_devices: int | None,
    meshes: Meshes,
    restart_passes: float,
) -> list[Layout | None]:
    """How the batch of every stretch lies on its devices; None where it does not divide.

    Args:
      keys: the batch keys.
      stretches: of the walk, and those that are `undecided`.
      num_devices: of one job; None = on the nodes that `node_schedule` gives each.
      meshes, restart_passes: as of `layout.schedule_nodes`.
    """
    if num_devices:
        nodes = -(-num_devices // keys.devices_per_node)
        return [layout.spread(keys, one.threshold, nodes, num_devices) for one in stretches]
    if keys.rampup_policy != "noise":
        return _on_nodes(keys, stretches, meshes, restart_passes)
    # The nodes of a size do not depend on when it will be decided.
    decided = [Threshold(*pair) for pair in ladder.expected(keys)]
    expected = list(walk(notations.thresholds(keys) + decided, 0, 0))
    sizes = [one.threshold.global_batch_size for one in expected]
    by_size = dict(zip(sizes, _on_nodes(keys, expected, meshes, restart_passes), strict=True))
    return [by_size[one.threshold.global_batch_size] for one in stretches]


def _on_nodes(
    keys: BatchKeys,
    stretches: Sequence[Stretch],
    meshes: Meshes,
    restart_passes: float,
) -> list[Layout | None]:
    """The layout of every stretch of a walk on the nodes that `node_schedule` gives it."""
    thresholds = [one.threshold for one in stretches]
    steps = [_steps_of_run(keys, one) for one in stretches]
    return layout.schedule_nodes(keys, thresholds, steps, meshes, restart_passes)


_LONG = 10**6  # steps that the last stretch of a run without a length is planned with


def _steps_of_run(keys: BatchKeys, stretch: Stretch) -> int:
    """Those of a stretch's steps that come before the end of the run."""
    left = _LONG if stretch.steps is None else stretch.steps
    if keys.steps != -1:
        left = keys.steps - stretch.first_step
    elif (samples := keys.samples_of_run) != -1:
        left = -(-(samples - stretch.first_sample) // stretch.threshold.global_batch_size)
    return max(0, left if stretch.steps is None else min(left, stretch.steps))
