"""What a compiler for other devices says of a train step, on a machine without them."""

import bisect
import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from maxramp.config.keys import Config
from maxramp.errors import ConfigError, reason_of
from maxramp.parallel import mesh as mesh_lib
from maxramp.planning.machine import Machine
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.training.device_memory import GIB, compiled_bytes
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import compiler_options, lower_step


@dataclasses.dataclass(frozen=True, eq=False)
class Pod:
    """The compiler of a pod or cluster, for the steps of a recipe.

    Attributes:
      recipe, learning_rate: what the step is made from.
      mesh: over the machine's devices.
      machine: whose compiler it is.
      device_memory_gib: of a device; -1 = what the machine says.
      batch: how many devices hold a row, and what their rows are a multiple of.
      say: takes a line of progress, before and after each compile.
    """

    recipe: Recipe
    learning_rate: LearningRate
    mesh: Mesh
    machine: Machine
    device_memory_gib: float
    batch: BatchKeys
    say: Callable[[str], None]

    @classmethod
    def of(
        cls,
        config: Config,
        ramp: RampupBatchManager,
        machine: Machine,
        say: Callable[[str], None] = lambda line: None,
    ) -> "Pod":
        """The compiler of a machine for the steps of a config that is resolved for it.

        Raises:
          ConfigError: they are steps of another program.
        """
        if config.run.program not in ("", "train"):
            raise ConfigError(
                f"program={config.run.program}: only the steps of maxramp.train are compiled ahead "
                "of a run; program=train compiles those for the same keys"
            )
        return cls(
            config.recipe,
            LearningRate.of(config.learning_rate, ramp),
            mesh_lib.make_mesh(config.mesh, machine.devices),
            machine,
            config.planning.device_memory_gib,
            config.batch,
            say,
        )

    @property
    def limit(self) -> float:
        """The memory of a device, in GiB; 0 where it is not known."""
        given = self.device_memory_gib
        return self.machine.memory_gib if given == -1 else given

    @functools.cached_property
    def _lower(self) -> Callable[[int, int], jax.stages.Lowered]:
        return lower_step(self.recipe, self.mesh, self.learning_rate, self.machine.platforms)

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        return compiler_options(self.mesh.devices.flat[0].platform) | self.machine.options

    @functools.cache  # noqa: B019
    def step(self, accumulation: int, rows: int) -> dict[str, Any]:
        """What the compiler says of the step of a batch shape."""
        policy = self.recipe.model.remat_policy
        self.say(f"compiling {accumulation} x {rows:,} rows, remat_policy={policy}")
        entry = self._step(accumulation, rows)
        memory = entry["memory_gib"]
        self.say(
            f"compiled in {entry['compile_seconds']:.0f} s, needs {memory['peak']:.3g} of "
            f"{memory['limit']:.3g} GiB"
        )
        return entry

    def _step(self, accumulation: int, rows: int) -> dict[str, Any]:
        lower = self._lower
        start = time.perf_counter()
        limit = {"peak_tflops_per_device": self.machine.peak_tflops}
        try:
            lowered = lower(accumulation, rows)
        except RuntimeError as error:  # a library that a kernel needs is not installed
            raise ConfigError(
                f"compile_topology={self.machine.name}: {reason_of(error)} "
                "docs/pods.md says what to install"
            ) from None
        try:
            compiled = lowered.compile(self._options or None)
        except jax.errors.JaxRuntimeError as error:
            if not (sizes := _too_big(str(error))):
                raise
            memory = {"arguments": None, "temporaries": None, "peak": sizes[0]}
            return limit | {
                "memory_gib": memory | {"limit": min(sizes[1], self.limit)},
                "fits": False,
                "compile_seconds": time.perf_counter() - start,
            }
        seconds = time.perf_counter() - start
        arguments = compiled.memory_analysis().argument_size_in_bytes / GIB
        peak = compiled_bytes(compiled) / GIB
        try:
            work = self.machine.work(compiled.as_text())
        except ValueError as error:
            raise ConfigError(
                f"compile_topology={self.machine.name}: the step compiles, but what its program "
                f"does cannot be counted: {error}; try another version of jax"
            ) from None
        return limit | {
            "memory_gib": {
                "arguments": arguments,
                "temporaries": peak - arguments,
                "peak": peak,
                "limit": self.limit,
            },
            "fits": peak <= self.limit,
            "compile_seconds": seconds,
            **work,
        }

    def nearest_fit(self, stage: Stage) -> dict[str, Any] | None:
        """The same global batch in the largest micro batches that fit; None if one row does not."""
        below = stage.micro_batch_size // self._ranks(stage)
        found = self._fits(stage, [n for n in self._sizes(stage) if n < below], 1)
        if not found:
            return None
        names = ("per_device_batch_size", "gradient_accumulation_steps")
        return {name: found[0][name] for name in names} | {
            "peak_gib": found[0]["memory_gib"]["peak"]
        }

    def largest_fits(self, stage: Stage, number: int) -> list[dict[str, Any]]:
        """A stage's global batch in the largest micro batches that fit, a few sizes of them."""
        return self._fits(stage, self._sizes(stage), number)

    def _ranks(self, stage: Stage) -> int:
        return stage.devices // self.batch.model_parallel_size

    def _sizes(self, stage: Stage) -> list[int]:
        """Rows a group of devices can take at a time, up to all of its own."""
        rows, multiple = stage.global_batch_size // self._ranks(stage), self.batch.rows_multiple
        return [size for size in range(multiple, rows + 1, multiple) if rows % size == 0]

    def _fits(self, stage: Stage, sizes: list[int], number: int) -> list[dict[str, Any]]:
        """The compiler's account of the largest sizes that fit, by bisection."""
        ranks = self._ranks(stage)
        rows = stage.global_batch_size // ranks

        def step(size: int) -> dict[str, Any]:
            return self.step(rows // size, size * ranks)

        low = bisect.bisect_left(sizes, True, key=lambda size: not step(size)["fits"])
        return [
            step(size)
            | {"global_batch_size": stage.global_batch_size}
            | {"per_device_batch_size": size / self.batch.model_parallel_size}
            | {"gradient_accumulation_steps": rows // size}
            for size in reversed(sizes[max(0, low - number) : low])
        ]


def _too_big(error: str) -> tuple[float, float] | None:
    """GiB that a refused program needs at least, and those there are; None if nothing is said."""
    used = re.search(r"Used ([0-9.]+[KMGT]) of ([0-9.]+[KMGT]) hbm", error)
    used = used or re.search(
        r"temporaries \(([0-9.]+[KMGT])\) exceeds available HBM \(([0-9.]+[KMGT])\)", error
    )
    if not used:
        return None
    return tuple(float(n[:-1]) * 1024.0 ** ("KMGT".index(n[-1]) - 2) for n in used.groups())
