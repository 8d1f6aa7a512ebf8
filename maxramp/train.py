"""Trains a model, or continues the run of that run_name where it stopped.

python -m maxramp.train CONFIG.yml [key=value ...]

configs/base.yml trains a small model in about a minute. docs/running.md says what a run writes and
what its exit status means.
"""

import sys

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console
    from maxramp.processes.ending import Preemption

    console.outlive_readers()
    _PREEMPTION = Preemption()

    from maxramp.commandline import parse_config
    from maxramp.config.load import load
    from maxramp.errors import ConfigError, report

    try:
        # Reports what is wrong at once.
        load(parse_config(__doc__, sys.argv[1:]), "train", note=lambda line: None)
    except (ConfigError, OSError) as error:
        sys.exit(report(error))

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.commandline import parse_config, show_wait
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.data.batch import count_targets
from maxramp.data.corpus import Corpus, hash_of
from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.order import RunRows
from maxramp.data.relay import Expansion
from maxramp.evaluation.in_run import RunTasks, hash_of_tasks
from maxramp.handover.weights import check_first_weights
from maxramp.job import start
from maxramp.job.loop import train
from maxramp.job.reference import add_reference
from maxramp.job.start import Job, JobContext
from maxramp.measuring.batch_check import check_batches
from maxramp.model.decoder import Decoder
from maxramp.model.size import training_flops_per_token
from maxramp.parallel.mesh import Jitted
from maxramp.processes.ending import Preemption, run
from maxramp.rampup.phases import MIXTURE
from maxramp.rampup.schedule import Stage
from maxramp.run.metrics import Dispatched, Record, evaluation_from_sums, names_of_sums
from maxramp.stage import RopeKeys
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.device_memory import device_memory
from maxramp.training.eight_bits import is_counted
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import Programs
from maxramp.training.state import TrainState


def main(arguments: Sequence[str] | None = None, preemption: Preemption | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments

    def load_config(note: Callable[[str], None]) -> Config:
        config = load(parse_config(__doc__, words), "train", note)
        check_first_weights(config)
        return config

    return start.run(load_config, _run, preemption)


def _run(context: JobContext) -> int:
    config = context.config
    expansion = Expansion(context.mesh, config.data.expansion_factor_real_data)
    phases, beat = config.batch.changing(MIXTURE), context.watchdog.beat
    later = [(phase.first_sample, phase.changes[MIXTURE]) for phase in phases]
    corpus = open_rows(config.data, expansion.reads, beat, later)
    context.watchdog.beat()
    fields = functools.partial(config.objective.fields, separate=corpus.packed)
    rows = len(RunRows(corpus.train, config.data.num_epoch, None, corpus.later))
    job = context.open_run(corpus.identity(_evaluations(config, corpus)), fields, rows)
    if not job.has_work:
        return job.end()
    if config.objective.has_reference:
        corpus = add_reference(job, corpus, expansion)
    ramp, first_step = job.schedule.ramp, job.schedule.first_step
    loader = Loader(config.data, config.reading, corpus, ramp, expansion, first_step)
    job.closing.callback(loader.close)
    abstract, read = job.abstract_state()
    tasks = RunTasks(job, abstract) if config.evaluation.evaluate_tasks else None
    return train(job, Pretrainer(job, loader, abstract, read, tasks))


_FEW_TARGETS = 10_000  # of an evaluation, whose loss moves by more than a run's progress


def _describe_rows(corpus: Corpus, config: Config) -> Iterator[str]:
    """Describes what is held out, and how far the rows of a mixture reach, by a resolved config;
    only in a process that reads rows."""
    limit = config.evaluation.eval_samples
    for part in corpus.held_out if config.data.eval_interval != -1 else ():
        available = len(part.items)
        rows = available if limit == -1 else min(limit, available)
        targets = count_targets(map(part.items.__getitem__, range(rows)), _FEW_TARGETS)
        shown = f"{targets:,} targets; few make a noisy loss"
        if targets > _FEW_TARGETS:
            shown = f"more than {_FEW_TARGETS:,} targets"
        yield (
            f"eval     {f'{part.name}: ' * bool(part.name)}{rows:,} of {available:,} held-out "
            f"rows, {shown}"
        )
    mixed = [part for part in corpus.train if part.weight]
    if len(mixed) > 1:
        total = sum(part.weight for part in mixed)
        rows, name = min((len(part.items) * total / part.weight, part.name) for part in mixed)
        yield f"mixture  after {rows:,.0f} rows of these shares {name} was read once, and repeats"


def _evaluations(config: Config, corpus: Corpus) -> dict[str, str]:
    """Hashes what the numbers of evaluations depend on, as in `DataIdentity`."""
    names = "eval_samples", *config.objective.in_evaluations
    keys = [(name, config.values[name]) for name in names]
    hashes = {"eval": hash_of([corpus.held_out_hash, *keys])}
    if config.evaluation.evaluate_tasks:
        hashes["task"] = hash_of_tasks(config.evaluation)
    return hashes


class Pretrainer:
    """Trains on rows of text, chats or pairs; a `Trainer` of job/loop.py."""

    def __init__(
        self,
        job: Job,
        loader: Loader,
        abstract: TrainState,
        read: Callable[[], Decoder] | None,
        tasks: RunTasks | None,
    ):
        """Announces the programs of every stage, and makes or restores the state meanwhile, on all
        processes together; `abstract` and `read` are from `Job.abstract_state`; `tasks` None =
        there are none."""
        config, schedule, say = job.config, job.schedule, job.output.say
        self._keys, self._loader, self._tasks = config.evaluation, loader, tasks
        self._recipe, self._schedule = config.recipe, schedule
        limit = device_memory(config.planning.device_memory_gib)
        self._compiler = BackgroundCompiler(limit, say, job.preemption.ask)
        job.closing.callback(self._compiler.close)
        self.raise_failure = self._compiler.raise_failure
        rate = LearningRate.from_keys(config.learning_rate, schedule.ramp)
        rows, recipe = config.evaluation.rows(job.mesh.size), config.recipe
        self._programs = Programs(recipe, loader.expansion, rate, abstract, self._compiler, rows)
        if recipe.model.quantization and not schedule.position:
            self._programs.add_exponent_count(schedule.stages[0])
        for stage in schedule.stages:
            self._programs.add(stage)
            if tasks:
                tasks.announce(self._compiler, stage)
        self._compiler.lower()
        job.output.say_start(loader.corpus, abstract, config.recipe, schedule, job.changes)
        if jax.process_index() == 0:
            first = schedule.ramp.samples_before(schedule.first_step)
            for line in check_batches(config, job.meshes, job.output.local, first):
                say(f"batch    {line}")
        for line in loader.cuts(schedule.stages) if jax.process_index() == 0 else ():
            say(f"rows     {line}")
        for line in _describe_rows(loader.corpus, config) if jax.process_index() == 0 else ():
            say(line)
        # Flat between steps: modules cost a millisecond a step.
        with show_wait(say, "wait     the first state: still loading or drawing weights"):
            self._arrays, self._structure = jax.tree.flatten(job.first_state(abstract, read))
        self._has_scales = is_counted(self.state.buffers)
        count = len(self._recipe.eval_sums)  # of the sums of an evaluation, on the devices
        self._no_sums = Jitted(job.mesh, lambda: (jnp.float32(0),) * count)()

    @property
    def state(self) -> TrainState:
        return self._structure.unflatten(self._arrays)

    @property
    def evaluation_names(self) -> list[str]:
        tasks = self._tasks.names if self._tasks else []
        return names_of_sums(self._loader.held_out, [*self._recipe.eval_sums]) + tasks

    def step(self, step: int, stage: Stage, first_sample: int) -> Dispatched:
        ramp = self._schedule.ramp
        batch, data_seconds = self._loader.batch(step, ramp)
        consumed_tokens = ramp.tokens(first_sample + stage.global_batch_size)
        train_step, compile_seconds = self._programs.train_step(stage)
        compile_seconds += self._programs.follow(self._arrays, stage)
        if not self._has_scales:
            count, seconds = self._programs.exponent_count(stage)
            self._arrays, self._has_scales = count(self._arrays, batch), True
            compile_seconds += seconds
        handed_over = time.perf_counter()
        self._arrays, shown = train_step(self._arrays, batch)
        self._compiler.lower()

        def measure(read: dict[str, Any], begin: float, end: float) -> Record:
            seconds, row = end - begin, stage.spec.row_length
            # Waiting while the devices still work on the step before costs nothing.
            idle = max(0.0, handed_over - begin)
            compiling = min(compile_seconds, idle)
            tokens = stage.global_batch_size * stage.spec.tokens
            model = self._recipe.with_spec(stage.spec).model
            flops = tokens * training_flops_per_token(model, row) / stage.devices
            targets = int(read["target_tokens"])
            high, low = (int(word) for word in read["batch_fingerprint"])
            return {
                "consumed_tokens": consumed_tokens,
                "target_tokens": targets,
                "step_seconds": seconds,
                "data_seconds": min(data_seconds, idle - compiling),
                "compile_seconds": compiling,
                "tokens_per_second": tokens / seconds,
                "target_tokens_per_second": targets / seconds,
                "tflops_per_device": flops / seconds / 1e12,
                "batch_fingerprint": f"{high:08x}{low:08x}",
            }

        return Dispatched(shown, measure)

    def evaluate(self, stage: Stage) -> Dispatched:
        """Adds up what the objective shows of held-out sets, or of each batch of them; not with
        eval_interval=-1. Raises as `Programs.eval_step`."""
        by_batch, no_sums = self._keys.log_eval_batches, self._no_sums
        eval_step, _ = self._programs.eval_step(stage)
        model, sums_by_set = self.state.model, {}
        with show_wait(self._compiler.say, "wait     evaluation: still running"):
            for name in self._loader.held_out:
                sums_by_set[name] = sums = [] if by_batch else [no_sums]
                for batch in self._loader.eval_batches(stage, self._keys, name):
                    sums.append(eval_step(model, no_sums if by_batch else sums.pop(), batch))
        return evaluation_from_sums(sums_by_set, by_batch, self._recipe.eval_sums)

    def evaluate_tasks(self, rope_keys: RopeKeys) -> Dispatched | None:
        return self._tasks.evaluate(self._compiler, self.state, rope_keys)


if __name__ == "__main__":
    run(functools.partial(main, preemption=_PREEMPTION))
