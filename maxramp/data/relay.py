"""The expansion factor: a few processes read for all; rows travel inside the compiled step.

Glossary
  factor f  processes p with p % f == 0 read, each for itself and the f - 1 processes after it
  position  of a device in the mesh, counted over all its axes in order
  slot j    of a reading process's device: the rows of the corresponding device of process p + j

The step takes f slots and moves slot j to its process by one permutation, so the interconnect
carries exactly the rows that devices without a reader need. Factor 1 adds nothing to the step;
other factors give the same bits.

Shapes: f slots, A gradient accumulation steps, B rows of a micro batch, N rows of all devices
(those that several devices hold are counted for each).
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxramp.data.batch import Batch, abstract_batch
from maxramp.data.keys import ReadingKeys
from maxramp.data.order import Share
from maxramp.data.prefetch import Read, ReadAhead
from maxramp.errors import ConfigError
from maxramp.parallel.axes import AXES
from maxramp.parallel.mesh import reshape_mesh
from maxramp.parallel.sharding import BATCH_ABT, SLOTS_fANT
from maxramp.stage import StageSpec


def _process_indices(mesh: Mesh) -> list[int]:
    return [device.process_index for device in mesh.devices.flat]


class Expansion:
    """Which processes read which rows (`reads`, `share`), and how rows get to the others."""

    def __init__(self, mesh: Mesh, expansion_factor_real_data: float):
        """Stages have the devices of `mesh`. The factor is a whole number, or below 1 for a run
        that continues on 1/factor times as many devices: rows are found by number, so nothing is to
        do. A ConfigError for one that the processes do not fit."""
        self.mesh = mesh
        process_indices = _process_indices(mesh)
        positions: dict[int, list[int]] = {}  # of each process's devices
        for position, process in enumerate(process_indices):
            positions.setdefault(process, []).append(position)
        factor = max(1, int(expansion_factor_real_data))
        key, processes = f"expansion_factor_real_data={factor}", len(positions)
        possible = [str(n) for n in range(1, processes + 1) if processes % n == 0]
        sizes = sorted({*map(len, positions.values())})
        if processes % factor:
            raise ConfigError(
                f"{key}: one of that many processes reads for the others, but this job has "
                f"{processes}; use {' or '.join(possible)}"
            )
        if factor > 1 and len(sizes) > 1:
            raise ConfigError(
                f"{key}: the processes of this job have {sizes} devices, and rows go from device "
                "to device; use 1, or processes of equal size"
            )
        self.factor = factor
        readers = [p for p in sorted(positions) if p % factor == 0]
        self._moves = [
            [(a, b) for p in readers for a, b in zip(positions[p], positions[p + j], strict=True)]
            for j in range(1, factor)
        ]
        self._slots = [process % factor for process in process_indices]  # by position
        process = jax.process_index()
        self.reads = process in readers
        served = range(process, process + factor) if self.reads else ()
        self.share = Share(np.array([positions[p] for p in served], int))
        self._zeros = functools.cache(self._make_zeros)

    def mesh_of(self, spec: StageSpec) -> Mesh:
        """Returns the mesh of a stage."""
        return reshape_mesh(self.mesh, spec.mesh)

    def abstract_batch(self, spec: StageSpec) -> Batch:
        """Returns the shapes of a batch as `place` puts it on the devices."""
        leading, partition = (spec.accumulation, spec.rows), BATCH_ABT
        if self.factor > 1:
            rows = spec.rows * spec.mesh.model_parallel_size
            leading, partition = (self.factor, spec.accumulation, rows), SLOTS_fANT
        return abstract_batch(spec.fields, leading, NamedSharding(self.mesh_of(spec), partition))

    def read_ahead(
        self, what: str, read: Read, numbers: range, reading: ReadingKeys, largest: StageSpec
    ) -> Iterator[Batch | None]:
        """Returns what `place` takes for each number, read ahead: None if this process reads
        nothing. `read` gives its part of a batch; `largest` is the stage of the largest batch."""
        if not self.reads:
            return (None for _ in numbers)
        abstract = jax.tree.leaves(self.abstract_batch(largest))
        size = sum(x.size * x.dtype.itemsize for x in abstract) // jax.process_count()
        return ReadAhead(what, read, numbers, reading, size)

    def place(self, local: Batch | None, batch: Batch) -> Batch:
        """Puts a batch on the devices, on all processes together; `local` is None where this one
        does not read, `batch` has the shapes (`abstract_batch`)."""
        if local is None:
            return jax.tree.map(self._zeros, batch)
        make = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x, part: make(x.sharding, part, x.shape), batch, local)

    def _make_zeros(self, x: jax.ShapeDtypeStruct) -> jax.Array:
        shape = x.sharding.shard_shape(x.shape)
        return jax.make_array_from_callback(
            x.shape, x.sharding, lambda index: np.zeros(shape, x.dtype)
        )

    def gather(self, batch: Batch) -> Batch:
        """Brings every row to its devices, inside a compiled step: [A, B, ...] as BATCH_ABT."""
        if self.factor == 1:
            return batch

        def move(slots_fANT: jax.Array) -> jax.Array:
            moved = (jax.lax.ppermute(slots_fANT[j], AXES, p) for j, p in enumerate(self._moves, 1))
            arrived = [slots_fANT[0], *moved]
            # A choice that the compiler leaves alone. A sum with zeros, or a select, it would put
            # into the loops that read the rows, and a loss's sum, compiled so, has other last bits.
            slot = jnp.array(self._slots)[jax.lax.axis_index(AXES)]
            return jax.lax.switch(slot, [lambda j=j: arrived[j] for j in range(self.factor)])

        # The devices of a group get equal rows, which the compiler cannot know.
        spread = jax.shard_map(move, in_specs=SLOTS_fANT, out_specs=BATCH_ABT, check_vma=False)
        return jax.tree.map(spread, batch)
