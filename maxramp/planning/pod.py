"""What a compiler for other devices says of a train step, on a machine without them."""

import bisect
import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax

from maxramp.config.keys import Config
from maxramp.errors import ConfigError, reason_of
from maxramp.planning.machine import Machine
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rampup.spec import StageSpec
from maxramp.training.device_memory import GIB, compiled_bytes
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import compiler_options, lower_step


@dataclasses.dataclass(frozen=True, eq=False)
class Pod:
    """The compiler of a pod or cluster, for the steps of a recipe.

    Attributes:
      recipe, learning_rate: what the step is made from.
      machine: whose compiler it is.
      device_memory_gib: of a device; -1 = what the machine says.
      say: takes a line of progress, before and after each compile.
    """

    recipe: Recipe
    learning_rate: LearningRate
    machine: Machine
    device_memory_gib: float
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
            machine,
            config.planning.device_memory_gib,
            say,
        )

    @property
    def limit(self) -> float:
        """The memory of a device, in GiB; 0 where it is not known."""
        given = self.device_memory_gib
        return self.machine.memory_gib if given == -1 else given

    @functools.cache  # noqa: B019
    def step(self, spec: StageSpec) -> dict[str, Any]:
        """What the compiler says of the step of a stage."""
        self.say(
            f"compiling {spec.accumulation} x {spec.rows:,} rows, remat_policy={spec.remat_policy}"
        )
        entry = self._step(spec)
        memory = entry["memory_gib"]
        self.say(
            f"compiled in {entry['compile_seconds']:.0f} s, needs {memory['peak']:.3g} of "
            f"{memory['limit']:.3g} GiB"
        )
        return entry

    def _step(self, spec: StageSpec) -> dict[str, Any]:
        machine, start = self.machine, time.perf_counter()
        limit = {"peak_tflops_per_device": machine.peak_tflops}
        options = compiler_options(machine.devices[0].platform) | machine.options
        try:
            lowered = lower_step(
                self.recipe, self.learning_rate, spec, machine.devices, machine.platforms
            )
        except RuntimeError as error:  # a library that a kernel needs is not installed
            raise ConfigError(
                f"compile_topology={self.machine.name}: {reason_of(error)} "
                "docs/pods.md says what to install"
            ) from None
        try:
            compiled = lowered.compile(options or None)
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

    def nearest_fit(self, spec: StageSpec) -> dict[str, Any] | None:
        """The same global batch in the largest micro batches that fit; None if one row does not."""
        below = spec.rows // spec.ranks
        found = self._fits(spec, [n for n in _sizes(spec) if n < below], 1)
        if not found:
            return None
        names = ("per_device_batch_size", "gradient_accumulation_steps")
        return {name: found[0][name] for name in names} | {
            "peak_gib": found[0]["memory_gib"]["peak"]
        }

    def largest_fits(self, spec: StageSpec, number: int) -> list[dict[str, Any]]:
        """A stage's global batch in the largest micro batches that fit, a few sizes of them."""
        return self._fits(spec, _sizes(spec), number)

    def _fits(self, spec: StageSpec, sizes: list[int], number: int) -> list[dict[str, Any]]:
        """The compiler's account of the largest sizes that fit, by bisection."""
        ranks = spec.ranks
        rows = spec.samples // ranks

        def step(size: int) -> dict[str, Any]:
            return self.step(spec.of_size(rows // size, size * ranks))

        low = bisect.bisect_left(sizes, True, key=lambda size: not step(size)["fits"])
        return [
            step(size)
            | {"global_batch_size": spec.samples}
            | {"per_device_batch_size": size / spec.mesh.model_parallel_size}
            | {"gradient_accumulation_steps": rows // size}
            for size in reversed(sizes[max(0, low - number) : low])
        ]


def _sizes(spec: StageSpec) -> list[int]:
    """Rows a group of devices can take at a time, up to all of its own."""
    rows, multiple = spec.samples // spec.ranks, spec.rows_multiple
    return [size for size in range(multiple, rows + 1, multiple) if rows % size == 0]


def _too_big(error: str) -> tuple[float, float] | None:
    """GiB that a refused program needs at least, and those there are; None if nothing is said."""
    used = re.search(r"Used ([0-9.]+[KMGT]) of ([0-9.]+[KMGT]) hbm", error)
    used = used or re.search(
        r"temporaries \(([0-9.]+[KMGT])\) exceeds available HBM \(([0-9.]+[KMGT])\)", error
    )
    if not used:
        return None
    return tuple(float(n[:-1]) * 1024.0 ** ("KMGT".index(n[-1]) - 2) for n in used.groups())
