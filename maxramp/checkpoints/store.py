"""Saving and restoring the train state, on any mesh, with Orbax.

Checkpoint n means "n steps done". What a restart needs before anything is built (the consumed
samples, the stages, the configuration, what identifies the data) stands beside its arrays, where
`folder` reads it.
"""

import contextlib
import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxramp.checkpoints import arrays
from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.checkpoints.resume import changes_since
from maxramp.checkpoints.saves import Saves
from maxramp.checkpoints.timer import Timer
from maxramp.errors import ConfigError
from maxramp.files.place import Place, is_near, place
from maxramp.model.decoder import Decoder
from maxramp.parallel.mesh import mesh_of
from maxramp.processes import agreement
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.keys import Recipe
from maxramp.training.state import TrainState, initial_state


class Checkpoints:
    """The checkpoints of a run's folder.

    Attributes:
      reference: fingerprint of the weights that the run stays near to, "" for none; every
        checkpoint keeps it.
    """

    def __init__(
        self,
        keys: CheckpointKeys,
        folder: Place,
        corpus_hash: str,
        values: Mapping[str, Any],
        warn: Callable[[str], None],
    ):
        """
        Args:
          keys: when to save, what to keep, where to start.
          folder: of the checkpoints; every process of the job sees it.
          corpus_hash: what identifies the data.
          values: of all keys, resolved; every checkpoint keeps them.
          warn: takes a line about what went wrong and is no reason to stop.
        """
        self._keys, self._folder, self._warn = keys, folder.absolute(), warn
        self._corpus_hash, self._values = corpus_hash, values
        self.reference = ""
        self._is_first = jax.process_index() == 0
        self._torn: list[int] = []
        self._saves = Saves(self._folder, keys.max_failed_saves, warn)
        self._timer: Timer | None = None

    def latest(self) -> Checkpoint | None:
        """Where to go on: the newest whole checkpoint, or load_full_state_path; None without one.

        The first process chooses, the others follow. Nothing in the folder is changed.

        Raises:
          ConfigError: there are checkpoints, but all of them are torn, or enable_checkpointing is
            off: a start from nothing would overwrite what belongs to them.
        """
        newest = agreement.all_gather_json(agreement.raise_everywhere(self._newest_whole))[0]
        self._saves.newest = None if newest < 0 else newest
        if newest < 0 and not self._keys.load_full_state_path:
            return None

        def read() -> Checkpoint:
            if newest >= 0:
                return self._read(self._folder / str(newest))
            return self._read(folder_lib.find(place(self._keys.load_full_state_path)))

        return agreement.raise_everywhere(read)

    def changes_since(self, checkpoint: Checkpoint) -> str:
        """What this start changes against a checkpoint, as `resume.changes_since`."""
        allowed = self._keys.allow_changed
        return changes_since(checkpoint, self._values, allowed, self._corpus_hash, versions())

    def _newest_whole(self) -> int:
        """The newest step whose checkpoint is whole, -1 without any checkpoint."""
        reason, steps = "", folder_lib.steps_in(self._folder) if self._is_first else []
        if steps and not self._keys.enable_checkpointing:
            raise ConfigError(
                f"enable_checkpointing=False: {self._folder} holds a run's checkpoints, the newest "
                f"after {steps[-1]:,} steps, and this start would overwrite that run's metrics; "
                "give another run_name, or enable_checkpointing=True to continue the run"
            )
        for step in reversed(steps):
            path = self._folder / str(step)
            try:
                folder_lib.read(path)
            except folder_lib.TornError as error:
                self._torn.append(step)
                reason = reason or f"{path} is torn ({error})"
            else:
                if reason:
                    self._warn(f"{reason}; going on from the checkpoint before it, {step}")
                return step
        if reason:
            raise ConfigError(
                f"{reason}, and no checkpoint before it is whole; put the file back, or take "
                "another run_name"
            )
        return -1

    def _read(self, path: Place) -> Checkpoint:
        try:
            return folder_lib.read(path)
        except folder_lib.TornError as error:
            raise ConfigError(
                f"{path}: {error}; the checkpoint must be whole, and every host must see it"
            ) from None

    def compare(self, checkpoint: Checkpoint, abstract: Any) -> None:
        """Refuses a checkpoint whose arrays are not those of `abstract`, as `arrays.compare`."""
        arrays.compare(checkpoint, abstract, self._values)

    def restore(self, checkpoint: Checkpoint, abstract: TrainState) -> TrainState:
        """The state of a checkpoint, with the shapes, dtypes and shardings of `abstract`.

        Raises:
          ConfigError: the arrays cannot be read.
        """
        loaded = arrays.load(checkpoint.path, arrays.items_of(abstract))
        state = dataclasses.replace(abstract.with_model(loaded["model"]), **loaded["optimizer"])
        low, high = (int(word) for word in jax.device_get(state.consumed_samples))
        if (high << 32) + low != checkpoint.consumed_samples:
            raise ConfigError(
                f"{checkpoint.path}: its clock stands at {(high << 32) + low} samples and its "
                f"metadata at {checkpoint.consumed_samples}; move it away to go on from the one "
                "before"
            )
        return state

    def first_state(
        self, position: Checkpoint | None, abstract: TrainState, recipe: Recipe
    ) -> TrainState:
        """The state that a job begins with: of a checkpoint, or a new one.

        A new one has the weights of load_parameters_path, where that is given.

        Raises:
          ConfigError: there is no such checkpoint, it cannot be read, or it holds other weights.
        """
        if position:
            return self.restore(position, abstract)
        with jax.set_mesh(mesh_of(abstract)):
            state = initial_state(recipe)
        if self._keys.load_parameters_path:
            path = place(self._keys.load_parameters_path)
            return state.with_model(self.load_parameters(path, abstract.model))
        return state

    def load_parameters(self, path: Place, model: Decoder) -> Decoder:
        """The weights of a checkpoint, of this run or another one.

        Args:
          path: a checkpoint, or a folder of them or of a run, whose newest counts.
          model: their shapes, dtypes and shardings.

        Raises:
          ConfigError: there is no such checkpoint, it cannot be read, or it holds other weights.
        """
        checkpoint = self.check_parameters(path, model)
        return arrays.load(checkpoint.path, {"model": model})["model"]

    def check_parameters(self, path: Place, model: Decoder) -> Checkpoint:
        """The checkpoint that a path means, whose weights are those of an abstract model.

        Raises:
          ConfigError: there is no such checkpoint, or it holds other weights.
        """
        checkpoint = self._read(folder_lib.find(path))
        self.compare(checkpoint, {"model": model})
        return checkpoint

    def start_saving(self) -> None:
        """Removes what killed saves left behind and moves torn checkpoints aside."""
        self._timer = Timer(self._keys.checkpoint_period_minutes)
        if not (self._keys.enable_checkpointing and self._is_first):
            return
        for step in self._torn:
            folder_lib.set_aside(self._folder / str(step))
        folder_lib.discard_all(self._folder)

    def is_due(self, step: int, ramp: RampupBatchManager) -> bool:
        """Whether to save after `step` steps: the same answer on every process."""
        keys = self._keys
        if not keys.enable_checkpointing:
            return False
        before, after = ramp.samples_before(step - 1), ramp.samples_before(step)
        steps, samples = keys.checkpoint_period, keys.checkpoint_period_samples
        return (
            (steps != -1 and step % steps == 0)
            or (samples != -1 and after // samples > before // samples)
            or (keys.checkpoint_stage_ends and ramp.stage_at_step(step).first_step == step)
            or self._timer.is_due()
        )

    def save(
        self,
        step: int,
        state: TrainState,
        ramp: RampupBatchManager,
        prepare: Callable[[], Callable[[], None]],
        last: bool,
    ) -> None:
        """Saves the state after `step` steps of `ramp`, unless that was the last save.

        Returns when the state is copied; files are written in the background if
        `async_checkpointing`. A checkpoint that is not complete is never seen by a restart.

        Args:
          step: steps done.
          state: after them.
          ramp: the schedule.
          prepare: writes what must be there before the checkpoint counts, and returns what waits
            until it is there, for the first process; where it raises an OSError nothing is saved.
          last: nothing is trained after it: returns when it is written.

        Raises:
          TrainingError: max_failed_saves saves in a row have failed, or the last one.
        """
        if not self._keys.enable_checkpointing or (not last and self._saves.is_late(step)):
            return
        self._saves.settle()
        if step == self._saves.newest:
            return
        checkpoint = Checkpoint(
            path=self._folder / str(step),
            step=step,
            consumed_samples=ramp.samples_before(step),
            stages=[stage.to_json() for stage in ramp.stages],
            corpus_hash=self._corpus_hash,
            config=dict(self._values),
            versions=versions(),
            reference=self.reference,
        )
        write = self._writer(checkpoint, state, prepare)
        self._timer.stop()
        self._saves.begin(step, write)
        if last or not self._keys.async_checkpointing:
            self._saves.settle(last)

    def _writer(
        self, checkpoint: Checkpoint, state: TrainState, prepare: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        """Copies a state, and returns what writes it and makes the checkpoint count."""
        failure, prepared, written = None, None, None
        try:
            prepared = prepare()
        except OSError as error:
            failure = error
        if any(agreement.all_gather_json(failure is not None)):
            failure = failure or OSError("the first process cannot write")
        else:
            try:
                written = arrays.save(checkpoint.path, state)
            except Exception as error:  # of the part that does not run in the background
                failure = error

        def write() -> None:
            try:
                if failure:
                    raise failure
                written()
                if self._is_first:
                    prepared()
                    folder_lib.commit(checkpoint)
                    self._tidy()
            except BaseException:
                if self._is_first and is_near(self._folder):  # else it may be another run's by now
                    with contextlib.suppress(OSError):
                        folder_lib.discard(checkpoint.path)  # for room
                raise
            finally:
                self._timer.start()

        return write

    def _tidy(self) -> None:
        """Removes what no restart needs; where that fails, the next save tries it again."""
        try:
            folder_lib.discard_all(self._folder)
            for old in self._not_kept():
                folder_lib.remove(self._folder / str(old))
        except OSError as error:
            self._warn(f"old checkpoints could not be removed: {arrays.reason_of(error)}")

    def _not_kept(self) -> list[int]:
        """The newest max_num_checkpoints_to_keep stay, and the first of every keep_period."""
        newest = self._keys.max_num_checkpoints_to_keep
        if newest is None:
            return []
        steps = folder_lib.steps_in(self._folder)
        period, kept = self._keys.checkpoint_keep_period, {}
        if period != -1:
            for step in steps:
                kept.setdefault(step // period, step)
        old = [step for step in steps[:-newest] if step not in kept.values() or step < period]
        return [step for step in old if self._is_ours(step)]

    def _is_ours(self, step: int) -> bool:
        """Whether a folder holds this checkpoint, and not what somebody put there."""
        try:
            folder_lib.read(self._folder / str(step))
        except (folder_lib.TornError, ConfigError):
            return False
        return True

    def check(self) -> None:
        """Notices a save that has failed by now, where one process can tell.

        Raises:
          TrainingError: max_failed_saves saves in a row have failed.
        """
        self._saves.check()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._saves.close(error)


def versions() -> dict[str, str]:
    """What decides the arithmetic besides the config."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {"python": platform.python_version()} | {
        p: importlib.metadata.version(p) for p in packages
    }
