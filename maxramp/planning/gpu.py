"""GPU clusters by name, described to XLA's compiler on a machine without a GPU.

Sources: NVIDIA's data sheets and architecture papers of each GPU (dense bfloat16 rate, memory,
NVLink) and of its DGX system (one network adapter a GPU), and the CUDA programming guide's table of
compute capabilities. Memory is what the driver leaves of it.
"""

import dataclasses
import pathlib
import re
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys.yamlfile import read_yaml


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
    if not re.fullmatch(r"\d+\.\d+", values["compute_capability"]):
        raise ConfigError(
            f'{path}: compute_capability: {values["compute_capability"]} must be as in "9.0"'
        )
    return Gpu(**values)


def _target_config(gpu: Gpu) -> str:
    """XLA's description of a GPU, a text proto (stream_executor's GpuTargetConfigProto)."""
    major, minor = gpu.compute_capability.split(".")
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
        cuda_compute_capability {{ major: {major} minor: {minor} }}
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      runtime_version {{ major: 13 }}
      device_description_str: "{gpu.name}"
    """
