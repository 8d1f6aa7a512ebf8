"""The training loop.

python -m maxramp.train CONFIG.yml [key=value ...]
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
        load(sys.argv[1:], note=lambda line: None)  # what is wrong is said at once
    except (ConfigError, OSError) as error:
        sys.exit(report(error))

import contextlib
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxramp.checkpoints import decisions
from maxramp.checkpoints.resume import Schedule, take_up
from maxramp.checkpoints.store import Checkpoints
from maxramp.commandline import print_note
from maxramp.config.keys import Config
from maxramp.config.load import load, to_yaml
from maxramp.config.resolve import mesh_checker, resolve
from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.relay import Expansion
from maxramp.errors import (
    EXIT_PREEMPTED,
    EXIT_STAGE_END,
    ConfigError,
    TrainingError,
    report,
)
from maxramp.model.size import training_flops_per_token
from maxramp.parallel import agreement, cpu, lifeline
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.processes import run
from maxramp.planning.cost import PassCost
from maxramp.run.growth import Growth
from maxramp.run.metrics import MetricsLog
from maxramp.run.output import Output
from maxramp.run.preemption import Preemption
from maxramp.run.profiling import Profiler
from maxramp.run.watchdog import Watchdog
from maxramp.training.device_memory import device_memory
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import Programs
from maxramp.training.state import HeldState, TrainState, abstract_state


def main(arguments: Sequence[str] | None = None, preemption: Preemption | None = None) -> int:
    """Runs a command line; returns the exit status of `errors`, 0 when training is finished."""
    preemption = preemption or Preemption()
    notes: list[str] = []
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        loaded = load(arguments, note=notes.append)
        hang, join = loaded.run.hang_timeout_seconds, loaded.backend.join_timeout_seconds
        with Watchdog(hang, join) as watchdog:
            return _run(loaded, notes, preemption, watchdog)
    except (ConfigError, TrainingError, jax.errors.JaxRuntimeError, MemoryError, OSError) as error:
        return report(error)


def _run(loaded: Config, notes: list[str], preemption: Preemption, watchdog: Watchdog) -> int:
    """Starts the backend, opens the data and the run's folder, and trains from where it stands."""
    mesh_lib.start_backend(loaded.backend)
    for line in notes if jax.process_index() == 0 else ():
        print_note(line)
    watchdog.beat()
    preemption.begin(jax.process_count() > 1, lifeline.end_now)
    config = resolve(loaded, jax.device_count(), mesh_lib.num_slices(), jax.process_count())
    mesh = mesh_lib.make_mesh(config.mesh)
    jax.set_mesh(mesh)
    expansion = Expansion(mesh, config.data.expansion_factor_real_data)
    corpus = open_rows(config.data, config.reading, expansion.reads, watchdog.beat)
    with contextlib.ExitStack() as closing:
        output = closing.enter_context(Output(config.run, to_yaml(config)))
        if jax.process_index() == 0:
            preemption.say = output.say
        folder = output.folder / "checkpoints"
        checkpoints = closing.enter_context(
            Checkpoints(config.checkpoints, folder, corpus.hash, config.values, output.warn)
        )
        closing.enter_context(agreement.noticing_lost_peers())
        position = checkpoints.latest()
        changes = checkpoints.changes_since(position) if position else ""
        recorded = agreement.raise_everywhere(lambda: decisions.read(output.here))
        schedule = take_up(
            config.batch,
            config.checkpoints,
            jax.device_count(),
            mesh_checker(loaded),
            PassCost(config.batch, config.planning, config.model).restart,
            position,
            agreement.all_gather_json(recorded)[0],
        )
        if schedule.first_step >= schedule.ramp.total_steps:
            output.say_finished(schedule)
            return 0
        if schedule.first_step == schedule.last_step:
            output.write_next_stage(schedule)
            return EXIT_STAGE_END
        loader = Loader(
            config.data,
            config.reading,
            config.evaluation,
            corpus,
            schedule.ramp,
            expansion,
            schedule.first_step,
            checkpoints.shuffle,
        )
        closing.callback(loader.close)
        abstract = abstract_state(config.recipe, mesh)
        if position:
            checkpoints.compare(position, abstract)
        return train(
            config, abstract, loader, schedule, changes, checkpoints, output, preemption, watchdog
        )


def train(
    config: Config,
    abstract: TrainState,
    loader: Loader,
    schedule: Schedule,
    changes: str,
    checkpoints: Checkpoints,
    output: Output,
    preemption: Preemption,
    watchdog: Watchdog,
) -> int:
    """Trains the steps of a schedule, on the set mesh.

    Args:
      config: a resolved config.
      abstract: the train state's shapes and shardings, those of the checkpoint.
      loader: the batches of these steps.
      schedule: the steps, and the checkpoint that they go on from.
      changes: what changed since that checkpoint, in one line.
      checkpoints: reads it, and saves.
      output: the run's folder and display.
      preemption: whether somebody asked the run to stop.
      watchdog: gets a beat at every step.

    Returns:
      0, EXIT_PREEMPTED after a signal or EXIT_STAGE_END at the end of a stage (everything is
      saved).

    Raises:
      ConfigError: load_parameters_path holds no such weights.
      TrainingError: the run cannot go on.
    """
    ramp, first_step = schedule.ramp, schedule.first_step
    with contextlib.ExitStack() as closing:
        programs = Programs(
            config.recipe,
            loader.expansion,
            LearningRate.of(config.schedule, ramp),
            abstract,
            stages=schedule.stages,
            eval_rows=loader.eval_rows,
            packed=loader.corpus.packed,
            memory_limit=device_memory(config.planning.device_memory_gib),
            say=output.say,
            on_failure=preemption.ask,
        )
        closing.callback(programs.close)
        output.say_start(loader.corpus, abstract.model, config.model.dtype, schedule, changes)
        position = schedule.position
        state = HeldState(checkpoints.first_state(position, abstract, config.recipe))
        cpu.keep()

        checkpoints.start_saving()
        writers = output.open_files(ramp, first_step)
        growth = Growth(
            schedule, output.history(schedule), output.record_decision, output.write_plan
        )
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
        for step in schedule.steps():
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

            watchdog.beat()
            output.check()
            checkpoints.check()
            stopping = preemption.reached(done)
            last = stopping or done == schedule.last_step
            if checkpoints.is_due(done, ramp) or last:
                log.flush()  # a state whose loss ends the run is never saved
                checkpoints.save(done, state.tree, ramp, output.flush, last)
                log.restart_clock()
            if stopping and done < schedule.last_step:
                programs.raise_failure()  # which asked for the end
                output.say_stopped(step)
                return EXIT_PREEMPTED
        if schedule.last_step < ramp.total_steps:
            output.write_next_stage(schedule)
            return EXIT_STAGE_END
        return 0


if __name__ == "__main__":
    run(functools.partial(main, preemption=_PREEMPTION))
