"""The training loop.

python -m maxramp.train CONFIG.yml [key=value ...]
"""

import sys

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console
    from maxramp.config.load import load
    from maxramp.errors import ConfigError, report
    from maxramp.run.preemption import Preemption

    console.outlive_readers()
    _PREEMPTION = Preemption()
    try:
        load(sys.argv[1:], note=lambda line: None)  # what is wrong is said at once
    except (ConfigError, OSError) as error:
        sys.exit(report(error))

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxramp.checkpoints.resume import changes_since, take_up
from maxramp.checkpoints.store import Checkpoints, versions
from maxramp.commandline import print_note
from maxramp.config.keys import Config
from maxramp.config.load import load, to_yaml
from maxramp.config.resolve import mesh_checker, resolve
from maxramp.data.corpus import Corpus
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
from maxramp.rampup.numbers import exact
from maxramp.run.metrics import MetricsLog
from maxramp.run.output import Output
from maxramp.run.preemption import Preemption
from maxramp.run.profiling import Profiler
from maxramp.run.watchdog import Watchdog
from maxramp.training.device_memory import device_memory
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import Programs
from maxramp.training.state import HeldState, abstract_state, initial_state


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
    """Starts the backend, opens the data and trains."""
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
    return train(config, corpus, expansion, mesh_checker(loaded), preemption, watchdog)


def train(
    config: Config,
    corpus: Corpus,
    expansion: Expansion,
    usable: Callable[[int], bool],
    preemption: Preemption,
    watchdog: Watchdog,
) -> int:
    """Trains from the newest checkpoint to the end of the run or the stage, on the set mesh.

    Args:
      config: a resolved config.
      corpus: the rows.
      expansion: which processes read them.
      usable: whether the model's mesh can be made of so many devices, in a later job.
      preemption: whether somebody asked the run to stop.
      watchdog: gets a beat at every step.

    Returns:
      0, EXIT_PREEMPTED after a signal or EXIT_STAGE_END at the end of a stage (everything is
      saved).

    Raises:
      ConfigError: the data or a checkpoint does not fit the configuration.
      TrainingError: the run cannot go on.
    """
    mesh = jax.sharding.get_mesh()
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
        first_step = position.step if position else 0
        changes = ""
        if position:
            checkpoints.shuffle = position.shuffle  # a run stays with the one that it began with
            allowed = config.checkpoints.allow_changed
            changes = changes_since(position, config.values, allowed, corpus.hash, versions())
        restart = PassCost(config.batch, config.planning, config.model).restart
        schedule = take_up(
            config.batch, config.checkpoints, jax.device_count(), usable, restart, position
        )
        ramp, last_step = schedule.ramp, schedule.last_step
        if first_step >= ramp.total_steps:
            output.say_finished(first_step, ramp)
            return 0
        if first_step == last_step:
            output.write_next_stage(schedule.planned, last_step)
            return EXIT_STAGE_END

        evaluation = config.evaluation
        with_eval = evaluation.eval_interval > 0
        eval_rows = int(exact(evaluation.eval_per_device_batch_size) * jax.device_count())
        loader = Loader(
            config.data,
            config.reading,
            corpus,
            ramp,
            expansion,
            first_step,
            eval_rows,
            evaluation.eval_steps,
            checkpoints.shuffle,
        )
        closing.callback(loader.close)
        abstract = abstract_state(config.recipe, mesh)
        if position:
            checkpoints.compare(position, abstract)
        programs = Programs(
            config.recipe,
            expansion,
            LearningRate.of(config.schedule, ramp),
            abstract,
            stages=ramp.stages_between(first_step, last_step),
            eval_rows=eval_rows if with_eval else 0,
            packed=corpus.packed,
            memory_limit=device_memory(config.planning.device_memory_gib),
            say=output.say,
            on_failure=preemption.ask,
        )
        closing.callback(programs.close)
        output.say_start(
            corpus, abstract.model, config.model.dtype, mesh, schedule, first_step, changes
        )
        if position:
            state = checkpoints.restore(position, abstract)
        else:
            state = initial_state(config.recipe)
            if config.checkpoints.load_parameters_path:
                model = checkpoints.load_parameters(abstract.model)
                state = dataclasses.replace(state, model=model)
        state = HeldState(state)
        cpu.keep()

        checkpoints.start_saving()
        log = MetricsLog(
            config.run,
            training_flops_per_token(config.model),
            config.model.max_target_length,
            output.open_files(ramp, first_step),
        )
        closing.callback(log.close)
        profiler = Profiler(config.profiling, output.folder / "tensorboard", first_step, log.flush)
        closing.callback(profiler.close)
        no_sums = jax.jit(lambda: (jnp.float32(0),) * 2)()  # of an evaluation, on the devices
        for step in range(first_step, last_step):
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

            if with_eval and (done % evaluation.eval_interval == 0 or done == ramp.total_steps):
                sums = no_sums
                eval_step, _ = programs.eval_step()
                model = state.tree.model
                for eval_batch in loader.eval_batches():
                    sums = eval_step(model, sums, eval_batch)
                log.log_eval(step, consumed, sums)

            watchdog.beat()
            checkpoints.check()
            stopping = preemption.reached(done)
            last = stopping or done == last_step
            if checkpoints.is_due(done, ramp) or last:
                log.flush()  # a state whose loss ends the run is never saved
                checkpoints.save(done, state.tree, ramp, output.flush, last)
                log.restart_clock()
            if stopping and done < last_step:
                programs.raise_failure()  # which asked for the end
                output.say_stopped(step)
                return EXIT_PREEMPTED
        if last_step < ramp.total_steps:
            output.write_next_stage(schedule.planned, last_step)
            return EXIT_STAGE_END
        return 0


if __name__ == "__main__":
    run(functools.partial(main, preemption=_PREEMPTION))
