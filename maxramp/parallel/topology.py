"""TPU slices by name, and what their chips are published to do.

Sources: cloud.google.com/tpu/docs, the pages of each version (memory, peak bfloat16 rate, interchip
interconnect bandwidth); MaxText's names count cores for v4 and v5p, chips for v5e and v6e.
"""

import dataclasses
import importlib.util
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
    interconnect_gbytes: float  # gigabytes a second into a chip, over all its links
    dimensions: int  # of the torus or mesh
    cores: int  # that a name such as v5p-2048 counts for a chip


CHIPS = {
    "v4": Chip(32, 275, 1.05, 300, 3, 2),
    "v5e": Chip(16, 197, 1.5, 200, 2, 1),
    "v5p": Chip(95, 459, 1.75, 600, 3, 2),
    "v6e": Chip(32, 918, 1.75, 448, 2, 1),
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
            sides = "three sides, multiples of 4 or each 1, 2 or 4"
            if chip.dimensions == 2:
                sides = "two sides, each 1, 2, 4, 8 or 16"
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
    """In three dimensions whole 4x4x4 cubes, or a part of one; in two 16x16 or a part of it."""
    if len(shape) == 2:
        return all(n in (1, 2, 4, 8, 16) for n in shape)
    part = all(n in (1, 2, 4) for n in shape) and math.prod(shape) >= 4
    return part or all(n % 4 == 0 and n <= 32 for n in shape)


def _shape_of(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """The slice of so many chips that is nearest to a cube or square, shorter sides first."""
    sides = [n for n in (1, 2, *range(4, 33, 4)) if chips % n == 0]
    shapes = [
        shape
        for shape in itertools.combinations_with_replacement(sides, dimensions)
        if math.prod(shape) == chips and _exists(shape)
    ]
    if dimensions == 3:  # what is less than a host's 2x2x1 long in one dimension lies flat: 2x2x1
        shapes = [tuple(sorted(shape, key=lambda n: (n == 1, n))) for shape in shapes]
    return min(shapes, key=lambda shape: (sum(shape), shape), default=None)


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
            "python -m pip install 'jax[tpu]' (no TPU is needed)"
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
        return topologies.get_topology_desc(str(topology), platform="tpu", num_slices=num_slices)
    except Exception as error:  # whatever the plugin raises
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"compile_topology={topology}: libtpu does not make it: {reason}"
        ) from None
