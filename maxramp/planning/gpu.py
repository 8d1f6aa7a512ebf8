"""GPU clusters by name: what XLA's compiler is told of them, and how fast they run its programs.

Sources: NVIDIA's data sheets and architecture papers of each GPU (dense bfloat16 rate, memory,
NVLink) and of its DGX system (one network adapter a GPU), and the CUDA programming guide's table of
compute capabilities. Memory is what the driver leaves of it.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.errors import ConfigError
from maxramp.keys.section import refuse
from maxramp.keys.yamlfile import read_yaml
from maxramp.model.parts.positions import run_length
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

    compiler, plugin, extra = "GPU", "jax_cuda13_plugin", "cuda13-compiler"

    def description(self, num_slices: int) -> dict[str, Any]:
        """Returns the arguments of JAX's `get_topology_desc`; GPUs are one slice."""
        return {
            "platform": "cuda",
            "topology": f"{num_slices}x{self.nodes}x{self.gpus}",
            "target_config": _target_config(self.gpu),
        }

    def __str__(self) -> str:
        return f"{self.kind}:{self.nodes}x{self.gpus}"


def parse(name: str) -> Cluster:
    """Reads `h200:16x8`, nodes x GPUs of a node, or `FILE.yml:16x8` with the fields of `Gpu`; a
    ConfigError for another text or GPU."""
    kind, _, shape = name.rpartition(":")
    if not kind or not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise ConfigError(
            f"compile_topology={name} is not a GPU cluster; give nodes x GPUs of a node, such as "
            f"{kind or name}:16x8"
        )
    nodes, gpus = map(int, shape.split("x"))
    return Cluster(kind, GPUS.get(kind) or _read(pathlib.Path(kind)), nodes, gpus)


def _read(path: pathlib.Path) -> Gpu:
    """Reads a GPU from a file; a ConfigError unless it has all fields of `Gpu` and no others."""
    values, fields = read_yaml(path), [field.name for field in dataclasses.fields(Gpu)]
    if wrong := {*fields} ^ values.keys():
        raise ConfigError(
            f"{path}: a GPU is described by {', '.join(fields)}; "
            f"{', '.join(sorted(wrong))} {'is' if len(wrong) == 1 else 'are'} missing or unknown"
        )
    texts = {name: str(values.pop(name)) for name in ("name", "compute_capability")}
    refuse(
        (type(n) not in (int, float) or n <= 0, f"{path}: {name}: {n} must be a number above 0")
        for name, n in values.items()
    )
    return Gpu(**texts, **values)


def _target_config(gpu: Gpu) -> str:
    """Describes a GPU to XLA: a text proto (stream_executor's GpuTargetConfigProto)."""
    major, _, minor = gpu.compute_capability.partition(".")
    shared = gpu.shared_memory_kib * 1024
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024}
        shared_memory_per_core: {shared} l2_cache_size: {gpu.cache_mib * 2**20:.0f}
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        core_count: {gpu.cores} fpus_per_core: {gpu.float32_lanes} clock_rate_ghz: {gpu.clock_ghz}
        memory_bandwidth: {gpu.memory_gbytes * 1e9:.0f}
        device_memory_size: {gpu.memory_gib * 2**30:.0f}
        cuda_compute_capability {{ major: {major} minor: {minor or 0} }}
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
      device_description_str: "{gpu.name}"
    """


# No kernel of their own: they name memory, or run others.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"),
    *("conditional", "partition-id", "replica-id", "after-all", "opt-barrier"),
}
_SLICES = ("dynamic-slice", "slice", "gather")

# Products of cuDNN's flash attention, each of [T, h] with [h, T] or [T, T] with [T, h]: scores and
# result; scores again, dP, dV, dK, dQ.
_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
# Those of our own kernels: scores and result; scores, dP, dQ; scores, dP, dV, dK.
# How many of these are as wide as a query, and how many as a value.
_OURS = {"forward": (1, 1), "dq": (2, 1), "dkv": (2, 2)}


def count(
    text: str, nodes: Sequence[int], rates: tuple[float, float, float, float]
) -> hlo.StepCost:
    """Computes a roofline of a compiled program: the least time of its kernels and transfers.

    A GPU's compiler gives no times, so two clocks follow the scheduled program. Kernels run one
    after another, at the slower rate of arithmetic and memory; transfers run beside them, one after
    another over the links, and kernels wait where a transfer has to be done. Branches of a
    conditional are not counted.

    `nodes` has every device's node, in the order of the program's device assignment; `rates` per
    second: products, bytes to and from memory, bytes into a GPU from its node, and from others.

    Raises:
      ValueError: the text does not say how often a loop runs, or who takes part in a transfer.
    """
    flop_rate, memory_rate, nvlink_rate, network_rate = rates
    work = hlo.StepCost()

    def run(computation: hlo.Computation, times: int) -> float:
        """Adds the work of `times` runs of a computation; returns the seconds of one."""
        now, link = 0.0, 0.0  # `link`: when the transfers that have started are done
        done: dict[hlo.Instruction, float] = {}
        for i in computation.values():
            kind = i.opcode.removesuffix("-start")
            if i.opcode == "while":
                trips = hlo.trip_count(i)
                now += trips * run(i.callee("body"), times * trips)
            elif i.opcode == "call":
                now += run(i.callee("to_apply"), times)
            elif kind in hlo.COLLECTIVES:
                nvlink, network = _link_bytes(i, kind, nodes)
                work.collective_bytes[kind] += times * nvlink
                work.network_bytes[kind] += times * network
                seconds = max(nvlink / nvlink_rate, network / network_rate)
                link = done[i] = max(link, now) + seconds
                if i.opcode == kind:  # nothing runs beside it
                    now = link
            elif i.opcode.endswith("-done"):
                now = max([now, *(done.get(operand, 0.0) for operand in i.operands)])
            elif i.opcode not in _FREE:
                flops = _flops(i)
                seconds = max(flops / flop_rate, _memory_bytes(i) / memory_rate)
                work.flops += times * flops
                work.compute_seconds += times * seconds
                now += seconds
        return now

    work.collective_seconds = max(run(hlo.parse(text), 1) - work.compute_seconds, 0.0)
    return work


def _flops(i: hlo.Instruction) -> float:
    """Counts the FLOPs of a kernel's products, 0 of others; of kernels that XLA does not look into,
    by name."""
    if i.opcode == "dot":
        return hlo.dot_flops(i)
    if i.opcode != "custom-call":
        return sum(map(_flops, i.callee("calls").values()))
    target = re.search(r'custom_call_target="([^"]*)"', i.rest)[1]
    if target.startswith("__cublas"):
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.rest)[1]
        lhs = i.operands[0].shape
        return 2.0 * math.prod(i.shape) * math.prod(lhs[d] for d in hlo.numbers(dims))
    if target in _ATTENTION:
        (B, T, H, h), (_, S, _, _) = (operand.shape for operand in i.operands[:2])
        window = re.search(r'"sliding_window_length":\s*([1-9]\d*)', i.rest)
        causal = window or '"mask_type": "CAUSAL"' in i.rest
        W = min(int(window[1]), T) if window else T
        seen = W * (2 * T - W) / 2 if causal else T * S  # of a row's pairs half is never made
        return _ATTENTION[target] * 2.0 * B * H * h * seen
    if scope := re.search(r"attention_window_(\d+)\b.*?(forward|dq|dkv)_kernel", i.rest):
        (B, T, H, h), (_, S, _, _), (*_, v) = (operand.shape for operand in i.operands[:3])
        # What documents leave out is not known.
        length = run_length(T)
        pairs_n = np.minimum(np.arange(S) + 0.5, int(scope[1]) or S).reshape(-1, length).sum(1)
        seen = hlo.share_of_row(i.rest, pairs_n, T / S)
        queries, values = _OURS[scope[2]]
        return 2.0 * B * H * (queries * h + values * v) * seen
    if scope := re.search(r"grouped_rows_(\d+)_.*/grouped_", i.rest):  # buffers have room for more
        return 2.0 * int(scope[1]) * i.operands[-2].shape[1] * i.shape[-1]
    return 0.0


def _memory_bytes(i: hlo.Instruction) -> float:
    """Counts the bytes that a kernel reads and writes; of an array that it slices, the slices."""
    kernel, operands, root = [i], i.operands, i
    if inner := i.callee("calls"):
        kernel, root = list(inner.values()), inner.root
        operands = [j for j in kernel if j.opcode == "parameter"]

    def read(operand: hlo.Instruction) -> float:
        parts = 0.0
        for user in (j for j in kernel if operand in j.operands):
            first = user.operands[0] is operand
            if user.opcode == "bitcast":
                parts += read(user)
            elif first and user.opcode in _SLICES:
                parts += user.bytes
            elif not (first and user.opcode == "dynamic-update-slice"):
                return operand.bytes
        return min(parts, operand.bytes)

    def write(result: hlo.Instruction) -> float:
        if result.opcode in ("bitcast", "tuple"):
            return sum(map(write, filter(None, result.operands)))
        if result.opcode == "dynamic-update-slice":
            return result.operands[1].bytes
        return result.bytes

    return sum(map(read, filter(None, operands))) + write(root)


def _link_bytes(i: hlo.Instruction, kind: str, nodes: Sequence[int]) -> tuple[float, float]:
    """Counts the bytes that a GPU receives over NVLink and over the network. Each GPU of a group
    fetches its share of what the other nodes have for its node, so it crosses the network once."""
    size = i.operand_bytes
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
