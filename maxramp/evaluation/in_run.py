"""Tasks that a run is evaluated on while it trains."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from maxramp.commandline import Throttle
from maxramp.data.corpus import hash_of
from maxramp.data.keys import EvalKeys
from maxramp.errors import ConfigError, StepError, Stopped, TrainingError
from maxramp.evaluation.scorer import Scorer
from maxramp.evaluation.server import DryRun, EvalOptions, EvalServer, compile_ahead
from maxramp.handover.opening import load_tokenizer
from maxramp.handover.weights import find_kept
from maxramp.job.start import Job
from maxramp.parallel.mesh import attach_mesh, mesh_of, reshape_mesh
from maxramp.processes.agreement import broadcast_json, run_on_first
from maxramp.rampup.schedule import Stage
from maxramp.run.metrics import Dispatched, Record
from maxramp.stage import RopeKeys
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.state import TrainState


def hash_of_tasks(keys: EvalKeys) -> str:
    """Hashes the user's own tasks; those of lm-eval are known by their names."""
    own = pathlib.Path(os.path.expanduser(keys.evaluate_tasks_include_path or os.devnull))
    return hash_of([(path.name, path.read_bytes()) for path in sorted(own.rglob("*.yaml"))])


class RunTasks:
    """The tasks of a run, loaded once."""

    def __init__(self, job: Job, abstract: TrainState):
        """Loads them on process 0, and goes through all requests without a model, while the others,
        which call it too, wait; raises as `harness.Tasks`. `abstract` has the train state's shapes
        and shardings."""
        config, self._job = job.config, job
        keys: EvalKeys = config.evaluation
        self._keys, self._abstract = keys, abstract
        self._beat: Callable[[], None] = job.watchdog.beat
        self._tokenizer = load_tokenizer(config.data, find_kept(job.output.folder))
        self._scorers: dict[tuple[Mesh, RopeKeys], Scorer] = {}
        longest = config.model.max_target_length

        def load() -> tuple[Any, list[Any]]:
            from maxramp.evaluation import harness  # and with it lm-eval

            names, own = [*map(str, keys.evaluate_tasks)], keys.evaluate_tasks_include_path
            stages = config.mesh.pipeline_stages
            tasks = harness.Tasks("evaluate_tasks", names, own, stages)
            dry_run = DryRun(longest, self._beat)
            names = [*self._numbers(tasks, dry_run)]
            return tasks, (dry_run.requests, names)

        self._tasks, known = run_on_first(load, self._beat) or (None, None)
        self._requests, self.names = broadcast_json(known, self._beat)  # names of the numbers

    def announce(self, compiler: BackgroundCompiler, stage: Stage) -> None:
        """Has the programs compiled for the evaluations of a stage, if it has any; in the main
        thread, on every process. A ConfigError as `compile_ahead`."""
        total = end = self._job.schedule.ramp.total_samples
        if stage.samples is not None:
            end = stage.first_sample + stage.samples
        if self._keys.tasks_are_due(stage.first_sample, end, end >= total):
            mesh = reshape_mesh(self._job.mesh, stage.spec.mesh)
            compile_ahead(self._scorer(compiler, mesh, stage.spec.rope_keys), self._requests)

    def evaluate(
        self, compiler: BackgroundCompiler, state: TrainState, rope_keys: RopeKeys
    ) -> Dispatched | None:
        """Evaluates the tasks; returns None if the job is asked to stop meanwhile, and raises a
        StepError on every process if a task fails.
        """
        self._tell = Throttle(self._job.output.say)  # 30 seconds from here
        scorer = self._scorer(compiler, mesh_of(state), rope_keys)
        server = EvalServer(scorer, state.model, self._beat)
        try:
            numbers = server.run(lambda: self._numbers(self._tasks, server))
        except Stopped:
            return None
        except (ConfigError, TrainingError) as error:
            raise StepError(str(error)) from None
        return Dispatched((), lambda read, begin, end: numbers or {})

    def _numbers(self, tasks: Any, server: EvalServer | DryRun) -> Record:
        from maxramp.evaluation import harness

        model = harness.Model(server, self._tokenizer)
        return harness.numbers(harness.evaluate(tasks, model, EvalOptions(bootstrap_iters=0)))

    def _scorer(self, compiler: BackgroundCompiler, mesh: Mesh, rope_keys: RopeKeys) -> Scorer:
        """Returns the scorer of a mesh and rope keys, the same at every call: it keeps its
        programs."""
        config, key = self._job.config, (mesh, rope_keys)
        if key not in self._scorers:
            recipe = dataclasses.replace(
                config.recipe, model=dataclasses.replace(config.model, **vars(rope_keys))
            )
            abstract = attach_mesh(self._abstract.model, mesh)
            self._scorers[key] = Scorer(
                recipe, abstract, self._tokenizer, compiler, beat=self._pause
            )
        return self._scorers[key]

    def _pause(self, line: str) -> None:
        """Lets a signal stop the job between two passes, on all processes."""
        self._tell(line)
        self._job.pause()
