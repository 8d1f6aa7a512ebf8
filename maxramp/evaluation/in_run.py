"""Tasks that a run is evaluated on while it trains."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from maxramp.data.keys import EvalKeys
from maxramp.evaluation.asking import Asking
from maxramp.evaluation.scorer import Scorer
from maxramp.evaluation.together import Together
from maxramp.handover.opening import tokenizer_of
from maxramp.job.start import Job
from maxramp.parallel.mesh import mesh_of, on_mesh
from maxramp.processes.agreement import led
from maxramp.run.metrics import Record, Taken
from maxramp.training.programs import compiler_options
from maxramp.training.state import TrainState


def open_tasks(job: Job, abstract: TrainState) -> Callable[[TrainState], Taken] | None:
    """What evaluates a state on the tasks of a run; None if it has none.

    Args:
      job: of the run.
      abstract: the train state's shapes and shardings.

    Raises:
      ConfigError: there is no such task, or it cannot be loaded.
    """
    config, beat = job.config, job.watchdog.beat
    keys: EvalKeys = config.evaluation
    if not keys.evaluate_tasks:
        return None
    tokenizer = tokenizer_of(config.data, config.checkpoints.load_parameters_path)

    def load() -> Any:
        from maxramp.evaluation import harness  # and with it lm-eval

        names, own = [*map(str, keys.evaluate_tasks)], keys.evaluate_tasks_include_path
        tasks = harness.Tasks("evaluate_tasks", names, own)
        tasks.refuse_answers(config.mesh.pipeline_stages)
        return tasks

    tasks = led(load, beat)

    @functools.cache
    def scorer_on(mesh: Mesh) -> Scorer:
        return Scorer(
            config.model,
            config.objective.loss_block_tokens,
            on_mesh(abstract.model, mesh),
            tokenizer.tokenizer,
            tokenizer.ends,
            compiler_options(jax.default_backend()),
            beat=beat,
        )

    def evaluate(state: TrainState) -> Taken:
        together = Together(scorer_on(mesh_of(state)), state.model, beat)

        def lead() -> Record:
            from maxramp.evaluation import harness

            model = harness.Model(together, tokenizer.tokenizer, config.data)
            return harness.numbers(harness.evaluate(tasks, model, Asking(bootstrap_iters=0)))

        found = together.run(lead)
        return Taken((), lambda read, begin, end: found or {})

    return evaluate
