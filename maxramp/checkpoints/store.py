"""Saving and restoring the train state, on any mesh, with Orbax.

Checkpoint n means "n steps done". What a restart needs before anything is built (the consumed
samples, the stages, the configuration, what identifies the data) stands beside its arrays, where
`folder` reads it.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import math
import platform
import secrets
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxramp.checkpoints import arrays
from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints import starts as starts_lib
from maxramp.checkpoints.changes import changes_since, seen_mixtures
from maxramp.checkpoints.folder import Best, Checkpoint, select_kinds
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.checkpoints.saving import Saves
from maxramp.checkpoints.snapshots import Snapshots, list_held, local_folder
from maxramp.checkpoints.starts import Starts
from maxramp.data.corpus import DataIdentity
from maxramp.errors import ConfigError, TrainingError
from maxramp.files.place import Place, is_near, place, set_aside
from maxramp.files.run_folder import RunFiles
from maxramp.processes import agreement
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.state import TrainState

_SECONDS_BETWEEN_LINES = 10.0  # a run that saves every few steps does not fill its log


class Checkpoints(contextlib.AbstractContextManager):
    """Saves, finds and removes the checkpoints of a run."""

    def __init__(
        self,
        folder: Place,
        files: RunFiles,
        keys: CheckpointKeys,
        data: DataIdentity,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ):
        """Opens the `folder` of the checkpoints, which every process of the job sees, on all of
        them together. No checkpoint counts before the records in `files` are written. `say` takes a
        line, and `warn` one about a fault that need not end the run.
        """
        self._keys = keys
        self._folder, self._warn = folder.absolute(), warn
        self._say, self._last_line = say, -math.inf
        self._run, self._files = self._folder.parent, files
        self._saves = Saves(self._folder, keys, warn)
        self._data, self.reference = data, ""
        self._evaluations = dict(data.evaluations)  # as in `DataIdentity`
        self.best = Best(keys.checkpoint_best, self._evaluations)
        self._first: Mapping[str, str] = {}
        self._starts = Starts()
        self._start = agreement.decide_on_first(lambda: secrets.token_hex(4))
        self.snapshots: Snapshots | None = None
        self._directory: str | None = None  # as in `Starts`
        if keys.enable_emergency_checkpoint:
            self._directory = keys.local_checkpoint_directory
            self.snapshots = Snapshots(keys, self._run, self._start, say, warn)
        self._position: Checkpoint | None = None
        self._is_first = jax.process_index() == 0
        self._torn: list[Place] = []

    def __exit__(self, kind, error, trace) -> None:
        self._saves.finish(error)
        if self.snapshots:
            self.snapshots.close(error, self.newest)

    @property
    def newest(self) -> int | None:
        return self._saves.newest

    def settle_alone(self) -> int | None:
        return self._saves.settle_alone()

    @property
    def continues_run(self) -> bool:
        """Whether the job begins with a state of this run."""
        return self._position is not None and self._position.path.parent == self._folder

    def check(self) -> None:
        self._saves.check()

    def latest(
        self, first: Mapping[str, str] = types.MappingProxyType({}), recorded: int = 0
    ) -> Checkpoint | None:
        """Finds the newest whole checkpoint, as the first process sees it, or else that of
        load_full_state_path, or a snapshot newer than either; None without one. All processes call
        it, before all that save; nothing in the folder changes. `first` are the weights of a run
        that begins, as in `Checkpoint`; the run has records of `recorded` steps. A ConfigError if
        none of the run's checkpoints is whole, or for any under enable_checkpointing=False.
        """
        self._first = first
        position = None
        if chosen := agreement.decide_on_first(self._choose_position):
            position = agreement.raise_everywhere(lambda: folder_lib.read(place(chosen)))
            if position.path.parent == self._folder:
                self._saves.newest = position.step
        self._starts = Starts(
            *agreement.decide_on_first(lambda: starts_lib.read(self._files.local))
        )
        if self.snapshots:
            newer = self.snapshots.find(self._folder, self._starts, position, recorded)
            position, self._first = (newer, newer.first) if newer else (position, first)
        self._name_passed_over(position, recorded)
        self._position = position
        return position

    def _name_passed_over(self, position: Checkpoint | None, recorded: int) -> None:
        """Warns of a newer snapshot of the last start that this one does not look for, or that has
        more steps than are `recorded`.
        """
        if not self._is_first or (before := self._starts.directory) is None:
            return
        folder, why = local_folder(before, self._run), "enable_emergency_checkpoint=False"
        if before == self._directory:
            why = f"metrics.jsonl, which holds {recorded:,} steps (put back from a copy?),"
        elif self.snapshots:
            why = f"local_checkpoint_directory={self._directory}"
        for name in list_held(folder, self._starts, position)[-1:]:
            if before == self._directory and name.step <= recorded:
                continue  # it is not whole, as `find` says
            self._warn(
                f"{why} passes over the snapshot after step {name.step} in {folder}; continuing "
                f"from {position or 'the start'}"
            )

    def _choose_position(self) -> str:
        """Returns the path of the checkpoint or full state to continue from, "" without one, on the
        first process; warns of torn ones. A ConfigError if all are torn, or if there are some
        without enable_checkpointing."""
        if not self._keys.enable_checkpointing and (steps := folder_lib.steps_in(self._folder)):
            raise ConfigError(
                f"enable_checkpointing=False: {self._folder} holds a run's checkpoints, the newest "
                f"after {steps[-1]:,} steps, and this start would overwrite that run's metrics; "
                "give another run_name, or enable_checkpointing=True to continue the run"
            )
        position, torn = folder_lib.newest(self._folder)
        if torn:
            self._torn = [error.path for error in torn]
            reason = f"{torn[0].path} is torn ({torn[0].what})"
            if not position:
                raise ConfigError(
                    f"{reason}, and no checkpoint before it is whole; put the file back, or take "
                    "another run_name"
                )
            before = f"continuing from the checkpoint before it, {position.step}"
            self._warn(f"{reason}; {before}")
        elsewhere = self._keys.load_full_state_path
        if not position and elsewhere:
            return str(folder_lib.find(place(elsewhere)))
        return str(position.path) if position else ""

    def changes_since(self, checkpoint: Checkpoint, values: Mapping[str, Any]) -> str:
        allowed = self._keys.allow_changed
        return changes_since(checkpoint, values, allowed, self._data, versions())

    def keep_reference(self, fingerprint: str) -> None:
        """Keeps in every checkpoint the fingerprint of the weights that the run adapts or stays
        near to. Numbers of evaluations under others do not compare.
        """
        self.reference = self._evaluations["eval_reference"] = fingerprint

    def start_saving(self) -> list[Place]:
        """Begins the part of the run that this start trains, called on all processes after `latest`
        when nothing can be refused any more. Removes what killed saves left behind, and returns it,
        [] on all but the first; moves torn checkpoints aside."""
        unfinished = []
        agreement.raise_everywhere(lambda: self._is_first and self._write_starts())
        if self.snapshots:
            self.snapshots.begin()
        self._saves.restart_clock()
        if self._keys.enable_checkpointing and self._is_first:
            for path in self._torn:
                set_aside(path, folder_lib.TORN)
            unfinished = folder_lib.discard(self._folder)
            if self._keys.checkpoint_best:
                for checkpoint in folder_lib.read_whole(self._folder):
                    self._add_to_best(checkpoint)
        return unfinished

    def _write_starts(self) -> None:
        """Adds this start to those of the run, on the first process; a ConfigError if the folder
        cannot be written."""
        before, position = self._starts if self.continues_run else Starts(), self._position
        starts = before.begin(self._start, position.step if position else 0, self._directory)
        try:
            starts.write(self._files.local)
            self._files.publish()  # a kill before the mirror's first round leaves it in the storage
        except OSError as error:
            reason = arrays.reason_of(error)
            raise ConfigError(f"{self._run}: cannot be written: {reason}") from None

    def is_due(self, step: int, ramp: RampupBatchManager) -> bool:
        """Tells whether to save after `step` steps, asked once a step; the same answer on every
        process."""
        keys = self._keys
        if not keys.enable_checkpointing:
            return False
        steps, samples = keys.checkpoint_period, keys.checkpoint_period_samples
        before = ramp.samples_before
        return (
            (steps != -1 and step % steps == 0)
            or (samples != -1 and before(step) // samples > before(step - 1) // samples)
            or (keys.checkpoint_stage_ends and ramp.stage_at_step(step).first_step == step)
            or self._saves.is_time()
        )

    def make_record(
        self,
        step: int,
        consumed_samples: int,
        stages: list[dict[str, Any]],
        config: Mapping[str, Any],
        evaluation: Mapping[str, float] = types.MappingProxyType({}),
        noise: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> Checkpoint:
        """Returns what `save` and `take_snapshot` write beside the state after `step` steps. The
        arguments are fields of `Checkpoint`; numbers of `evaluation` that are not finite are left
        out."""
        return Checkpoint(
            path=self._folder / str(step),
            step=step,
            consumed_samples=consumed_samples,
            stages=stages,
            corpus_hash=self._data.hash,
            config=dict(config),
            versions=versions(),
            reference=self.reference,
            parts=list(self._data.parts),
            mixtures=seen_mixtures(self._data.mixtures, consumed_samples),
            evaluations=dict(self._evaluations),
            evaluation=_finite(evaluation),
            noise=dict(noise),
            first=dict(self._first),
        )

    def save(self, record: Checkpoint, state: TrainState, last: bool) -> None:
        """Saves the state of a `record`, on all processes, under enable_checkpointing: not if it is
        saved already, nor while an object storage still takes the save before, unless it is the
        `last`. A TrainingError where max_failed_saves saves in a row have failed, or the last one.

        Returns when the state is copied; files are written in the background if
        `async_checkpointing`, or if nothing is trained after the `last`. A checkpoint that is not
        complete is never seen by a restart.
        """
        step = record.step
        if not self._keys.enable_checkpointing or (not last and self._saves.is_late(step)):
            return
        self._saves.settle()
        if step == self.newest:
            return
        checkpoint = dataclasses.replace(record, saved=secrets.token_hex(8))
        self._saves.begin(step, self._writer(checkpoint, state, last))
        if last or not self._keys.async_checkpointing:
            self._saves.settle(last)

    def take_snapshot(self, record: Checkpoint, state: TrainState) -> float:
        """Takes a snapshot of a state that is there; returns the seconds that the copy took."""
        return self.snapshots.save(record, state, _start_work(self._files.flush))

    def add_evaluation(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Adds numbers of evaluations to the run's newest checkpoint, if it is that after `step`
        steps. Called on all processes; a TrainingError says that they cannot be written."""

        def add_to_record() -> None:
            path = self._folder / str(step)
            # "eval" or "task": the identities of only these kinds are renewed.
            kinds = {name.partition("_")[0] for name in evaluation}
            try:
                saved = folder_lib.read(path)
                numbers = saved.evaluation | _finite(evaluation)
                evaluations = saved.evaluations | select_kinds(self._evaluations, kinds)
                updated = dataclasses.replace(saved, evaluation=numbers, evaluations=evaluations)
                # flush hands over; what it returns waits until the records are in the run's folder.
                self._files.flush()()
                folder_lib.commit(updated)
            except OSError as error:
                raise TrainingError(f"{path}: {arrays.reason_of(error)}") from None
            self._add_to_best(updated)
            self._remove_old()

        agreement.raise_everywhere(
            lambda: self._is_first and self.newest == step and add_to_record()
        )

    def _writer(self, checkpoint: Checkpoint, state: TrainState, last: bool) -> Callable[[], None]:
        """Begins to save a state, on all processes. Returns what another thread calls: it waits
        until the save counts, or raises its error once the first process has removed its files from
        a disk."""
        begin = time.monotonic()
        written = _start_work(lambda: arrays.save(checkpoint.path, state))
        recorded = _start_work(self._files.flush)

        def write() -> None:
            try:
                written()
                if self._is_first:
                    recorded()
                    folder_lib.commit(checkpoint)
                    now = time.monotonic()
                    if last or now - self._last_line >= _SECONDS_BETWEEN_LINES:
                        self._last_line = now
                        self._say(f"save     checkpoint {checkpoint.step} in {now - begin:.1f} s")
                    self._add_to_best(checkpoint)
                    self._remove_old()
            except BaseException:
                if self._is_first and is_near(self._folder):  # else it may be another run's by now
                    with contextlib.suppress(OSError):
                        folder_lib.discard(self._folder)  # for room
                raise

        return write

    def _add_to_best(self, checkpoint: Checkpoint) -> None:
        self.best.add(checkpoint.step, checkpoint.evaluation, checkpoint.evaluations)

    def _remove_old(self) -> None:
        """Removes what no restart needs: all but the newest max_num_checkpoints_to_keep, the first
        of every keep_period, and the best. Where that fails, the next save tries it again.
        """
        newest, period = self._keys.max_num_checkpoints_to_keep, self._keys.checkpoint_keep_period
        try:
            folder_lib.discard(self._folder)
            steps = folder_lib.steps_in(self._folder)
            first = {step // period: step for step in reversed(steps) if step >= period > 0}
            for step in steps[:-newest] if newest else []:
                if step not in (*first.values(), self.best.step):
                    folder_lib.remove(self._folder / str(step))
        except OSError as error:
            self._warn(f"old checkpoints could not be removed: {arrays.reason_of(error)}")


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: x for name, x in numbers.items() if math.isfinite(x)}


def _start_work(begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Begins a work, and returns what waits for its end, and raises there why it cannot begin."""
    try:
        return begin()
    except Exception as error:
        failed: concurrent.futures.Future = concurrent.futures.Future()
        failed.set_exception(error)
        return failed.result


def versions() -> dict[str, str]:
    """Returns the versions that decide the arithmetic besides the config."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {"python": platform.python_version()} | {
        p: importlib.metadata.version(p) for p in packages
    }
