"""The backend and the device mesh.

The axes are those of `axes`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from maxramp.errors import ConfigError
from maxramp.keys.section import is_address
from maxramp.parallel import platform, processes
from maxramp.parallel.axes import AXES
from maxramp.parallel.keys import BackendKeys, MeshKeys
from maxramp.parallel.sharding import REPLICATED

# Explicit: the sharding of every array is part of its type, and a matrix product whose result could
# be laid out in two ways does not trace until the code says which.
AXIS_TYPE = AxisType.Explicit


def start_backend(keys: BackendKeys) -> None:
    """Joins the processes of the job and starts JAX on the asked-for hardware.

    Raises:
      ConfigError: the hardware is not there, or the processes are described wrongly.
      TrainingError: the processes do not find each other.
    """
    platform.take_hardware(keys.hardware)
    if keys.jax_cache_dir:
        try:
            if not is_address(keys.jax_cache_dir):  # JAX writes to storages too
                os.makedirs(os.path.expanduser(keys.jax_cache_dir), exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"jax_cache_dir={keys.jax_cache_dir}: cannot write there: {error.strerror}; use "
                'another folder, or "" for none'
            ) from None
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(keys.jax_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # On CPUs a program runs in the thread that calls it. With several devices in a process, those
    # dispatched asynchronously can each take the threads that the other's collective waits for, and
    # XLA then aborts the process; with one, each would hold memory of its own.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    processes.join(keys.join_timeout_seconds)
    platform.start(keys.hardware)


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
