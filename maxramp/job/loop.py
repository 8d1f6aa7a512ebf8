"""The loop of every run that trains: steps, their metrics one step late, evaluations, saves.

It never waits for the devices: step k + 1 is on its way when the numbers of step k are read.
"""

from typing import Protocol

from maxramp.errors import EXIT_PREEMPTED, NotFiniteError, StepError
from maxramp.job.start import Job
from maxramp.parallel import cpu
from maxramp.rampup.schedule import Stage
from maxramp.run.growth import Growth
from maxramp.run.metrics import LastEvaluation, MetricsLog, Taken
from maxramp.run.profiling import Profiler
from maxramp.stage import SightKeys
from maxramp.training.state import TrainState


class Trainer(Protocol):
    """What a run trains on, with which objective: rows of text, or prompts and rewards.

    Its programs are announced before the loop begins.
    """

    @property
    def state(self) -> TrainState:
        """The state after the steps that were taken."""
        ...

    def step(self, step: int, stage: Stage, first_sample: int) -> Taken | None:
        """Hands step `step` to the devices; its samples begin with number `first_sample`.

        Returns:
          Its numbers; None if it was given up because somebody asks for the end: the state stands.

        Raises:
          StepError: it cannot be taken; the state stands.
        """
        ...

    def evaluate(self, stage: Stage) -> Taken:
        """Hands an evaluation of the state to the devices, with the programs of a stage."""
        ...

    def evaluate_tasks(self, sight: SightKeys) -> Taken | None:
        """Evaluates the state on tasks, of a run that has some, and returns when it is done.

        Args:
          sight: what tokens saw in the step before.

        Returns:
          Its numbers; None if it was given up because somebody asks for the end.
        """
        ...

    def raise_failure(self) -> None:
        """Says why a program that was compiled ahead did not compile, if there is one.

        Raises:
          TrainingError: there is one.
        """
        ...


def train(job: Job, trainer: Trainer) -> int:
    """Trains the steps of a job.

    Args:
      job: the run's folder, and which steps of it.
      trainer: takes them.

    Returns:
      0, EXIT_PREEMPTED after a signal or EXIT_STAGE_END at the end of a stage (everything is
      saved).

    Raises:
      TrainingError: the run cannot go on.
    """
    config, output, checkpoints, span = job.config, job.output, job.checkpoints, job.span
    ramp, first_step = span.ramp, span.first_step
    cpu.keep()
    checkpoints.start_saving()
    writers = output.open_files(ramp, first_step, job.owes_tasks)
    growth = Growth(span, output.history(span), output.record_decision, output.write_plan)
    evaluation = LastEvaluation()
    log = MetricsLog(config.run, [growth, evaluation, *writers])
    job.closing.callback(log.close)
    profiler = Profiler(config.profiling, output.here / "tensorboard", first_step, log.flush)
    job.closing.callback(profiler.close)

    def save(done: int, last: bool, owes_tasks: bool = False) -> None:
        log.flush()  # a state whose loss ends the run is never saved
        consumed, stages = ramp.samples_before(done), ramp.to_json()["stages"]
        numbers, flush = evaluation.of(done - 1), output.kept.flush
        checkpoints.save(done, trainer.state, consumed, stages, flush, last, numbers, owes_tasks)
        log.restart_clock()

    def evaluate_tasks(step: int, consumed: int, sight: SightKeys) -> bool:
        log.flush()
        log.restart_clock()
        if taken := trainer.evaluate_tasks(sight):
            log.log_eval(step, consumed, taken)
        return taken is not None

    def is_best(step: int) -> bool:
        log.flush()  # an evaluation decides whether its state is saved
        return checkpoints.best.is_beaten(evaluation.of(step))

    if job.owes_tasks:
        step, consumed = first_step - 1, span.position.consumed_samples
        if not evaluate_tasks(step, consumed, span.position.sight):
            output.say_stopped(None)
            return EXIT_PREEMPTED
        log.flush()
        checkpoints.make_up(span.position, evaluation.of(step))

    for step in span.steps():
        growth.before(step)
        stage, first_sample = ramp.stage_at_step(step), ramp.samples_before(step)
        try:
            with profiler.before(step):
                taken = trainer.step(step, stage, first_sample)
        except NotFiniteError:
            log.flush()  # the step before may say why
            raise
        except StepError:
            if step > first_step:
                save(step, last=True)
            raise
        if taken is None:
            if step > first_step:
                save(step, last=True)
            trainer.raise_failure()  # which asked for the end
            output.say_stopped(step - 1 if step > first_step else None)
            return EXIT_PREEMPTED
        done, consumed = step + 1, first_sample + stage.global_batch_size
        log.log_step(step, stage, consumed, taken)
        if evaluated := config.evaluation.is_due(done, ramp.total_steps):
            log.log_eval(step, consumed, trainer.evaluate(stage))
        # Before the save: a checkpoint has all that was due, and what it lacks comes again.
        is_last, owes_tasks = done == ramp.total_steps, False
        if config.evaluation.tasks_are_due(first_sample, consumed, is_last):
            owes_tasks = not evaluate_tasks(step, consumed, stage.spec.sight)
            evaluated = True

        stopping = owes_tasks or job.check()
        last = stopping or done == span.last_step
        best = evaluated and config.checkpoints.checkpoint_best and is_best(step)
        if best or last or checkpoints.is_due(done, ramp):
            save(done, last, owes_tasks)
        if owes_tasks or (stopping and done < span.last_step):
            trainer.raise_failure()
            output.say_stopped(step)
            return EXIT_PREEMPTED
    return job.end()
