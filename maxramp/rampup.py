"""The batch-size schedule as data: a short list of stages.

Glossary
  sample      one row of `max_target_length` tokens
  step        one optimizer update; step k is 0-based, "n steps done" means steps 0 .. n-1
  micro batch the rows of one forward and backward pass over all devices:
              per_device_batch_size * devices
  global batch size
              the rows of one step: micro batch * gradient_accumulation_steps
  threshold   the number of samples from which on a global batch size holds
  stage       a run of steps with one batch shape

Every notation becomes a list of thresholds, and one walk over the thresholds gives the stages: a
step uses the batch size of the last threshold that is not above the samples consumed before it. All
questions are then answered from the list in closed form, for any step, in any order.

This module imports no jax.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from maxramp.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Threshold:
    """From `first_sample` consumed samples on, steps have this batch shape."""

    first_sample: int
    per_device_batch_size: Fraction
    gradient_accumulation_steps: int
    nodes: int
    devices: int

    @property
    def micro_batch_size(self) -> Fraction:
        """Rows of one forward and backward pass over all devices."""
        return self.per_device_batch_size * self.devices


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

    @property
    def micro_batch_size(self) -> int:
        """Rows of one forward and backward pass over all devices."""
        return self.global_batch_size // self.gradient_accumulation_steps

    def to_json(self) -> dict[str, Any]:
        """The stage as it stands in plan.json."""
        return dataclasses.asdict(self) | {
            "per_device_batch_size": plain_number(self.per_device_batch_size)
        }


def exact(value: float | int | Fraction) -> Fraction:
    """The number that was written: 0.1 is 1/10, not the nearest binary fraction."""
    return value if isinstance(value, Fraction) else Fraction(str(value))


def plain_number(value: Fraction) -> int | float:
    """A Fraction as JSON and a person see it: an integer where it is one."""
    return value.numerator if value.denominator == 1 else float(value)


class RampupBatchManager:
    """The stages of a run.

    The list may grow at its end, and only there; everything else is derived from it.
    """

    def __init__(self, config: Any, num_devices: int | None = None):
        """
        Args:
          config: any object with the batch keys as attributes: `enable_rampup_batch_size`,
            `per_device_batch_size`, `gradient_accumulation_steps`, under a ramp also
            `per_device_batch_size_start`, `per_device_batch_size_increment`,
            `global_rampup_samples`; and `num_nodes`, `devices_per_node`.
          num_devices: the devices that a micro batch is spread over;
            by default num_nodes * devices_per_node.

        Raises:
          ConfigError: a key is out of range, or a stage's batch is not a whole number of rows.
        """
        check_keys(config)
        nodes = max(1, config.num_nodes)
        devices = num_devices or nodes * config.devices_per_node
        if devices < 1:
            raise ConfigError(
                f"devices_per_node={config.devices_per_node} leaves the number of devices open, "
                "and per_device_batch_size counts rows per device; give devices_per_node"
            )
        self.thresholds = _maxtext_thresholds(config, nodes, devices)
        self.stages: list[Stage] = list(_walk(self.thresholds))
        self._first_steps = [stage.first_step for stage in self.stages]
        self._first_samples = [stage.first_sample for stage in self.stages]

    def stage_at_step(self, step: int) -> Stage:
        """The stage of 0-based optimizer step `step`."""
        return self.stages[bisect.bisect_right(self._first_steps, _not_negative("step", step)) - 1]

    def stage_at_sample(self, sample: int) -> Stage:
        """The stage of the step that trains on row `sample` of the run (0-based)."""
        sample = _not_negative("sample", sample)
        return self.stages[bisect.bisect_right(self._first_samples, sample) - 1]

    def samples_before(self, step: int) -> int:
        """Samples consumed by steps 0 .. step-1: step k trains on rows
        [samples_before(k), samples_before(k + 1))."""
        stage = self.stage_at_step(step)
        return stage.first_sample + (step - stage.first_step) * stage.global_batch_size

    def stages_between(self, first_step: int, last_step: int) -> list[Stage]:
        """The stages of steps first_step .. last_step - 1."""
        first = self.stage_at_step(first_step).index
        return [stage for stage in self.stages[first:] if stage.first_step < last_step]

    def step_at_sample(self, sample: int) -> int:
        """The step that trains on row `sample`: samples_before(step) <= sample."""
        stage = self.stage_at_sample(sample)
        return stage.first_step + (sample - stage.first_sample) // stage.global_batch_size


def _not_negative(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name}={value} is negative")
    return value


def check_keys(config: Any) -> None:
    """Checks the batch keys, as far as they can be checked without knowing the devices.

    Raises:
      ConfigError: names the key, its value, the relation it breaks and a remedy.
    """
    if config.per_device_batch_size <= 0:
        raise ConfigError(
            f"per_device_batch_size={_show(config.per_device_batch_size)} must be above 0 "
            "(rows per device in one forward and backward pass)"
        )
    if config.gradient_accumulation_steps < 1:
        raise ConfigError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} must be 1 or more"
        )
    if not config.enable_rampup_batch_size:
        return
    start = exact(config.per_device_batch_size_start)
    increment = exact(config.per_device_batch_size_increment)
    rise = exact(config.per_device_batch_size) - start
    if start <= 0:
        raise ConfigError(f"per_device_batch_size_start={_show(start)} must be above 0")
    if rise < 0:
        raise ConfigError(
            f"per_device_batch_size={_show(config.per_device_batch_size)} is below "
            f"per_device_batch_size_start={_show(start)}; a ramp grows: lower the start"
        )
    if rise == 0:
        raise ConfigError(
            f"per_device_batch_size_start={_show(start)} equals per_device_batch_size, which "
            "leaves nothing to ramp; lower the start, or set enable_rampup_batch_size=False"
        )
    if increment <= 0:
        raise ConfigError(
            f"per_device_batch_size_increment={_show(increment)} must be above 0; the ramp "
            f"rises by {_show(rise)} in all: use {_divisors(rise)}"
        )
    if rise % increment:
        raise ConfigError(
            f"per_device_batch_size_increment={_show(increment)} does not divide "
            f"per_device_batch_size - per_device_batch_size_start = {_show(rise)}; "
            f"use {_divisors(rise)}"
        )
    if config.global_rampup_samples <= 0:
        raise ConfigError(
            f"global_rampup_samples={config.global_rampup_samples} must be above 0 (the "
            "samples over which the batch grows); for a constant batch set "
            "enable_rampup_batch_size=False"
        )


def _maxtext_thresholds(config: Any, nodes: int, devices: int) -> list[Threshold]:
    """MaxText's notation (and a constant batch, which is a ramp of no increments).

    samples_per_increment = global_rampup_samples / increments; a stage lasts the smallest number of
    steps whose samples reach samples_per_increment, and the next stage counts from zero.
    """
    final = exact(config.per_device_batch_size)
    accumulation = config.gradient_accumulation_steps
    sizes = [final]
    samples_per_increment = Fraction(0)
    if config.enable_rampup_batch_size:
        start = exact(config.per_device_batch_size_start)
        increment = exact(config.per_device_batch_size_increment)
        increments = int((final - start) / increment)
        sizes = [start + i * increment for i in range(increments + 1)]
        samples_per_increment = Fraction(config.global_rampup_samples, increments)
    thresholds, first_sample = [], 0
    for size in sizes:
        if (size * devices).denominator != 1:
            raise ConfigError(
                f"per_device_batch_size {_show(size)} on {devices} devices is "
                f"{_show(size * devices)} rows, not a whole number; "
                "per_device_batch_size, its start and its increment must be multiples of "
                f"1/{devices}"
            )
        thresholds.append(Threshold(first_sample, size, accumulation, nodes, devices))
        batch = int(size * devices) * accumulation
        first_sample += math.ceil(samples_per_increment / batch) * batch
    return thresholds


def _walk(thresholds: Sequence[Threshold]) -> Iterable[Stage]:
    """Thresholds -> stages: each stage ends with the first step that reaches the next threshold.

    A threshold that is passed within a step of the stage before gives no stage.
    """
    step = sample = index = 0
    ends = [t.first_sample for t in thresholds[1:]] + [None]
    for threshold, end in zip(thresholds, ends, strict=True):
        batch = int(threshold.micro_batch_size) * threshold.gradient_accumulation_steps
        steps = None if end is None else max(0, math.ceil(Fraction(end - sample, batch)))
        if steps == 0:
            continue
        yield Stage(
            index=index,
            first_step=step,
            steps=steps,
            first_sample=sample,
            samples=None if steps is None else steps * batch,
            per_device_batch_size=threshold.per_device_batch_size,
            gradient_accumulation_steps=threshold.gradient_accumulation_steps,
            global_batch_size=batch,
            nodes=threshold.nodes,
            devices=threshold.devices,
        )
        if steps is not None:
            index, step, sample = index + 1, step + steps, sample + steps * batch


def _show(value: float | Fraction) -> str:
    """The number as it would be written in a config, or as a fraction where it has no end."""
    number = plain_number(exact(value))
    return str(number) if Fraction(str(number)) == exact(value) else str(value)


def _divisors(rise: Fraction) -> str:
    """A few increments that divide `rise`, small to large, for an error's remedy."""
    if rise.denominator == 1:
        whole = int(rise)
        found = [d for d in range(1, min(whole, 10_000) + 1) if whole % d == 0]
        found = found if len(found) <= 6 else found[:5] + [whole]
        numbers = [str(d) for d in found]
    else:
        numbers = [_show(rise / n) for n in (4, 2, 1)]
    return ", ".join(numbers[:-1]) + " or " + numbers[-1] if len(numbers) > 1 else numbers[0]
