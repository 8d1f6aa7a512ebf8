"""The stages of a run that is planned, on the nodes of each, and what they cost."""

import dataclasses
import functools

import jax

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.config.resolve import resolve_planned
from maxramp.errors import ConfigError
from maxramp.planning import machine
from maxramp.planning.cost import PassCost
from maxramp.planning.keys import PlanKeys
from maxramp.processes import backend
from maxramp.rampup import ladder
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.rampup.spec import Meshes


def with_nodes(config: Config) -> Config:
    """A loaded config with the nodes that its job will have.

    They are those of num_nodes and devices_per_node, else of compile_topology, else this machine.

    Raises:
      ConfigError: compile_topology names no machine, or another one than the two keys; this machine
        does not have the hardware.
    """
    batch, planning = config.batch, config.planning
    if planning.compile_topology:
        config = config.replace(**_nodes_of(batch, planning))
    elif batch.devices_per_node == -1:
        backend.take_hardware(config.backend.hardware)
        backend.start_devices(config.backend.hardware)
        return config.replace(num_nodes=batch.nodes, devices_per_node=jax.local_device_count())
    backend.take_hardware("cpu")  # nothing runs
    return config.replace(num_nodes=config.batch.nodes)


def _nodes_of(batch: BatchKeys, planning: PlanKeys) -> dict[str, int]:
    """The nodes of compile_topology: as the keys count them, or slices of TPUs, nodes of GPUs."""
    nodes, per_node = machine.nodes(planning)
    total = nodes * per_node
    if batch.devices_per_node != -1:
        per_node = batch.devices_per_node
        nodes = total // per_node
    if batch.num_nodes != -1:
        nodes = batch.num_nodes
        per_node = total // nodes if batch.devices_per_node == -1 else per_node
    if nodes * per_node != total:
        raise ConfigError(
            f"compile_topology={planning.compile_topology} has {count(total, 'device')}, which "
            f"num_nodes={batch.num_nodes} of devices_per_node={batch.devices_per_node} are not; "
            "change one of the three, or leave the last two out (-1)"
        )
    return {"num_nodes": nodes, "devices_per_node": per_node}


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
    def of(cls, config: Config, meshes: Meshes) -> "PlannedRun":
        """Plans a run.

        Args:
          config: loaded, with its nodes (`with_nodes`).
          meshes: the mesh by the number of devices (`meshes_of`).

        Raises:
          ConfigError: the keys do not make a run, or a stage does not fit its nodes' devices.
        """
        target = resolve_planned(config, config.batch.num_devices)
        cost = PassCost(target.batch, target.planning, target.model)
        ramp = RampupBatchManager(
            target.batch,
            decided=ladder.expected(target.batch),
            meshes=meshes,
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
