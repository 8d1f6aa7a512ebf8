"""The device mesh.

The axes are those of `axes`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from maxramp.parallel.axes import AXES
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.sharding import REPLICATED

# Explicit: the sharding of every array is part of its type, and a matrix product whose result could
# be laid out in two ways does not trace until the code says which.
AXIS_TYPE = AxisType.Explicit


def num_slices() -> int:
    """Groups of devices that only the slow network joins: the slices of a TPU multi-slice job.

    On CPUs and GPUs JAX numbers hosts, or GPUs that NVLink joins, in the same attribute. They make
    one group: `fsdp` shards over all of them, as the plan assumes.
    """
    if jax.default_backend() != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in jax.devices()})


def make_mesh(keys: MeshKeys, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The device mesh of a resolved config, over all devices of the job or those given.

    An axis is its dcn part (outer, between slices) times its ici part (inner, inside a slice).
    """
    devices = jax.devices() if devices is None else devices
    ici, dcn = (list(keys.group(group).values()) for group in ("ici", "dcn"))
    if math.prod(dcn) > 1:
        grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    elif devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(ici)
    else:
        grid = mesh_utils.create_device_mesh(ici, devices)
    return Mesh(grid, AXES, axis_types=(AXIS_TYPE,) * len(AXES))


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of axes of these sizes without devices, on which arrays have shapes and shardings."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AXIS_TYPE,) * len(sizes))


def on_mesh(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shapes of arrays with their shardings on a mesh, such as a program is lowered for.

    Args:
      tree: from `jax.eval_shape`; what has no sharding is on every device.
    """

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding else REPLICATED
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)
