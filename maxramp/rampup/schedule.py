"""The batch-size schedule as data: a short list of stages, with the words of docs/architecture.md.
Imports no JAX.

Every notation becomes a list of thresholds (`notations`), and one `walk` over the thresholds gives
the stages: a step uses the batch size of the last threshold that is not above the samples consumed
before it. How a batch lies on the devices is `layout`'s. All questions are then answered from the
list in closed form, for any step, in any order.
"""

import bisect
import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from maxramp.errors import ConfigError
from maxramp.keys.numbers import plain_number
from maxramp.rampup import ladder, layout, notations
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.layout import Layouts
from maxramp.rampup.notations import Threshold
from maxramp.rampup.shape import Meshes
from maxramp.stage import Fields, StageSpec, text_fields


class Stretch(NamedTuple):
    """Steps of one global batch size; `steps` is None where it has no end."""

    threshold: Threshold
    first_step: int
    first_sample: int
    steps: int | None


def walk(thresholds: Sequence[Threshold], step: int, sample: int) -> Iterator[Stretch]:
    """The stretches of thresholds, from a step and a sample on. Each ends with the first step that
    reaches the next threshold; one that is passed within a step of the stretch before gives none.
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
    """None where a batch does not divide. Without `num_devices` (of one job), on the nodes that
    `node_schedule` gives each.
    """
    if num_devices or keys.node_schedule == "fixed":
        devices = num_devices or keys.num_devices
        nodes = -(-devices // keys.devices_per_node)
        return [layout.spread(keys, one.threshold, nodes, devices) for one in stretches]
    expected, is_open = stretches, keys.rampup_policy == "noise"
    if is_open:  # the nodes of a size do not depend on when it will be decided
        decided = [Threshold(*pair) for pair in ladder.plan_rungs(keys)]
        expected = list(walk(notations.thresholds(keys) + decided, 0, 0))
    thresholds = [one.threshold for one in expected]
    steps = [_steps_of_run(keys, one) for one in expected]
    found = layout.schedule_nodes(keys, thresholds, steps, meshes, restart_passes)
    if not is_open:
        return found
    by_size = dict(zip((one.global_batch_size for one in thresholds), found, strict=True))
    return [by_size[one.threshold.global_batch_size] for one in stretches]


_LONG = 10**6  # steps that the last stretch of a run without a length is planned with


def _steps_of_run(keys: BatchKeys, stretch: Stretch) -> int:
    left = _LONG if stretch.steps is None else stretch.steps
    if keys.steps != -1:
        left = keys.steps - stretch.first_step
    elif (samples := keys.samples_of_run) != -1:
        left = -(-(samples - stretch.first_sample) // stretch.threshold.global_batch_size)
    return max(0, left if stretch.steps is None else min(left, stretch.steps))


@dataclasses.dataclass(frozen=True)
class Stage:
    """A run of optimizer steps with one batch shape. The last stage has no end."""

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

    @property
    def micro_batch_size(self) -> int:
        """Rows of one forward and backward pass over all devices."""
        return self.spec.rows

    def to_json(self) -> dict[str, Any]:
        size = plain_number(self.per_device_batch_size)
        found = vars(self) | {"per_device_batch_size": size, "row_length": self.spec.row_length}
        found |= {"max_target_length": self.spec.tokens}
        found |= {"mesh": self.spec.mesh and self.spec.mesh.sizes, **vars(self.spec.sight)}
        return {name: value for name, value in found.items() if name != "spec"}


class Start(NamedTuple):
    """Where a schedule is taken up: a run whose batch keys changed at a restart has steps and
    stages behind it that today's keys would have made otherwise.
    """

    first_step: int = 0
    first_sample: int = 0
    first_index: int = 0  # the number of the stage that the schedule begins with
    history: Sequence[dict[str, Any]] = ()  # the stages before, as in plan.json
    # (first sample, global batch size) of the rungs that a run with rampup_policy=noise has taken
    decided: Sequence[tuple[int, int]] = ()


class RampupBatchManager:
    """The stages of a run and its length.

    The list may grow at its end, and only there; everything else is derived from it. A ramp that is
    decided while it runs says with `settle` how far it is fixed; `grow` adds to it after that.

    Under rampup_policy=noise `rungs` are the stages still to be decided, as they will lie on the
    devices, from step -1 on.

    Args:
      config: a mapping of batch keys (`BatchKeys`), or any object with them as attributes, such as
        a configuration of MaxText's.
      num_devices: lay every stage on these devices of one job; without it the keys `num_nodes`,
        `devices_per_node` and `node_schedule` decide for each stage. The global batch sizes do not
        depend on it where `devices_per_node` is given.
      meshes: None where the model has none on this many devices: `node_schedule` does not take
        them. By default, what these keys give.
      restart_passes: how long a change of nodes takes, in passes of the largest micro batch
        (`PassCost`), for `node_schedule`.
    """

    def __init__(
        self,
        config: Any,
        num_devices: int | None = None,
        start: Start | None = None,
        *,
        meshes: Meshes | None = None,
        fields: Fields = text_fields,
        restart_passes: float = 0.0,
    ):
        keys, start = BatchKeys.read(config), start or Start()
        if keys.devices_per_node < 1 and num_devices:
            keys = dataclasses.replace(keys, num_nodes=1, devices_per_node=num_devices)
        self.history, self.shown_length = list(start.history), keys.shown_length
        # How many tokens more the samples before were than as many of today.
        length = keys.max_target_length
        longer = [(s["max_target_length"] - length, s["samples"]) for s in self.history]
        self._more_tokens = sum(more * samples for more, samples in longer)
        if any(more for more, _ in longer) and (unit := keys.unit_of_token_thresholds):
            before = sorted({s["max_target_length"] for s in self.history} - {length})
            raise ConfigError(
                f"{unit}=tokens: the run has trained rows of {', '.join(map(str, before))} tokens, "
                f"and thresholds in tokens are those of rows of max_target_length={length}; give "
                f"them in samples ({unit}=samples), or max_target_length as it was"
            )
        if keys.total_tokens != -1:
            rest = keys.total_tokens - self._more_tokens
            keys = dataclasses.replace(keys, total_tokens=max(1, rest))
        thresholds = notations.thresholds(keys) + [Threshold(*pair) for pair in start.decided]
        walked = list(walk(thresholds, start.first_step, start.first_sample))
        sizes = keys.rampup_ladder if keys.rampup_policy == "noise" else ()
        undecided = (n for n in sizes if n > thresholds[-1].global_batch_size)
        stretches = walked + [Stretch(Threshold(-1, n), -1, -1, None) for n in undecided]
        meshes = functools.cache(meshes or keys.mesh_at)
        found = layouts(keys, stretches, num_devices, meshes, restart_passes)
        self.keys, self.thresholds, self._meshes = keys, thresholds, meshes
        self._refusals: dict[int, ConfigError] = {}
        stages: list[Stage] = []
        pairs = zip(stretches, found, strict=True)
        for index, ((threshold, first_step, first_sample, steps), placed) in enumerate(
            pairs, start.first_index
        ):
            if placed is None:
                self._refusals[index] = layout.refusal(keys, index, threshold, num_devices)
                placed = layout.uneven(keys, threshold, num_devices)
            size, passes = threshold.global_batch_size, placed.gradient_accumulation_steps
            mesh = meshes(placed.devices, threshold.first_sample)
            held = keys.keys_at(threshold.first_sample)
            stages.append(
                Stage(
                    index=index,
                    first_step=first_step,
                    steps=steps,
                    first_sample=first_sample,
                    samples=None if steps is None else steps * size,
                    global_batch_size=size,
                    spec=held.spec(passes, size // passes, mesh, fields),
                    **vars(placed),
                )
            )
        self.stages, self.rungs = stages[: len(walked)], stages[len(walked) :]
        self._settled = 0 if self.rungs else None  # all is decided

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_meshes": None}  # for readers in other processes, which ask for none

    def fit(self, stage: Stage, there: int) -> Stage:
        """A stage on as many nodes as are `there`, of those that are planned for it."""
        begins = operator.attrgetter("first_sample")
        last = bisect.bisect_right(self.thresholds, stage.first_sample, key=begins) - 1
        threshold = self.thresholds[max(0, last)]
        if stage.first_sample < 0:  # a rung that is still to be decided
            threshold = Threshold(-1, stage.global_batch_size)
        placed = layout.fit(self.keys, threshold, stage.nodes, there, self._meshes)
        return dataclasses.replace(stage, **vars(placed)) if placed else stage

    def settle(self, step: int) -> None:
        """Fixes the stages of steps 0 .. step-1, so that their batches may be read. Call it, like
        `grow`, in the main thread, on every process before the same step and with the same
        arguments.
        """
        if step < (self._settled or 0):
            raise ValueError(f"{self._settled} steps are settled, more than {step}")
        self._settled = step

    @property
    def settled_steps(self) -> int:
        """Steps whose stage is fixed: all of the run, unless `settle` was called."""
        total = self.total_steps
        return total if self._settled is None else min(self._settled, total)

    def grow(self, first_step: int) -> Stage:
        """Ends the last stage at a step, where the next of `rungs` begins. The loader and the loop
        look a step's stage up here, so they need no notice.
        """
        last, sample = self.stages[-1], self.samples_before(first_step)
        if first_step <= last.first_step or first_step < self.settled_steps:
            raise ValueError(
                f"a stage from step {first_step} on: {self.settled_steps} steps are settled, and "
                f"the last stage begins at step {last.first_step}"
            )
        steps, samples = first_step - last.first_step, sample - last.first_sample
        last = dataclasses.replace(last, steps=steps, samples=samples)
        stage = dataclasses.replace(self.rungs[0], first_step=first_step, first_sample=sample)
        self.stages[-1:], self.rungs = [last, stage], self.rungs[1:]
        self.thresholds = [*self.thresholds, Threshold(sample, stage.global_batch_size)]
        return stage

    def stage_at_step(self, step: int) -> Stage:
        return self._last_begun("first_step", step)

    def stage_at_sample(self, sample: int) -> Stage:
        return self._last_begun("first_sample", sample)

    def _last_begun(self, name: str, value: int) -> Stage:
        begun = bisect.bisect_right(self.stages, value, key=operator.attrgetter(name))
        if not begun:
            first = getattr(self.stages[0], name)
            raise ValueError(f"{value} lies before {name}={first}, where the schedule starts")
        return self.stages[begun - 1]

    def samples_before(self, step: int) -> int:
        """Step k trains on rows [samples_before(k), samples_before(k + 1))."""
        stage = self.stage_at_step(step)
        return stage.first_sample + (step - stage.first_step) * stage.global_batch_size

    def batch_before(self, step: int) -> tuple[int, int]:
        """The size of step - 1, which may lie in the history, and the samples after it."""
        for stage in self.history:
            if stage["first_step"] < step <= stage["first_step"] + stage["steps"]:
                size = stage["global_batch_size"]
                return size, stage["first_sample"] + (step - stage["first_step"]) * size
        return self.stage_at_step(step - 1).global_batch_size, self.samples_before(step)

    def step_at_sample(self, sample: int) -> int:
        """The step that trains on row `sample`: samples_before(step) <= sample."""
        stage = self.stage_at_sample(sample)
        return stage.first_step + (sample - stage.first_sample) // stage.global_batch_size

    def stages_between(self, first_step: int, last_step: int) -> list[Stage]:
        first = self.stage_at_step(first_step).index - self.stages[0].index
        return [stage for stage in self.stages[first:] if stage.first_step < last_step]

    def run_steps(self, stage: Stage) -> int:
        end = self.total_steps
        if stage.steps is not None:
            end = min(end, stage.first_step + stage.steps)
        return end - stage.first_step

    @property
    def total_steps(self) -> int:
        if self.keys.steps != -1:
            return self.keys.steps
        samples = self.keys.samples_of_run
        if samples < 1:
            raise ConfigError(
                "steps=-1, total_samples=-1 and total_tokens=-1: the run is as long as num_epoch "
                "passes over its data, which only maxramp.train reads; give one of them"
            )
        if samples <= self.stages[0].first_sample:
            return self.stages[0].first_step
        return self.step_at_sample(samples - 1) + 1

    @property
    def total_samples(self) -> int:
        return self.samples_before(self.total_steps)

    def steps_of_constant(self, batch: int) -> int:
        """The steps of a run as long whose batches all have this size."""
        samples = self.keys.samples_of_run
        return -(-(self.total_samples if samples == -1 else samples) // batch)

    @property
    def sample_lengths(self) -> list[int]:
        """The tokens of the run's samples: another max_target_length may lie behind a restart."""
        before = [stage["max_target_length"] for stage in self.history]
        return list(dict.fromkeys([*before, self.keys.max_target_length]))

    def tokens(self, samples: int) -> int:
        """Tokens of the run's first samples, at least of those before this schedule."""
        return samples * self.keys.max_target_length + self._more_tokens

    @property
    def warnings(self) -> list[str]:
        end, final, keys = self.total_steps, self.stages[-1], self.keys
        length, found = self.shown_length, []
        if self.stages[0].first_step < end <= final.first_step:
            last = self.stage_at_step(end - 1)
            sizes = [f" (batch {stage.global_batch_size})" for stage in (last, final)]
            sizes = sizes if sizes[0] != sizes[1] else ["", ""]
            found.append(
                f"{length} ends the run inside the ramp: after {end:,} steps it is in stage "
                f"{last.index}{sizes[0]}, and the final stage {final.index}{sizes[1]} begins after "
                f"{final.first_step:,} steps"
            )
        if 0 < (steps := keys.learning_rate_schedule_steps) < end:
            found.append(
                f"learning_rate_schedule_steps={steps} ends the learning rate's curve before the "
                f"run, which has {end} steps: it is 0 in the last {end - steps}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": [stage.to_json() for stage in self.stages],
            "total_steps": self.total_steps,
            "total_samples": self.total_samples,
            "total_tokens": self.tokens(self.total_samples),
            "history": self.history,
        }

    def check(self, stages: Sequence[Stage]) -> None:
        for stage in stages:
            if stage.index in self._refusals:
                raise self._refusals[stage.index]
