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
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from maxramp.checkpoints import arrays
from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.best import Best
from maxramp.checkpoints.fingerprint import fingerprint_of_weights
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.checkpoints.parameters import load_parameters
from maxramp.checkpoints.resume import changes_since, seen_mixtures
from maxramp.checkpoints.saving import Saves
from maxramp.data.corpus import DataIdentity
from maxramp.errors import ConfigError, TrainingError
from maxramp.files.place import Place, is_near, place, set_aside
from maxramp.model.adapters import has_adapters, without_adapters
from maxramp.model.order import order_by_layer
from maxramp.parallel.mesh import mesh_of
from maxramp.processes import agreement
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.keys import Recipe
from maxramp.training.state import TrainState, initial_state, state_of


class Checkpoints(Saves):
    """The checkpoints of a run's folder."""

    def __init__(
        self,
        keys: CheckpointKeys,
        folder: Place,
        data: DataIdentity,
        values: Mapping[str, Any],
        warn: Callable[[str], None],
    ):
        """
        Args:
          keys: when to save, what to keep, where to start.
          folder: of the checkpoints; every process of the job sees it.
          data: what identifies the data.
          values: of all keys, resolved; every checkpoint keeps them.
          warn: takes a line about what went wrong and is no reason to stop.
        """
        super().__init__(folder.absolute(), keys, warn)
        self._data, self.values = data, values
        self.best = Best(keys.checkpoint_best, self._folder, data.evaluations)
        # A fingerprint of the weights that the run stays near to, "" for none, that every
        # checkpoint keeps.
        self.reference = ""
        # What the run trained before the schedule of this job, which every checkpoint keeps.
        self.history: list[dict[str, Any]] = []
        self._is_first = jax.process_index() == 0
        self._torn: list[Place] = []

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or that of load_full_state_path; None without one.

        The first process chooses, the others follow. Nothing in the folder is changed.

        Raises:
          ConfigError: there are checkpoints, but all of them are torn, or enable_checkpointing is
            off: a start from nothing would overwrite what belongs to them.
        """
        chosen = agreement.all_gather_json(agreement.raise_everywhere(self._choose))[0]
        if not chosen:
            return None
        position = agreement.raise_everywhere(lambda: folder_lib.read(place(chosen)))
        if position.path.parent == self._folder:
            self.newest = position.step
        return position

    def _choose(self) -> str:
        """The checkpoint to continue from, "" for none and on all processes but the first."""
        if not self._is_first:
            return ""
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

    def changes_since(self, checkpoint: Checkpoint) -> str:
        """What this start changes against a checkpoint, as `resume.changes_since`."""
        allowed = self._keys.allow_changed
        return changes_since(checkpoint, self.values, allowed, self._data, versions())

    def first_state(
        self, position: Checkpoint | None, abstract: TrainState, recipe: Recipe
    ) -> TrainState:
        """The state that a job begins with: of a checkpoint, or a new one.

        A new one has the weights of load_parameters_path, where that is given.

        Raises:
          ConfigError: there is no such checkpoint, it cannot be read, or it holds other weights.
        """
        path = self._keys.load_parameters_path
        if has_adapters(abstract.model):
            return self._first_adapted(position, abstract, recipe)
        if position:
            return arrays.restore(position, abstract)
        if path:
            return state_of(recipe, load_parameters(path, abstract.model, self.values))
        with jax.set_mesh(mesh_of(abstract)):
            return initial_state(recipe)

    def _first_adapted(
        self, position: Checkpoint | None, abstract: TrainState, recipe: Recipe
    ) -> TrainState:
        """`first_state` of a model with adapters: its base is that of load_parameters_path.

        Every checkpoint keeps the base's hash, and goes on from no other.
        """
        path = self._keys.load_parameters_path
        if not path:
            raise ConfigError(
                f"lora_rank={recipe.model.lora_rank} adapts the model of load_parameters_path, "
                "which is not given; give the folder of one"
            )
        first = load_parameters(path, abstract.model, self.values)
        base = without_adapters(first)
        self.reference = fingerprint_of_weights(order_by_layer(base))
        if not position:
            return state_of(recipe, first)
        if position.reference != self.reference and "load_parameters_path" not in (
            self._keys.allow_changed
        ):
            raise ConfigError(
                f"load_parameters_path={path}: not the weights that {position.path} adapts (hash "
                f"{self.reference}, was {position.reference or 'none'}); give those, "
                "allow_changed=[load_parameters_path], or another run_name"
            )
        return arrays.restore(position, abstract, base)

    def start_saving(self) -> None:
        """Removes what killed saves left behind and moves torn checkpoints aside."""
        self.restart_clock()
        if self._keys.enable_checkpointing and self._is_first:
            for path in self._torn:
                set_aside(path, folder_lib.TORN)
            folder_lib.discard(self._folder)
            self.best.find()

    def is_due(self, step: int, ramp: RampupBatchManager) -> bool:
        """Whether to save after `step` steps: the same answer on every process."""
        keys = self._keys
        if not keys.enable_checkpointing:
            return False
        steps, samples = keys.checkpoint_period, keys.checkpoint_period_samples
        before = ramp.samples_before
        return (
            (steps != -1 and step % steps == 0)
            or (samples != -1 and before(step) // samples > before(step - 1) // samples)
            or (keys.checkpoint_stage_ends and ramp.stage_at_step(step).first_step == step)
            or self.is_time()
        )

    def save(
        self,
        step: int,
        state: TrainState,
        consumed_samples: int,
        stages: list[dict[str, Any]],
        prepare: Callable[[], Callable[[], None]],
        last: bool,
        evaluation: Mapping[str, float] = types.MappingProxyType({}),
        owes: Sequence[str] = (),
    ) -> None:
        """Saves the state after `step` steps, unless that was the last save.

        Returns when the state is copied; files are written in the background if
        `async_checkpointing`. A checkpoint that is not complete is never seen by a restart.

        Args:
          step: steps done.
          state: after them.
          consumed_samples: in them.
          stages: of the schedule, as in plan.json.
          prepare: writes what must be there before the checkpoint counts, and returns what waits
            until it is there, for the first process; where either raises, nothing counts.
          last: nothing is trained after it: returns when it is written.
          evaluation: the numbers of the evaluations of this state, by their names.
          owes: those that are due and have not come.

        Raises:
          TrainingError: max_failed_saves saves in a row have failed, or the last one.
        """
        if not self._keys.enable_checkpointing or (not last and self.is_late(step)):
            return
        self.settle()
        if step == self.newest:
            return
        checkpoint = Checkpoint(
            path=self._folder / str(step),
            step=step,
            consumed_samples=consumed_samples,
            stages=stages,
            corpus_hash=self._data.hash,
            config=dict(self.values),
            versions=versions(),
            reference=self.reference,
            history=self.history,
            parts=list(self._data.parts),
            mixtures=seen_mixtures(self._data.mixtures, consumed_samples),
            evaluations=dict(self._data.evaluations),
            evaluation=_finite(evaluation),
            saved=secrets.token_hex(8),
            owes=list(owes),
        )
        self.begin(step, self._writer(checkpoint, state, prepare))
        if last or not self._keys.async_checkpointing:
            self.settle(last)

    def make_up(
        self, step: int, evaluation: Mapping[str, float], prepare: Callable[[], Callable[[], None]]
    ) -> None:
        """Adds to this run's last checkpoint the numbers of the evaluations that it owes.

        Args:
          step: the checkpoint's; nothing is done where it is another run's.
          evaluation: the numbers.
          prepare: as in `save`.

        Raises:
          TrainingError: they cannot be written.
        """

        def write() -> None:
            there = folder_lib.read(self._folder / str(step))
            numbers = there.evaluation | _finite(evaluation)
            kinds = {name.partition("_")[0] for name in evaluation}
            of_today = {k: x for k, x in self._data.evaluations.items() if k in kinds}
            evaluations = there.evaluations | of_today
            whole = dataclasses.replace(there, evaluation=numbers, evaluations=evaluations, owes=[])
            try:
                prepare()()
                folder_lib.commit(whole)
            except OSError as error:
                raise TrainingError(f"{whole.path}: {arrays.reason_of(error)}") from None
            self.best.add(whole)
            self._tidy()

        agreement.raise_everywhere(lambda: self._is_first and self.newest == step and write())

    def _writer(
        self, checkpoint: Checkpoint, state: TrainState, prepare: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        """Copies a state, and returns what writes it and makes the checkpoint count."""
        written = _begin(lambda: arrays.save(checkpoint.path, state))
        prepared = _begin(prepare)

        def write() -> None:
            try:
                written()
                if self._is_first:
                    prepared()
                    folder_lib.commit(checkpoint)
                    self.best.add(checkpoint)
                    self._tidy()
            except BaseException:
                if self._is_first and is_near(self._folder):  # else it may be another run's by now
                    with contextlib.suppress(OSError):
                        folder_lib.discard(self._folder)  # for room
                raise

        return write

    def _tidy(self) -> None:
        """Removes what no restart needs; where that fails, the next save tries it again.

        The newest max_num_checkpoints_to_keep stay, the first of every keep_period, and the best.
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


def _begin(begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Begins a work, and returns what waits for it, there raising also why it cannot begin."""
    try:
        return begin()
    except Exception as error:
        failed: concurrent.futures.Future = concurrent.futures.Future()
        failed.set_exception(error)
        return failed.result


def versions() -> dict[str, str]:
    """What decides the arithmetic besides the config."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {"python": platform.python_version()} | {
        p: importlib.metadata.version(p) for p in packages
    }
