"""The configuration: every section, put together."""

import dataclasses
import itertools
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.data.keys import DataKeys, EvalKeys, ReadingKeys
from maxramp.errors import ConfigError
from maxramp.keys.base import base
from maxramp.keys.section import Keys
from maxramp.launch.keys import LaunchKeys
from maxramp.model.keys import ModelKeys
from maxramp.parallel.keys import MeshKeys
from maxramp.planning.keys import PlanKeys
from maxramp.processes.keys import BackendKeys
from maxramp.rampup import notations
from maxramp.rampup.keys import BatchKeys
from maxramp.rl.keys import RolloutKeys
from maxramp.run.keys import ProfilerKeys, RunKeys
from maxramp.training.keys import (
    LearningRateKeys,
    ObjectiveKeys,
    OptimizerKeys,
    PolicyKeys,
    Recipe,
)

# Sections that one of the programs that train reads, and the other does not.
OF_ONE_PROGRAM = {
    "train": ("data", "reading", "objective", "evaluation"),
    "grpo": ("policy", "rollout"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    """Every section, for the commands, which hand each room its own.

    Attributes:
      values: all keys by their name, in the order of base.yml.
    """

    values: Mapping[str, Any]
    batch: BatchKeys
    backend: BackendKeys
    mesh: MeshKeys
    model: ModelKeys
    data: DataKeys
    reading: ReadingKeys
    objective: ObjectiveKeys
    optimizer: OptimizerKeys
    learning_rate: LearningRateKeys
    policy: PolicyKeys
    checkpoints: CheckpointKeys
    run: RunKeys
    evaluation: EvalKeys
    profiling: ProfilerKeys
    planning: PlanKeys
    launch: LaunchKeys
    rollout: RolloutKeys

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The sections of the values of all keys."""
        values = types.MappingProxyType(dict(values))
        sections = cls._sections()
        return cls(values, **{name: section.of(values) for name, section in sections.items()})

    @classmethod
    def _sections(cls) -> dict[str, type[Keys]]:
        return {field.name: field.type for field in fields(cls) if field.name != "values"}

    @classmethod
    def unread_by(cls, program: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The keys that are given for other programs that train, with their defaults.

        They change nothing in a run of this one; none of what is about a run of any of them.
        """
        sections = cls._sections()
        ours = OF_ONE_PROGRAM.get(program, sections)
        others = {*itertools.chain(*OF_ONE_PROGRAM.values())} - {*ours}
        read = {f.name for n, s in sections.items() if n not in others for f in fields(s)}
        return {
            name: default
            for name, default in base().items()
            if name not in read and values[name] != default
        }

    def check(self) -> None:
        """Checks every section, and the relations across them that need no devices.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        for name in self._sections():
            getattr(self, name).check()
        notations.check(self.batch)
        if (
            self.batch.rampup_policy == "noise"
            and self.learning_rate.batch_size_lr_reference == "final"
        ):
            raise ConfigError(
                "batch_size_lr_reference=final with rampup_policy=noise: the learning rate would "
                "depend on a batch that is not decided yet; use initial, or leave it out"
            )
        curve_steps = self.learning_rate.learning_rate_schedule_steps
        if self.batch.steps != -1 and curve_steps > self.batch.steps:
            raise ConfigError(
                f"learning_rate_schedule_steps={curve_steps} exceeds steps={self.batch.steps}; "
                "the learning rate would never reach its end: lower it, or use -1 for all steps"
            )

    @property
    def recipe(self) -> Recipe:
        """What a train state and its step are made from."""
        return Recipe(self.model, self.objective, self.optimizer)

    def replace(self, **values: Any) -> Self:
        """The same with other values of some keys."""
        return self.of({**self.values, **values})
