"""The loop of every run that trains: steps, their metrics one step late, evaluations, saves.

It never waits for the devices: step k + 1 is on its way when the numbers of step k are read.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

from maxramp.checkpoints.folder import Checkpoint
from maxramp.commandline import count
from maxramp.data.keys import HELD_OUT, TASKS
from maxramp.errors import EXIT_PREEMPTED, NotFiniteError, StepError
from maxramp.job.start import Job
from maxramp.processes import agreement
from maxramp.rampup.adaptive import Decision, NoisePolicy
from maxramp.rampup.schedule import Stage
from maxramp.run.keys import ProfilerKeys
from maxramp.run.metrics import Dispatched, LastEvaluation, MetricsLog
from maxramp.stage import RopeKeys
from maxramp.training.state import TrainState


class Trainer(Protocol):
    """What a run trains on, with which objective: rows of text, or prompts and rewards.

    Its programs are announced before the loop begins.
    """

    @property
    def state(self) -> TrainState:
        """The state after the steps that were taken."""
        ...

    @property
    def evaluation_names(self) -> Sequence[str]: ...

    def step(self, step: int, stage: Stage, first_sample: int) -> Dispatched | None:
        """Hands step `step` to the devices; its samples begin with number `first_sample`. None if
        it was given up because somebody asks for the end; then, and after a StepError, the state
        stands.
        """
        ...

    def evaluate(self, stage: Stage) -> Dispatched:
        """Hands an evaluation of the state to the devices, with the programs of a stage."""
        ...

    def evaluate_tasks(self, rope_keys: RopeKeys) -> Dispatched | None:
        """Evaluates the state on tasks, of a run that has some, and returns when it is done.

        Tokens see what they saw in the step before (`rope_keys`). None if it was given up because
        somebody asks for the end.
        """
        ...

    def raise_failure(self) -> None: ...


class Profiler:
    """With `profiler=xplane`, traces `profiler_steps` steps into the run's TensorBoard folder.

    Each process writes its own trace. Keys and defaults are MaxText's.
    """

    def __init__(
        self, keys: ProfilerKeys, folder: pathlib.Path, first_step: int, settle: Callable[[], None]
    ):
        """Counts the steps to skip from `first_step`, the first of this start of the run.

        `settle` waits for the devices, so that a trace holds whole steps and those alone.
        """
        self._folder, self._settle = folder, settle
        first = first_step + keys.skip_first_n_steps_for_profiler if keys.profiler else -1
        self._first, self._last, self._running = first, first + keys.profiler_steps, False

    def annotate_step(self, step: int) -> jax.profiler.StepTraceAnnotation:
        """Starts or ends the trace where its time has come, so it is called before every step;
        returns the context to run the step in."""
        if step == self._first:
            self._settle()
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        if self._running and step == self._last:
            self._settle()
            self.close()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def close(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


class _StepEnd:
    """Evaluates and saves the state after a step, and takes the rungs of a ladder."""

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        log: MetricsLog,
        numbers: LastEvaluation,
        policy: NoisePolicy | None,
    ):
        self._job, self._trainer, self._log, self._numbers = job, trainer, log, numbers
        self._policy = policy

    def take_rung(self, done: int) -> Decision | None:
        """Takes the next rung after `done` steps, if the numbers before the last step ask for it:
        what follows is as after a restart there. Returns None to stay on the rung."""
        schedule = self._job.schedule
        decision = self._policy and self._policy.decide(schedule.ramp, done)
        if decision:
            schedule.take_rung(done, decision.global_batch_size)
            self.log_bound()
            self._job.output.write_decision(decision, schedule.ramp)
        return decision

    def log_bound(self) -> None:
        """Adds the lower bound that decided to the record of the next step, the rung's first."""
        if self._policy and self._policy.lower_bound is not None:
            self._log.add(noise_lower_bound=self._policy.lower_bound)

    def save(self, done: int, last: bool) -> None:
        """Saves the state after `done` steps, on all processes; `last`: the job trains no more, so
        it waits for the save. Raises as `Checkpoints.save`, and as `MetricsLog.flush` for a step
        whose loss ends the run."""
        record = self._record(done)
        with self._job.output.jobs.saving():
            self._job.checkpoints.save(record, self._trainer.state, last)
        self._log.restart_clock()

    def take_snapshot(self, done: int) -> None:
        """Keeps the state after `done` steps with the nodes, on all processes, of a run with
        snapshots; only the copy takes time."""
        seconds = self._job.checkpoints.take_snapshot(self._record(done), self._trainer.state)
        self._log.add(snapshot_seconds=seconds)

    def _record(self, done: int) -> Checkpoint:
        self._log.flush()  # a state whose loss ends the run is never saved
        ramp, known = self._job.schedule.ramp, self._numbers.numbers_after(done - 1)
        return self._job.checkpoints.make_record(
            done,
            ramp.samples_before(done),
            ramp.to_json()["stages"],
            self._job.config.values,
            evaluation=known,
            noise=self._policy.to_json() if self._policy else {},
        )

    @contextlib.contextmanager
    def save_on_error(self, done: int) -> Iterator[None]:
        """Saves the state after `done` steps before an error ends the run, or says what is lost. A
        StepError leaves the state as it was, on every process. Other errors may be those of one
        process, which cannot save without the others, or may have taken the state's arrays.
        """
        try:
            yield
        except NotFiniteError:
            self._log.flush()  # the step before may say why
            raise
        except Exception as error:
            if done > self._job.schedule.first_step:
                if isinstance(error, StepError) or self._is_state_intact(done):
                    self.save(done, last=True)
                elif not self._job.checkpoints.snapshots:
                    checkpoints = self._job.checkpoints
                    written = checkpoints.settle_alone()
                    lost = _lost_since(done, checkpoints.newest or 0)
                    if written:
                        lost = f"{_lost_since(done, written)} if that becomes whole, else {lost}"
                    self._job.output.say(
                        f"lost     {lost}: the error left no state to save; the next start trains "
                        "them again"
                    )
            raise

    def _is_state_intact(self, done: int) -> bool:
        """Tells whether the state is that after `done` steps, by its clock, on the only process."""
        try:
            low, high = map(int, np.asarray(self._trainer.state.consumed_samples))
        except RuntimeError:  # a step that failed had taken its arrays
            return False
        consumed = self._job.schedule.ramp.samples_before(done)
        return jax.process_count() == 1 and low + (high << 32) == consumed

    def evaluate(self, step: int, consumed: int, stage: Stage, due: Sequence[str]) -> bool:
        """Evaluates the state after step `step` (`consumed` samples), by all processes together;
        `due` is from `EvalKeys.due`. False if somebody asks for the end meanwhile; a StepError on
        every process if a task fails."""
        if HELD_OUT in due:
            self._log.log_eval(step, consumed, self._trainer.evaluate(stage))
        if TASKS in due:
            self._log.flush()
            self._log.restart_clock()
            dispatched = self._trainer.evaluate_tasks(stage.spec.rope_keys)
            if dispatched is None:
                return False
            self._log.log_eval(step, consumed, dispatched)
        return True

    def evaluate_saved(self, step: int, consumed: int, stage: Stage, due: Sequence[str]) -> bool:
        """Evaluates a state that is saved, as `evaluate` does; its checkpoint gets the numbers. A
        TrainingError if they cannot be written."""
        if not self.evaluate(step, consumed, stage, due):
            return False
        self._log.flush()
        self._job.checkpoints.add_evaluation(step + 1, self._numbers.numbers_after(step))
        return True

    def evaluate_position(self, due: Sequence[str]) -> bool:
        """Evaluates the state that the job begins with, as `evaluate_saved` does."""
        schedule = self._job.schedule
        position, stage = schedule.position, schedule.ramp.stage_at_step(schedule.first_step)
        spec = dataclasses.replace(stage.spec, rope_keys=position.rope_keys)  # of the step before
        stage = dataclasses.replace(stage, spec=spec)
        return self.evaluate_saved(position.step - 1, position.consumed_samples, stage, due)

    def is_best(self, step: int) -> bool:
        """Tells whether the evaluation after step `step` is the best so far, the same on every
        process; waits for its numbers."""
        if not self._job.config.checkpoints.checkpoint_best:
            return False
        self._log.flush()  # it decides whether the state is saved
        best = self._job.checkpoints.best  # the first process knows how good they are
        return agreement.all_gather_json(best.is_beaten(self._numbers.numbers_after(step)))[0]


def _lost_since(done: int, checkpoint: int) -> str:
    return f"{count(done - checkpoint, 'step')} since checkpoint {checkpoint}"


def train(job: Job, trainer: Trainer) -> int:
    """Trains the steps of a job, and saves; all processes call it together. Returns 0,
    EXIT_PREEMPTED after a signal, or EXIT_STAGE_END at the end of a stage. Raises a TrainingError
    if the run cannot continue, a ConfigError as `Job.end`, or if checkpoint_best names no number of
    its evaluations."""
    config, output, checkpoints, schedule = job.config, job.output, job.checkpoints, job.schedule
    position, first_step = schedule.position, schedule.first_step
    checkpoints.best.check(trainer.evaluation_names)
    for path in checkpoints.start_saving():
        output.say(f"resume   removed {path}, which a killed save or removal left unfinished")
    pending = job.pending_evaluations
    writers, numbers, policy = [output.jobs], LastEvaluation(), None
    if config.batch.rampup_policy == "noise":
        policy = NoisePolicy(schedule.ramp.keys, position and position.noise)
        writers.append(policy)
    writers += [numbers, *output.open_files(schedule.ramp, first_step, pending)]
    log = MetricsLog(config.run, writers, output.say, checkpoints.continues_run)
    job.closing.callback(log.close)
    profiler = Profiler(config.profiling, output.local / "tensorboard", first_step, log.flush)
    job.closing.callback(profiler.close)
    after_step = _StepEnd(job, trainer, log, numbers, policy)

    after_step.log_bound()

    def stop(done: int) -> int:
        trainer.raise_failure()  # which asked for the end
        output.say_stopped(done - 1 if done > first_step else None)
        output.status = EXIT_PREEMPTED
        return EXIT_PREEMPTED

    if pending and not after_step.evaluate_position(pending):
        return stop(first_step)

    for step in schedule.steps():
        ramp = schedule.ramp
        stage, first_sample = ramp.stage_at_step(step), ramp.samples_before(step)
        with after_step.save_on_error(step), profiler.annotate_step(step):
            dispatched = trainer.step(step, stage, first_sample)
        if dispatched is None:
            if step > first_step:
                after_step.save(step, last=True)
            return stop(step)
        done, consumed = step + 1, first_sample + stage.global_batch_size
        log.log_step(step, stage, consumed, dispatched)
        decision = after_step.take_rung(done)
        due = config.evaluation.due(done, first_sample, consumed, schedule.ramp.total_steps)
        stopping, ends = job.check(), done == schedule.last_step
        if stopping or ends:
            after_step.save(done, last=True)  # before anything else can fail
            if stopping and (due or not ends):
                return stop(done)
            if due and not after_step.evaluate_saved(step, consumed, stage, due):
                return stop(done)
            continue
        # Before the save: a checkpoint has all that was due, and what it lacks comes again.
        with after_step.save_on_error(done):
            evaluated = after_step.evaluate(step, consumed, stage, due)
        if not evaluated:
            after_step.save(done, last=True)
            return stop(done)
        snapshot_is_due = checkpoints.snapshots and checkpoints.snapshots.is_due(done)
        is_asked_for = decision or (due and after_step.is_best(step))
        # A job ends for new nodes only where it saves or takes a snapshot.
        if is_asked_for or checkpoints.is_due(done, schedule.ramp):
            after_step.save(done, last=job.end_if_nodes_came(done))
        elif snapshot_is_due and job.end_if_nodes_came(done):
            after_step.save(done, last=True)
        elif snapshot_is_due:
            after_step.take_snapshot(done)
    return job.end()
