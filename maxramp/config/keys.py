"""The configuration: every section, put together."""

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, Self

from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.config import alternatives
from maxramp.data.keys import DataKeys, EvalKeys, ReadingKeys
from maxramp.errors import ConfigError
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
    checkpoints: CheckpointKeys
    run: RunKeys
    evaluation: EvalKeys
    profiling: ProfilerKeys
    planning: PlanKeys
    launch: LaunchKeys
    policy: PolicyKeys
    rollout: RolloutKeys

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The sections of the values of all keys."""
        values = types.MappingProxyType(dict(values))
        sections = cls._sections()
        return cls(values, **{name: section.of(values) for name, section in sections.items()})

    @classmethod
    def _sections(cls) -> dict[str, type[Keys]]:
        fields = dataclasses.fields(cls)
        return {field.name: field.type for field in fields if field.name != "values"}

    @classmethod
    def not_read_by(cls, program: str) -> set[str]:
        """The keys of other programs that train: they change nothing in a run of this one."""
        if program not in OF_ONE_PROGRAM:  # which is about a run of any of them
            return set()
        sections = cls._sections()
        others = {name for of, names in OF_ONE_PROGRAM.items() if of != program for name in names}
        read = [section for name, section in sections.items() if name not in others]
        return _keys_of(sections[name] for name in others) - _keys_of(read)

    def check(self) -> None:
        """Checks every section, and the relations across them that need no devices.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        for name in self._sections():
            getattr(self, name).check()
        notations.check(self.batch)
        alternatives.check_notation(self.values)
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


def _keys_of(sections: Iterable[type[Keys]]) -> set[str]:
    return {field.name for section in sections for field in dataclasses.fields(section)}
