"""The device mesh. Programs are traced and lowered where their mesh is set; only code that is being
traced may ask for it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from maxramp.parallel.axes import AXES, SHARD_AXES
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.sharding import REPLICATED

# Explicit: the sharding of every array is part of its type, and a matrix product whose result could
# be laid out in two ways does not trace until the code says which.
AXIS_TYPE = AxisType.Explicit


def num_slices() -> int:
    """Counts the slices of a TPU job, which only the slow network joins; 1 on other platforms. On
    CPUs and GPUs the attribute numbers hosts or NVLink domains, which `fsdp` joins in one group."""
    if jax.default_backend() != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in jax.devices()})


def make_mesh(keys: MeshKeys, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of these sizes, none of them -1, over as many `devices` (None: all of the
    job), or returns it from the cache. An axis is its dcn part (outer, between slices) times its
    ici part (inner)."""
    ici, dcn = (tuple(keys.group(group).values()) for group in ("ici", "dcn"))
    return _make_mesh(ici, dcn, tuple(jax.devices() if devices is None else devices))


@functools.cache
def _make_mesh(ici: tuple[int, ...], dcn: tuple[int, ...], devices: tuple[jax.Device, ...]) -> Mesh:
    """Lays devices into a mesh; sizes are in the order of AXES, `ici` inside a slice and `dcn`
    between slices."""
    split = {"allow_split_physical_axes": True}  # tensor 2 on a torus of 8x8x16
    if math.prod(dcn) > 1:
        grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, **split)
    elif devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(ici)
    else:
        try:
            grid = mesh_utils.create_device_mesh(ici, devices)
        except NotImplementedError:  # the sides of the torus do not make these sizes
            # XLA for TPUs gathers over all shards only in the torus's order.
            first, last = AXES.index(SHARD_AXES[0]), AXES.index(SHARD_AXES[-1]) + 1
            joined = *ici[:first], math.prod(ici[first:last]), *ici[last:]
            grid = mesh_utils.create_device_mesh(joined, devices, **split).reshape(ici)
    return Mesh(grid, AXES, axis_types=(AXIS_TYPE,) * len(AXES))


def reshape_mesh(mesh: Mesh, keys: MeshKeys) -> Mesh:
    """Returns the mesh with other sizes of the same product and the devices in the same order, so
    an ordinary program moves arrays between the two. Slices must have the same sizes."""
    return _reshape_mesh(mesh, tuple(keys.sizes.values()))


def move_into_fsdp(mesh: Mesh, axis: str) -> Mesh:
    """Returns the mesh with the devices of an axis in fsdp."""
    sizes = dict(mesh.shape)
    sizes |= {axis: 1, "fsdp": sizes["fsdp"] * sizes[axis]}
    return _reshape_mesh(mesh, tuple(sizes.values()))


def mesh_without_copies(mesh: Mesh) -> Mesh:
    """Returns the mesh with data's devices in fsdp, so without copies; itself if axes between these
    two are in use."""
    between = AXES[AXES.index("data") + 1 : AXES.index("fsdp")]
    return mesh if any(mesh.shape[x] > 1 for x in between) else move_into_fsdp(mesh, "data")


@functools.cache
def _reshape_mesh(mesh: Mesh, sizes: tuple[int, ...]) -> Mesh:
    return Mesh(mesh.devices.reshape(sizes), AXES, axis_types=mesh.axis_types)


def line() -> Mesh:
    """Returns the mesh of all devices along one axis, for arrays that no mesh size may change."""
    others = (1,) * (len(AXES) - 1)
    return _make_mesh((jax.device_count(), *others), (1, *others), tuple(jax.devices()))


def mesh_of(tree: Any) -> Mesh:
    return jax.tree.leaves(tree)[0].sharding.mesh


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AXIS_TYPE,) * len(sizes))


def attach_mesh(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Puts shapes from `jax.eval_shape` on a mesh; those without a sharding are on every device."""

    def attach(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding else REPLICATED
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(attach, tree)


def bytes_per_device(tree: Any) -> int:
    """Counts the bytes of a tree on one device; its arrays, or their shapes, have a sharding."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def format_sizes(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 device"


class Jitted:
    """`jax.jit` of a function for one mesh, which is set where it is traced and called."""

    def __init__(self, mesh: Mesh, function: Callable, **options: Any):
        self._mesh, self.jitted = mesh, jax.jit(function, **options)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self.jitted(*arguments, **named)

    def trace(self, *arguments: Any, **named: Any) -> jax.stages.Traced:
        """Traces as `jax.jit` does; lower the result where the mesh is set."""
        with jax.set_mesh(self._mesh):
            return self.jitted.trace(*arguments, **named)

    def eval_shape(self, *arguments: Any, **named: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return attach_mesh(self.jitted.eval_shape(*arguments, **named), self._mesh)


def axis_size(*axes: str) -> int:
    """Counts the devices along these axes of the mesh that is set."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in axes)


def axes_of_several() -> tuple[str, ...]:
    """Returns the axes of the mesh that is set along which there are several devices."""
    return tuple(axis for axis in AXES if axis_size(axis) > 1)


def platform() -> str | None:
    """Returns the platform of the mesh that is set ("cpu", "gpu", "tpu"); None without devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else None
