"""The axes of the mesh, and what the devices along each divide among them. Imports no JAX."""

from typing import NamedTuple


class Axis(NamedTuple):
    """An axis; its devices hold copies of whatever it does not divide."""

    name: str
    key: str  # ici_{key}_parallelism is its size
    # "rows" or "tokens" of a batch, "layers" or "experts" of the weights, or "widths": an axis of
    # every weight, such as its heads
    divides: tuple[str, ...]


# The outermost first. Axes that divide rows come before those that do not, so the devices that hold
# a row together are neighbours.
TABLE = (
    Axis("data", "data", ("rows",)),
    # The layers of a pipeline. Outside the layers, stages are copies with rows of their own.
    Axis("stage", "pipeline", ("rows", "layers")),
    Axis("fsdp", "fsdp", ("rows", "widths")),
    # Outside the experts it acts as more fsdp.
    Axis("expert", "expert", ("rows", "widths", "experts")),
    # Each device has a part of a row's tokens. For weights it acts as more fsdp.
    Axis("context", "context", ("tokens", "widths")),
    Axis("tensor", "tensor", ("widths",)),
)


def _axes_that_divide(*what: str) -> tuple[str, ...]:
    return tuple(axis.name for axis in TABLE if {*what} & {*axis.divides})


AXES = tuple(axis.name for axis in TABLE)
NAME_IN_KEYS = {axis.name: axis.key for axis in TABLE}
ROW_AXES, TOKEN_AXES = _axes_that_divide("rows"), _axes_that_divide("tokens")
_stage = ROW_AXES.index("stage")
AROUND_STAGES, WITHIN_STAGES = ROW_AXES[:_stage], ROW_AXES[_stage + 1 :]
BATCH_AXES = _axes_that_divide("rows", "tokens")  # a sum over a batch is one over their devices
# Each device along these holds a copy of a weight whose spec does not name them, and reads rows or
# tokens of its own: the copies' gradients are added up.
COPY_AXES = tuple(axis for axis in BATCH_AXES if axis not in _axes_that_divide("widths"))
# These shard one side of every weight, and the batch.
SHARD_AXES = tuple(axis for axis in BATCH_AXES if axis in _axes_that_divide("widths"))
# These shard one side of an expert's weights.
SHARDS_OF_EXPERT = tuple(axis for axis in SHARD_AXES if axis not in _axes_that_divide("experts"))
# These shard the leading axes of stacked weights; the rows that meet a part of them are there too.
STACK_AXES = _axes_that_divide("layers", "experts")
