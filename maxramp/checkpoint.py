"""Saving and restoring the train state, on any mesh.

Checkpoint n means "n steps done". Its metadata holds what a restart needs before anything is built:
the consumed samples, the stages, the configuration and what identifies the data.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from maxramp.config import Config
from maxramp.errors import ConfigError
from maxramp.rampup import RampupBatchManager
from maxramp.step import TrainState


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a checkpoint stands."""

    step: int  # steps done = the next step
    consumed_samples: int
    stages: list[dict[str, Any]]  # of the schedule it was trained with, as in plan.json


class Checkpoints:
    """The checkpoints of a run's folder."""

    def __init__(self, config: Config, folder: pathlib.Path, corpus_hash: str):
        self._config, self._folder, self._corpus_hash = config, folder.absolute(), corpus_hash
        self._checkpointer = None
        if config.enable_checkpointing:
            self._checkpointer = self._open(for_saving=False)

    def _open(self, for_saving: bool) -> ocp.training.Checkpointer:
        keep = self._config.max_num_checkpoints_to_keep
        policies = ocp.training.preservation_policies
        return ocp.training.Checkpointer(
            self._folder,
            preservation_policy=policies.LatestN(keep) if keep else policies.PreserveAll(),
            cleanup_tmp_directories=for_saving,
        )

    def start_saving(self) -> None:
        """Removes what killed saves left behind. Before it, nothing in the folder is changed."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = self._open(for_saving=True)

    def latest(self) -> Position | None:
        """Where the newest checkpoint stands; None without one.

        Raises:
          ConfigError: the checkpoint was trained on other data.
        """
        if self._checkpointer is None or self._checkpointer.latest is None:
            return None
        newest = self._checkpointer.latest
        saved = self._checkpointer.checkpointables_metadata(newest).custom_metadata or {}
        if "consumed_samples" not in saved:
            raise ConfigError(
                f"{newest.path}: not a checkpoint of maxramp; move it away, or take another "
                "run_name"
            )
        if saved["corpus_hash"] != self._corpus_hash:
            raise ConfigError(
                f"{newest.path}: trained on other data (hash {saved['corpus_hash']}, now "
                f"{self._corpus_hash}), whose rows cannot be continued; restore the data, or take "
                "another run_name"
            )
        return Position(newest.step, saved["consumed_samples"], saved["stages"])

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state after `step` steps, with the shapes, dtypes and shardings of `abstract`.

        Raises:
          ConfigError: the checkpoint holds other weights than the config describes.
        """
        saved = self._checkpointer.checkpointables_metadata(step).metadata["state"]
        there = {_path(p): (tuple(x.shape), str(x.dtype)) for p, x in _leaves(saved)}
        wanted = {_path(p): (tuple(x.shape), str(x.dtype)) for p, x in _leaves(abstract)}
        for path in sorted(there.keys() | wanted.keys()):
            if there.get(path) != wanted.get(path):
                raise ConfigError(
                    f"{self._checkpointer.directory / str(step)}: {path} is "
                    f"{_shown(there.get(path))}, but this config makes it "
                    f"{_shown(wanted.get(path))}; give the model and optimizer keys it was "
                    "trained with, or another run_name"
                )
        return self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]

    def is_due(self, step: int) -> bool:
        """Whether checkpoint `step` is one of every checkpoint_period."""
        return self._checkpointer is not None and step % self._config.checkpoint_period == 0

    def save(self, step: int, state: TrainState, ramp: RampupBatchManager) -> None:
        """Saves the state after `step` steps of `ramp`, unless that checkpoint is there already.

        Returns when the state is copied; files are written in the background if
        `async_checkpointing`. A checkpoint that is not complete is never seen by a restart.
        """
        if self._checkpointer is None or any(
            checkpoint.step == step for checkpoint in self._checkpointer.checkpoints
        ):
            return
        metadata = {
            "consumed_samples": ramp.samples_before(step),
            "stages": [stage.to_json() for stage in ramp.stages],
            "corpus_hash": self._corpus_hash,
            "config": json.dumps(self._config.to_dict()),
            "versions": {"jax": jax.__version__},
        }
        response = self._checkpointer.save_checkpointables_async(
            step, {"state": state}, force=True, custom_metadata=metadata
        )
        if not self._config.async_checkpointing:
            response.result()

    def close(self) -> None:
        """Waits until everything is written."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _path(path: Any) -> str:
    """One spelling for a leaf, whether it is an attribute or an entry of what Orbax read back."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    return ".".join(name for name in names if name != "value")


def _shown(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
