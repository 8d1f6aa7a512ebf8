"""How a run resumes: its schedule, and the history that this must fit."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxramp.checkpoints import decisions
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.commandline import count
from maxramp.data.corpus import DataIdentity
from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.rampup import ladder
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager, Stage, Start
from maxramp.rampup.shape import Meshes
from maxramp.stage import SIGHT_KEYS, Fields, text_fields
from maxramp.training.keys import LearningRateKeys
from maxramp.training.learning_rate import LearningRate

# Keys that decide which rows the run has seen, and from which weights it began.
_HISTORY_KEYS = (
    *("dataset_type", "max_target_length", "eval_fraction"),
    *("enable_data_shuffling", "data_shuffle_seed"),
    *("init_weights_seed", "lora_alpha", "use_rslora", "trainable_layers"),
    *("tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "split_special_tokens"),
    *("packing", "grain_packing_type", "separate_documents"),
)
_SMALL = 1e-3  # relative: a curve that is rounded to other batches does not count as another one
# Of a stage in plan.json, what no devices decide.
_SHAPE = ("first_step", "steps", "first_sample", "global_batch_size")
_SHAPE += ("max_target_length", "row_length", *SIGHT_KEYS)
_CORPUS = "corpus"  # in allow_changed: what the corpus hash stands for


def changes_since(
    checkpoint: Checkpoint,
    values: Mapping[str, Any],
    allow_changed: Sequence[str],
    data: DataIdentity,
    versions: Mapping[str, str],
) -> str:
    """The keys and versions that a start changes against its checkpoint, in one line; "" for none.
    Refuses what makes the run another one, unless `allow_changed` names it. Mixtures to come may
    differ.
    """
    pairs = checkpoint.differences(values)
    pairs.pop("allow_changed", None)
    refused = {name: pair for name, pair in pairs.items() if name in _HISTORY_KEYS}
    if checkpoint.corpus_hash != data.hash:
        refused[_CORPUS] = _changed_parts(checkpoint, data)
    today = seen_mixtures(data.mixtures, checkpoint.consumed_samples)
    for before, now in itertools.zip_longest(checkpoint.mixtures, today):
        if before != now:
            refused.setdefault(_CORPUS, (_mixture(before), _mixture(now)))
    if _CORPUS in refused:
        pairs[_CORPUS] = refused[_CORPUS]
    for kind, digest in data.evaluations.items():
        if (before := checkpoint.evaluations.get(kind, digest)) != digest:
            pairs[f"{kind} hash"] = before, digest
    refused = {name: pair for name, pair in refused.items() if name not in allow_changed}
    if refused:
        raise ConfigError(
            f"{checkpoint}: trained with {_list_changes(refused)}, which would change what "
            "the run has seen; give the values from before, "
            f"allow_changed=[{','.join([*allow_changed, *refused])}], or another run_name"
        )
    pairs |= {
        name: (checkpoint.versions[name], version)
        for name, version in versions.items()
        if checkpoint.versions.get(name, version) != version
    }
    return _list_changes(pairs)


def seen_mixtures(mixtures: Sequence[Any], consumed_samples: int) -> list[Any]:
    return [mixture for mixture in mixtures if mixture[0] < consumed_samples]


def _changed_parts(checkpoint: Checkpoint, data: DataIdentity) -> tuple[str, str]:
    """The parts that differ, then and now; a name alone makes no difference."""
    both = itertools.zip_longest(checkpoint.parts, data.parts)
    pairs = [pair for pair in both if not all(pair) or pair[0][1:] != pair[1][1:]]
    if not pairs:
        return checkpoint.corpus_hash, data.hash
    then, now = (_parts([part for part in of if part]) for of in zip(*pairs, strict=True))
    return then, now


def _parts(parts: Sequence[Any]) -> str:
    shown = (
        f"{name}{f' weight {weight:g}' if weight != 1 else ''}{f' (hash {x})' if x else ''}"
        for name, weight, x in parts
    )
    return ", ".join(shown) or "nothing"


def _mixture(mixture: list[Any] | None) -> str:
    return f"{_parts(mixture[1])} from sample {mixture[0]} on" if mixture else "the mixture before"


def rate_change(keys: LearningRateKeys, ramp: RampupBatchManager, position: Checkpoint) -> str:
    """How a start changes the learning rate of its run, in one line; "" if it keeps its curve."""
    step, values = position.step, base.base() | position.config
    if not 0 < step < ramp.total_steps:
        return ""
    sizes = [(stage["first_sample"], stage["global_batch_size"]) for stage in position.stages[1:]]
    start = _start_of_schedule(position, sizes if values["rampup_policy"] == "noise" else [])
    before = RampupBatchManager(BatchKeys.from_values(values), ramp.stages[0].devices, start)
    old = LearningRate.from_keys(LearningRateKeys.from_values(values), before)
    new = LearningRate.from_keys(keys, ramp)
    sample = before.samples_before(step - 1)
    batch = before.stage_at_step(step - 1).global_batch_size
    today = dataclasses.replace(new, ramp=before)  # its ramp may begin after that step
    last, same = float(old(sample, batch)), float(today(sample, batch))
    if abs(same - last) <= _SMALL * max(same, last):
        return ""
    rate = new(position.consumed_samples, ramp.stage_at_step(step).global_batch_size)
    return (
        f"the learning rate is {float(rate):.3g} from step {step} on, after {last:.3g} in step "
        f"{step - 1}: these keys give it another curve, which was at {same:.3g} there"
    )


def _list_changes(pairs: dict[str, tuple]) -> str:
    return ", ".join(f"{name}={before} (now {after})" for name, (before, after) in pairs.items())


@dataclasses.dataclass
class Span:
    """The stages of a run as this job takes them up; under rampup_policy=noise they `grow`."""

    # the checkpoint that the job continues from; None for a run that begins
    position: Checkpoint | None
    ramp: RampupBatchManager  # the stages on this job's devices
    planned: RampupBatchManager  # the same stages on the nodes that the plan gives them
    change: str  # what changed in the batch sizes since the checkpoint, in one line; "" if nothing
    keys: CheckpointKeys  # where a job ends before its run does
    num_devices: int  # of this job
    nodes_there: int | None = None  # for a job; None: as many as are planned
    # the end of this job: of the run, or of a stage under `stop_at_stage_end` or
    # `stop_at_node_change`. Under the latter, a job on fewer devices than the plan gives its stage
    # ends where it starts.
    last_step: int = dataclasses.field(init=False)

    def __post_init__(self):
        self._find_end()

    @property
    def first_step(self) -> int:
        return self.position.step if self.position else 0

    @property
    def stages(self) -> list[Stage]:
        """The stages that this job runs, or may run: rungs that are still to be decided too."""
        known = self.ramp.stages_between(self.first_step, self.last_step)
        return known + self.ramp.rungs[: max(0, self._end - len(self.ramp.stages))]

    def grow(self, first_step: int) -> Stage:
        """Takes the next rung of the ladder from a step on; the job may end there."""
        self.planned.grow(first_step)
        stage = self.ramp.grow(first_step)
        self._find_end()
        return stage

    def _place(self, stage: Stage) -> Stage:
        """A planned stage on the nodes that are there."""
        there = self.nodes_there
        return stage if there is None else self.planned.fit(stage, there)

    @property
    def following(self) -> Stage:
        """The stage that the next job begins with, on the nodes that it takes."""
        return self._place(self.planned.stage_at_step(self.last_step))

    def end_for_nodes(self, step: int, nodes_there: int) -> bool:
        """Ends the job before a step whose stage takes more nodes now; whether it does."""
        self.nodes_there = nodes_there
        stage = self._place(self.planned.stage_at_step(step))
        if stage.devices > self.num_devices:
            self.last_step = step
        return self.last_step == step

    def steps(self) -> Iterator[int]:
        """While it runs, the last of them may change."""
        step = self.first_step
        while step < self.last_step:
            yield step
            step += 1

    def _find_end(self) -> None:
        ramp, step, keys = self.ramp, self.first_step, self.keys
        self.last_step, self._end = ramp.total_steps, len(ramp.stages)
        if step >= self.last_step:
            return
        here = ramp.stages.index(ramp.stage_at_step(step))
        planned = [self._place(stage) for stage in self.planned.stages + self.planned.rungs]
        of_nodes, nodes = keys.stop_at_node_change, planned[here].nodes
        ends = (
            index
            for index in range(here + 1, len(planned))
            if keys.stop_at_stage_end or (of_nodes and planned[index].nodes != nodes)
        )
        end = next(ends, len(planned))
        missing = planned[here].devices - self.num_devices
        if of_nodes and (missing > 0 or (missing and self.nodes_there)):
            end = here  # the stage may not fit into this job; another one takes it
        self._end = end
        ramp.check((ramp.stages + ramp.rungs)[here:end])
        self.planned.check(planned[end:])
        if end < len(ramp.stages):
            self.last_step = min(self.last_step, max(step, ramp.stages[end].first_step))


def take_up(
    batch: BatchKeys,
    keys: CheckpointKeys,
    num_devices: int,
    meshes: Meshes,
    restart_passes: float,
    position: Checkpoint | None = None,
    recorded: Sequence[dict[str, Any]] = (),
    fields: Fields = text_fields,
    nodes_there: int | None = None,
) -> Span:
    """The schedule of a job, from where its run stands at `position`. `meshes` are those of later
    jobs by devices, `restart_passes` are `PassCost.restart`, `recorded` is from `decisions.read`,
    `nodes_there` as in `Span`.
    """
    start, change = start_of(batch, num_devices, position, recorded)
    ramp = RampupBatchManager(batch, num_devices, start, fields=fields)
    planned = RampupBatchManager(
        batch, start=start, meshes=meshes, fields=fields, restart_passes=restart_passes
    )
    span = Span(position, ramp, planned, change, keys, num_devices, nodes_there)
    if ramp.rungs:  # what the first decision of this job cannot change
        ramp.settle(span.first_step + ladder.DELAY - 1)
    return span


def length_by_epochs(
    batch: BatchKeys, num_devices: int, position: Checkpoint | None, rows: int, num_epoch: int
) -> tuple[int, str]:
    """Samples of the whole steps in num_epoch passes of `rows`, and a line on the rows that no step
    trains on, "" for none.
    """
    start, _ = start_of(batch, num_devices, position)
    ramp = RampupBatchManager(batch, num_devices, start)
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


def start_of(
    batch: BatchKeys,
    num_devices: int,
    position: Checkpoint | None,
    recorded: Sequence[dict[str, Any]] = (),
) -> tuple[Start, str]:
    """Where the schedule of today's keys begins in a run that stands at a checkpoint, and what
    changed, in one line, "" if nothing.

    If today's keys make the stages that were trained, and the batch sizes that were to come, the
    checkpoint's schedule holds; else a new one begins where the run stands, and what was trained
    becomes its history. Stages are numbered on: the first of a new schedule is the stage that the
    checkpoint's last step was in if it has its batch size, and the next otherwise.

    Batch sizes do not depend on `num_devices`; `recorded` is as in `take_up`.
    """
    decided = decisions.binding(batch, recorded, position)
    if not position:
        return Start(decided=decided), ""
    start = _start_of_schedule(position, decided)
    step, consumed = position.step, position.consumed_samples
    ramp = RampupBatchManager(batch, num_devices, start)
    before = _sizes_from(position.stages, consumed)
    # What was decided after the checkpoint is not a change.
    known = len(position.stages) if decided else None
    same = _sizes_from(_json(ramp)[:known], consumed) == before
    trained, today = _trained_stages(position.stages, step), _trained_stages(_json(ramp), step)
    if same and ramp.samples_before(step) == consumed and _shapes(today) == _shapes(trained):
        return start, ""
    history = [*position.history, *trained]
    start = Start(step, consumed, start.first_index, history, decided)
    ramp = RampupBatchManager(batch, num_devices, start)
    if history:
        new = ramp.stages[0].global_batch_size != history[-1]["global_batch_size"]
        start = start._replace(first_index=history[-1]["index"] + new)
    if same:
        return start, (
            f"what today's keys say of the samples before {consumed} (step {step}) is not what was "
            "trained there, and is ignored; from there on they hold"
        )
    return start, (
        f"from sample {consumed} on (step {step}) the batch sizes are "
        f"{_format_sizes(_sizes_from(_json(ramp), consumed))}; before this start they were to be "
        f"{_format_sizes(before)}{_keep_devices(batch, position.config)}"
    )


def _start_of_schedule(position: Checkpoint, decided: Sequence[tuple[int, int]]) -> Start:
    """Of the checkpoint's; where a run's ramp was changed before, it starts there."""
    first = position.stages[0]
    of_stage = (first[name] for name in ("first_step", "first_sample", "index"))
    return Start(*of_stage, position.history, decided)


def _keep_devices(batch: BatchKeys, trained_with: Mapping[str, Any]) -> str:
    """What keeps the batches of a notation that counts rows per device; "" where another is why."""
    before = BatchKeys.from_values(base.base() | trained_with)
    before = before.nodes * before.devices_per_node
    if batch.gives_global_batch or before < 1 or before == batch.nodes * batch.devices_per_node:
        return ""
    return f" (rows per device, on {count(before, 'device')}: devices_per_node={before} keeps them)"


def _trained_stages(stages: list[dict], step: int) -> list[dict]:
    """The stages of the steps before one, the last with those of its steps alone."""
    found = [dict(stage) for stage in stages if stage["first_step"] < step]
    for last in found[-1:]:
        steps = step - last["first_step"]
        last |= {"steps": steps, "samples": steps * last["global_batch_size"]}
    return found


def _shapes(stages: list[dict]) -> list[list]:
    every = (base.base() | stage for stage in stages)  # older checkpoints know fewer keys
    return [[stage[name] for name in _SHAPE] for stage in every]


def _json(ramp: RampupBatchManager) -> list[dict]:
    return [stage.to_json() for stage in ramp.stages]


def _sizes_from(stages: list[dict], sample: int) -> list[tuple[int, int]]:
    """(from which sample on, global batch size) of what is still to come, equal sizes joined."""
    found: list[tuple[int, int]] = []
    for stage in stages:
        begins, size = max(stage["first_sample"], sample), stage["global_batch_size"]
        left = stage["samples"] is None or stage["first_sample"] + stage["samples"] > sample
        if left and (not found or found[-1][1] != size):
            found.append((begins, size))
    return found


def _format_sizes(sizes: list[tuple[int, int]]) -> str:
    first, *later = sizes[:6]
    parts = [str(first[1]), *(f"{size} from {sample}" for sample, size in later)]
    return ", ".join(parts) + (", ..." if len(sizes) > 6 else "")
