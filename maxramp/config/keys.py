"""The configuration: all sections together."""

import dataclasses
import itertools
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.config import relations
from maxramp.data.keys import DataKeys, EvalKeys, ReadingKeys
from maxramp.huggingface import config_json
from maxramp.keys.base import PATHS, base, expand_path
from maxramp.keys.section import Keys, refuse
from maxramp.launch.keys import LaunchKeys
from maxramp.model.keys import ModelKeys
from maxramp.objectives.objective import Objective
from maxramp.objectives.rewards import REWARDS, PolicyKeys
from maxramp.objectives.table import find_objective
from maxramp.parallel.keys import MeshKeys
from maxramp.planning.keys import PlanKeys
from maxramp.processes.keys import BackendKeys
from maxramp.rampup import notations
from maxramp.rampup.keys import BatchKeys
from maxramp.rl.keys import RolloutKeys
from maxramp.run.keys import ProfilerKeys, RunKeys
from maxramp.training.keys import LearningRateKeys, LossKeys, OptimizerKeys, Recipe

# Sections that only one of the training programs reads.
PROGRAM_SECTIONS = {
    "train": ("data", "reading", "loss", "evaluation"),
    "grpo": ("policy", "rollout"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    """All sections; commands pass each function the ones that it needs."""

    values: Mapping[str, Any]  # all keys by name, in the order of base.yml
    batch: BatchKeys
    backend: BackendKeys
    mesh: MeshKeys
    model: ModelKeys
    data: DataKeys
    reading: ReadingKeys
    loss: LossKeys
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
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Makes all sections of the values of every key, each of its type; refuses those out of
        bounds. Relations are left to `check`."""
        values = types.MappingProxyType(dict(values))
        return cls(values, **{n: s.from_values(values) for n, s in cls.sections().items()})

    @classmethod
    def sections(cls) -> dict[str, type[Keys]]:
        return {field.name: field.type for field in fields(cls) if field.name != "values"}

    @classmethod
    def unread_by(cls, program: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the defaults of changed keys that only other training programs read; none for a
        program that does not train."""
        sections = cls.sections()
        own_sections = PROGRAM_SECTIONS.get(program, sections)
        others = {*itertools.chain(*PROGRAM_SECTIONS.values())} - {*own_sections}
        read = {f.name for n, s in sections.items() if n not in others for f in fields(s)}
        return {
            name: default
            for name, default in base().items()
            if name not in read and values[name] != default
        }

    def check(self) -> None:
        """Refuses what is wrong on any devices, in any phase; `resolve` checks the rest."""
        for name in PATHS:
            expand_path(name, self.values[name])
        refuse(relations.all_relations(self))
        notations.check(self.batch)
        for phase in self.batch.phase_list[1:]:
            with phase.name_errors():
                self.replace(**phase.values, phases={}).check()
        if self.run.export_huggingface:
            config_json.make_config(self.model, {}, "")

    @property
    def objective(self) -> Objective:
        return find_objective(self.values)

    @property
    def recipe(self) -> Recipe:
        """What the train state and its steps depend on; of an unresolved config it has open keys
        (-1)."""
        loss = self.policy if self.objective is REWARDS else self.loss
        return Recipe(self.model, self.objective, loss, self.optimizer)

    def replace(self, **values: Any) -> Self:
        """Returns a config with these values, which meet the bounds of their keys; `check` is left
        to the caller. Sections that read no changed key stay as they are, so that thousands of
        meshes can be tried."""
        merged = types.MappingProxyType({**self.values, **values})
        changed = {name for name, value in values.items() if value != self.values[name]}
        return dataclasses.replace(
            self,
            values=merged,
            **{
                name: section.from_values(merged)
                for name, section in self.sections().items()
                if not changed.isdisjoint(section.names())
            },
        )
