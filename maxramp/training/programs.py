"""Every stage's program, compiled before it is needed.

A new batch shape is a new program. Lowering needs the mesh of the main thread and takes tenths of a
second: one program after each step, while the devices are busy with it. Compiling takes seconds to
minutes and needs no mesh: one background thread does it, in the order of use, which is the same on
every host, while earlier stages train.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from maxramp.data.batch import Batch, abstract_batch
from maxramp.data.relay import Expansion
from maxramp.errors import TrainingError, reason_of
from maxramp.model.decoder import Decoder
from maxramp.parallel import cpu, processes
from maxramp.parallel.sharding import BATCH_ABS
from maxramp.rampup.schedule import Stage
from maxramp.training.device_memory import GIB, compiled_bytes
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.objective import next_token_prediction
from maxramp.training.state import TrainState, abstract_state
from maxramp.training.step import Metrics, eval_step, make_train_step

# What XLA leaves off on GPUs by default and large runs want, communication that runs beside the
# arithmetic: the compiler's own effort level O1. Its single options change names between versions.
_GPU_OPTIONS = {"optimization_level": 19}
# With rows and heads both sharded XLA would turn products into loops that each gather a part of the
# weight. They take longer than gathering it first, and five times as long to compile.
_TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


@dataclasses.dataclass
class _Program:
    """A program on its way: lowered, then compiled."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    compiled: concurrent.futures.Future


def compiler_options(on: str | None) -> dict[str, int]:
    """What the compiler is told beyond its defaults, by platform ("cpu", "cuda", "tpu", ...).

    What the user sets in LIBTPU_INIT_ARGS, XLA_FLAGS or JAX_OPTIMIZATION_LEVEL stays as it is.
    """
    set_by_user = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    if jax.config.jax_optimization_level != "UNKNOWN":
        set_by_user += " --optimization_level"
    ours = {"gpu": _GPU_OPTIONS, "cuda": _GPU_OPTIONS, "tpu": _TPU_OPTIONS}.get(on, {})
    return {name: value for name, value in ours.items() if f"--{name}" not in set_by_user}


def lower_step(
    recipe: Recipe,
    mesh: Mesh,
    learning_rate: LearningRate,
    platforms: tuple[str, ...] | None = None,
) -> Callable[[int, int], jax.stages.Lowered]:
    """Lowers the train step alone, to ask how much memory a batch needs. Call it on a set mesh.

    Args:
      recipe, learning_rate: what the step is made from.
      mesh: that is set.
      platforms: to lower for, where the mesh's devices belong to no backend of this process.

    Returns:
      A function of gradient accumulation steps and the rows of a micro batch over all devices.
    """
    state = abstract_state(recipe, mesh)
    jitted = jax.jit(make_train_step(recipe, learning_rate), donate_argnums=0)
    sharding = NamedSharding(mesh, BATCH_ABS)

    def lower(accumulation: int, rows: int) -> jax.stages.Lowered:
        shape = (accumulation, rows, recipe.model.max_target_length + 1)
        traced = jitted.trace(state, abstract_batch(shape, False, sharding))
        return traced.lower(lowering_platforms=platforms)

    return lower


class Programs:
    """The compiled train step of every stage, and the evaluation step."""

    def __init__(
        self,
        recipe: Recipe,
        expansion: Expansion,
        learning_rate: LearningRate,
        state: TrainState,
        stages: list[Stage],
        eval_rows: int,
        packed: bool,
        memory_limit: int,
        say: Callable[[str], None],
        on_failure: Callable[[], None],
    ):
        """Lowers the first program, and hands it to the compiler.

        Args:
          recipe: what the step is made from.
          expansion: how rows get to their devices, on the mesh that is set.
          learning_rate: of consumed samples.
          state: abstract state.
          stages: the stages that will run, in order.
          eval_rows: rows of an evaluation batch; 0 = there is no evaluation.
          packed: whether rows hold several documents.
          memory_limit: bytes of a device, beyond which a program is warned of; 0 = not known.
          say: takes a line about each program when it is compiled, in the background thread.
          on_failure: called in the background thread when a program does not compile.
        """
        self._expansion = expansion
        self._row_length, self._packed = recipe.model.max_target_length + 1, packed
        self._memory_limit = memory_limit
        self._options = compiler_options(expansion.mesh.devices.flat[0].platform)
        self._say, self._on_failure = say, on_failure
        self._failure: TrainingError | None = None
        self._programs: dict[Any, _Program] = {}
        self._ahead: collections.deque[_Program] = collections.deque()  # not yet lowered
        self._work: queue.SimpleQueue = queue.SimpleQueue()  # lowered, not yet compiled
        self._sizes: collections.deque[int] = collections.deque()  # compiled, memory not prepared

        train_step = make_train_step(recipe, learning_rate)
        objective = next_token_prediction(recipe.objective)
        self._arrays, structure = jax.tree.flatten(state)

        def step(arrays: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], Metrics]:
            state, metrics = train_step(structure.unflatten(arrays), expansion.gather(batch))
            return jax.tree.leaves(state), metrics

        def evaluate(model: Decoder, sums: tuple, batch: Batch) -> tuple:
            return eval_step(model, sums, expansion.gather(batch), objective=objective)

        self._step = step
        first, *later = stages
        self.add(first)
        if eval_rows:  # an evaluation may come before the second stage
            sums = (jax.ShapeDtypeStruct((), jnp.float32),) * 2
            batch = self._batch(1, eval_rows)
            self._announce("eval", "evaluation", evaluate, state.model, sums, batch)
        for stage in later:
            self.add(stage)

        self._thread = threading.Thread(
            target=self._compile_all, name=processes.COMPILING, daemon=True
        )
        self._thread.start()
        self._lower_next()

    def add(self, stage: Stage) -> tuple[int, ...]:
        """Has the step of one more stage compiled, after those that wait to be.

        The list of stages may grow while the run goes on: call it in the main thread, on every
        process after the same step. Stages of one shape share a program.

        Returns:
          The key of the program.
        """
        batch = self._batch(stage.gradient_accumulation_steps, stage.micro_batch_size)
        name = f"stage {stage.index} (batch {stage.global_batch_size})"
        self._announce(batch.tokens.shape, name, self._step, self._arrays, batch, donate=(0,))
        return batch.tokens.shape

    def train_step(self, stage: Stage) -> tuple[Callable, float]:
        """The compiled step of a stage, and the seconds spent waiting for it.

        It takes the arrays of a HeldState and a batch, and returns the next arrays and metrics.

        Raises:
          TrainingError: it does not compile.
        """
        return self._get(self.add(stage))

    def eval_step(self) -> tuple[Callable, float]:
        """The compiled evaluation step, and the seconds spent waiting for it."""
        return self._get("eval")

    def lower_ahead(self) -> None:
        """Lowers one program more, or prepares the memory of one: what to do between two steps."""
        if self._ahead:
            self._lower_next()
        elif self._sizes:
            cpu.prepare(self._sizes.popleft())

    def raise_failure(self) -> None:
        """Says why a program that was compiled ahead did not compile, if there is one.

        Raises:
          TrainingError: there is one.
        """
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Compiles nothing more, and gives the program in work a second to be done."""
        self._ahead.clear()
        self._work.put(None)
        for program in self._programs.values():
            program.compiled.cancel()
        self._thread.join(1.0)

    def _batch(self, accumulation: int, rows: int) -> Batch:
        return self._expansion.abstract_batch(accumulation, rows, self._row_length, self._packed)

    def _announce(
        self, key: Any, name: str, function: Callable, *arguments: Any, donate: tuple = ()
    ) -> None:
        if key not in self._programs:  # stages of one shape share a program
            lower = functools.partial(jax.jit(function, donate_argnums=donate).lower, *arguments)
            self._programs[key] = _Program(name, lower, concurrent.futures.Future())
            self._ahead.append(self._programs[key])

    def _get(self, key: Any) -> tuple[Callable, float]:
        program = self._programs[key]
        if program.compiled.done():
            return program.compiled.result(), 0.0
        start = time.perf_counter()
        while program in self._ahead:
            self._lower_next()
        return program.compiled.result(), time.perf_counter() - start

    def _lower_next(self) -> None:
        program = self._ahead.popleft()
        self._work.put((program, program.lower()))

    def _compile_all(self) -> None:
        while item := self._work.get():
            program, lowered = item
            if not program.compiled.set_running_or_notify_cancel():
                continue
            start = time.perf_counter()
            try:
                compiled = lowered.compile(self._options or None)
                self._report(program.name, compiled, time.perf_counter() - start)
                self._sizes.append(compiled.memory_analysis().temp_size_in_bytes)
            except Exception as error:  # whatever the compiler raises is the answer to who asks
                failure = TrainingError(
                    f"the program of {program.name} did not compile: {reason_of(error)}"
                )
                self._failure = self._failure or failure
                self._on_failure()
                program.compiled.set_exception(failure)
            else:
                program.compiled.set_result(compiled)

    def _report(self, name: str, compiled: jax.stages.Compiled, seconds: float) -> None:
        needed, limit = compiled_bytes(compiled), self._memory_limit
        self._say(
            f"ready    {name}: compiled in {seconds:.1f} s, needs {needed / GIB:.3g} GiB a device"
        )
        if limit and needed > limit:
            self._say(
                f"warning  {name} needs {needed / GIB:.3g} GiB a device, which has "
                f"{limit / GIB:.3g}: it will not run; start again with a smaller "
                "per_device_batch_size and more gradient_accumulation_steps, or remat_policy=full"
            )
