"""The machine that a preflight compiles for: a TPU pod or a GPU cluster, by its name."""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from maxramp.errors import ConfigError, install, reason_of
from maxramp.parallel import mesh
from maxramp.planning import gpu, hlo, topology
from maxramp.planning.keys import PlanKeys
from maxramp.training.device_memory import GIB, device_memory


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a preflight needs to know of the devices that are not there.

    Attributes:
      name: as in compile_topology.
      device: what its users call one: "chip" or "GPU".
      devices: abstract ones of JAX, for a mesh.
      slices: groups that the slow network joins, for the mesh; GPUs are one.
      groups: what the network joins: "slices" or "nodes".
      memory_gib: that a program can use of a device.
      peak_tflops: of a device, bfloat16.
      work: a compiled program's text -> what it does and how long that takes, the entries from
        `flops_per_device` on of `compiled.compile_stages`.
      platforms: to lower for, where these are not those of the devices' own backend.
      options: of the compiler, beyond those of a run.
      times: where the times come from, in one line for people.
    """

    name: str
    device: str
    devices: Sequence[Any]
    slices: int
    groups: str
    memory_gib: float
    peak_tflops: float
    work: Callable[[str], dict[str, Any]]
    platforms: tuple[str, ...] | None
    options: Mapping[str, Any]
    times: str


def here() -> Machine:
    """The devices of this machine, on the backend that has started; their times are not known."""
    devices = jax.devices()
    return Machine(
        name=devices[0].device_kind,
        device="device",
        devices=devices,
        slices=mesh.num_slices(),
        groups="slices",
        memory_gib=device_memory(-1) / GIB,
        peak_tflops=0.0,
        work=lambda compiled: {},
        platforms=None,
        options={},
        times="",
    )


def find(keys: PlanKeys) -> Machine:
    """The machine that compile_topology names.

    Raises:
      ConfigError: there is none of that name, or its compiler is not installed.
    """
    found, slices = _parse(keys), keys.compile_topology_num_slices
    devices = describe(found, slices)
    if isinstance(found, topology.Topology):
        return Machine(
            name=str(found),
            device="chip",
            devices=devices,
            slices=slices,
            groups="slices",
            memory_gib=found.chip.memory_gib,
            peak_tflops=found.chip.peak_tflops,
            work=functools.partial(_work_of_chip, found.chip),
            platforms=None,
            options={},
            times="the compiler's cycles at the chip's clock, attention kernels at its peak, and "
            "the waits and what travels between slices at its published rates: a pod is slower, "
            "not faster",
        )
    kind = found.gpu
    rates = (
        keys.planned_flops_share * kind.peak_tflops * 1e12,
        keys.planned_memory_share * kind.memory_gbytes * 1e9,
        keys.planned_link_share * kind.nvlink_gbytes * 1e9,
        keys.planned_link_share * kind.network_gbytes * 1e9,
    )
    return Machine(
        name=str(found),
        device="GPU",
        devices=devices,
        slices=1,
        groups="nodes",
        memory_gib=gpu.JAX_SHARE * kind.memory_gib,
        peak_tflops=kind.peak_tflops,
        work=functools.partial(_work_of_gpu, [x.id // found.gpus for x in devices], rates),
        platforms=("cuda",),
        options={"xla_gpu_autotune_level": 0},  # trying kernels takes a GPU
        times=f"a roofline, not a measurement: kernels at {keys.planned_flops_share:.0%} of the "
        f"GPU's peak or {keys.planned_memory_share:.0%} of its memory's rate, transfers at "
        f"{keys.planned_link_share:.0%} of the links', beside each other as the compiler "
        "scheduled them (planned_flops_share, planned_memory_share, planned_link_share)",
    )


def describe(found: gpu.Cluster | topology.Topology, num_slices: int = 1) -> Sequence[Any]:
    """The devices of a cluster or pod, from its compiler on a machine without any.

    Raises:
      ConfigError: the compiler is not installed, or does not know such a machine.
    """
    shown, what = f"compile_topology={found}", f"the {found.compiler} compiler"
    if not is_installed(found.plugin):
        raise ConfigError(
            f"{shown}: {what} is not installed; {install(found.extra)} (no {found.compiler} is "
            "needed)"
        )
    try:
        return topologies.get_topology_desc(**found.description(num_slices)).devices
    except Exception as error:  # whatever the plugin raises
        raise ConfigError(f"{shown}: {what} does not make it: {reason_of(error)}") from None


def is_installed(plugin: str) -> bool:
    """Whether a plugin of JAX's is there, by the name of its module."""
    try:
        return importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def nodes(keys: PlanKeys) -> tuple[int, int]:
    """What compile_topology has several of, and the devices of each: slices, or nodes of GPUs.

    Raises:
      ConfigError: there is no machine of that name.
    """
    found = _parse(keys)
    if isinstance(found, gpu.Cluster):
        return found.nodes, found.gpus
    return keys.compile_topology_num_slices, found.chips


def _parse(keys: PlanKeys) -> gpu.Cluster | topology.Topology:
    name, slices = keys.compile_topology, keys.compile_topology_num_slices
    kind = name.partition(":")[0]
    if kind in gpu.GPUS or kind.endswith((".yml", ".yaml")):
        if slices != 1:
            raise ConfigError(
                f"compile_topology_num_slices={slices}: compile_topology={name} gives its nodes "
                "itself; use 1"
            )
        return gpu.parse(name)
    if not re.match(r"v\d", name):
        raise ConfigError(
            f"compile_topology={name} is no TPU slice and no GPU cluster; give a slice, such as "
            f"v5p:8x8x16 or v5p-2048, or nodes x GPUs of a node, such as h200:16x8, of "
            f"{', '.join(gpu.GPUS)} or FILE.yml"
        )
    return topology.parse(name)


def _work_of_chip(chip: topology.Chip, text: str) -> dict[str, Any]:
    work = hlo.count(text)
    attention = work.kernel_flops / (chip.peak_tflops * 1e12)
    compute = work.cycles / (chip.clock_ghz * 1e9) + attention
    waited = work.waited_bytes / (chip.interconnect_gbytes * 1e9)
    network = sum(work.network_bytes.values()) / (chip.network_gbytes * 1e9)
    return {
        "flops_per_device": work.flops,
        "compute_seconds": compute,
        "attention_seconds": attention,
        "collective_seconds": waited,
        "network_seconds": network,
        "step_seconds": compute + waited + network,
        "collective_gib": _gib(work.collective_bytes),
        "network_gib": _gib(work.network_bytes),
    }


def _work_of_gpu(nodes: Sequence[int], rates: tuple[float, ...], text: str) -> dict[str, Any]:
    work = gpu.count(text, nodes, rates)
    return {
        "flops_per_device": work.flops,
        "compute_seconds": work.compute_seconds,
        "collective_seconds": work.seconds - work.compute_seconds,
        "step_seconds": work.seconds,
        "collective_gib": _gib(work.nvlink_bytes),
        "network_gib": _gib(work.network_bytes),
    }


def _gib(moved: Mapping[str, float]) -> dict[str, float]:
    return {kind: size / GIB for kind, size in sorted(moved.items()) if size}
