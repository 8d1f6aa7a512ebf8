"""Trains a model, or continues the run of that run_name where it stopped.

python -m maxramp.train CONFIG.yml [key=value ...]

configs/base.yml trains a small model in about a minute. docs/running.md says what a run writes and
what its exit status means.
"""

import sys

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console
    from maxramp.run.preemption import Preemption

    console.outlive_readers()
    _PREEMPTION = Preemption()

    from maxramp.config.load import load
    from maxramp.errors import ConfigError, report

    try:
        # What is wrong is said at once.
        load(sys.argv[1:], "train", __doc__, note=lambda line: None)
    except (ConfigError, OSError) as error:
        sys.exit(report(error))

import contextlib
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxramp.config.load import load
from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.relay import Expansion
from maxramp.errors import EXIT_PREEMPTED, ConfigError, TrainingError, report
from maxramp.job.start import Job, Start, start
from maxramp.model.size import training_flops_per_token
from maxramp.parallel import cpu
from maxramp.parallel.processes import run
from maxramp.run.growth import Growth
from maxramp.run.metrics import MetricsLog
from maxramp.run.preemption import Preemption
from maxramp.run.profiling import Profiler
from maxramp.training.device_memory import device_memory
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import Programs
from maxramp.training.state import HeldState, TrainState


def main(arguments: Sequence[str] | None = None, preemption: Preemption | None = None) -> int:
    """Runs a command line; returns the exit status of `errors`, 0 when training is finished."""
    preemption = preemption or Preemption()
    notes: list[str] = []
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        loaded = load(arguments, "train", __doc__, note=notes.append)
        with start(loaded, notes, preemption) as begun:
            return _run(begun)
    except (ConfigError, TrainingError, jax.errors.JaxRuntimeError, MemoryError, OSError) as error:
        return report(error)


def _run(begun: Start) -> int:
    """Opens the data and the run's folder, and trains from where it stands."""
    config = begun.config
    expansion = Expansion(begun.mesh, config.data.expansion_factor_real_data)
    corpus = open_rows(config.data, config.reading, expansion.reads, begun.watchdog.beat)
    job = begun.open_run(corpus.hash)
    if not job.has_steps:
        return job.end()
    loader = Loader(
        config.data,
        config.reading,
        config.evaluation,
        corpus,
        job.span.ramp,
        expansion,
        job.span.first_step,
    )
    job.closing.callback(loader.close)
    return train(job, loader, job.abstract_state())


def train(job: Job, loader: Loader, abstract: TrainState) -> int:
    """Trains the steps of a job, on the set mesh.

    Args:
      job: the run's folder, and which steps of it.
      loader: the batches of these steps.
      abstract: the train state's shapes and shardings, those of the checkpoint.

    Returns:
      0, EXIT_PREEMPTED after a signal or EXIT_STAGE_END at the end of a stage (everything is
      saved).

    Raises:
      ConfigError: load_parameters_path holds no such weights.
      TrainingError: the run cannot go on.
    """
    config, output, checkpoints, span = job.config, job.output, job.checkpoints, job.span
    ramp, first_step = span.ramp, span.first_step
    with contextlib.ExitStack() as closing:
        programs = Programs(
            config.recipe,
            loader.expansion,
            LearningRate.of(config.learning_rate, ramp),
            abstract,
            stages=span.stages,
            eval_rows=loader.eval_rows,
            packed=loader.corpus.packed,
            memory_limit=device_memory(config.planning.device_memory_gib),
            say=output.say,
            on_failure=job.preemption.ask,
        )
        closing.callback(programs.close)
        output.say_start(loader.corpus, abstract.model, config.model.dtype, span, job.changes)
        state = HeldState(checkpoints.first_state(span.position, abstract, config.recipe))
        cpu.keep()

        checkpoints.start_saving()
        writers = output.open_files(ramp, first_step)
        growth = Growth(span, output.history(span), output.record_decision, output.write_plan)
        log = MetricsLog(
            config.run,
            training_flops_per_token(config.model),
            config.model.max_target_length,
            [growth, *writers],
        )
        closing.callback(log.close)
        profiler = Profiler(config.profiling, output.here / "tensorboard", first_step, log.flush)
        closing.callback(profiler.close)
        no_sums = jax.jit(lambda: (jnp.float32(0),) * 2)()  # of an evaluation, on the devices
        for step in span.steps():
            growth.before(step)
            stage = ramp.stage_at_step(step)
            batch, data_seconds = loader.batch(step)
            try:
                train_step, compile_seconds = programs.train_step(stage)
            except TrainingError:  # every process comes here before the same step
                if step > first_step:
                    log.flush()
                    checkpoints.save(step, state.tree, ramp, output.flush, last=True)
                raise
            with profiler.before(step):
                state.arrays, metrics = train_step(state.arrays, batch)
            done, consumed = step + 1, ramp.samples_before(step + 1)
            programs.lower_ahead()
            log.log_step(step, stage, consumed, metrics, data_seconds, compile_seconds)

            if config.evaluation.is_due(done, ramp.total_steps):
                by_batch = config.evaluation.log_eval_batches
                sums = [] if by_batch else [no_sums]
                eval_step, _ = programs.eval_step()
                model = state.tree.model
                for eval_batch in loader.eval_batches():
                    before = no_sums if by_batch else sums.pop()
                    sums.append(eval_step(model, before, eval_batch))
                log.log_eval(step, consumed, sums, by_batch)

            stopping = job.check()
            last = stopping or done == span.last_step
            if checkpoints.is_due(done, ramp) or last:
                log.flush()  # a state whose loss ends the run is never saved
                checkpoints.save(done, state.tree, ramp, output.flush, last)
                log.restart_clock()
            if stopping and done < span.last_step:
                programs.raise_failure()  # which asked for the end
                output.say_stopped(step)
                return EXIT_PREEMPTED
        return job.end()


if __name__ == "__main__":
    run(functools.partial(main, preemption=_PREEMPTION))
