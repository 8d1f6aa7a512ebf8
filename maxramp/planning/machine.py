"""The machine that a preflight compiles for: a TPU pod or a GPU cluster, by its name."""

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from maxramp.errors import ConfigError, install, reason_of
from maxramp.parallel import mesh
from maxramp.planning import gpu, hlo, topology
from maxramp.planning.keys import PlanKeys
from maxramp.training.device_memory import GIB, device_memory

# Of the peak, that the TPU compiler's cycles leave for matrix products.
_TPU_FLOPS_SHARE = 0.9
# Of the gathers of weights, that the GPU compiler schedules beside products: of Llama 3 8B's and
# Gemma 3 12B's, and of the experts' of Mixtral, on 8 and 64 H200 (benchmarks/results/meshes.json).
_GPU_HIDDEN_SHARE, _GPU_HIDDEN_EXPERTS_SHARE = 0.95, 0.65
# Bytes that GPU programs move for each of the room of experts (docs/experts.md's figures).
_GPU_ROOM = 8


class Rates(NamedTuple):
    """What `planning.mesh_cost` counts with: of a device, per second."""

    flops: float
    memory: float  # bytes to and from its memory
    links: float  # bytes into it from its slice or node
    network: float  # and from others
    node: int = 0  # devices of a node, neighbours in the mesh; 0 where dcn sizes tell the slices
    hidden: float = 0.0  # share of the gathers of weights that runs beside products
    hidden_experts: float = 0.0  # and of those of experts' weights
    room: int = 14  # bytes moved for each byte of a row of experts that nothing fills


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that a preflight compiles for."""

    name: str  # as in compile_topology
    devices: Sequence[Any]  # abstract ones of JAX, for a mesh
    memory_gib: float  # that a program can use of a device
    peak_tflops: float = 0.0  # of a device, bfloat16
    device: str = "device"  # what its users call one: "chip" or "GPU"
    slices: int = 1  # groups that the slow network joins, for the mesh; GPUs are one
    groups: str = "slices"  # what the network joins: "slices" or "nodes"
    # A compiled program's text -> what it does and how long that takes, as `hlo.StepCost.to_json`.
    work: Callable[[str], dict[str, Any]] = lambda text: {}
    platforms: tuple[str, ...] | None = None  # to lower for, if not the devices' own backend's
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the compiler alone
    times: str = ""  # where the times come from, in one line for people
    rates: Rates | None = None  # of a machine by name


def local_machine() -> Machine:
    """Describes this machine, whose JAX has started; it tells no times."""
    devices, memory = jax.devices(), device_memory(-1) / GIB
    return Machine(devices[0].device_kind, devices, memory, slices=mesh.num_slices())


def describe_machine(keys: PlanKeys) -> Machine:
    """Describes the machine that compile_topology names; a ConfigError if it names none, or its
    compiler is not installed."""
    cluster, slices = _parse(keys), keys.compile_topology_num_slices
    devices = describe_devices(cluster, slices)
    if isinstance(cluster, topology.Topology):
        chip = cluster.chip
        return Machine(
            name=str(cluster),
            devices=devices,
            memory_gib=chip.memory_gib,
            peak_tflops=chip.peak_tflops,
            device="chip",
            slices=slices,
            work=lambda text: hlo.count(text, chip).to_json(),
            times="the compiler's cycles at the chip's clock, attention kernels at its peak, and "
            "the waits and what travels between slices at its published rates: a pod is slower, "
            "not faster",
            rates=Rates(
                _TPU_FLOPS_SHARE * chip.peak_tflops * 1e12,
                chip.memory_gbytes * 1e9,
                chip.interconnect_gbytes * 1e9,
                chip.network_gbytes * 1e9,
            ),
        )
    kind, nodes = cluster.gpu, [device.id // cluster.gpus for device in devices]
    rates = (
        keys.planned_flops_share * kind.peak_tflops * 1e12,
        keys.planned_memory_share * kind.memory_gbytes * 1e9,
        keys.planned_link_share * kind.nvlink_gbytes * 1e9,
        keys.planned_link_share * kind.network_gbytes * 1e9,
    )
    return Machine(
        name=str(cluster),
        devices=devices,
        memory_gib=gpu.JAX_SHARE * kind.memory_gib,
        peak_tflops=kind.peak_tflops,
        device="GPU",
        groups="nodes",
        work=lambda text: gpu.count(text, nodes, rates).to_json(),
        platforms=("cuda",),
        options={"xla_gpu_autotune_level": 0},  # trying kernels takes a GPU
        times=f"a roofline, not a measurement: kernels at {keys.planned_flops_share:.0%} of the "
        f"GPU's peak or {keys.planned_memory_share:.0%} of its memory's rate, transfers at "
        f"{keys.planned_link_share:.0%} of the links', beside each other as the compiler "
        "scheduled them (planned_flops_share, planned_memory_share, planned_link_share)",
        rates=Rates(
            *rates, cluster.gpus, _GPU_HIDDEN_SHARE, _GPU_HIDDEN_EXPERTS_SHARE, room=_GPU_ROOM
        ),
    )


def describe_devices(
    cluster: gpu.Cluster | topology.Topology, num_slices: int = 1
) -> Sequence[Any]:
    """Returns JAX's abstract devices of a cluster, or of num_slices TPU slices; a ConfigError if
    its compiler is missing or refuses it."""
    shown, what = f"compile_topology={cluster}", f"the {cluster.compiler} compiler"
    if importlib.util.find_spec(cluster.plugin) is None:
        raise ConfigError(
            f"{shown}: {what} is not installed; {install(cluster.extra)} (no {cluster.compiler} is "
            "needed)"
        )
    try:
        return topologies.get_topology_desc(**cluster.description(num_slices)).devices
    except Exception as error:  # whatever the plugin raises
        raise ConfigError(f"{shown}: {what} does not make it: {reason_of(error)}") from None


def usable_memory(keys: PlanKeys) -> tuple[float, str]:
    """Returns the GiB of a device that a program can use, 0 where unknown, and where the number
    comes from. Asks no compiler; without either key it asks this machine's JAX, which starts."""
    if keys.device_memory_gib != -1:
        return keys.device_memory_gib, "device_memory_gib"
    if not keys.compile_topology:
        return device_memory(-1) / GIB, "this machine"
    cluster = _parse(keys)
    is_gpu = isinstance(cluster, gpu.Cluster)
    gib = gpu.JAX_SHARE * cluster.gpu.memory_gib if is_gpu else cluster.chip.memory_gib
    return gib, f"compile_topology={cluster}"


def planned_platform(keys: PlanKeys, hardware: str) -> str:
    """Returns the platform of compile_topology, without it that of `hardware`, and if that is
    "auto" the one of this machine's JAX, which starts."""
    if keys.compile_topology:
        return "gpu" if isinstance(_parse(keys), gpu.Cluster) else "tpu"
    return jax.default_backend() if hardware == "auto" else hardware


def count_nodes(keys: PlanKeys) -> tuple[int, int]:
    """Returns nodes and the GPUs of each, or slices and the chips of each, of compile_topology,
    which is given; a ConfigError if it names no machine."""
    cluster = _parse(keys)
    if isinstance(cluster, gpu.Cluster):
        return cluster.nodes, cluster.gpus
    return keys.compile_topology_num_slices, cluster.chips


def count_hosts(keys: PlanKeys) -> tuple[int, int]:
    """Returns machines and the devices of each, as `count_nodes`; a slice has hosts of 4 chips, or
    one of its own."""
    nodes, devices = count_nodes(keys)
    if isinstance(_parse(keys), gpu.Cluster):
        return nodes, devices
    per_host = min(devices, topology.HOST_CHIPS)
    return nodes * devices // per_host, per_host


def _parse(keys: PlanKeys) -> gpu.Cluster | topology.Topology:
    """Reads compile_topology, which is given; a ConfigError if it names no machine, or slices of
    GPUs."""
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
            f"compile_topology={name} is neither a TPU slice nor a GPU cluster; give a slice, such "
            "as v5p:8x8x16 or v5p-2048, or nodes x GPUs of a node, such as h200:16x8, of "
            f"{', '.join(gpu.GPUS)} or FILE.yml"
        )
    return topology.parse(name)
