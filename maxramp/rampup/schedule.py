"""The batch-size schedule as data: a short list of stages, with the words of docs/architecture.md.
Imports no JAX.

`notations` turns every notation into a list of thresholds, and `walk` turns thresholds into runs of
steps: a step uses the batch size of the last threshold that is not above the samples consumed
before it. `layout` spreads a batch over devices. `RampupBatchManager` answers all questions from
the list of stages in closed form, for any step, in any order.
"""

import bisect
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from maxramp.errors import ConfigError
from maxramp.keys.numbers import plain_number
from maxramp.rampup import ladder, layout, notations
from maxramp.rampup.keys import BatchKeys, Meshes
from maxramp.rampup.layout import Layouts
from maxramp.rampup.notations import Threshold
from maxramp.stage import Fields, StageSpec, text_fields


class Stretch(NamedTuple):
    """Steps of one global batch size; `steps` is None where it has no end."""

    threshold: Threshold
    first_step: int
    first_sample: int
    steps: int | None


def walk(thresholds: Sequence[Threshold], step: int, sample: int) -> Iterator[Stretch]:
    """Yields the stretches of thresholds, which never decrease, from a step and a sample on. A
    stretch ends with the first step that reaches the next threshold; a threshold inside that step
    gives no stretch, nor does any of equal ones but the last.
    """
    ends = [threshold.first_sample for threshold in thresholds[1:]]
    for threshold, end in zip(thresholds, [*ends, None], strict=True):
        steps = None
        if end is not None:
            steps = max(0, -(-(end - sample) // threshold.global_batch_size))
            if steps == 0:
                continue
        yield Stretch(threshold, step, sample, steps)
        if steps is not None:
            step, sample = step + steps, sample + steps * threshold.global_batch_size


def layouts(
    keys: BatchKeys,
    stretches: Sequence[Stretch],
    num_devices: int | None,
    meshes: Meshes,
    restart_passes: float,
) -> Layouts:
    """Lays the batch of each stretch on the `num_devices` of one job, or without them on the nodes
    that `node_schedule` chooses. A batch that does not divide gives None.
    """
    if num_devices or keys.node_schedule == "fixed":
        devices = num_devices or keys.num_devices
        nodes = -(-devices // keys.devices_per_node)
        return [layout.spread(keys, one.threshold, nodes, devices) for one in stretches]

    def identity(threshold: Threshold) -> Threshold | int:
        # The nodes of a rung do not depend on when it is decided.
        return threshold.global_batch_size if keys.rampup_policy == "noise" else threshold

    def schedule_nodes(walked: Sequence[Stretch]) -> dict[Threshold | int, layout.Layout | None]:
        thresholds, steps = [x.threshold for x in walked], [_steps_of_run(keys, x) for x in walked]
        chosen = layout.schedule_nodes(keys, thresholds, steps, meshes, restart_passes)
        return dict(zip(map(identity, thresholds), chosen, strict=True))

    # The choice is that of the whole run, wherever the stretches begin.
    expected = [Threshold(*rung) for rung in ladder.expected_rungs(keys)]
    chosen = schedule_nodes(list(walk(notations.thresholds(keys) + expected, 0, 0)))
    # The steps of a changed ramp may meet a threshold that those from 0 on pass over.
    others = [one for one in stretches if identity(one.threshold) not in chosen]
    chosen |= schedule_nodes(others) if others else {}
    return [chosen[identity(one.threshold)] for one in stretches]


_LONG = 10**6  # steps of the last stretch, to plan a run without a length


def _steps_of_run(keys: BatchKeys, stretch: Stretch) -> int:
    """Counts the steps of a stretch that lie in the run, 0 behind its end; `_LONG` if nothing ends
    them."""
    left = _LONG if stretch.steps is None else stretch.steps
    if keys.steps != -1:
        left = keys.steps - stretch.first_step
    elif (samples := keys.samples_of_run) != -1:
        left = -(-(samples - stretch.first_sample) // stretch.threshold.global_batch_size)
    return max(0, left if stretch.steps is None else min(left, stretch.steps))


@dataclasses.dataclass(frozen=True)
class Stage:
    """Optimizer steps in a row with one batch shape. The last stage has no end."""

    index: int
    first_step: int
    steps: int | None
    first_sample: int
    samples: int | None
    per_device_batch_size: Fraction
    gradient_accumulation_steps: int
    global_batch_size: int
    nodes: int
    devices: int
    spec: StageSpec
    threshold: Threshold  # that the stage begins with

    def to_json(self) -> dict[str, Any]:
        size = plain_number(self.per_device_batch_size)
        values = vars(self) | {"per_device_batch_size": size, "row_length": self.spec.row_length}
        values |= {"max_target_length": self.spec.tokens}
        values |= {"mesh": self.spec.mesh and self.spec.mesh.sizes, **vars(self.spec.rope_keys)}
        return {n: value for n, value in values.items() if n not in ("spec", "threshold")}


class ResumePoint(NamedTuple):
    """Where a schedule begins: what the run trained before it stays as it was trained."""

    step: int = 0
    sample: int = 0
    # of the schedule before, as in plan.json: those that were trained, and those that were to come
    stages: Sequence[dict[str, Any]] = ()
    # (first sample, global batch size) of the rungs above the first, under rampup_policy=noise
    rungs: Sequence[tuple[int, int]] = ()


def trained_stages(stages: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Returns the stages up to a step, the last one cut there."""
    trained = [dict(stage) for stage in stages if stage["first_step"] < step]
    for last in trained[-1:]:
        steps = step - last["first_step"]
        last |= {"steps": steps, "samples": steps * last["global_batch_size"]}
    return trained


class RampupBatchManager:
    """The stages of a run from a step on, and the run's length.

    A schedule never changes. Every start makes a new one where the run stands, and so does a
    decision of rampup_policy=noise: the stages to come do not depend on where a schedule begins.

    Args:
      config: a mapping of batch keys (`BatchKeys`), or any object with them as attributes, such as
        a configuration of MaxText's.
      num_devices: lay every stage on these devices of one job; without it the keys `num_nodes`,
        `devices_per_node` and `node_schedule` decide for each stage. The global batch sizes do not
        depend on it where `devices_per_node` is given.
      point: where the schedule begins; None for a new run.
      meshes: a function of devices and first sample; it returns None where the model has no mesh on
        them, and `node_schedule` leaves those out. By default, what these keys give.
      fields: the arrays of a batch, by its tokens; those of text by default.
      restart_passes: how long a change of nodes takes, in passes of the largest micro batch
        (`PassCost`), for `node_schedule`.
    """

    def __init__(
        self,
        config: Any,
        num_devices: int | None = None,
        point: ResumePoint | None = None,
        *,
        meshes: Meshes | None = None,
        fields: Fields = text_fields,
        restart_passes: float = 0.0,
    ):
        keys, point = BatchKeys.read(config), point or ResumePoint()
        if keys.devices_per_node < 1 and num_devices:
            keys = dataclasses.replace(keys, num_nodes=1, devices_per_node=num_devices)
        self.trained = trained_stages(point.stages, point.step)
        self.shown_length = keys.shown_length
        # Samples that were trained with another length have more or fewer tokens than today's.
        length = keys.max_target_length
        longer = [(s["max_target_length"] - length, s["samples"]) for s in self.trained]
        self._more_tokens = sum(more * samples for more, samples in longer)
        if any(more for more, _ in longer) and (unit := keys.unit_of_token_thresholds):
            before = sorted({s["max_target_length"] for s in self.trained} - {length})
            raise ConfigError(
                f"{unit}=tokens: the run has trained rows of {', '.join(map(str, before))} tokens, "
                f"and thresholds in tokens are those of rows of max_target_length={length}; give "
                f"them in samples ({unit}=samples), or max_target_length as it was"
            )
        if keys.total_tokens != -1:
            rest = keys.total_tokens - self._more_tokens
            keys = dataclasses.replace(keys, total_tokens=max(1, rest))
        thresholds = notations.thresholds(keys) + [Threshold(*pair) for pair in point.rungs]
        stretches = list(walk(thresholds, point.step, point.sample))
        meshes = functools.cache(meshes or keys.mesh_at)
        placements = layouts(keys, stretches, num_devices, meshes, restart_passes)
        self.keys, self.thresholds, self._meshes = keys, thresholds, meshes
        self._num_devices = num_devices
        self._undivided: set[int] = set()  # indices of stages whose batch lies on no devices
        self.stages: list[Stage] = []
        for stretch, placed in zip(stretches, placements, strict=True):
            threshold, steps = stretch.threshold, stretch.steps
            size = threshold.global_batch_size
            spread = placed or layout.uneven(keys, threshold, num_devices)
            passes = spread.gradient_accumulation_steps
            mesh = meshes(spread.devices, threshold.first_sample)
            phase_keys = keys.keys_at(threshold.first_sample)
            spec = phase_keys.spec(passes, size // passes, mesh, fields)
            index = self.stages[-1].index + 1 if self.stages else _first_index(point, size, spec)
            if not placed:
                self._undivided.add(index)
            self.stages.append(
                Stage(
                    index=index,
                    first_step=stretch.first_step,
                    steps=steps,
                    first_sample=stretch.first_sample,
                    samples=None if steps is None else steps * size,
                    global_batch_size=size,
                    spec=spec,
                    threshold=threshold,
                    **vars(spread),
                )
            )
        # (first step, first sample, global batch size) of all stages of the run
        names = "first_step", "first_sample", "global_batch_size"
        self.batches = [tuple(stage[name] for name in names) for stage in self.trained]
        self.batches += [tuple(getattr(stage, name) for name in names) for stage in self.stages]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_meshes": None}  # readers in other processes need no meshes

    def fit(self, stage: Stage, available_nodes: int) -> Stage:
        """Returns a stage on the available nodes, up to those that are planned for it. Where its
        batch divides over none of these numbers, it waits for the fewest that it divides over."""
        planned = self.keys, stage.threshold, stage.nodes
        placed = layout.fit(*planned, available_nodes, self._meshes)
        return dataclasses.replace(stage, **vars(placed)) if placed else stage

    def stage_at_step(self, step: int) -> Stage:
        """Returns the stage of a step; the last has no end, also past the run's. A ValueError for a
        step before the schedule's first, as after a restart.
        """
        return _last_begun(self.stages, "step", step, operator.attrgetter("first_step"))

    def stage_at_sample(self, sample: int) -> Stage:
        """Returns the stage that trains on row `sample`, as `stage_at_step` does."""
        return _last_begun(self.stages, "sample", sample, operator.attrgetter("first_sample"))

    def samples_before(self, step: int) -> int:
        """Counts the samples before a step, which trains on rows [samples_before(step),
        samples_before(step + 1)). It knows the run's trained steps, too."""
        first, sample, size = _last_begun(self.batches, "step", step, operator.itemgetter(0))
        return sample + (step - first) * size

    def step_at_sample(self, sample: int) -> int:
        """Returns the step that trains on row `sample`."""
        first, begins, size = _last_begun(self.batches, "sample", sample, operator.itemgetter(1))
        return first + (sample - begins) // size

    def stages_between(self, first_step: int, last_step: int) -> list[Stage]:
        """Returns the stages of the steps [first_step, last_step); raises as `stage_at_step`."""
        first = self.stage_at_step(first_step).index - self.stages[0].index
        return [stage for stage in self.stages[first:] if stage.first_step < last_step]

    def steps_in_run(self, stage: Stage) -> int:
        """Counts the steps of a stage that the run takes; negative if it ends before the stage."""
        end = self.total_steps
        if stage.steps is not None:
            end = min(end, stage.first_step + stage.steps)
        return end - stage.first_step

    @property
    def total_steps(self) -> int:
        """The steps of the whole run, from 0 on; a ConfigError if no key gives its length."""
        if self.keys.steps != -1:
            return self.keys.steps
        samples = self.keys.samples_of_run
        if samples < 1:
            raise ConfigError(
                "steps=-1, total_samples=-1 and total_tokens=-1: the run is as long as num_epoch "
                "passes over its data, which is not read here; give one of them"
            )
        if samples <= self.stages[0].first_sample:
            return self.stages[0].first_step
        return self.step_at_sample(samples - 1) + 1

    @property
    def total_samples(self) -> int:
        return self.samples_before(self.total_steps)

    def steps_of_constant(self, batch: int) -> int:
        """Counts the steps of a run of the same length whose batches all have this size."""
        samples = self.keys.samples_of_run
        return -(-(self.total_samples if samples == -1 else samples) // batch)

    @property
    def sample_lengths(self) -> list[int]:
        """Lengths of the run's samples: max_target_length may have changed at a restart."""
        before = [stage["max_target_length"] for stage in self.trained]
        return list(dict.fromkeys([*before, self.keys.max_target_length]))

    def tokens(self, samples: int) -> int:
        """Counts the tokens of the run's first samples, which include all that were trained."""
        return samples * self.keys.max_target_length + self._more_tokens

    @property
    def warnings(self) -> list[str]:
        """Lines on a ramp or curve that the run cuts off; raises as `total_steps`."""
        end, final, keys = self.total_steps, self.stages[-1], self.keys
        length, lines = self.shown_length, []
        if self.stages[0].first_step < end <= final.first_step:
            last = self.stage_at_step(end - 1)
            sizes = [f" (batch {stage.global_batch_size})" for stage in (last, final)]
            sizes = sizes if sizes[0] != sizes[1] else ["", ""]
            lines.append(
                f"{length} ends the run inside the ramp: after {end:,} steps it is in stage "
                f"{last.index}{sizes[0]}, and the final stage {final.index}{sizes[1]} begins after "
                f"{final.first_step:,} steps"
            )
        if 0 < (steps := keys.learning_rate_schedule_steps) < end:
            lines.append(
                f"learning_rate_schedule_steps={steps} ends the learning rate's curve before the "
                f"run, which has {end} steps: it is 0 in the last {end - steps}"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the length and the stages of the whole run, those that were trained too; a
        ConfigError if no key gives the length."""
        first, *later = (stage.to_json() for stage in self.stages)
        before = self.trained
        if before and before[-1]["index"] == first["index"]:  # the first stage continues that one
            *before, begun = before
            first |= {name: begun[name] for name in ("first_step", "first_sample")}
            if first["steps"] is not None:
                first |= {name: begun[name] + first[name] for name in ("steps", "samples")}
        return {
            "stages": [*before, first, *later],
            "total_steps": self.total_steps,
            "total_samples": self.total_samples,
            "total_tokens": self.tokens(self.total_samples),
        }

    def check(self, stages: Sequence[Stage]) -> None:
        """Refuses stages whose batch does not divide over their devices."""
        for stage in stages:
            if stage.index in self._undivided:
                raise layout.refusal(self.keys, stage.index, stage.threshold, self._num_devices)


def _last_begun(items: Sequence[Any], name: str, value: int, first: Callable[[Any], int]) -> Any:
    """Returns the last item, of rising `first`, that begins at `value` or before; a ValueError if
    none."""
    begun = bisect.bisect_right(items, value, key=first)
    if not begun:
        raise ValueError(f"{name} {value} lies before {first(items[0])}, where the schedule starts")
    return items[begun - 1]


def _first_index(point: ResumePoint, size: int, spec: StageSpec) -> int:
    """Returns the index of a schedule's first stage: that of the stage which the schedule before
    has at this step, where it is the same; else it continues or follows the last trained stage.
    """
    shape = {"global_batch_size": size, "max_target_length": spec.tokens}
    shape |= {"row_length": spec.row_length, **vars(spec.rope_keys)}
    begun = [stage for stage in point.stages if stage["first_step"] <= point.step]
    trained = [stage for stage in begun if stage["first_step"] < point.step]
    if begun and shape.items() <= begun[-1].items():
        return begun[-1]["index"]
    if trained:
        return trained[-1]["index"] + (not shape.items() <= trained[-1].items())
    return 0
