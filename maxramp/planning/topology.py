"""TPU slices by name, and what their chips are published to do.

Sources: cloud.google.com/tpu/docs, the pages of each version (memory, peak bfloat16 rate, bandwidth
of the interchip interconnect and of the data center network; for v4, which has none of the last,
jax-ml.github.io/scaling-book/tpus gives 25 GB/s a host). MaxText's names count cores for v4 and
v5p, chips for v5e and v6e.
"""

import dataclasses
import importlib.util
import itertools
import math
import os
import re
from typing import Any

from maxramp.errors import ConfigError, install


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip of a TPU version."""

    memory_gib: float
    peak_tflops: float  # bfloat16
    clock_ghz: float  # at which its matrix units reach that
    interconnect_gbytes: float  # gigabytes a second into a chip, over all its links
    network_gbytes: float  # gigabytes a second into a chip from other slices
    dimensions: int  # of the torus or mesh
    cores: int  # of a chip, which a name such as v5p-2048 counts; they work as one device


CHIPS = {
    "v4": Chip(32, 275, 1.05, 300, 6.25, 3, 2),
    "v5e": Chip(16, 197, 1.5, 200, 3.125, 2, 1),
    "v5p": Chip(95, 459, 1.75, 600, 6.25, 3, 2),
    "v6e": Chip(32, 918, 1.75, 400, 12.5, 2, 1),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: `version:AxBxC`."""

    version: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        """What one of its chips does."""
        return CHIPS[self.version]

    @property
    def chips(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether links join the two ends of a side, so that it is a ring.

        A slice of whole 4x4x4 cubes is a torus, a part of a cube is a mesh
        (cloud.google.com/tpu/docs/v4 and v5p). In two dimensions a side of 16 wraps, which is the
        pod's own (jax-ml.github.io/scaling-book/tpus; MaxText's table of accelerators).
        """
        if len(self.shape) == 2:
            return tuple(n == 16 for n in self.shape)
        return (all(n % 4 == 0 for n in self.shape),) * 3

    @property
    def host(self) -> tuple[int, int, int]:
        """The chips of one machine: four, unless there is only one."""
        return (1, 1, 1) if self.chips == 1 else (2, 2, 1)

    def __str__(self) -> str:
        return f"{self.version}:{'x'.join(map(str, self.shape))}"


def parse(name: str) -> Topology:
    """`v5p:8x8x16`, or MaxText's `v5p-2048`, `v5e-256`, `v6e-256`.

    Raises:
      ConfigError: there is no such slice.
    """
    shown = f"compile_topology={name}"
    found = re.fullmatch(r"(v\d\w*)(?::(\d+(?:x\d+)+)|-(\d+))", name)
    if not found or found[1] not in CHIPS:
        raise ConfigError(
            f"{shown} is no TPU slice; give VERSION:AxB or AxBxC, or a name such as v5p-2048, with "
            f"version {', '.join(CHIPS)}"
        )
    chip = CHIPS[found[1]]
    if found[2]:
        shape = tuple(map(int, found[2].split("x")))
        if len(shape) != chip.dimensions or not _exists(shape):
            near = _shape_of(math.prod(shape), chip.dimensions)
            sides = "three sides, multiples of 4, or a part of 4x4x4 from 2x2x1 on"
            if chip.dimensions == 2:
                sides = "two sides, each 2, 4, 8 or 16, or 1x1"
            raise ConfigError(
                f"{shown} is no slice: {found[1]} has {sides}"
                + (f"; so many chips are {Topology(found[1], near)}" if near else "")
            )
        return Topology(found[1], shape)
    count, rest = divmod(int(found[3]), chip.cores)
    shape = None if rest else _shape_of(count, chip.dimensions)
    if shape is None:
        near = min(
            (n for n in range(1, 2 * count + 8) if _shape_of(n, chip.dimensions)),
            key=lambda n: abs(n - count),
        )
        raise ConfigError(
            f"{shown}: {found[3]} {'cores' if chip.cores > 1 else 'chips'} make no slice; the "
            f"nearest is {found[1]}-{near * chip.cores}"
        )
    return Topology(found[1], shape)


def _exists(shape: tuple[int, ...]) -> bool:
    """Whole 4x4x4 cubes or a part of one, 16x16 or a part of it; of whole hosts, or one chip."""
    if len(shape) == 2:
        return shape == (1, 1) or all(n in (2, 4, 8, 16) for n in shape)
    part = all(n in (2, 4) for n in shape[:2]) and shape[2] in (1, 2, 4)
    return part or all(n % 4 == 0 and n <= 32 for n in shape)


def _shape_of(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """The slice of so many chips that is nearest to a cube or square, shorter sides first."""
    sides = [n for n in (1, 2, *range(4, 33, 4)) if chips % n == 0]
    shapes = (
        # A side of 1 is the last one: a host is 2x2x1.
        shape if dimensions == 2 else tuple(sorted(shape, key=lambda n: (n == 1, n)))
        for shape in itertools.combinations_with_replacement(sides, dimensions)
        if math.prod(shape) == chips
    )
    return min(filter(_exists, shapes), key=lambda shape: (sum(shape), shape), default=None)


def describe(topology: Topology, num_slices: int) -> Any:
    """The devices of a pod, from libtpu on a machine without one.

    Returns:
      A `jax.experimental.topologies.TopologyDescription`.

    Raises:
      ConfigError: libtpu is not installed, or does not know the slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"compile_topology={topology}: the TPU compiler is not installed; "
            f"{install('tpu')} (no TPU is needed)"
        )
    # Read when libtpu is loaded: nothing is asked of a metadata server that is not there.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no TPU is taken
    os.environ["TPU_ACCELERATOR_TYPE"] = (
        f"{topology.version}-{topology.chips * topology.chip.cores}"
    )
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(
            str(topology),
            platform="tpu",
            num_slices=num_slices,
            chip_config_name="megacore" if topology.chip.cores == 2 else "default",
            chips_per_host_bounds=topology.host,
            wrap=(*topology.wraps, False)[:3],
        )
    except Exception as error:  # whatever the plugin raises
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"compile_topology={topology}: libtpu does not make it: {reason}"
        ) from None
