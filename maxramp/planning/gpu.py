"""GPU clusters by name: what XLA's compiler is told of them, and how fast they run its programs.

Sources: NVIDIA's data sheets and architecture papers of each GPU (dense bfloat16 rate, memory,
NVLink) and of its DGX system (one network adapter a GPU), and the CUDA programming guide's table of
compute capabilities. Memory is what the driver leaves of it.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys.yamlfile import read_yaml
from maxramp.planning import hlo


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU, and the links into it."""

    name: str
    compute_capability: str
    cores: int  # streaming multiprocessors
    float32_lanes: int  # of a multiprocessor
    shared_memory_kib: int  # of a multiprocessor
    cache_mib: float
    clock_ghz: float
    memory_gib: float
    memory_gbytes: float  # gigabytes a second
    peak_tflops: float  # bfloat16, dense
    nvlink_gbytes: float  # gigabytes a second into a GPU, from all others of its node
    network_gbytes: float  # and from other nodes


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 64, 164, 40, 1.41, 79.2, 2039, 312, 300, 25),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", "9.0", 132, 128, 228, 50, 1.98, 79.1, 3352, 989.4, 450, 50
    ),
    "h200": Gpu("NVIDIA H200", "9.0", 132, 128, 228, 50, 1.98, 141.0, 4800, 989.4, 450, 50),
    "b200": Gpu("NVIDIA B200", "10.0", 148, 128, 228, 126.5, 1.965, 178.4, 7672, 2250, 900, 50),
}
# JAX's share of a GPU's memory, unless XLA_CLIENT_MEM_FRACTION says otherwise.
JAX_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs that NVLink joins, and a network between them: `h200:16x8`."""

    kind: str  # a name in GPUS, or a file
    gpu: Gpu
    nodes: int
    gpus: int  # of a node

    compiler, plugin, extra = "GPU", "jax_plugins.xla_cuda13", "cuda13-compiler"

    def description(self, num_slices: int) -> dict[str, Any]:
        """What JAX's `get_topology_desc` takes; GPUs are one slice."""
        return {
            "platform": "cuda",
            "topology": f"{num_slices}x{self.nodes}x{self.gpus}",
            "target_config": _target_config(self.gpu),
        }

    def __str__(self) -> str:
        return f"{self.kind}:{self.nodes}x{self.gpus}"


def parse(name: str) -> Cluster:
    """`h200:16x8`, nodes x GPUs of a node; or `FILE.yml:16x8` with the fields of `Gpu`.

    Raises:
      ConfigError: the name has another form, or the file does not describe a GPU.
    """
    kind, _, shape = name.rpartition(":")
    if not kind or not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise ConfigError(
            f"compile_topology={name} is no GPU cluster; give nodes x GPUs of a node, such as "
            f"{kind or name}:16x8"
        )
    nodes, gpus = map(int, shape.split("x"))
    return Cluster(kind, GPUS.get(kind) or _read(pathlib.Path(kind)), nodes, gpus)


def _read(path: pathlib.Path) -> Gpu:
    """The GPU that a file describes, one line a field."""
    values = read_yaml(path)
    fields = [field.name for field in dataclasses.fields(Gpu)]
    if wrong := {*fields} ^ values.keys():
        raise ConfigError(
            f"{path}: a GPU is described by {', '.join(fields)}; "
            f"{', '.join(sorted(wrong))} {'is' if len(wrong) == 1 else 'are'} missing or unknown"
        )
    values |= {name: str(values[name]) for name in ("name", "compute_capability")}
    for name, value in values.items():
        if not isinstance(value, str) and (type(value) not in (int, float) or value <= 0):
            raise ConfigError(f"{path}: {name}: {value} must be a number above 0")
    return Gpu(**values)


def _target_config(gpu: Gpu) -> str:
    """XLA's description of a GPU, a text proto (stream_executor's GpuTargetConfigProto)."""
    major, _, minor = gpu.compute_capability.partition(".")
    shared = gpu.shared_memory_kib * 1024
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024
        threads_per_warp: 32
        shared_memory_per_block: 49152
        shared_memory_per_core: {shared}
        shared_memory_per_block_optin: {shared - 1024}
        threads_per_core_limit: 2048
        core_count: {gpu.cores}
        fpus_per_core: {gpu.float32_lanes}
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535
        block_dim_limit_z: 65535
        registers_per_core_limit: 65536
        registers_per_block_limit: 65536
        l2_cache_size: {gpu.cache_mib * 2**20:.0f}
        clock_rate_ghz: {gpu.clock_ghz}
        memory_bandwidth: {gpu.memory_gbytes * 1e9:.0f}
        device_memory_size: {gpu.memory_gib * 2**30:.0f}
        cuda_compute_capability {{ major: {major} minor: {minor or 0} }}
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      runtime_version {{ major: 13 }}
      device_description_str: "{gpu.name}"
    """


# No kernel of their own: they name memory, or run others.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}
_FREE |= {"conditional", "partition-id", "replica-id", "after-all", "opt-barrier"}
_SLICES = ("dynamic-slice", "slice", "gather")

# Products of cuDNN's flash attention, each of [T, h] with [h, T] or [T, T] with [T, h]: scores and
# result; scores again, dP, dV, dK, dQ.
_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}


@dataclasses.dataclass
class Work:
    """What one run of a program does on one GPU.

    Attributes:
      seconds: from start to end.
      compute_seconds: of its kernels alone; the rest of `seconds` waits for transfers.
      flops: of matrix products and attention.
      nvlink_bytes: kind -> bytes that a GPU receives from GPUs of its node.
      network_bytes: kind -> bytes that it receives from other nodes.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    flops: float = 0.0
    nvlink_bytes: dict[str, float] = dataclasses.field(default_factory=collections.Counter)
    network_bytes: dict[str, float] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Work", times: int) -> None:
        """Adds what another program does, so many times."""
        for name, value in vars(other).items():
            if isinstance(value, collections.Counter):
                getattr(self, name).update({kind: times * n for kind, n in value.items()})
            else:
                setattr(self, name, getattr(self, name) + times * value)


def count(text: str, nodes: Sequence[int], rates: tuple[float, float, float, float]) -> Work:
    """A roofline of a compiled program: the least time that its kernels and transfers can take.

    A GPU's compiler gives no times. What it does give is a scheduled program: which kernels run in
    which order, what each of them reads and writes, and where every transfer starts and has to be
    done. Two clocks follow the schedule. Kernels run one after another, each at the rate of its
    arithmetic or of its memory, whichever is slower. Transfers run beside them, one after another
    over the links. Where a transfer has to be done, the kernels wait for it.

    Args:
      text: `jax.stages.Compiled.as_text()` of a program for GPUs.
      nodes: the node of every device, in the order of the program's device assignment.
      rates: what a program can count on in a second: products, bytes to and from the memory, bytes
        into a GPU from those of its node, and from other nodes.

    Raises:
      ValueError: the text does not say how often a loop runs, or who takes part in a transfer.
    """
    computations, entry = hlo.parse(text)
    flop_rate, memory_rate, nvlink_rate, network_rate = rates

    @functools.cache
    def work_of(name: str) -> Work:
        work, link = Work(), 0.0  # `link`: when the transfers that have started are done
        done: dict[str, float] = {}
        table = computations[name]
        for i in table.values():
            kind = i.opcode.removesuffix("-start")
            if i.opcode == "while":
                work.add(work_of(i.attribute("body")), hlo.turns(i, table, computations))
                link = max(link, work.seconds)
            elif i.opcode == "call":
                work.add(work_of(i.attribute("to_apply")), 1)
            elif kind in hlo.COLLECTIVES:
                nvlink, network = _moved(i, kind, table, nodes)
                work.nvlink_bytes[kind] += nvlink
                work.network_bytes[kind] += network
                taken = max(nvlink / nvlink_rate, network / network_rate)
                link = done[i.name] = max(link, work.seconds) + taken
                if i.opcode == kind:  # nothing runs beside it
                    work.seconds = link
            elif i.opcode.endswith("-done"):
                work.seconds = max([work.seconds, *(done.get(o, 0.0) for o in i.operands)])
            elif i.opcode not in _FREE:
                flops = _flops(i, table, computations)
                touched = _touched(i, table, computations)
                taken = max(flops / flop_rate, touched / memory_rate)
                work.flops += flops
                work.seconds += taken
                work.compute_seconds += taken
        return work

    return work_of(entry)


def _flops(i: hlo.Instruction, table: hlo.Computation, computations: dict) -> float:
    """Of a kernel's matrix products, those of a fusion's computation included."""
    if i.opcode == "dot":
        return hlo.dot_flops(i, table)
    if i.opcode != "custom-call":
        inner = computations.get(i.attribute("calls"), {})
        return sum(_flops(j, inner, computations) for j in inner.values())
    target = re.search(r'custom_call_target="([^"]*)"', i.rest)[1]
    shapes = [table[o].shape for o in i.operands if o in table]
    if target.startswith("__cublas"):
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.rest)[1]
        return 2.0 * math.prod(i.shape) * math.prod(shapes[0][d] for d in hlo.numbers(dims))
    if target in _ATTENTION:
        (B, T, H, h), (_, S, _, _) = shapes[:2]
        causal = 0.5 if '"mask_type": "CAUSAL"' in i.rest else 1.0  # half is never made
        return _ATTENTION[target] * 2.0 * B * H * T * S * h * causal
    return 0.0


def _touched(i: hlo.Instruction, table: hlo.Computation, computations: dict) -> float:
    """Bytes that a kernel reads and writes: of an array that it only cuts from, what it cuts."""
    inner = computations.get(i.attribute("calls"))
    if inner:
        kernel, names, root = list(inner.values()), inner, inner[inner.root]
        operands = [j for j in kernel if j.opcode == "parameter"]
    else:
        kernel, names, root = [i], table, i
        operands = [table[o] for o in i.operands if o in table]

    def read(operand: hlo.Instruction) -> float:
        parts = 0.0
        for user in (j for j in kernel if operand.name in j.operands):
            first = user.operands[0] == operand.name
            if user.opcode == "bitcast":
                parts += read(user)
            elif first and user.opcode in _SLICES:
                parts += user.bytes
            elif not (first and user.opcode == "dynamic-update-slice"):
                return operand.bytes
        return min(parts, operand.bytes)

    def written(result: hlo.Instruction) -> float:
        if result.opcode in ("bitcast", "tuple"):
            return sum(written(names[o]) for o in result.operands if o in names)
        if result.opcode == "dynamic-update-slice" and result.operands[1] in names:
            return names[result.operands[1]].bytes
        return result.bytes

    return sum(map(read, operands)) + written(root)


def _moved(
    i: hlo.Instruction, kind: str, table: hlo.Computation, nodes: Sequence[int]
) -> tuple[float, float]:
    """Bytes that a GPU receives over NVLink and over the network.

    Each GPU of a group fetches its share of what the other nodes have, and passes it on inside its
    own node, so that what a node receives crosses the network once.
    """
    size = sum(table[o].bytes for o in i.operands if o in table)
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", i.rest.partition("source_target_pairs=")[2])
        crosses = any(nodes[int(a)] != nodes[int(b)] for a, b in pairs)
        return (0.0, size) if crosses else (size, 0.0)
    members = hlo.groups(i.rest, len(nodes))
    count = members.shape[1]
    spread = max(len({nodes[d] for d in group}) for group in members)  # nodes of a group
    if kind == "all-to-all":
        inside = count // spread
        return (inside - 1) * size / count, (count - inside) * size / count
    share = {"all-gather": size, "all-reduce": 2 * size / count}.get(kind, size / count)
    return (count - spread) * share, (spread - 1) * share
