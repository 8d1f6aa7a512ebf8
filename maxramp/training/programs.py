"""The programs of every stage, compiled before they are needed: each batch shape has its own."""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from maxramp.data.batch import Batch, abstract_batch
from maxramp.data.relay import Expansion
from maxramp.model.decoder import Decoder
from maxramp.parallel.compiler import compiler_options
from maxramp.parallel.mesh import attach_mesh, bytes_per_device, format_sizes, mesh_of, reshape_mesh
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import Stage
from maxramp.stage import StageSpec
from maxramp.training import moving
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.device_memory import GIB
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import Metrics, TrainState, abstract_state
from maxramp.training.step import eval_loss_of, eval_step, make_exponent_count, make_train_step


def lower_step(
    recipe: Recipe,
    learning_rate: LearningRate,
    spec: StageSpec,
    mesh: Mesh,
    platforms: tuple[str, ...] | None = None,
) -> jax.stages.Lowered:
    """Lowers the train step of a stage alone, to be compiled with `compiler_options`, as that of a
    run is. `mesh` has the devices. Give `platforms` where they are of another kind than this
    process's. A RuntimeError if a library that a kernel needs is not installed."""
    mesh = reshape_mesh(mesh, spec.mesh)
    leading, sharding = (spec.accumulation, spec.rows), NamedSharding(mesh, BATCH_ABT)
    batch = abstract_batch(spec.fields, leading, sharding)
    jitted = jax.jit(make_train_step(recipe.with_spec(spec), learning_rate), donate_argnums=0)
    # Nothing runs under a concrete mesh of devices that this machine does not have.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jitted.trace(abstract_state(recipe, mesh), batch)
        return traced.lower(lowering_platforms=platforms)


class Programs:
    """Compiled train steps of every stage, the evaluation step, and moves from mesh to mesh."""

    def __init__(
        self,
        recipe: Recipe,
        expansion: Expansion,
        learning_rate: LearningRate,
        state: TrainState,
        compiler: BackgroundCompiler,
        eval_rows: int = 0,
    ):
        """Takes an abstract state on the mesh of the first stage. `eval_rows` are those of an
        evaluation's pass, of all devices; 0: no evaluation."""
        self._recipe, self._expansion, self._rate = recipe, expansion, learning_rate
        self._arrays, self._structure = jax.tree.flatten(state)
        self._eval_rows, self._mesh, self._compiler = eval_rows, mesh_of(state), compiler
        platform, quantization = expansion.mesh.devices.flat[0].platform, recipe.model.quantization
        self._options = compiler_options(platform, quantization) or None

    def add(self, stage: Stage) -> None:
        """Queues a stage's programs to be compiled; equal stages share them. In training, call it
        in the main thread, on every process after the same step."""
        name = f"stage {stage.index} (batch {stage.global_batch_size})"
        before, mesh = self._mesh, self._expansion.mesh_of(stage.spec)
        if mesh != before:
            arrays = attach_mesh(self._arrays, before)
            move = functools.partial(moving.lower, arrays, mesh, options=self._options)
            self._compiler.announce(
                (before, mesh), f"the move of each array to {format_sizes(mesh.shape)}", mesh, move
            )
        self._mesh = mesh
        lower = functools.partial(self._lower_step, stage.spec)
        self._compiler.announce(stage.spec, name, mesh, lower)
        if self._eval_rows:  # an evaluation may come before the next stage
            self._add_evaluation(stage)

    def train_step(self, stage: Stage) -> tuple[Callable, float]:
        """Returns a stage's compiled step, (the state's arrays, a batch) -> (the next arrays,
        metrics), and the seconds spent waiting for it. Raises StepError if it does not compile."""
        if stage.spec not in self._compiler:
            self.add(stage)
        return self._compiler.get(stage.spec)

    def exponent_count(self, stage: Stage) -> tuple[Callable, float]:
        """Returns a stage's compiled `step.count_exponents`, (the state's arrays, a batch) -> the
        arrays, and the seconds spent waiting for it. Raises StepError if it does not compile."""
        return self._compiler.get(self.add_exponent_count(stage))

    def add_exponent_count(self, stage: Stage) -> tuple[str, StageSpec]:
        """Queues the program of `exponent_count`, before the steps if it is called first."""
        name, spec = "the first scales of 8 bits", stage.spec
        lower = functools.partial(self._lower_exponent_count, spec)
        self._compiler.announce((name, spec), name, self._expansion.mesh_of(spec), lower)
        return name, spec

    def follow(self, state: list[jax.Array], stage: Stage) -> float:
        """Moves a state's arrays, in the list, to the mesh of a stage that was added, and waits
        until they are there. Returns the seconds spent waiting for programs; raises StepError if
        they do not compile."""
        before, mesh = mesh_of(state), self._expansion.mesh_of(stage.spec)
        if mesh == before:
            return 0.0
        compiled, waited = self._compiler.get((before, mesh))
        begin = time.perf_counter()
        jax.block_until_ready(state)  # or the time would include a step that still runs
        moving.move(state, self._arrays, compiled)
        size = bytes_per_device(state) / GIB
        self._compiler.say(
            f"mesh     stage {stage.index}: the state moved to {format_sizes(mesh.shape)}, "
            f"{size:.3g} GiB a device in {time.perf_counter() - begin:.2g} s"
        )
        return waited

    def eval_step(self, stage: Stage) -> tuple[Callable, float]:
        """Returns the compiled `step.eval_step` of a stage's mesh, and the seconds spent waiting
        for it; not with `eval_rows` 0. Raises as `train_step`."""
        return self._compiler.get(self._add_evaluation(stage))

    def _add_evaluation(self, stage: Stage) -> tuple[str, StageSpec]:
        name, spec = "evaluation", stage.spec.single_pass(self._eval_rows)
        lower = functools.partial(self._lower_evaluation, spec)
        self._compiler.announce((name, spec), name, self._expansion.mesh_of(spec), lower)
        return name, spec

    def _lower_step(self, spec: StageSpec) -> jax.stages.Lowered:
        """Lowers the step of a stage, which takes the arrays of the state (donated) and a batch; in
        the main thread."""
        train_step = make_train_step(self._recipe.with_spec(spec), self._rate)

        def step(arrays: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], Metrics]:
            state = self._structure.unflatten(arrays)
            state, metrics = train_step(state, self._expansion.gather(batch))
            return jax.tree.leaves(state), metrics

        return self._lower_on_state(step, spec)

    def _lower_exponent_count(self, spec: StageSpec) -> jax.stages.Lowered:
        count = make_exponent_count(self._recipe.with_spec(spec), self._rate)

        def step(arrays: list[jax.Array], batch: Batch) -> list[jax.Array]:
            state = self._structure.unflatten(arrays)
            return jax.tree.leaves(count(state, self._expansion.gather(batch)))

        return self._lower_on_state(step, spec)

    def _lower_on_state(self, step: Callable, spec: StageSpec) -> jax.stages.Lowered:
        batch = self._expansion.abstract_batch(spec)
        arrays = attach_mesh(self._arrays, self._expansion.mesh_of(spec))
        jitted = jax.jit(step, donate_argnums=0, compiler_options=self._options)
        return jitted.lower(arrays, batch)

    def _lower_evaluation(self, spec: StageSpec) -> jax.stages.Lowered:
        """Lowers the evaluation of a stage, which adds a batch to sums; in the main thread."""
        recipe = self._recipe.with_spec(spec)
        loss = eval_loss_of(recipe)

        def evaluate(model: Decoder, sums: tuple, batch: Batch) -> tuple:
            return eval_step(model, sums, self._expansion.gather(batch), loss=loss)

        sums = (jax.ShapeDtypeStruct((), jnp.float32),) * len(recipe.eval_sums)
        arrays = attach_mesh(self._arrays, self._expansion.mesh_of(spec))
        model = self._structure.unflatten(arrays).model
        batch = self._expansion.abstract_batch(spec)
        return jax.jit(evaluate, compiler_options=self._options).lower(model, sums, batch)
