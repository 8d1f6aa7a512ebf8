"""The sizes of the mesh's axes. Imports no JAX."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Self

from maxramp.commandline import count
from maxramp.errors import ConfigError
from maxramp.keys.section import Keys, positive_or_open
from maxramp.parallel.axes import AXES, NAME_IN_KEYS, ROW_AXES


def _names(group: str) -> list[str]:
    return [f"{group}_{NAME_IN_KEYS[axis]}_parallelism" for axis in AXES]


_Sizes = dataclasses.make_dataclass(
    "_Sizes",
    [(n, int, positive_or_open("to be filled in")) for n in (*_names("ici"), *_names("dcn"))],
    bases=(Keys,),
    frozen=True,
)


@dataclasses.dataclass(frozen=True)
class MeshKeys(_Sizes):
    """The sizes of the mesh's axes, between slices (dcn) and inside one (ici)."""

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int], slices: Mapping[str, int] | None = None) -> Self:
        """Makes the mesh of all axes' sizes, and of their parts between slices (else 1), which
        divide them."""
        dcn = [(slices or {}).get(axis, 1) for axis in AXES]
        ici = [sizes[axis] // part for axis, part in zip(AXES, dcn, strict=True)]
        return cls(*ici, *dcn)

    def group(self, group: str) -> dict[str, int]:
        return {name: getattr(self, name) for name in _names(group)}

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every mesh axis, with 1 for an open one."""
        pairs = zip(self.group("ici").values(), self.group("dcn").values(), strict=True)
        return {axis: max(1, i) * max(1, d) for axis, (i, d) in zip(AXES, pairs, strict=True)}

    @functools.cached_property
    def slices(self) -> dict[str, int]:
        """The part of every mesh axis between slices, with 1 for an open one."""
        sizes = self.group("dcn").values()
        return {axis: max(1, size) for axis, size in zip(AXES, sizes, strict=True)}

    @property
    def ranks(self) -> int:
        """Groups of devices that each hold rows of their own."""
        return math.prod(size for axis, size in self.sizes.items() if axis in ROW_AXES)

    @property
    def model_parallel_size(self) -> int:
        """Devices that together hold one row."""
        return math.prod(size for axis, size in self.sizes.items() if axis not in ROW_AXES)

    @property
    def pipeline_stages(self) -> int:
        return self.sizes["stage"]

    def command_line(self, axis: str) -> str:
        """Formats the two keys of an axis, with their values, for errors."""
        names = (f"{group}_{NAME_IN_KEYS[axis]}_parallelism" for group in ("ici", "dcn"))
        return " x ".join(f"{name}={getattr(self, name)}" for name in names)

    def resolve(self, num_devices: int, num_slices: int | None = None) -> "MeshKeys":
        """Fills in the open size of a group; a ConfigError if the devices make no such mesh.
        `num_slices` None: as many slices as the dcn sizes make."""
        slices = num_slices or math.prod(max(1, size) for size in self.group("dcn").values())
        dcn = _fill(self.group("dcn"), slices, f"this job has {count(slices, 'slice')}")
        inside, rest = divmod(num_devices, slices)
        job = f"this job has {count(num_devices, 'device')}"
        if rest:
            shown = " ".join(f"{name}={size}" for name, size in dcn.items() if size > 1)
            raise ConfigError(
                f"{shown}: {job}, which do not divide over {count(slices, 'slice')}; change either"
            )
        if num_devices == 1:
            product = math.prod(self.sizes.values())
            job += f"; hardware=cpu devices_per_node={product} makes {product} devices of a CPU"
        ici = _fill(self.group("ici"), inside, job)
        return MeshKeys(**ici, **dcn)


def _fill(sizes: dict[str, int], wanted: int, job: str) -> dict[str, int]:
    """Returns sizes, the one that is -1 filled in, with the product `wanted`; else a ConfigError.
    `job` is what it says of the job."""
    names = [f"{name}=-1" for name, size in sizes.items() if size == -1]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)}: one size of a group at most may be -1")
    known = math.prod(size for size in sizes.values() if size != -1)
    is_open = bool(names)
    if is_open and wanted and wanted % known == 0:
        return {name: wanted // known if size == -1 else size for name, size in sizes.items()}
    if not is_open and known == wanted:
        return sizes
    shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
    remedy = "let one of them be -1"
    if is_open:
        smaller = {name: _largest_size(size, known, wanted) for name, size in sizes.items()}
        fits = " or ".join(f"{name}={size}" for name, size in smaller.items() if size)
        remedy = f"use {fits}" if fits else f"give sizes whose product divides {wanted}"
    raise ConfigError(f"{shown} makes no mesh of {wanted}, and {job}; {remedy}")


def _largest_size(size: int, product: int, wanted: int) -> int:
    """Returns the largest size below an axis' own with which the product divides `wanted`, or 0."""
    fits = (n for n in range(1, size) if wanted and wanted % (product // size * n) == 0)
    return max(fits, default=0)
