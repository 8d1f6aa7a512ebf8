"""What a compiler says of train steps: how long they take, whether they fit, and what would fit."""

import bisect
import collections
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
from jax.sharding import Mesh

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError, reason_of
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.mesh import make_mesh, on_mesh, reshaped, shown
from maxramp.planning import machine as machines
from maxramp.planning.machine import Machine
from maxramp.processes import backend
from maxramp.rampup import ladder
from maxramp.rampup.numbers import plain_number
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.stage import StageSpec
from maxramp.training import moving
from maxramp.training.device_memory import GIB, compiled_bytes
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import compiler_options, lower_step
from maxramp.training.state import abstract_state

# Values of remat_policy, from the least work to the least memory.
POLICIES = ("none", "minimal_with_context", "minimal", "full")


@dataclasses.dataclass(frozen=True, eq=False)
class Pod:
    """The compiler of a machine, which may be this one, for the steps of a config."""

    config: Config  # resolved for the machine
    ramp: RampupBatchManager  # its stages on the machine's devices
    machine: Machine
    say: Callable[[str], None] = lambda line: None  # before and after each compile

    @classmethod
    def of(cls, config: Config, say: Callable[[str], None]) -> "Pod":
        """The compiler for a loaded config: of its compile_topology, else of this machine.

        Raises:
          ConfigError: its steps are those of another program; the machine does not exist; or the
            mesh or the batches do not fill it.
        """
        if config.run.program not in ("", "train"):
            raise ConfigError(
                f"program={config.run.program}: only the steps of maxramp.train are compiled ahead "
                "of a run; program=train compiles those for the same keys"
            )
        if config.planning.compile_topology:
            backend.take_hardware("cpu")  # nothing runs; the devices are only described
            machine = machines.find(config.planning)
        else:
            backend.start(config.backend)
            machine = machines.here()
        config = resolve(config, len(machine.devices), machine.slices, 1)
        batch, number = config.batch, len(machine.devices)
        ramp = RampupBatchManager(
            batch, number, decided=ladder.expected(batch), fields=config.data.fields
        )
        return cls(config, ramp, machine, say)

    @property
    def limit(self) -> float:
        """The memory of a device, in GiB; 0 where it is not known."""
        given = self.config.planning.device_memory_gib
        return self.machine.memory_gib if given == -1 else given

    @property
    def mesh(self) -> Mesh:
        """Of all devices, of which those of the stages are made."""
        return make_mesh(self.config.mesh, self.machine.devices)

    @property
    def _options(self) -> dict[str, Any] | None:
        machine = self.machine
        return compiler_options(machine.devices[0].platform) | machine.options or None

    @functools.cache  # noqa: B019
    def step(self, spec: StageSpec) -> dict[str, Any]:
        """What the compiler says of the step of a stage."""
        self.say(
            f"compiling {spec.accumulation} x {spec.rows:,} rows, remat_policy={spec.remat_policy}"
        )
        machine, start, work = self.machine, time.perf_counter(), {}
        memory = {"arguments": None, "temporaries": None, "limit": self.limit}
        rate = LearningRate.of(self.config.learning_rate, self.ramp)
        try:
            lowered = lower_step(self.config.recipe, rate, spec, self.mesh, machine.platforms)
        except RuntimeError as error:  # a library that a kernel needs is not installed
            reason = f"{reason_of(error)} docs/pods.md says what to install"
            raise ConfigError(f"compile_topology={machine.name}: {reason}") from None
        try:
            compiled = lowered.compile(self._options)
            seconds = time.perf_counter() - start
            peak = compiled_bytes(compiled) / GIB
            arguments = compiled.memory_analysis().argument_size_in_bytes / GIB
            memory |= {"arguments": arguments, "temporaries": peak - arguments}
            fits = peak <= self.limit
            work = machine.work(compiled.as_text())
        except jax.errors.JaxRuntimeError as error:
            if not (sizes := _too_big(str(error))):
                raise
            fits, peak, seconds = False, sizes[0], time.perf_counter() - start
            memory["limit"] = min(sizes[1], self.limit)
        except ValueError as error:
            raise ConfigError(
                f"compile_topology={machine.name}: the step compiles, but what its program does "
                f"cannot be counted: {error}; try another version of jax"
            ) from None
        self.say(f"compiled in {seconds:.0f} s, needs {peak:.3g} of {memory['limit']:.3g} GiB")
        return {
            "peak_tflops_per_device": machine.peak_tflops,
            "memory_gib": memory | {"peak": peak},
            "fits": fits,
            "compile_seconds": seconds,
            **work,
        }

    @functools.cache  # noqa: B019
    def move(self, before: MeshKeys, after: MeshKeys) -> dict[str, Any]:
        """What the compiler says of the programs that move the state from one mesh to another.

        Returns:
          `collective_gib` and `network_gib` as of a step, `peak_gib`: what a device holds at most,
          and `fits`.
        """
        meshes = [reshaped(self.mesh, keys) for keys in (before, after)]
        self.say(f"compiling the move of the state to {shown(after.sizes)}")
        arrays = jax.tree.leaves(abstract_state(self.config.recipe, meshes[0]))
        with jax.sharding.use_abstract_mesh(meshes[1].abstract_mesh):
            lowered = moving.lower(arrays, meshes[1], self.machine.platforms)
        compiled = jax.tree.map(lambda program: program.compile(self._options), lowered)
        work = jax.tree.map(lambda program: self.machine.work(program.as_text()), compiled)
        moved = {"collective_gib": collections.Counter(), "network_gib": collections.Counter()}
        for x, (name, gib) in itertools.product(arrays, moved.items()):
            for of_program in work[moving.kind(x)]:
                gib.update(of_program.get(name, {}))
        taken = [max(map(compiled_bytes, compiled[moving.kind(x)])) for x in arrays]
        peak = moving.peak_bytes(arrays, on_mesh(arrays, meshes[1]), taken) / GIB
        self.say(f"compiled, needs {peak:.3g} of {self.limit:.3g} GiB")
        return moved | {"peak_gib": peak, "fits": peak <= self.limit}

    def largest_fits(
        self, spec: StageSpec, number: int, most: int | None = None
    ) -> list[dict[str, Any]]:
        """A stage's global batch in the largest micro batches that fit, by bisection.

        At most so many rows a group of devices at a time; None = all of its own.
        """
        ranks, multiple = spec.ranks, spec.rows_multiple
        rows = spec.samples // ranks
        upto = (rows if most is None else most) + 1
        sizes = [size for size in range(multiple, upto, multiple) if rows % size == 0]

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

    def by_speed(self, spec: StageSpec) -> list[dict[str, Any]]:
        """What fits of a stage's global batch, the most tokens per second first.

        Under each remat policy, the two largest micro batches: a smaller one is slower but for
        small models, and each costs a compile.
        """
        found = [
            {"remat_policy": policy} | entry
            for policy in POLICIES
            for entry in self.largest_fits(dataclasses.replace(spec, remat_policy=policy), 2)
        ]
        return sorted(found, key=lambda entry: entry["step_seconds"])

    def largest_batch(self) -> str:
        """Compiles the last stage's step in growing sizes under each remat policy.

        Returns:
          The lines to put into a config: the cheapest policy under which anything fits, and the
          most that fits under it.

        Raises:
          ConfigError: the device does not say how much memory it has, or one row is too much.
        """
        spec, batch, limit = self.ramp.stages[-1].spec, self.config.batch, self.limit
        # With accumulation the sums of the gradients live through the passes: two passes show it.
        passes = 2 if batch.gradient_accumulation_steps > 1 or batch.global_batch_size != -1 else 1
        if not limit:
            raise ConfigError(
                f"device_memory_gib=-1: {self.machine.name} does not report its memory; "
                "give device_memory_gib"
            )
        parallel, multiple = spec.mesh.model_parallel_size, spec.rows_multiple
        least = least_rows(multiple)

        def needed(policy: str, shares: int) -> float:
            of_size = spec.of_size(passes, shares * multiple * spec.ranks)
            found = self.step(dataclasses.replace(of_size, remat_policy=policy))
            return found["memory_gib"]["peak"]

        fitting, others = "", []
        for policy in POLICIES:
            ask = functools.partial(needed, policy)
            if ask(1) > limit:
                others.append(f"{policy} needs {ask(1):.3g} GiB for {least}")
                continue
            found = edge(ask, limit)
            size, above = (plain_number(Fraction(n * multiple, parallel)) for n in found)
            if fitting:
                others.append(f"{policy} fits {size}")
                continue
            fits, too_much = map(ask, found)
            fitting = (
                f"per_device_batch_size: {size}  # {fits:.3g} of {limit:.3g} GiB; "
                f"{above} would need {too_much:.3g}\n"
                f"remat_policy: {policy}  # the cheapest that fits"
            )
        if not fitting:
            raise ConfigError(
                f"{least} per {count(parallel, 'device')} needs {ask(1):.3g} "
                f"GiB, but device_memory_gib={limit:.3g}; use remat_policy=full, a shorter "
                "max_target_length, or more devices"
            )
        return "; ".join([fitting, *others])


def least_rows(multiple: int) -> str:
    """The fewest rows that a group of devices takes at a time, in words."""
    return "one row" if multiple == 1 else f"{multiple} rows"


def edge(needed: Callable[[int], float], limit: float) -> tuple[int, int]:
    """The most rows that fit, and the one more that do not, with few questions.

    A step's memory grows almost evenly with its rows: the line through one row and the last try
    says where the limit is. Where that is wrong, every second try halves what is left. `needed` is
    never less for more rows, and one row fits.
    """
    fits, too_much, rows, halve = 1, None, 2, False
    while True:
        fits, too_much = (rows, too_much) if needed(rows) <= limit else (fits, rows)
        if too_much == fits + 1:
            return fits, too_much
        per_row = (needed(rows) - needed(1)) / (rows - 1)
        most = too_much - 1 if too_much else 8 * fits  # a step far too large may not compile
        guess = 1 + int((limit - needed(1)) / per_row) if per_row else most
        rows = (fits + too_much) // 2 if halve else max(fits + 1, min(guess, most))
        halve = bool(too_much) and not halve


def _too_big(error: str) -> tuple[float, float] | None:
    """GiB that a refused program needs at least, and those there are; None if nothing is said."""
    size = "([0-9.]+[KMGT])"
    used = re.search(
        rf"Used {size} of {size} hbm|temporaries \({size}\) exceeds available HBM \({size}\)", error
    )
    sizes = filter(None, used.groups() if used else ())
    return tuple(float(n[:-1]) * 1024.0 ** ("KMGT".index(n[-1]) - 2) for n in sizes) or None
