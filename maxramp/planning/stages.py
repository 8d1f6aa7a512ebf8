"""The stages of a run that is planned, on the nodes of each, and what they cost."""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction

import jax

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError
from maxramp.model.size import training_flops_per_token
from maxramp.planning import machine
from maxramp.planning.keys import PlanKeys
from maxramp.processes import backend
from maxramp.rampup import ladder
from maxramp.rampup.keys import BatchKeys, Meshes
from maxramp.rampup.layout import pass_price, rows_per_device_limit
from maxramp.rampup.phases import MESH_KEYS
from maxramp.rampup.schedule import RampupBatchManager, ResumePoint, Stage

# From the resolved batch keys to where the run stands.
Origin = Callable[[BatchKeys], ResumePoint]

# As base.yml says at restart_minutes. The peak is 989, in bfloat16 (NVIDIA's data sheet).
_ASSUMED_TFLOPS = 400.0


def price(keys: PlanKeys, device_hours: float | None) -> float | None:
    """Returns the price of device hours; None if they or price_per_device_hour are unknown."""
    if device_hours is None or keys.price_per_device_hour == -1:
        return None
    return device_hours * keys.price_per_device_hour


class PassCost:
    """The time of a pass, in passes of the largest micro batch; `restart` is restart_minutes."""

    def __init__(self, config: Config):
        """Takes a config that is resolved for all nodes."""
        self._batch, plan = config.batch, config.planning
        self._limit = rows_per_device_limit(self._batch)
        tokens = self._batch.max_target_length
        flops = float(self._limit) * tokens * training_flops_per_token(config.model, tokens)
        tflops = plan.planned_tflops_per_device
        hours = flops / ((_ASSUMED_TFLOPS if tflops == -1 else tflops) * 1e12) / 3600
        self._full_hours = None if tflops == -1 else hours
        self.restart = plan.restart_minutes / 60 / hours

    def pass_time(self, rows_per_device: float | Fraction) -> float:
        return float(pass_price(self._batch, Fraction(rows_per_device)))

    def hours(self, passes: float) -> float | None:
        """Converts passes to hours; None without planned_tflops_per_device."""
        return None if self._full_hours is None else passes * self._full_hours

    def step_time(self, rows_per_device: float) -> float:
        """Returns the time of a step, in equal passes of as many rows as a device may hold."""
        count = math.ceil(rows_per_device / self._limit)
        return count * self.pass_time(rows_per_device / count)


def with_nodes(config: Config) -> Config:
    """Fills in the nodes of a loaded config: as the keys say, else those of compile_topology, else
    this machine's. Unless it asks for those, JAX runs on the CPU from then on. A ConfigError if the
    keys and compile_topology differ.
    """
    batch, planning = config.batch, config.planning
    if not planning.compile_topology and batch.devices_per_node == -1:
        backend.take_hardware(config.backend.hardware)
        backend.start_devices(config.backend.hardware)
        return config.replace(num_nodes=batch.nodes, devices_per_node=jax.local_device_count())
    backend.take_hardware("cpu")  # nothing runs
    if not planning.compile_topology:
        return config.replace(num_nodes=batch.nodes)
    nodes, per_node = machine.count_nodes(planning)
    total = nodes * per_node
    return _with_total(
        config, total, per_node if batch.num_nodes == -1 else total // batch.num_nodes
    )


def with_hosts(config: Config) -> Config:
    """Fills in the nodes of a launch, which are hosts, from compile_topology where the keys leave
    them open. A ConfigError as `with_nodes`."""
    is_open = -1 in (config.batch.num_nodes, config.batch.devices_per_node)
    if not (is_open and config.planning.compile_topology):
        return config
    hosts, per_host = machine.count_hosts(config.planning)
    return _with_total(config, hosts * per_host, per_host)


def _with_total(config: Config, total: int, per_node: int) -> Config:
    """Fills in nodes of `total` devices, `per_node` each, where the keys of a loaded config leave
    them open; a ConfigError if its keys make another total."""
    batch, planning = config.batch, config.planning
    per_node = per_node if batch.devices_per_node == -1 else batch.devices_per_node
    nodes = total // per_node if batch.num_nodes == -1 else batch.num_nodes
    if nodes * per_node != total:
        raise ConfigError(
            f"compile_topology={planning.compile_topology} has {count(total, 'device')}, which "
            f"num_nodes={batch.num_nodes} of devices_per_node={batch.devices_per_node} are not; "
            "change one of the three, or leave the last two out (-1)"
        )
    return config.replace(num_nodes=nodes, devices_per_node=per_node)


def _cause(config: Config, error: ConfigError) -> ConfigError:
    """Says why a stage of a loaded config has no nodes: a phase without a mesh on some, else the
    ramp's error. Returns what the caller raises."""
    batch = config.batch
    changes = any(batch.changing(name) for name in MESH_KEYS)
    for nodes in range(min(batch.min_nodes, batch.nodes), batch.nodes) if changes else ():
        try:
            resolve(config, nodes * batch.devices_per_node)
        except ConfigError as cause:
            text = f"on {count(nodes, 'node')}, where every phase needs a mesh: {cause}"
            return ConfigError(text)
    return error


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run with every stage on the nodes that are planned for it."""

    config: Config  # resolved for all nodes
    cost: PassCost
    ramp: RampupBatchManager  # as expected, where it is decided while the run trains
    stages: tuple[Stage, ...]  # those that the run reaches

    @classmethod
    def from_config(
        cls, config: Config, meshes: Meshes, origin: Origin | None = None
    ) -> "PlannedRun":
        """Plans a run for a loaded config of `with_nodes`, and the `meshes_of` it; `origin` tells
        where the run stands. A ConfigError if the devices cannot run a stage."""
        target = resolve(config, config.batch.num_devices)
        cost = PassCost(target)
        point = origin(target.batch) if origin else ResumePoint()
        rungs = ladder.expected_rungs(target.batch, point.sample, point.rungs)
        point = point._replace(rungs=rungs)
        ramp = RampupBatchManager(
            target.batch, point=point, meshes=meshes, restart_passes=cost.restart
        )
        first = ramp.stages[0].first_step
        stages = ramp.stages_between(first, max(ramp.total_steps, first + 1))
        try:
            ramp.check(stages)
        except ConfigError as error:
            raise _cause(config, error) from None
        return cls(target, cost, ramp, tuple(stages))

    def time(self, stage: Stage) -> float:
        """Returns the time of a stage, in passes of the largest micro batch."""
        passes = self.ramp.steps_in_run(stage) * stage.gradient_accumulation_steps
        return passes * self.cost.pass_time(float(stage.per_device_batch_size)) * self.share(stage)

    def share(self, stage: Stage) -> float:
        """Divides the FLOPs of a stage's rows by those of whole samples under the first keys."""
        model, spec = self.config.recipe.with_spec(stage.spec).model, stage.spec
        flops = training_flops_per_token(model, spec.row_length)
        return flops / training_flops_per_token(self.config.model, spec.tokens)

    @functools.cached_property
    def node_time(self) -> float:
        return sum(self.time(stage) * stage.nodes for stage in self.stages)
