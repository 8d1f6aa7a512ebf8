"""Every stage's program, compiled before it is needed: a new batch shape is a new program."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from maxramp.data.batch import Batch, Field, abstract_batch, text_fields
from maxramp.data.relay import Expansion
from maxramp.model.decoder import Decoder
from maxramp.parallel.mesh import make_mesh
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import Stage
from maxramp.rampup.spec import StageSpec
from maxramp.training.ahead import Ahead
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.objective import next_token_prediction
from maxramp.training.state import TrainState, abstract_state
from maxramp.training.step import Metrics, eval_step, make_train_step

# What XLA leaves off on GPUs by default and large runs want, communication that runs beside the
# arithmetic: the compiler's own effort level O1. Its single options change names between versions.
# Not the unrolling of loops by two that belongs to it: XLA then fails at a schedule of its own
# ("not scheduled after its control predecessor") for some loops of more than two layers.
_GPU_OPTIONS = {
    "optimization_level": 19,
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_NO_UNROLL",
}
# With rows and heads both sharded XLA would turn products into loops that each gather a part of the
# weight. They take longer than gathering it first, and five times as long to compile.
_TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


def compiler_options(on: str | None) -> dict[str, int | str]:
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
    learning_rate: LearningRate,
    spec: StageSpec,
    devices: Sequence[jax.Device] | None = None,
    platforms: tuple[str, ...] | None = None,
) -> jax.stages.Lowered:
    """Lowers the train step of a stage alone, to ask how much memory it needs.

    Args:
      recipe, learning_rate: what the step is made from.
      spec: what the stage is.
      devices: to lower for; by default those of this job.
      platforms: to lower for, where the devices belong to no backend of this process.
    """
    mesh = make_mesh(spec.mesh, devices)
    fields, leading = text_fields(spec.tokens, False), (spec.accumulation, spec.rows)
    batch = abstract_batch(fields, leading, NamedSharding(mesh, BATCH_ABT))
    jitted = jax.jit(make_train_step(recipe.of(spec), learning_rate), donate_argnums=0)
    # Setting a mesh of devices that are not there fails as soon as anything runs.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jitted.trace(abstract_state(recipe, mesh), batch)
        return traced.lower(lowering_platforms=platforms)


class Programs:
    """The compiled train step of every stage, and the evaluation step."""

    def __init__(
        self,
        recipe: Recipe,
        expansion: Expansion,
        learning_rate: LearningRate,
        state: TrainState,
        stages: list[Stage],
        fields: tuple[Field, ...],
        eval_rows: int,
        memory_limit: int,
        say: Callable[[str], None],
        on_failure: Callable[[], None],
    ):
        """Lowers the first program, and hands it to the compiler.

        Args:
          recipe: what the step is made from.
          expansion: how rows get to their devices, on the mesh of these.
          learning_rate: of consumed samples.
          state: abstract state.
          stages: the stages that will run, in order.
          fields: the arrays of a batch.
          eval_rows: rows of an evaluation batch; 0 = there is no evaluation.
          memory_limit: bytes of a device, beyond which a program is warned of; 0 = not known.
          say: takes a line about each program when it is compiled, in the background thread.
          on_failure: called in the background thread when a program does not compile.
        """
        self._expansion, self._fields = expansion, fields
        options = compiler_options(expansion.mesh.devices.flat[0].platform)
        self._ahead = Ahead(options, memory_limit, say, on_failure)

        train_step = make_train_step(recipe, learning_rate)
        objective = next_token_prediction(recipe.objective, recipe.execution)
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
            batch = expansion.abstract_batch(fields, 1, eval_rows)
            self._announce("eval", "evaluation", evaluate, state.model, sums, batch)
        for stage in later:
            self.add(stage)

        self._ahead.lower()

    def add(self, stage: Stage) -> None:
        """Has the step of one more stage compiled, after those that wait to be.

        The list of stages may grow while the run goes on: call it in the main thread, on every
        process after the same step. Stages of one shape share a program.
        """
        name = f"stage {stage.index} (batch {stage.global_batch_size})"
        batch = self._expansion.abstract_batch(self._fields, *_shape(stage))
        self._announce(_shape(stage), name, self._step, self._arrays, batch, donate=(0,))

    def train_step(self, stage: Stage) -> tuple[Callable, float]:
        """The compiled step of a stage, and the seconds spent waiting for it.

        It takes the arrays of a HeldState and a batch, and returns the next arrays and metrics. A
        stage that was not added is now.

        Raises:
          StepError: it does not compile.
        """
        if _shape(stage) not in self._ahead:
            self.add(stage)
        return self._ahead.get(_shape(stage))

    def eval_step(self) -> tuple[Callable, float]:
        """The compiled evaluation step, and the seconds spent waiting for it."""
        return self._ahead.get("eval")

    def lower_ahead(self) -> None:
        """Lowers one program more, or prepares the memory of one: what to do between two steps."""
        self._ahead.lower()

    def raise_failure(self) -> None:
        """Says why a program that was compiled ahead did not compile, if there is one.

        Raises:
          TrainingError: there is one.
        """
        self._ahead.raise_failure()

    def close(self) -> None:
        """Compiles nothing more, and gives the program in work a second to be done."""
        self._ahead.close()

    def _announce(
        self, key: Any, name: str, function: Callable, *arguments: Any, donate: tuple = ()
    ) -> None:
        def lower() -> jax.stages.Lowered:
            return jax.jit(function, donate_argnums=donate).lower(*arguments)

        self._ahead.announce(key, name, self._expansion.mesh, lower)


def _shape(stage: Stage) -> tuple[int, int]:
    """Accumulation steps and rows of a micro batch: what tells the programs of stages apart."""
    return stage.gradient_accumulation_steps, stage.micro_batch_size
