"""The schedule of a job: where it continues its run, and where it ends."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.commandline import count
from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.rampup import ladder
from maxramp.rampup.keys import BatchKeys, Meshes
from maxramp.rampup.schedule import RampupBatchManager, ResumePoint, Stage
from maxramp.stage import Fields, text_fields
from maxramp.training.keys import LearningRateKeys
from maxramp.training.learning_rate import LearningRate

_SMALL = 1e-3  # relative: a curve that is rounded to other batches does not count as another one


def rate_change(keys: LearningRateKeys, ramp: RampupBatchManager, position: Checkpoint) -> str:
    """Describes in one line how a start, by today's `keys` and `ramp` from `position` on, changes
    the learning rate of its run; "" if it does not."""
    step, values = position.step, base.base() | position.config
    if not 0 < step < ramp.total_steps:
        return ""
    before = _ramp_before(position, ramp.stages[0].devices)
    old = LearningRate.from_keys(LearningRateKeys.from_values(values), before)
    new = LearningRate.from_keys(keys, ramp)
    sample = ramp.samples_before(step - 1)
    batch = position.consumed_samples - sample
    last, same = float(old(sample, batch)), float(new(sample, batch))
    if abs(same - last) <= _SMALL * max(same, last):
        return ""
    next_step = position.consumed_samples, ramp.stages[0].global_batch_size
    rate = float(new(*next_step))
    if abs(rate - float(old(*next_step))) <= _SMALL * rate:  # the curves have met again
        return ""
    return (
        f"the learning rate is {rate:.3g} from step {step} on, after {last:.3g} in step "
        f"{step - 1}: these keys give it another curve, which is at {same:.3g} in step {step - 1}"
    )


def _ramp_before(position: Checkpoint, num_devices: int) -> RampupBatchManager:
    """Builds the schedule from a checkpoint on, by the keys that it was trained with."""
    keys = BatchKeys.from_values(base.base() | position.config)
    return RampupBatchManager(keys, num_devices, resume_point(keys, position))


@dataclasses.dataclass
class JobSchedule:
    """The stages of a run from where a job continues it, and where the job ends.

    Under rampup_policy=noise `ramp` knows the batch that the run stands on, and `take_rung`
    replaces it.
    """

    batch: BatchKeys
    keys: CheckpointKeys  # where a job ends before its run does
    num_devices: int  # of this job
    meshes: Meshes  # of later jobs by devices
    restart_passes: float  # `PassCost.restart`
    # the checkpoint that the job continues from; None for a run that begins
    position: Checkpoint | None = None
    fields: Fields = text_fields
    available_nodes: int | None = None  # for a job; None: as many as are planned

    def __post_init__(self):
        self._make_ramps(resume_point(self.batch, self.position))
        self._find_end()

    def _make_ramps(self, point: ResumePoint) -> None:
        """Makes the stages from a point on: `ramp`, on this job's devices, up to the rung where the
        run stands; `_expected`, with the rungs that a plan expects; `planned`, these on the nodes
        that the plan gives them. Without rampup_policy=noise `ramp` has all.
        """
        batch, fields, devices = self.batch, self.fields, self.num_devices
        expected = point._replace(rungs=ladder.expected_rungs(batch, point.sample, point.rungs))
        self.ramp = self._expected = RampupBatchManager(batch, devices, point, fields=fields)
        if expected.rungs:
            self._expected = RampupBatchManager(batch, devices, expected, fields=fields)
        nodes = {"meshes": self.meshes, "restart_passes": self.restart_passes}
        self.planned = RampupBatchManager(batch, None, expected, fields=fields, **nodes)

    @property
    def first_step(self) -> int:
        return self.position.step if self.position else 0

    def take_rung(self, step: int, global_batch_size: int) -> None:
        """Replaces the ramp from a step on, as at a restart there, on all processes alike; the job
        may end there."""
        nodes, sample = self._fit(self.planned.stages[0]).nodes, self.ramp.samples_before(step)
        stages, rungs = self.ramp.to_json()["stages"], [(sample, global_batch_size)]
        self._make_ramps(ResumePoint(step, sample, stages, rungs))
        moves = self._fit(self.planned.stages[0]).nodes != nodes
        ends = self.keys.stop_at_stage_end or (self.keys.stop_at_node_change and moves)
        self.last_step = step if ends else self.ramp.total_steps

    def _fit(self, stage: Stage) -> Stage:
        """Puts a planned stage on the nodes that are available."""
        available = self.available_nodes
        return stage if available is None else self.planned.fit(stage, available)

    def _planned_at(self, step: int) -> Stage:
        number = self.ramp.stage_at_step(step).index - self.ramp.stages[0].index
        return self._fit(self.planned.stages[number])

    @property
    def following(self) -> Stage:
        """The stage that the next job begins with, on the nodes that it takes."""
        return self._planned_at(self.last_step)

    def end_for_nodes(self, step: int, available_nodes: int) -> bool:
        """Ends the job before a step whose stage takes more nodes now; whether it does. All
        processes must give the same number."""
        self.available_nodes = available_nodes
        if self._planned_at(step).devices > self.num_devices:
            self.last_step = step
        return self.last_step == step

    def steps(self) -> Iterator[int]:
        """Yields the steps of the job; while it runs, the last of them may change."""
        step = self.first_step
        while step < self.last_step:
            yield step
            step += 1

    def _find_end(self) -> None:
        """Finds `last_step`, before which this job ends: the run's end, or a stage's under
        `stop_at_stage_end` or `stop_at_node_change`; and `stages`, which it runs or may run. Under
        `stop_at_node_change` a job on fewer devices than the plan gives its stage ends where it
        starts. A ConfigError for a batch that does not divide over its devices."""
        ramp, step, keys = self.ramp, self.first_step, self.keys
        stages, planned = self._expected.stages, [self._fit(stage) for stage in self.planned.stages]
        self.last_step, self.stages = ramp.total_steps, stages[:1]
        if step >= self.last_step:
            return
        at_node_change, nodes = keys.stop_at_node_change, planned[0].nodes
        ends = (
            index
            for index in range(1, len(planned))
            if keys.stop_at_stage_end or (at_node_change and planned[index].nodes != nodes)
        )
        end = next(ends, len(planned))
        missing = planned[0].devices - self.num_devices
        if at_node_change and (missing > 0 or (missing and self.available_nodes)):
            end = 0  # the stage may not fit into this job; another one takes it
        self._expected.check(stages[:end])
        self.planned.check(planned[end:])
        if end < len(ramp.stages):
            self.last_step = min(self.last_step, ramp.stages[end].first_step)
        known = len(ramp.stages) == len(stages)
        reached = [stage for stage in stages if stage.first_step < self.last_step or not known]
        self.stages = reached[: max(1, end)]


def length_by_epochs(
    batch: BatchKeys, num_devices: int, position: Checkpoint | None, rows: int, num_epoch: int
) -> tuple[int, str]:
    """Counts the samples of the whole steps in `rows`, those of all num_epoch passes; returns also
    a line on the rows that no step trains on, "" for none. A ConfigError if they are fewer than a
    step's. `position` None = from the start."""
    ramp = RampupBatchManager(batch, num_devices, resume_point(batch, position))
    samples = first = ramp.stages[0].first_sample
    if rows > first:
        samples = ramp.samples_before(step := ramp.step_at_sample(rows))
    has = f"num_epoch={num_epoch} over the data is {count(rows, 'row')}"
    if not samples:
        raise ConfigError(
            f"{has}, fewer than the {ramp.samples_before(1)} of the first step; use more data, a "
            "larger num_epoch, or a smaller batch"
        )
    if samples >= rows:
        return samples, ""
    batch_size = ramp.stage_at_step(step).global_batch_size
    return (
        samples,
        f"{has}; {count(rows - samples, 'row')} at its end fill no step of {batch_size}",
    )


def resume_point(batch: BatchKeys, position: Checkpoint | None) -> ResumePoint:
    """Returns where the schedule of today's keys begins in a run that stands at a checkpoint."""
    if not position:
        return ResumePoint()
    rungs = _rung_of(batch, position)
    return ResumePoint(position.step, position.consumed_samples, position.stages, rungs)


def _rung_of(batch: BatchKeys, position: Checkpoint) -> list[tuple[int, int]]:
    """Returns (first sample, global batch size) of the rung above the first that a run of
    rampup_policy=noise stands on, else []. A ConfigError if today's ladder has no such rung."""
    if not batch.rampup_policy == position.config.get("rampup_policy") == "noise":
        return []
    *_, stage = (stage for stage in position.stages if stage["first_step"] <= position.step)
    size, rungs = stage["global_batch_size"], list(batch.rampup_ladder)
    if size > rungs[0] and size not in rungs:
        raise ConfigError(
            f"rampup_ladder={rungs}: the run trains batches of {size} rows ({position}), "
            f"which is no rung of it; give a ladder with {size}, or another run_name"
        )
    return [(stage["first_sample"], size)] if size > rungs[0] else []


def ramp_change(batch: BatchKeys, ramp: RampupBatchManager, position: Checkpoint) -> str:
    """Describes in one line how a start, by today's keys and `ramp` from `position` on, changes
    the batch sizes of its run, or that they say something else of what is trained already, which
    changes nothing; "" if neither."""
    step, consumed = position.step, position.consumed_samples
    before = _sizes_from(position.stages, consumed)
    today = _sizes_from(ramp.to_json()["stages"], consumed)
    if today != before:
        return (
            f"from sample {consumed} on (step {step}) the batch sizes are {_format_sizes(today)}; "
            f"before this start they were to be {_format_sizes(before)}"
            f"{_keep_sizes(batch, position.config, before)}"
        )
    if not step:
        return ""
    trained = list(_shapes_before(_ramp_before(position, ramp.stages[0].devices), consumed))
    if trained == list(_shapes_before(ramp, consumed)):
        return ""
    return (
        f"what today's keys say of the samples before {consumed} (step {step}) is not what was "
        "trained there, and is ignored; from there on they hold"
    )


def _shapes_before(ramp: RampupBatchManager, sample: int) -> Iterator[tuple]:
    """Yields what no devices decide of the thresholds before a sample."""
    for threshold in ramp.thresholds:
        first, size = threshold.first_sample, threshold.global_batch_size
        if first < sample:
            keys = ramp.keys.keys_at(first)
            yield first, size, keys.max_target_length, keys.row_length, keys.rope_keys


def _keep_sizes(
    batch: BatchKeys, trained_with: Mapping[str, Any], sizes: Sequence[tuple[int, int]]
) -> str:
    """Names the key that keeps `sizes`, at least one, of a run `trained_with` keys that count rows
    per device; "" if the number of devices is not why they change.
    """
    before = BatchKeys.from_values(base.base() | trained_with)
    before = before.nodes * before.devices_per_node
    if batch.gives_global_batch or before < 1 or before == batch.nodes * batch.devices_per_node:
        return ""
    (_, first), *later = sizes
    schedule = ",".join((f"0:{first}", *(f"{sample}:{size}" for sample, size in later)))
    key = f"global_batch_size={first}"
    if later:
        key = f"step_batch_size_schedule={schedule} step_batch_size_unit=samples"
    return f" (rows per device, on {count(before, 'device')}: {key} has the same sizes on others)"


def _sizes_from(stages: list[dict], sample: int) -> list[tuple[int, int]]:
    """Lists (first sample, global batch size) of what is still to come, equal sizes joined."""
    sizes: list[tuple[int, int]] = []
    for stage in stages:
        begins, size = max(stage["first_sample"], sample), stage["global_batch_size"]
        left = stage["samples"] is None or stage["first_sample"] + stage["samples"] > sample
        if left and (not sizes or sizes[-1][1] != size):
            sizes.append((begins, size))
    return sizes


def _format_sizes(sizes: list[tuple[int, int]]) -> str:
    first, *later = sizes[:6]
    parts = [str(first[1]), *(f"{size} from {sample}" for sample, size in later)]
    return ", ".join(parts) + (", ..." if len(sizes) > 6 else "")
