"""TPU slices by name, and the published rates of their chips.

Sources: cloud.google.com/tpu/docs, the pages of each version (for v4's data center network
jax-ml.github.io/scaling-book/tpus: 25 GB/s a host). MaxText's names count cores for v4 and v5p,
chips for v5e and v6e.
"""

import dataclasses
import itertools
import math
import os
import re
from typing import Any

from maxramp.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip of a TPU version."""

    memory_gib: float
    peak_tflops: float  # bfloat16
    clock_ghz: float  # at which its matrix units reach that
    memory_gbytes: float  # gigabytes a second
    interconnect_gbytes: float  # gigabytes a second into a chip, over all its links
    network_gbytes: float  # gigabytes a second into a chip from other slices
    dimensions: int  # of the torus or mesh
    cores: int  # of a chip, which a name such as v5p-2048 counts; they work as one device


CHIPS = {
    "v4": Chip(32, 275, 1.05, 1228, 300, 6.25, 3, 2),
    "v5e": Chip(16, 197, 1.5, 819, 200, 3.125, 2, 1),
    "v5p": Chip(95, 459, 1.75, 2765, 600, 6.25, 3, 2),
    "v6e": Chip(32, 918, 1.75, 1640, 400, 12.5, 2, 1),
}

HOST_CHIPS = 4  # of a machine, unless its slice has only one


# The slices that there are, by their dimensions: a part of 16x16 of whole hosts, or one chip; whole
# 4x4x4 cubes, or a part of one.
_SHAPES = {
    2: ((1, 1), *itertools.product((2, 4, 8, 16), repeat=2)),
    3: (
        *itertools.product((2, 4), (2, 4), (1, 2, 4)),
        *itertools.product(range(4, 33, 4), repeat=3),
    ),
}
_SIDES = {
    2: "two sides, each 2, 4, 8 or 16, or 1x1",
    3: "three sides, multiples of 4, or a part of 4x4x4 from 2x2x1 on",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: `version:AxBxC`."""

    version: str
    shape: tuple[int, ...]

    compiler, plugin, extra = "TPU", "libtpu", "tpu"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.version]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """As MaxText and Google Cloud name it: v5p-2048."""
        return f"{self.version}-{self.chips * self.chip.cores}"

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether links join the two ends of a side. A slice of whole 4x4x4 cubes is a torus, a
        part of a cube a mesh (cloud.google.com/tpu/docs/v4 and v5p); in two dimensions only a pod's
        own side of 16 wraps (jax-ml.github.io/scaling-book/tpus; MaxText's table of
        accelerators)."""
        if len(self.shape) == 2:
            return tuple(n == 16 for n in self.shape)
        return (all(n % 4 == 0 for n in self.shape),) * 3

    def description(self, num_slices: int) -> dict[str, Any]:
        """Returns the arguments of JAX's `get_topology_desc`, and sets the environment for libtpu,
        which must not be loaded yet."""
        # Read when libtpu is loaded: nothing is asked of a metadata server that is not there.
        os.environ |= {
            **{"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"},
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is taken
            "TPU_ACCELERATOR_TYPE": self.name,
        }
        return {
            "platform": "tpu",
            "topology_name": str(self),
            "num_slices": num_slices,
            "chip_config_name": "megacore" if self.chip.cores == 2 else "default",
            "chips_per_host_bounds": (1, 1, 1) if self.chips == 1 else (2, 2, 1),
            "wrap": (*self.wraps, False)[:3],
        }

    def __str__(self) -> str:
        return f"{self.version}:{'x'.join(map(str, self.shape))}"


def parse(name: str) -> Topology:
    """Reads `v5p:8x8x16`, or MaxText's `v5p-2048`, `v5e-256`, `v6e-256`; a ConfigError if no slice
    has that shape or size."""
    match = re.fullmatch(r"(v\d\w*)(?::(\d+(?:x\d+)+)|-(\d+))", name)
    if not match or match[1] not in CHIPS:
        raise ConfigError(
            f"compile_topology={name} is not a TPU slice; give VERSION:AxB or AxBxC, or a name "
            f"such as v5p-2048, with version {', '.join(CHIPS)}"
        )
    version, sides, cores = match.groups()
    chip = CHIPS[version]
    shape, shapes = tuple(map(int, sides.split("x"))) if sides else (), _SHAPES[chip.dimensions]
    chips = math.prod(shape) if sides else int(cores) / chip.cores
    # Of as many chips, the one nearest to a cube or square, shorter sides first.
    near = min(shapes, key=lambda shape: (abs(math.prod(shape) - chips), sum(shape), shape))
    nearest = Topology(version, near)
    if shape not in shapes and (sides or nearest.chips != chips):
        raise ConfigError(
            f"compile_topology={name} is not a slice: {version} has {_SIDES[chip.dimensions]}; the "
            f"nearest is {nearest} ({nearest.name})"
        )
    return Topology(version, shape or near)
