"""The batch keys: a batch, its ramp, its nodes, the run's length; and those of the learning rate's
curve, which a ramp may follow (`ladder`). Imports no JAX.
"""

import bisect
import contextlib
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import ml_collections

from maxramp.errors import ConfigError
from maxramp.keys import base, peers
from maxramp.keys.choices import Choices, Values, refuse_unread
from maxramp.keys.numbers import nearest_divisors, nearest_multiples
from maxramp.keys.section import Keys, above_zero, fraction, minimum, one_of, positive_or_open
from maxramp.parallel.keys import MeshKeys
from maxramp.rampup import phases
from maxramp.stage import Fields, RopeKeys, StageSpec

# The mesh by the number of devices and the first sample of a threshold, where there is one.
Meshes = Callable[[int, int], MeshKeys | None]
# Each of these gives a batch.
_SIZES = (
    *("per_device_batch_size", "global_batch_size", "global_batch_tokens", "rampup_batch_size"),
    *("step_batch_size_schedule", "rampup_ladder"),
)
_GLOBAL_SIZES = (
    "rampup_batch_size or step_batch_size_schedule or rampup_policy or global_batch_size or "
    "global_batch_tokens"
)
MAXTEXT_RAMP = (
    *("per_device_batch_size_start", "per_device_batch_size_increment", "global_rampup_samples"),
)
# Keys that are read only where other keys have some value.
RAMP_CHOICES: Choices = {
    f"without {_GLOBAL_SIZES}": (*MAXTEXT_RAMP, "gradient_accumulation_steps"),
    "step_batch_size_schedule": ("step_batch_size_unit",),
    "rampup_policy": ("rampup_ladder",),
    "rampup_policy=seesaw": ("rampup_rounding",),
    "rampup_policy=noise": (
        *("rampup_noise_factor", "rampup_decision_samples", "rampup_earliest", "rampup_latest"),
    ),
}
CHOICES: Choices = {**RAMP_CHOICES, _GLOBAL_SIZES: ("micro_batch_size",)}
# The ramp and length of base.yml's default job, which a program that leaves them out does not want.
_NOT_BY_DEFAULT = ("enable_rampup_batch_size", *MAXTEXT_RAMP, "steps")


@dataclasses.dataclass(frozen=True)
class CurveKeys(Keys):
    """The keys of the learning rate's curve."""

    lr_schedule_type: str = one_of("cosine", "wsd")
    learning_rate_final_fraction: float = minimum(0)
    warmup_steps_fraction: float = fraction()
    wsd_decay_steps_fraction: float = fraction()
    wsd_decay_style: str = one_of("linear", "cosine")
    learning_rate_schedule_steps: int = positive_or_open()
    learning_rate_by: str = one_of("samples", "steps")


@dataclasses.dataclass(frozen=True)
class ShapeKeys(MeshKeys, RopeKeys):
    """The keys that give a step its shape, without the number of its rows."""

    max_target_length: int = minimum(1)
    row_length: int = positive_or_open("max_target_length")
    remat_policy: str  # `ModelKeys` checks it: MaxText's configuration has others
    num_pipeline_microbatches: int = positive_or_open()

    @property
    def open_pipeline(self) -> str:
        """Key, with its value, that leaves the pipeline's stages open; "" where none does."""
        names = ("ici_pipeline_parallelism", "dcn_pipeline_parallelism")
        return next((f"{name}=-1" for name in names if getattr(self, name) == -1), "")

    @property
    def rows_multiple(self) -> int:
        """Number that divides a rank's rows of a pass: the micro batches of a pipeline over its
        stages, else 1. A ConfigError if that is not whole, or the stages are open."""
        count, stages = self.num_pipeline_microbatches, self.pipeline_stages
        if count == -1:
            return 1
        if self.open_pipeline:
            raise ConfigError(
                f"num_pipeline_microbatches={count} has to be a multiple of the stages, and "
                f"{self.open_pipeline} leaves their number open; give it"
            )
        if stages == 1 and count > 1:
            raise ConfigError(
                f"num_pipeline_microbatches={count} is for a pipeline, and "
                f"{self.command_line('stage')} is none; use -1, or 2 or more stages"
            )
        if count % stages:
            raise ConfigError(
                f"num_pipeline_microbatches={count} is not a multiple of the {stages} stages that "
                f"{self.command_line('stage')} make; use {nearest_multiples(count, stages)}"
            )
        return count // stages

    @property
    def rows_of_sample(self) -> int:
        """Number of rows into which a step cuts a sample; a ConfigError if row_length does not
        divide max_target_length."""
        row, sample = self.row_length, self.max_target_length
        if row == -1:
            return 1
        if row > sample or sample % row:
            raise ConfigError(
                f"row_length={row} does not divide max_target_length={sample}: a step cuts each "
                f"sample into rows of equal length; use {nearest_divisors(row, sample)}"
            )
        return sample // row

    @property
    def rope_keys(self) -> RopeKeys:
        return RopeKeys.from_values(vars(self))

    def spec(self, passes: int, rows: int, mesh: MeshKeys | None, fields: Fields) -> StageSpec:
        """Makes the shape of steps of `passes` with `rows` samples each; raises as
        `rows_of_sample`."""
        tokens, held = self.max_target_length, (self.remat_policy, self.num_pipeline_microbatches)
        shape = passes, rows, tokens, fields(tokens)
        return StageSpec(*shape, mesh, *held, self.rope_keys, self.rows_of_sample)


@dataclasses.dataclass(frozen=True)
class BatchKeys(CurveKeys, ShapeKeys):
    """The keys that stages are made of: batch sizes, the curve that they may follow, the shape."""

    per_device_batch_size: float
    gradient_accumulation_steps: int = minimum(1)
    # MaxText
    enable_rampup_batch_size: bool
    per_device_batch_size_start: float
    per_device_batch_size_increment: float
    global_rampup_samples: int
    # NeMo / Megatron
    global_batch_size: int = positive_or_open("not given")
    global_batch_tokens: int = positive_or_open("not given")
    micro_batch_size: int = positive_or_open("not given")
    rampup_batch_size: Sequence[int] | None
    # Megatron since 2026
    step_batch_size_schedule: str
    step_batch_size_unit: str = one_of("tokens", "samples")
    # by a rule
    rampup_policy: str = one_of("", "seesaw", "noise")
    rampup_ladder: Sequence[int]
    rampup_rounding: str = one_of("nearest", "below")
    rampup_noise_factor: float = above_zero()
    rampup_decision_samples: int = positive_or_open()
    rampup_earliest: Sequence[int]
    rampup_latest: Sequence[int]
    # what changes while it runs
    phases: Mapping[str, Mapping[str, Any]]
    phases_unit: str = one_of("tokens", "samples")
    # what it runs on
    num_nodes: int = positive_or_open()
    devices_per_node: int = positive_or_open()
    min_nodes: int = minimum(1)
    node_schedule: str = one_of("best", "nemo", "fixed")
    node_time_tolerance: float = minimum(0)
    planned_pass_overhead: float = minimum(0)
    # how long
    steps: int = positive_or_open()
    total_samples: int = positive_or_open()
    total_tokens: int = positive_or_open()

    @classmethod
    def read(cls, config: Any) -> Self:
        """Reads the batch keys of a mapping, or of any object that has some of them as attributes.
        Keys left out or None have base.yml's default, but the ramp and the length count as not
        given; a ConfigError without a batch size, or if a mapping has a key that nobody knows.
        """
        if isinstance(config, cls):
            return config
        is_mapping = isinstance(config, Mapping | ml_collections.ConfigDict)
        if is_mapping:
            config = types.SimpleNamespace(**_translate(config))
        values = {}
        for name in cls.names():
            value = None
            with contextlib.suppress(ValueError):  # of MaxText's configuration: it has no such key
                value = _plain(getattr(config, name, None))
            if value is not None:
                values[name] = base.cast_value(f"{name}={value}", value, name)
        if "phases" in values:
            by_text = {str(threshold): keys for threshold, keys in values["phases"].items()}
            flat = phases.flat([("phases", by_text)], {})
            values |= {n: base.cast_value(base.show_key(n, x), x, n) for n, x in flat}
        if all(values.get(name) in (None, "", -1) for name in _SIZES):
            sizes = ", ".join(_SIZES)
            raise ConfigError(
                f"no batch size is given; give one of {sizes} (configs/base.yml describes them)"
            )
        left_out = base.base() | {name: base.unset(name) for name in _NOT_BY_DEFAULT}
        # Without a row's length, Megatron takes thresholds for samples: a row is one token.
        defaults = left_out | {"max_target_length": 1}
        keys = cls.from_values(defaults | values)
        if is_mapping:  # an object, such as MaxText's configuration, has defaults of its own
            keys.refuse_unread_by_phase(CHOICES, values, defaults | values)
        return keys

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Makes the keys of all values; global_batch_tokens, if given, replaces global_batch_size.
        A ConfigError if it is not whole samples, and as `Keys.from_values`."""
        tokens, sample = values["global_batch_tokens"], values["max_target_length"]
        if tokens > 0 and sample > 0:
            if tokens % sample:
                raise ConfigError(
                    f"global_batch_tokens={tokens} is not a multiple of max_target_length={sample}"
                    f": a batch holds whole samples; use {nearest_multiples(tokens, sample)}"
                )
            values = {**values, "global_batch_size": tokens // sample}
        return super().from_values(values)

    def refuse_unread_by_phase(
        self, choices: Choices, names: Collection[str], values: Values
    ) -> None:
        """Refuses keys, of `names` or of a phase, that no choice of that phase or a later reads."""
        by_phase = [{**values, **phase.values} for phase in self.phase_list]
        for number, phase in enumerate(self.phase_list):
            with phase.name_errors():
                refuse_unread(choices, phase.changes if number else names, by_phase[number:])

    @functools.cached_property
    def phase_list(self) -> tuple[phases.Phase, ...]:
        return phases.make_phases(self)

    def phase_at(self, sample: int) -> phases.Phase:
        first = operator.attrgetter("first_sample")
        return self.phase_list[max(0, bisect.bisect_right(self.phase_list, sample, key=first) - 1)]

    def keys_at(self, sample: int) -> Self:
        """Returns the keys of the phase that trains on row `sample`."""
        return self.phase_at(sample).keys

    def changing(self, name: str) -> list[phases.Phase]:
        return [phase for phase in self.phase_list if name in phase.changes]

    def mesh_at(self, num_devices: int, sample: int) -> MeshKeys | None:
        """Returns the mesh on this many devices from the sample on; None if they make none."""
        with contextlib.suppress(ConfigError):
            return self.keys_at(sample).resolve(num_devices)

    @property
    def gives_global_batch(self) -> bool:
        """Whether the keys give global batches, which do not depend on the number of devices."""
        ramps = self.step_batch_size_schedule or self.rampup_policy
        return bool(ramps) or self.rampup_batch_size is not None or self.global_batch_size != -1

    @property
    def is_open(self) -> bool:
        return not self.shown_length

    @property
    def shown_length(self) -> str:
        """Key, with its value, that gives the run's length; "" where the data does."""
        names = ("steps", "total_samples", "total_tokens")
        return next((f"{n}={x}" for n in names if (x := getattr(self, n)) != -1), "")

    @property
    def samples_of_run(self) -> int:
        """total_samples, or the samples of total_tokens; -1 where neither is given."""
        if self.total_tokens != -1:
            return -(-self.total_tokens // self.max_target_length)
        return self.total_samples

    @property
    def unit_of_token_thresholds(self) -> str:
        """Key that makes thresholds after the first count tokens; "" where none does."""
        if self.phases and self.phases_unit == "tokens":
            return "phases_unit"
        pairs = self.step_batch_size_schedule.count(":")
        return "step_batch_size_unit" if pairs > 1 and self.step_batch_size_unit == "tokens" else ""

    def samples_in_batches_of(self, batch: int) -> int:
        """Counts the samples of a run of known length whose steps all train on `batch` rows."""
        return -(-self.samples_of_run // batch) * batch

    @property
    def nodes(self) -> int:
        return max(1, self.num_nodes)

    @property
    def num_devices(self) -> int:
        if self.devices_per_node < 1:
            raise ConfigError(
                f"devices_per_node={self.devices_per_node} leaves the number of devices open; give "
                "devices_per_node, or num_devices to RampupBatchManager"
            )
        return self.nodes * self.devices_per_node


def _translate(config: Mapping[str, Any] | ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the values of a mapping by our names; a ConfigError names keys that nobody knows.
    Leaves out other trainers' keys that have no name here, even those that a config file refuses.
    """
    values, unknown = {}, []
    for name, value in config.items():
        if pair := peers.translate(str(name), value):
            values[pair[0]] = pair[1]
        elif peers.refusal(str(name), value) is None:
            unknown.append((f"{name}={value}", str(name)))
    if unknown:
        raise ConfigError(base.unknown_keys(unknown, "configs/base.yml"))
    return values


def _plain(value: Any) -> Any:
    """Turns NumPy numbers, tuples and enums into what a config file would give."""
    value = value.value if isinstance(value, enum.Enum) else value
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value
