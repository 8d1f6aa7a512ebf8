"""The programs of a step of GRPO, compiled before they are needed.

A stage's parts have one shape, a number of rows. The programs that answer them, add up their
gradients and move the weights are compiled while the stages before train.

Shapes: R answers of a part, T tokens of a row.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxramp.config.keys import Config
from maxramp.data.batch import Batch, abstract_batch
from maxramp.generation.generator import GenerationConfig, Generator
from maxramp.model.decoder import Decoder
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.weights import join_parts
from maxramp.parallel.mesh import Jitted, mesh_of
from maxramp.parallel.sharding import ROWS_BT
from maxramp.rampup.schedule import Stage
from maxramp.stage import StageSpec
from maxramp.training import balance
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.learning_rate import LearningRate
from maxramp.training.log_probs import token_log_probs
from maxramp.training.state import TrainState
from maxramp.training.step import loss_of, share_out, update, zero_sums

# Programs that do not depend on the size of a part.
_SHARED = ("preparing weights", "zeroing sums", "the update", "later updates")


class PolicyPrograms:
    """What a step computes, on the mesh of its state.

    Attributes:
      policy: the keys of what is minimized.
      generator: writes the answers.
      raise_failure: as that of `BackgroundCompiler`.
      zeros: the trained weights -> sums before any part.
      add: sums (donated), trained and frozen weights, the state's buffers and a part of the batch
        -> their sums.
      update: the state (donated), the sums of the whole batch, its prompts, and whether they were
        counted already -> the next state and metrics.
      reference: the weights to stay near, and a part -> the same with their log-probabilities.
    """

    def __init__(
        self,
        config: Config,
        learning_rate: LearningRate,
        state: TrainState,
        generation: GenerationConfig,
        compiler: BackgroundCompiler,
        options: Mapping[str, Any],
    ):
        """Defines the programs for a resolved config and its state, which is abstract; `options`
        are the compiler's. A ConfigError if the model is a pipeline."""
        recipe, policy = config.recipe, config.policy
        self._mesh = mesh_of(state)
        jit = functools.partial(Jitted, self._mesh, compiler_options=dict(options) or None)
        self.policy, self._state, self._compiler = policy, state, compiler
        self.generator = Generator(recipe.model, state.model, generation, options)
        self.raise_failure = compiler.raise_failure
        self._announced: dict[StageSpec, dict[tuple, Callable[[], jax.stages.Traced]]] = {}
        dtype, minimized = recipe.model.dtype, loss_of(recipe)

        def add(sums: Any, trained: Decoder, frozen: Decoder, buffers: Any, batch: Batch) -> Any:
            def loss(trained: Decoder) -> tuple[jax.Array, Aux]:
                model = join_parts(frozen.cast(dtype), trained)
                own = share_out(batch, model.pattern, recipe.model)
                return minimized(balance.with_last_step(model, buffers), own)

            own_sums = jax.grad(loss, has_aux=True)(trained.cast(dtype))
            return jax.tree.map(jnp.add, sums, own_sums)

        def reference(model: Decoder, batch: Batch) -> jax.Array:
            block, temperature = policy.loss_block_tokens, policy.decode_sampling_temperature
            return token_log_probs(model.cast(dtype), recipe.model, batch, block, temperature)[0]

        self.zeros = jit(lambda trained: zero_sums(trained.cast(dtype), recipe.sum_names))
        self.add = jit(add, donate_argnums=0)
        self.update = jit(
            functools.partial(update, optimizer=recipe.optimizer, learning_rate=learning_rate),
            static_argnames="again",
            donate_argnums=0,
        )
        self.reference = jit(reference)

    def announce(self, stage: Stage) -> None:
        """Queues a stage's programs to be compiled, in the order of stages; called in the main
        thread."""
        part = stage.spec.resize(1, stage.spec.rows)
        if part not in self._announced:  # stages whose parts are equal share their programs
            self._announced[part] = self.trace_functions(part)
        for key, trace in self._announced[part].items():
            name = f"stage {stage.index} (batch {stage.global_batch_size}), {key[0]}"
            self._compiler.announce(key, name, self._mesh, lambda trace=trace: trace().lower())

    def wait(self, stage: Stage) -> float:
        """Waits for a stage's programs, which were announced, and lowers one of a later stage;
        returns the seconds. Raises a StepError if one does not compile."""
        part = stage.spec.resize(1, stage.spec.rows)
        waited = sum(self._compiler.get(key)[1] for key in self._announced[part])
        self._compiler.lower()
        return waited

    def trace_functions(self, part: StageSpec) -> dict[tuple, Callable[[], jax.stages.Traced]]:
        """Returns what traces each program for parts of a step, in the order of their use."""
        state, model = self._state, self._state.model
        answers = part.rows * self.policy.num_generations
        batch = abstract_batch(part.fields, (answers,), NamedSharding(self._mesh, ROWS_BT))

        def sums() -> Any:
            return self.zeros.eval_shape(state.trained)

        def trace_update(again: bool) -> Callable[[], jax.stages.Traced]:
            return lambda: self.update.trace(state, sums(), np.uint32(1), again=again)

        traces = self.generator.trace_programs(model, answers)
        traces["zeroing sums"] = lambda: self.zeros.trace(state.trained)
        if self.policy.grpo_beta:
            traces["the reference"] = functools.partial(self.reference.trace, model, batch)
            log_probs = self.reference.eval_shape(model, batch)
            batch = dataclasses.replace(batch, reference_log_probs=log_probs)
        traces["gradients"] = lambda: self.add.trace(
            sums(), state.trained, state.frozen, state.buffers, batch
        )
        traces["the update"] = trace_update(again=False)
        if self.policy.num_iterations > 1:
            traces["later updates"] = trace_update(again=True)
        return {(name, None if name in _SHARED else part): trace for name, trace in traces.items()}
