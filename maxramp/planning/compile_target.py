"""Asks a compiler how long train steps take, whether they fit, and what would fit."""

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Self

import jax
from jax.sharding import Mesh

from maxramp.commandline import count, show_wait
from maxramp.config.keys import Config
from maxramp.config.resolve import check_context, resolve
from maxramp.errors import ConfigError, reason_of
from maxramp.keys.numbers import plain_number
from maxramp.model.parts.attention import select_for
from maxramp.parallel.compiler import compiler_options
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.mesh import attach_mesh, format_sizes, make_mesh, reshape_mesh
from maxramp.planning import machine as machines
from maxramp.planning.machine import Machine
from maxramp.processes import backend
from maxramp.rampup import ladder
from maxramp.rampup.schedule import RampupBatchManager, ResumePoint
from maxramp.stage import StageSpec
from maxramp.training import moving
from maxramp.training.device_memory import GIB, compiled_bytes
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import lower_step
from maxramp.training.state import abstract_state

# Values of remat_policy, from the least work to the least memory.
POLICIES = ("none", "minimal_with_context", "minimal", "full")


def open_machine(config: Config) -> Machine:
    """Returns the machine of compile_topology, or this one, whose JAX it starts, for a loaded
    config; call it before JAX is used. A ConfigError for a config of another program than
    maxramp.train."""
    if config.run.program not in ("", "train"):
        raise ConfigError(
            f"program={config.run.program}: only the steps of maxramp.train are compiled ahead "
            "of a run; program=train compiles those for the same keys"
        )
    if config.planning.compile_topology:
        backend.take_hardware("cpu")  # nothing runs; the devices are only described
        return machines.describe_machine(config.planning)
    backend.start(config.backend)
    return machines.local_machine()


@dataclasses.dataclass(frozen=True, eq=False)
class CompileTarget:
    """The machine, which may be this one, that the steps of a config are compiled for."""

    config: Config  # resolved for the machine
    ramp: RampupBatchManager  # its stages on the machine's devices
    machine: Machine
    say: Callable[[str], None] = lambda line: None  # before and after each compile

    @classmethod
    def from_config(cls, config: Config, say: Callable[[str], None]) -> Self:
        """Opens the machine of a loaded config (`open_machine`); raises as that and
        `from_machine`."""
        return cls.from_machine(config, open_machine(config), say)

    @classmethod
    def from_machine(cls, config: Config, machine: Machine, say: Callable[[str], None]) -> Self:
        """Resolves a loaded config for a machine; a ConfigError if the devices do not fit it. A
        batch that does not divide is left to `ramp.check`."""
        config = resolve(config, len(machine.devices), machine.slices, 1)
        batch, number = config.batch, len(machine.devices)
        point = ResumePoint(rungs=ladder.expected_rungs(batch))
        ramp = RampupBatchManager(batch, number, point, fields=config.data.fields)
        return cls(config, ramp, machine, say)

    @property
    def limit(self) -> float:
        """The memory of a device, in GiB; 0 where unknown."""
        gib = self.config.planning.device_memory_gib
        return self.machine.memory_gib if gib == -1 else gib

    @property
    def policies(self) -> list[str]:
        """The values of remat_policy that make programs of their own: splash attention alone has a
        result that minimal_with_context keeps and minimal does not.
        """
        kernel = select_for(self.config.model, self.machine.devices[0].platform)
        return [p for p in POLICIES if kernel == "splash" or p != "minimal_with_context"]

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.config.mesh, self.machine.devices)

    @property
    def _options(self) -> dict[str, Any] | None:
        machine, quantization = self.machine, self.config.model.quantization
        return compiler_options(machine.devices[0].platform, quantization) | machine.options or None

    @functools.cache  # noqa: B019
    def step(self, spec: StageSpec) -> dict[str, Any]:
        """Compiles a stage's step: its memory, whether it fits (no, if `limit` is unknown), and on
        a machine by name `StepCost.to_json`, which is missing if the compiler refuses the step as
        too large. A ConfigError if a library that a kernel needs is not installed, or the program
        cannot be counted."""
        self.say(
            f"compiling {spec.accumulation} x {spec.rows:,} rows, remat_policy={spec.remat_policy}"
        )
        machine, start, work = self.machine, time.perf_counter(), {}
        memory = {"arguments": None, "temporaries": None, "limit": self.limit}
        rate = LearningRate.from_keys(self.config.learning_rate, self.ramp)
        try:
            lowered = lower_step(self.config.recipe, rate, spec, self.mesh, machine.platforms)
        except RuntimeError as error:  # a library that a kernel needs is not installed
            reason = f"{reason_of(error)} docs/pods.md says what to install"
            raise ConfigError(f"compile_topology={machine.name}: {reason}") from None
        try:
            with show_wait(self.say, "still compiling"):
                compiled = lowered.compile(self._options)
            seconds = time.perf_counter() - start
            peak = compiled_bytes(compiled) / GIB
            arguments = compiled.memory_analysis().argument_size_in_bytes / GIB
            memory |= {"arguments": arguments, "temporaries": peak - arguments}
            fits = peak <= self.limit
            work = self._work(compiled, "step")
        except jax.errors.JaxRuntimeError as error:
            if not (sizes := _too_big(str(error))):
                raise
            fits, peak, seconds = False, sizes[0], time.perf_counter() - start
            memory["limit"] = min(sizes[1], self.limit)
        self.say(f"compiled in {seconds:.0f} s, needs {peak:.3g} of {memory['limit']:.3g} GiB")
        return {
            "peak_tflops_per_device": machine.peak_tflops,
            "memory_gib": memory | {"peak": peak},
            "fits": fits,
            "compile_seconds": seconds,
            **work,
        }

    def _work(self, compiled: jax.stages.Compiled, what: str) -> dict[str, Any]:
        try:
            return self.machine.work(compiled.as_text())
        except ValueError as error:
            raise ConfigError(
                f"compile_topology={self.machine.name}: the {what} compiles, but what its program "
                f"does cannot be counted: {error}; try another version of jax"
            ) from None

    @functools.cache  # noqa: B019
    def move(self, before: MeshKeys, after: MeshKeys) -> dict[str, Any]:
        """Compiles the programs that move the state from one mesh to another: their
        `collective_gib` and `network_gib`, `peak_gib` of a device, and `fits`."""
        meshes = [reshape_mesh(self.mesh, keys) for keys in (before, after)]
        self.say(f"compiling the move of the state to {format_sizes(after.sizes)}")
        arrays = jax.tree.leaves(abstract_state(self.config.recipe, meshes[0]))
        with jax.sharding.use_abstract_mesh(meshes[1].abstract_mesh):
            lowered = moving.lower(arrays, meshes[1], self.machine.platforms)
        compiled = jax.tree.map(lambda program: program.compile(self._options), lowered)
        work = jax.tree.map(lambda program: self._work(program, "move"), compiled)
        moved = {"collective_gib": collections.Counter(), "network_gib": collections.Counter()}
        for x, (name, gib) in itertools.product(arrays, moved.items()):
            for program in work[moving.kind(x)]:
                gib.update(program.get(name, {}))
        sizes = [max(map(compiled_bytes, compiled[moving.kind(x)])) for x in arrays]
        peak = moving.peak_bytes(arrays, attach_mesh(arrays, meshes[1]), sizes) / GIB
        self.say(f"compiled, needs {peak:.3g} of {self.limit:.3g} GiB")
        return moved | {"peak_gib": peak, "fits": peak <= self.limit}

    def largest_fits(
        self, spec: StageSpec, number: int, most: int | None = None
    ) -> list[dict[str, Any]]:
        """Finds the `number` largest micro batches of a stage's global batch that fit, of at most
        `most` rows of a rank: what `step` returns with their batch keys, the largest first; [] if
        none fits."""
        multiple, rows = spec.rows_multiple, spec.samples // spec.mesh.ranks
        upto = (rows if most is None else most) + 1
        sizes = [size for size in range(multiple, upto, multiple) if rows % size == 0]

        def step(size: int) -> dict[str, Any]:
            return self.step(spec.resize(rows // size, size * spec.mesh.ranks))

        fitting = sizes[: count_fitting(sizes, lambda size: step(size)["fits"])]
        return [
            step(size)
            | {"global_batch_size": spec.samples}
            | {"per_device_batch_size": size / spec.mesh.model_parallel_size}
            | {"gradient_accumulation_steps": rows // size}
            for size in fitting[: -number - 1 : -1]
        ]

    def fastest_ways(self, spec: StageSpec) -> list[dict[str, Any]]:
        """Finds the ways to run a stage's global batch that fit, the fastest first: by remat policy
        the two `largest_fits`, as smaller ones are slower but for small models; with rows in as few
        parts as they can be, and in more as long as that is faster. Only on a machine by name, as
        no other tells times. [] if none fits."""
        ways: list[dict[str, Any]] = []
        fastest = math.inf
        for mesh in self._context_meshes(spec):
            for policy in self.policies:
                way = {
                    "remat_policy": policy,
                    "ici_context_parallelism": mesh.ici_context_parallelism,
                }
                tried = dataclasses.replace(spec, mesh=mesh, remat_policy=policy)
                ways += [way | entry for entry in self.largest_fits(tried, 2)]
            before, fastest = fastest, min((w["step_seconds"] for w in ways), default=math.inf)
            if ways and fastest == before:
                break
        return sorted(ways, key=lambda way: way["step_seconds"])

    def _context_meshes(self, spec: StageSpec) -> Iterator[MeshKeys]:
        """Yields the meshes that divide the devices of `fsdp` and `context` in all ways that rows
        and heads allow."""
        devices = spec.mesh.ici_fsdp_parallelism * spec.mesh.ici_context_parallelism
        for size in (n for n in range(1, devices + 1) if devices % n == 0):
            sizes = {"ici_fsdp_parallelism": devices // size, "ici_context_parallelism": size}
            mesh = dataclasses.replace(spec.mesh, **sizes)
            with contextlib.suppress(ConfigError):
                check_context(self.config.model, mesh, spec.row_length)
                if spec.samples % (mesh.ranks * spec.rows_multiple) == 0:
                    yield mesh

    def largest_batch(self) -> str:
        """Compiles the last stage's step in growing sizes under each remat policy. Returns lines
        for a config: the cheapest policy under which anything fits, and the largest pass. A
        ConfigError if the memory is not known, or the smallest pass fits under no policy."""
        spec, batch, limit = self.ramp.stages[-1].spec, self.config.batch, self.limit
        # With accumulation the sums of the gradients live through the passes: two passes show it.
        passes = 2 if batch.gradient_accumulation_steps > 1 or batch.global_batch_size != -1 else 1
        if not limit:
            raise ConfigError(
                f"device_memory_gib=-1: {self.machine.name} does not report its memory; "
                "give device_memory_gib"
            )
        parallel, multiple = spec.mesh.model_parallel_size, spec.rows_multiple
        sizes, least = range(multiple, sys.maxsize, multiple), least_rows(multiple)

        def step(policy: str, rows: int) -> dict[str, Any]:
            resized = spec.resize(passes, rows * spec.mesh.ranks)
            return self.step(dataclasses.replace(resized, remat_policy=policy))

        def needs(policy: str, rows: int) -> str:
            return f"{step(policy, rows)['memory_gib']['peak']:.3g}"

        def fits(policy: str, rows: int) -> bool:
            return step(policy, rows)["fits"]

        def show_size(rows: int) -> int | float:
            return plain_number(Fraction(rows, parallel))

        counts = {
            name: count_fitting(sizes, functools.partial(fits, name)) for name in self.policies
        }
        cheapest = next((policy for policy in counts if counts[policy]), None)
        if not cheapest:
            raise ConfigError(
                f"{least} per {count(parallel, 'device')} needs {needs(POLICIES[-1], multiple)} "
                f"GiB, but device_memory_gib={limit:.3g}; use remat_policy=full, a shorter "
                "max_target_length, or more devices"
            )
        size, above = sizes[counts[cheapest] - 1], sizes[counts[cheapest]]
        others = (
            f"; {policy} fits {show_size(number * multiple)}"
            if number
            else f"; {policy} needs {needs(policy, multiple)} GiB for {least}"
            for policy, number in counts.items()
            if policy != cheapest
        )
        return (
            f"per_device_batch_size: {show_size(size)}  # {needs(cheapest, size)} of {limit:.3g} "
            f"GiB; {show_size(above)} would need {needs(cheapest, above)}\n"
            f"remat_policy: {cheapest}  # the cheapest that fits{''.join(others)}"
        )


def least_rows(multiple: int) -> str:
    return "one row" if multiple == 1 else f"{multiple} rows"


def count_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Counts the rising sizes that fit: doubles up to one that does not, then halves. What is
    larger than one that does not fit must not fit either."""
    end = 1
    while end < len(sizes) and fits(sizes[end - 1]):
        end *= 2
    hi = min(end, len(sizes))
    return bisect.bisect_left(sizes, True, end // 2, hi, key=lambda size: not fits(size))


def _too_big(error: str) -> tuple[float, float] | None:
    """Reads the GiB that a refused program needs at least, and those available; None without."""
    size = "([0-9.]+[KMGT])"
    used = re.search(
        rf"Used {size} of {size} hbm|temporaries \({size}\) exceeds available HBM \({size}\)", error
    )
    sizes = filter(None, used.groups() if used else ())
    return tuple(float(n[:-1]) * 1024.0 ** ("KMGT".index(n[-1]) - 2) for n in sizes) or None
