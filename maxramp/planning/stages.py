"""The stages of a run that is planned, on the nodes of each, and what they cost."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from maxramp.config.keys import Config
from maxramp.config.resolve import resolve_planned
from maxramp.planning.cost import PassCost
from maxramp.rampup import ladder
from maxramp.rampup.schedule import RampupBatchManager, Stage


def with_nodes(config: Config) -> Config:
    """A loaded config with the nodes that its job will have; by default this machine."""
    if config.batch.devices_per_node == -1:
        config = config.replace(devices_per_node=jax.local_device_count())
    return config.replace(num_nodes=config.batch.nodes)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run with every stage on the nodes that are planned for it.

    Attributes:
      config: resolved for all nodes.
      cost: of its passes.
      ramp: as expected, where it is decided while the run goes on.
      stages: those that the run reaches.
    """

    config: Config
    cost: PassCost
    ramp: RampupBatchManager
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, config: Config, usable: Callable[[int], bool]) -> "PlannedRun":
        """Plans a run.

        Args:
          config: loaded, with its nodes (`with_nodes`).
          usable: whether the model's mesh can be made of so many devices (`mesh_checker`).

        Raises:
          ConfigError: the keys do not make a run, or a stage does not fit its nodes' devices.
        """
        target = resolve_planned(config, config.batch.num_devices)
        cost = PassCost(target.batch, target.planning, target.model)
        ramp = RampupBatchManager(
            target.batch,
            decided=ladder.expected(target.batch),
            usable=usable,
            restart_passes=cost.restart,
        )
        stages = ramp.stages_between(0, ramp.total_steps)
        ramp.check(stages)
        return cls(target, cost, ramp, tuple(stages))

    def time(self, stage: Stage) -> float:
        """What the run's steps of a stage take, in passes of the largest micro batch."""
        passes = self.ramp.run_steps(stage) * stage.gradient_accumulation_steps
        return passes * self.cost.of(float(stage.per_device_batch_size))

    @functools.cached_property
    def node_time(self) -> float:
        """Nodes times time, over the whole run."""
        return sum(self.time(stage) * stage.nodes for stage in self.stages)
