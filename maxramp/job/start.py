"""A job of a run: what every command that trains does before its first step, and after each.

A command opens its data between `start`, which gives it the devices, and `JobContext.open_run`,
which gives it the run's folder and tells where the run stands.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from maxramp.checkpoints import arrays
from maxramp.checkpoints.folder import select_kinds
from maxramp.checkpoints.pieces import Snapshot
from maxramp.checkpoints.store import Checkpoints
from maxramp.commandline import print_note
from maxramp.config.keys import Config
from maxramp.config.load import dump_config
from maxramp.config.resolve import meshes_of, resolve
from maxramp.data.corpus import DataIdentity
from maxramp.errors import EXIT_PREEMPTED, EXIT_STAGE_END, ConfigError, Stopped, report
from maxramp.handover.export import export_run
from maxramp.handover.weights import FirstWeights, SavedWeights, keep_released, pin_first_weights
from maxramp.model.adapters import without_adapters
from maxramp.model.decoder import Decoder
from maxramp.model.parts.weights import fingerprint_of_weights
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel import mesh as mesh_lib
from maxramp.planning.stages import PassCost
from maxramp.processes import agreement, backend
from maxramp.processes.agreement import count_nodes
from maxramp.processes.ending import Preemption, Watchdog
from maxramp.rampup.keys import Meshes
from maxramp.run.job_schedule import JobSchedule, length_by_epochs, ramp_change, rate_change
from maxramp.run.output import Output
from maxramp.stage import Fields
from maxramp.training.state import TrainState, abstract_state, initial_state


def run(
    load: Callable[[Callable[[str], None]], Config],
    work: Callable[["JobContext"], int],
    preemption: Preemption | None,
) -> int:
    """Runs a command that trains; returns its exit status, and says in one line why it cannot.
    `load` gets what takes a note, `work` returns the exit status; `preemption` None = listens to
    signals from here on."""
    preemption, notes = preemption or Preemption(), []
    try:
        with start(load(notes.append), notes, preemption) as context:
            try:
                status, config = work(context), context.config
                if status == 0 and config.run.export_huggingface:
                    export_run(config, context.pause, context.say)
                return status
            except Stopped:
                context.say("stopped by a signal; the next start continues")
                return EXIT_PREEMPTED
    except Exception as error:
        return report(error)


@contextlib.contextmanager
def start(loaded: Config, notes: Sequence[str], preemption: Preemption) -> Iterator["JobContext"]:
    """Starts the backend and joins the processes of the job; on the way out, closes all of it. The
    first process prints `notes`. Raises as `backend.start`, and a ConfigError if the devices do not
    fit the configuration."""
    hang, join = loaded.run.hang_timeout_seconds, loaded.backend.join_timeout_seconds
    with Watchdog(hang, join) as watchdog, contextlib.ExitStack() as closing:
        backend.start(loaded.backend)
        if jax.process_index() == 0:
            for line in notes:
                print_note(line)
        watchdog.beat()
        preemption.begin(jax.process_count() > 1)
        config = resolve(loaded, jax.device_count(), mesh_lib.num_slices(), jax.process_count())
        config, first = pin_first_weights(config)
        mesh = mesh_lib.make_mesh(config.mesh)
        yield JobContext(
            loaded, config, mesh, meshes_of(loaded), preemption, watchdog, closing, first
        )


@dataclasses.dataclass(frozen=True)
class JobContext:
    """A job that has its devices."""

    loaded: Config
    config: Config  # resolved
    mesh: Mesh  # of the job's devices; a phase may have another one of these
    meshes: Meshes  # for later jobs
    preemption: Preemption  # whether somebody asked the run to stop
    # gets a beat at every step or part of one, and before the first for what is opened
    watchdog: Watchdog
    closing: contextlib.ExitStack  # closes what the job opens, the last first
    first: FirstWeights  # what the run begins with

    def is_asked_to_stop(self) -> bool:
        """Tells whether to give up the current step; the same answer on every process."""
        return self.preemption.should_stop(after_step=False)

    def say(self, line: str) -> None:
        if jax.process_index() == 0:
            self.preemption.say(line)

    def pause(self) -> None:
        """Shows that a long work gets on, between two parts of it and on every process. Raises
        Stopped when somebody asks for the end.
        """
        self.watchdog.beat()
        if self.is_asked_to_stop():
            raise Stopped

    def open_run(self, data: DataIdentity, fields: Fields, rows: int = 0) -> "Job":
        """Opens the run's folder on all processes, and finds where the run stands; a ConfigError if
        it cannot continue. `rows`, of all num_epoch passes, give the run its length if no key does.
        """
        config = self.config
        output = Output(config.run, config.learning_rate, dump_config(config))
        self.closing.enter_context(output)
        if jax.process_index() == 0:
            self.preemption.say = output.say
        folder = output.folder / "checkpoints"
        checkpoints = self.closing.enter_context(
            Checkpoints(folder, output.files, config.checkpoints, data, output.say, output.warn)
        )
        self.closing.enter_context(agreement.report_lost_peers())
        position = checkpoints.latest(self.first.states, output.count_recorded_steps())
        left_over, devices = "", jax.device_count()
        if config.batch.is_open:
            samples, left_over = length_by_epochs(
                config.batch, devices, position, rows, config.data.num_epoch
            )
            config = config.replace(total_samples=samples)
        changes = {}
        if position:  # before the folder changes: it may refuse
            changes["changed"] = checkpoints.changes_since(position, config.values)
        # What an earlier start kept, which left no checkpoint, binds nobody.
        if not checkpoints.continues_run:
            agreement.decide_on_first(
                lambda: keep_released(
                    SavedWeights(position) if position else self.first.weights, output.folder
                )
            )
        batch = config.batch
        # Whatever nodes come while the job starts, it grows at a save.
        available = None if count_nodes() is None else devices // batch.devices_per_node
        schedule = JobSchedule(
            *(batch, config.checkpoints, devices, self.meshes),
            restart_passes=PassCost(config).restart,
            position=position,
            fields=fields,
            available_nodes=available,
        )
        if position:
            changes["rate"] = rate_change(config.learning_rate, schedule.ramp, position)
            changes["change"] = ramp_change(batch, schedule.ramp, position)
        changes["rows"] = left_over
        lines = [f"{name:<8} {line}" for name, line in changes.items() if line]
        length = self.config.batch.shown_length or f"num_epoch={config.data.num_epoch}"
        own = {"output": output, "checkpoints": checkpoints, "schedule": schedule}
        own["length"] = length
        job = Job(**vars(self) | own | {"changes": lines, "config": config})
        if job.has_work:
            output.begin_job(schedule)
        return job


@dataclasses.dataclass(frozen=True)
class Job(JobContext):
    """A job that has its run's folder, and knows which steps it shall train."""

    output: Output  # the run's folder and display
    checkpoints: Checkpoints  # reads and saves
    schedule: JobSchedule  # the steps of this job, and the checkpoint that they continue from
    length: str  # of the run, as the key that gives it
    changes: list[str]  # lines on what changed since that checkpoint, and on rows of no step

    @property
    def has_work(self) -> bool:
        return self.schedule.first_step < self.schedule.last_step or bool(self.pending_evaluations)

    @property
    def pending_evaluations(self) -> list[str]:
        """The evaluations (`EvalKeys.due`) that are due with the run's state so far, and of which
        its checkpoint has no numbers: the job before ended first.
        """
        position, ramp = self.schedule.position, self.schedule.ramp
        if not (self.checkpoints.continues_run and position.step):
            return []
        before, consumed = ramp.samples_before(position.step - 1), position.consumed_samples
        due = self.config.evaluation.due(position.step, before, consumed, ramp.total_steps)
        return [kind for kind in due if not select_kinds(position.evaluation, {kind})]

    def abstract_state(self) -> tuple[TrainState, Callable[[], Decoder] | None]:
        """Returns the shapes of the state on the mesh of the first step, and what reads the weights
        for `first_state`, None if that needs none. Refuses a checkpoint or weights that do not fit.
        """
        config, position = self.config, self.schedule.position
        spec = self.schedule.ramp.stage_at_step(self.schedule.first_step).spec
        mesh = mesh_lib.reshape_mesh(self.mesh, spec.mesh)
        abstract = abstract_state(config.recipe, mesh)
        if position:
            arrays.compare(position, abstract, config.values)
        # Of adapted weights a checkpoint has the adapters alone: the others are the first weights.
        if (position and not config.model.lora_rank) or not (weights := self.first.weights):
            return abstract, None
        note = (lambda line: None) if position else self.output.say
        return abstract, weights.prepare(abstract.model, config.values, note)

    def first_state(self, abstract: TrainState, read: Callable[[], Decoder] | None) -> TrainState:
        """Restores the state of a checkpoint, or makes one of the first weights or of new ones; all
        processes call it together, with what `abstract_state` returned. Raises as `read` and
        `arrays.restore`, and a ConfigError for adapters of other weights."""
        recipe, position = self.config.recipe, self.schedule.position
        if read:
            model = self._bind(read) if self.config.model.lora_rank else read()
            if position:
                return arrays.restore(position, abstract, without_adapters(model))
            with jax.set_mesh(mesh_lib.mesh_of(model)):
                return initial_state(recipe, model)
        if position:
            return arrays.restore(position, abstract)
        with jax.set_mesh(mesh_lib.mesh_of(abstract)):
            return initial_state(recipe)

    def load_reference(self, model: Decoder) -> Decoder:
        """Reads the weights that the run stays near to, which its first weights are, on all
        processes; `known_reference` are then these. Raises as `_bind`."""
        return without_adapters(self._bind(self.first.weights.prepare(model, self.config.values)))

    @property
    def known_reference(self) -> str:
        """The hash of the weights that the run adapts or stays near to so far; "" = any."""
        position = self.schedule.position
        # A run that begins with a state takes its weights, and not those that these stayed near to.
        is_own = position and position.path.parent.parent == self.config.run.folder.absolute()
        return position.reference if is_own else ""

    def _bind(self, read: Callable[[], Decoder]) -> Decoder:
        """Reads weights, on all processes; keeps the hash of the frozen ones in every checkpoint,
        and refuses, with a ConfigError, to continue with others."""
        weights, key = read(), self.first.key
        frozen = order_by_layer(without_adapters(weights))
        fingerprint, so_far = fingerprint_of_weights(frozen), self.known_reference
        if so_far not in ("", fingerprint) and key not in self.config.checkpoints.allow_changed:
            raise ConfigError(
                f"{key}={self.first.path}: not the weights that the run began with (hash "
                f"{fingerprint}, "
                f"was {so_far}); give those, allow_changed=[{key}], or another run_name"
            )
        self.checkpoints.keep_reference(fingerprint)
        return weights

    def end_if_nodes_came(self, done: int) -> bool:
        """Ends the job after `done` steps if nodes came for which its stage is planned; returns
        whether it does, the same on every process.
        """
        if self.schedule.available_nodes is None:
            return False
        return self.schedule.end_for_nodes(done, count_nodes())

    def check(self) -> bool:
        """Tells whether to save and end after a step; the same answer on every process. Raises a
        TrainingError if the run's folder is lost, or too many saves have failed.
        """
        self.watchdog.beat()
        self.output.files.check()
        self.checkpoints.check()
        return self.preemption.should_stop(after_step=True)

    def end(self) -> int:
        """Says what comes next when no step is left to this job; returns the exit status, the same
        on all processes, which call it together. A ConfigError if the run is done but for a
        checkpoint."""
        schedule = self.schedule
        if best := str(self.checkpoints.best):
            self.output.say(f"best     {best}")
        if schedule.last_step < schedule.ramp.total_steps:
            schedule.available_nodes = count_nodes()
            self.output.write_next_stage(schedule)
            self.output.status = EXIT_STAGE_END
            return EXIT_STAGE_END
        if schedule.first_step >= schedule.ramp.total_steps:
            if isinstance(schedule.position, Snapshot):  # which nobody saves, and nobody else reads
                raise ConfigError(
                    f"steps={schedule.ramp.total_steps}: the run stands after "
                    f"{schedule.first_step} steps, of which there is a snapshot and no checkpoint; "
                    "use more steps, after which the run saves one"
                )
            self.output.say_finished(schedule, self.length)
        return 0
