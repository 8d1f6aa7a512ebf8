"""Saving and restoring the train state, on any mesh, with Orbax.

Checkpoint n means "n steps done". What a restart needs before anything is built (the consumed
samples, the stages, the configuration, what identifies the data) stands beside its arrays, where
`folder` reads it.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.addresses import saving_context
from maxramp.checkpoints.arrays import compare, items_of, reading, reason_of
from maxramp.checkpoints.background import Patience, agreed_reason, in_thread, raiser
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.checkpoints.resume import changes_since
from maxramp.checkpoints.timer import Timer
from maxramp.commandline import clock_in
from maxramp.errors import ConfigError, PeerLostError, TrainingError
from maxramp.folders.kvstore import QUIET
from maxramp.folders.place import Place, check_writable, is_near, place
from maxramp.model.decoder import Decoder
from maxramp.parallel import agreement, processes
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.keys import Recipe
from maxramp.training.state import TrainState, in_layer_order, in_stage_order, initial_state

_LAST = 60.0  # seconds that a run which fails waits for a storage
_END = 300.0  # and that the end of another run waits for one that takes nothing of a save


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
        self._last_good: int | None = None
        self._failed_in_a_row = 0
        self._given_up: set[int] = set()  # saves to a storage, which threads may still write
        self._late: int | None = None
        self._waits = is_near(self._folder)  # for a save that goes on when the next is due
        self._saving: tuple[int, concurrent.futures.Future] | None = None
        self._timer: Timer | None = None

    def latest(self) -> Checkpoint | None:
        """Where to go on: the newest whole checkpoint, or load_full_state_path; None without one.

        The first process chooses, the others follow. Nothing in the folder is changed.

        Raises:
          ConfigError: there are checkpoints, but all of them are torn, or enable_checkpointing is
            off: a start from nothing would overwrite what belongs to them.
        """
        newest = agreement.all_gather_json(agreement.raise_everywhere(self._newest_whole))[0]
        self._last_good = None if newest < 0 else newest
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
                if not folder_lib.never_counted(path):
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
        compare(checkpoint, abstract, self._values)

    def restore(self, checkpoint: Checkpoint, abstract: TrainState) -> TrainState:
        """The state of a checkpoint, with the shapes, dtypes and shardings of `abstract`.

        Raises:
          ConfigError: the arrays cannot be read.
        """
        with reading(checkpoint.path):
            loaded = ocp.load_checkpointables(os.fspath(checkpoint.path), items_of(abstract))
        state = TrainState(model=loaded["model"], **loaded["optimizer"])
        state = in_stage_order(state)
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
        state = initial_state(recipe)
        if self._keys.load_parameters_path:
            path = place(self._keys.load_parameters_path)
            return dataclasses.replace(state, model=self.load_parameters(path, abstract.model))
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
        with reading(checkpoint.path):
            loaded = ocp.load_checkpointables(os.fspath(checkpoint.path), {"model": model})["model"]
        return in_stage_order(loaded)

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
        folder_lib.remove_leftovers(self._folder)  # last: they tell which are half renamed

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
        if not self._keys.enable_checkpointing:
            return
        if not (last or self._waits or self._is_save_decided()):
            self._note_late(step)
            return
        patience = None
        if last and not self._waits:
            patience = Patience(
                _END, lambda clock: self._say_waiting(f"{clock} if the storage takes nothing")
            )
        self._finish_save(patience=patience)
        if step == self._last_good:
            return
        self._given_up.discard(step)
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
        error, prepared = self._prepare(prepare)
        if any(agreement.all_gather_json(error is not None)):
            writing = raiser(error or OSError("the first process cannot write"))
        else:
            try:
                with saving_context(checkpoint.path):
                    writing = ocp.save_checkpointables_async(
                        os.fspath(folder_lib.unfinished_arrays(checkpoint.path)),
                        items_of(in_layer_order(state)),
                        custom_metadata=checkpoint.metadata(),
                    ).result
            except Exception as raised:  # by the part that does not run in the background
                writing = raiser(raised)
        self._timer.stop()
        self._saving = step, in_thread(lambda: self._write(checkpoint.path, writing, prepared))
        if last or not self._keys.async_checkpointing:
            self._finish_save(last, patience)

    def _prepare(
        self, prepare: Callable[[], Callable[[], None]]
    ) -> tuple[OSError | None, Callable[[], None]]:
        """What `prepare` raises, or else what stands in the way of a file; and what it returns."""
        prepared: Callable[[], None] = lambda: None  # noqa: E731
        try:
            prepared = prepare()
            if self._is_first:
                check_writable(self._folder)
        except OSError as error:
            return error, prepared
        return None, prepared

    def _write(
        self, path: Place, writing: Callable[[], None], prepared: Callable[[], None]
    ) -> None:
        """Waits for the files of a checkpoint, in the background, and removes old checkpoints."""
        try:
            if self._is_first:
                with contextlib.suppress(OSError):  # a restart then sets aside what it would remove
                    folder_lib.begin(path)
            writing()
            if not self._is_first:
                return
            prepared()
            if int(path.name) not in self._given_up:
                folder_lib.commit(path)
                self._tidy()
        finally:
            self._timer.start()

    def _tidy(self) -> None:
        """Removes what no restart needs; where that fails, the next save tries it again."""
        try:
            there = folder_lib.steps_in(self._folder) if self._given_up else []
            for step in self._given_up.intersection(there):
                folder_lib.discard(self._folder / str(step))
            folder_lib.remove_leftovers(self._folder)
            for old in self._not_kept():
                folder_lib.remove(self._folder / str(old))
        except OSError as error:
            self._warn(f"old checkpoints could not be removed: {reason_of(error)}")

    def _note_late(self, step: int) -> None:
        """Says once for every save that others are left out as long as it goes on."""
        slow = self._saving[0] if self._saving else None
        if self._is_first and slow != self._late:
            self._warn(
                f"{self._folder / str(slow)} is still being written: no checkpoint after step "
                f"{step}, and none until it is done"
            )
            self._late = slow

    def _say_waiting(self, until: str) -> None:
        """Says what the end of the run waits for."""
        if self._is_first:
            self._warn(
                f"{self._folder}: the last checkpoint is still being written; the run ends when it "
                f"is there, or at {until}"
            )

    def _is_save_decided(self) -> bool:
        """Whether no process still writes the last save, or one has failed: it is over for all."""
        done = self._saving is None or self._saving[1].done()
        failed = done and self._saving is not None and self._saving[1].exception() is not None
        states = agreement.all_gather_json([done, failed])
        return all(done for done, _ in states) or any(failed for _, failed in states)

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
        if self._saving and jax.process_count() == 1 and self._saving[1].done():
            self._finish_save()

    def _finish_save(self, last: bool = False, patience: Patience | None = None) -> None:
        """Waits until a save is done on every process, or has failed, as `agreed_reason`."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        reason = agreed_reason(saving, patience)
        if not reason:
            self._last_good, self._failed_in_a_row = step, 0
            return
        processes.leave_threads_behind()
        if not self._waits:  # the folder may be another run's by now: it goes after the next save
            self._given_up.add(step)
        elif self._is_first:  # for room; what other threads still write goes after the next save
            folder_lib.discard(self._folder / str(step))
        self._failed_in_a_row += 1
        most = self._keys.max_failed_saves
        stands = (
            "there is none before it"
            if self._last_good is None
            else f"checkpoint {self._last_good} stands"
        )
        line = f"{self._folder / str(step)} was not saved: {reason}; {stands}"
        if last or self._failed_in_a_row >= most:
            raise TrainingError(
                f"{line}; make room or mend the storage and start again"
                + ("" if last else f" (max_failed_saves={most} in a row have failed)")
            )
        self._warn(f"{line}; the run goes on ({self._failed_in_a_row} of max_failed_saves={most})")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Waits until this process has written; with a lost peer it never would have."""
        if self._saving is None or isinstance(error, PeerLostError):
            return  # the last save of a run that comes to its end was waited for
        step, saving = self._saving
        if self._waits:
            concurrent.futures.wait([saving])
        elif concurrent.futures.wait([saving], QUIET).not_done:
            self._say_waiting(clock_in(_LAST - QUIET))
            concurrent.futures.wait([saving], _LAST - QUIET)
        failed = saving.exception() if saving.done() else TimeoutError("the storage is slow")
        if failed:
            processes.leave_threads_behind()
            self._warn(f"{self._folder / str(step)} was not saved: {reason_of(failed)}")


def versions() -> dict[str, str]:
    """What decides the arithmetic besides the config."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {"python": platform.python_version()} | {
        p: importlib.metadata.version(p) for p in packages
    }
