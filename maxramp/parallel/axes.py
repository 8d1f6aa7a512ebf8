"""The axes of the mesh: what the devices along each share out between them. Imports no JAX."""

from typing import NamedTuple


class Axis(NamedTuple):
    """An axis; each of its devices holds a copy of what the axis does not divide."""

    name: str
    key: str  # ici_{key}_parallelism is its size
    # "rows" or "tokens" of a batch, "layers" or "experts" of the weights, and "widths", such as
    # heads: one of every weight, wherever it is
    divides: tuple[str, ...]


# The outermost first: what divides rows comes before what does not, so that the devices that hold
# a row together are neighbours.
TABLE = (
    Axis("data", "data", ("rows",)),
    # Layers of a pipeline. Outside of them stages share the work as copies do.
    Axis("stage", "pipeline", ("rows", "layers")),
    Axis("fsdp", "fsdp", ("rows", "widths")),
    # Outside of the experts it is more of fsdp.
    Axis("expert", "expert", ("rows", "widths", "experts")),
    # Of a row each device has a part of the tokens. Of weights it is more of fsdp.
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
# Of a weight that names none of them in its spec, each of their devices holds a copy, for rows or
# tokens of its own: so the gradients of these are added up.
COPY_AXES = tuple(axis for axis in BATCH_AXES if axis not in _axes_that_divide("widths"))
# Those that shard one side of weights, their part of the batch with them.
SHARD_AXES = tuple(axis for axis in BATCH_AXES if axis in _axes_that_divide("widths"))
# Those of them that shard an expert's weights.
SHARDS_OF_EXPERT = tuple(axis for axis in SHARD_AXES if axis not in _axes_that_divide("experts"))
# Those of what stands in front of a layer's matrices. Where a weight lies on one, so do its rows.
STACK_AXES = _axes_that_divide("layers", "experts")
