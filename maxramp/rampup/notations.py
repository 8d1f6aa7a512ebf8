"""Turns keys into thresholds: three notations for a ramp, a policy, phases and a constant batch.
Imports no JAX.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction

from maxramp.commandline import count
from maxramp.errors import ConfigError
from maxramp.keys.numbers import exact, nearest_divisors, parse_count, show
from maxramp.keys.section import Relations, refuse
from maxramp.rampup import ladder
from maxramp.rampup.keys import MAXTEXT_RAMP, BatchKeys
from maxramp.rampup.phases import WARMUP, Phase


@dataclasses.dataclass(frozen=True)
class Threshold:
    """From `first_sample` consumed samples on, steps train on `global_batch_size` samples."""

    first_sample: int
    global_batch_size: int
    rows_per_device: Fraction | None = None  # the most in one pass; None: the configured most
    accumulation: int | None = None  # the passes of the notation; None: what the split needs


def thresholds(keys: BatchKeys) -> list[Threshold]:
    """Returns the thresholds of the notation that is used and of the phases, the first at 0; a
    ConfigError if `check` refuses them, or the number of devices does not fit or is open."""
    check(keys)
    joined, ends = [], [phase.first_sample for phase in keys.phase_list[1:]]
    for phase, end in zip(keys.phase_list, [*ends, math.inf], strict=True):
        begin, own = phase.first_sample, _read_notation(phase.keys)
        first = max(i for i, one in enumerate(own) if one.first_sample <= begin)
        joined += [
            dataclasses.replace(one, first_sample=max(one.first_sample, begin))
            for one in own[first:]
            if one.first_sample < end
        ]
    return joined


def check(keys: BatchKeys) -> None:
    """Refuses a ramp and phases that are wrong on any number of devices."""
    for phase in keys.phase_list:
        with phase.name_errors():
            refuse(_check_phase(keys, phase))
            refuse(_check_notations(phase.keys))
            _ = phase.keys.rows_of_sample  # raises where a row is not part of a sample
            if phase.keys.gives_global_batch:
                _read_notation(phase.keys)
            elif phase.keys.enable_rampup_batch_size:
                refuse(_check_maxtext(phase.keys))


def _read_notation(keys: BatchKeys) -> list[Threshold]:
    """Returns the thresholds of one phase's keys, as if it were the run; a ConfigError if they are
    wrong."""
    if keys.rampup_batch_size is not None:
        refuse(_check_nemo(keys))
        return _nemo(keys)
    if keys.step_batch_size_schedule:
        return [Threshold(*pair) for pair in _parse_schedule(keys)]
    if keys.rampup_policy == "seesaw":
        refuse(ladder.check_seesaw(keys))
        return [Threshold(*pair) for pair in ladder.seesaw_sizes(keys)]
    if keys.rampup_policy:  # the first size; the others are decided while the run trains
        refuse(ladder.check_noise(keys))
        return [Threshold(0, keys.rampup_ladder[0])]
    if keys.global_batch_size != -1:
        return [Threshold(0, keys.global_batch_size)]
    return _maxtext(keys)


def _shown_ramps(keys: BatchKeys) -> list[str]:
    """Lists the keys that ask for a ramp, as NAME=VALUE."""
    schedule = keys.step_batch_size_schedule
    ramps = {
        "enable_rampup_batch_size=True": keys.enable_rampup_batch_size,
        f"rampup_batch_size={keys.rampup_batch_size}": keys.rampup_batch_size is not None,
        f'step_batch_size_schedule="{schedule}"': schedule,
        f"rampup_policy={keys.rampup_policy}": keys.rampup_policy,
    }
    return [shown for shown, is_used in ramps.items() if is_used]


def _check_phase(keys: BatchKeys, phase: Phase) -> Relations:
    """Refuses a batch that both a ramp and a phase give, and phases of a ramp that is not known."""
    maxtext = ("per_device_batch_size", "gradient_accumulation_steps")
    sizes = ("global_batch_size", "global_batch_tokens", *maxtext * keys.enable_rampup_batch_size)
    for ramp, name in itertools.product(_shown_ramps(keys), sizes):
        yield (
            name in phase.changes,
            f"{name}={phase.changes.get(name)}: {ramp} gives the batch; leave one of them out (the "
            "phases alone are a ramp: give the first batch as global_batch_size)",
        )
    warmup = phase.changes.get(WARMUP)
    yield (
        warmup is not None and keys.learning_rate_by == "steps",
        f"{WARMUP}={warmup} rises over samples from the phase on, and "
        "learning_rate_by=steps counts steps; use learning_rate_by=samples, or leave it out",
    )
    yield (
        phase.first_sample and keys.rampup_policy == "noise",
        "rampup_policy=noise decides its stages while the run trains, and phases are known before "
        "it; leave one of them out",
    )


def _check_notations(keys: BatchKeys) -> Relations:
    """Refuses a second notation, a global batch beside another than NeMo's, and no rows."""
    used = _shown_ramps(keys)
    yield (
        len(used) > 1,
        f"{' and '.join(used)} describe the ramp in two notations; keep one of them",
    )
    total, micro = keys.global_batch_size, keys.micro_batch_size
    yield (
        total != -1 and used and keys.rampup_batch_size is None,
        f"global_batch_size={total} and {''.join(used)}: that ramp has its own last batch; leave "
        "global_batch_size out, or use rampup_batch_size=[start, increment, samples] with it",
    )
    yield (
        keys.per_device_batch_size <= 0 and micro == total == -1,
        f"per_device_batch_size={show(keys.per_device_batch_size)} must be above 0 (rows per "
        "device in one forward and backward pass)",
    )


def _check_rise(
    numbers: Sequence[Fraction],
    shown: Sequence[str],
    end: tuple[str, Fraction],
    start_name: str,
    constant: str,
) -> Relations:
    """Refuses a ramp that does not rise from its start to `end` in whole increments. `shown` are
    the texts of the three `numbers` in an error, `constant` is how to have a constant batch.
    """
    start, increment, samples = numbers
    name, final = end
    rise, without = final - start, f"lower the start, or {constant}"
    yield start <= 0, f"{shown[0]} must be above 0"
    yield rise < 0, f"{shown[0]} is above {name}={show(final)}; a ramp grows: {without}"
    yield (
        rise == 0,
        f"{shown[0]} equals {name}={show(final)}, which leaves nothing to ramp; {without}",
    )
    relation = f"does not divide {name} - {start_name} = {show(rise)}"
    wrong = "must be above 0" if increment <= 0 else relation
    yield (
        increment <= 0 or rise % increment,
        f"{shown[1]} {wrong}; use {nearest_divisors(increment, rise)}",
    )
    yield (
        samples <= 0,
        f"{shown[2]} must be above 0 (over which the batch grows); for a constant batch {constant}",
    )


def _check_maxtext(keys: BatchKeys) -> Relations:
    numbers = [exact(getattr(keys, name)) for name in MAXTEXT_RAMP]
    shown = [f"{name}={show(number)}" for name, number in zip(MAXTEXT_RAMP, numbers, strict=True)]
    final = "per_device_batch_size", exact(keys.per_device_batch_size)
    return _check_rise(numbers, shown, final, MAXTEXT_RAMP[0], "set enable_rampup_batch_size=False")


def _maxtext(keys: BatchKeys) -> list[Threshold]:
    """Reads MaxText's notation, of keys that `_check_maxtext` lets pass, and a constant batch,
    which is a ramp of no increments. A stage lasts the smallest number of steps whose samples reach
    global_rampup_samples / increments, and the next stage counts from zero. A ConfigError if the
    number of devices is open, or gives a part of a row."""
    final, devices = exact(keys.per_device_batch_size), keys.num_devices
    sizes, share = [final], Fraction(0)
    if keys.enable_rampup_batch_size:
        start = exact(keys.per_device_batch_size_start)
        increment = exact(keys.per_device_batch_size_increment)
        increments = _limit_stages(int((final - start) / increment), MAXTEXT_RAMP[1])
        sizes = [start + i * increment for i in range(increments + 1)]
        share = Fraction(keys.global_rampup_samples, increments)
    thresholds, first_sample = [], 0
    for size in sizes:
        if (size * devices).denominator != 1:
            raise ConfigError(
                f"per_device_batch_size {show(size)} on {count(devices, 'device')} is "
                f"{show(size * devices)} rows, not a whole number; per_device_batch_size, its "
                f"start and its increment must be multiples of {show(Fraction(1, devices))}"
            )
        accumulation = keys.gradient_accumulation_steps
        batch = int(size * devices) * accumulation
        thresholds.append(Threshold(first_sample, batch, size, accumulation))
        first_sample += math.ceil(share / batch) * batch
    return thresholds


def _check_nemo(keys: BatchKeys) -> Relations:
    ramp = list(keys.rampup_batch_size)
    shown = f"rampup_batch_size={ramp}"
    yield (
        [type(number) for number in ramp] != [int] * 3,
        f"{shown} must be three integers: [start, increment, samples]",
    )
    yield (
        keys.global_batch_size == -1,
        f"{shown} needs global_batch_size, the size at which the ramp ends",
    )
    names = "start", "increment", "samples"
    numbers = [Fraction(number) for number in ramp]
    numbered = [f"{shown}: the {name} {number}" for name, number in zip(names, ramp, strict=True)]
    final = "global_batch_size", Fraction(keys.global_batch_size)
    yield from _check_rise(numbers, numbered, final, "start", "leave rampup_batch_size out")


def _nemo(keys: BatchKeys) -> list[Threshold]:
    """Reads NeMo's notation, of keys that `_check_nemo` lets pass: while consumed < samples, a step
    has start + floor(consumed / share) * increment rows, with share = samples / increments; from
    then on global_batch_size. Where a share is less than a sample, thresholds are equal, and the
    last of them holds. A ConfigError for 100,000 increments or more.
    """
    start, increment, samples = keys.rampup_batch_size
    increments = (keys.global_batch_size - start) // increment
    _limit_stages(increments, "rampup_batch_size")
    # consumed is whole, so it reaches i * samples / increments when it reaches the next integer.
    sizes = (start + i * increment for i in range(increments + 1))
    return [Threshold(-(-i * samples // increments), size) for i, size in enumerate(sizes)]


def _parse_schedule(keys: BatchKeys) -> list[tuple[int, int]]:
    """Returns (first sample, global batch size) of step_batch_size_schedule, whose thresholds are
    rounded down to samples; a ConfigError if they do not rise from 0."""
    key = "step_batch_size_schedule"
    pairs: list[tuple[int, int]] = []
    tokens = keys.step_batch_size_unit == "tokens"
    entries = keys.step_batch_size_schedule.replace(",", " ").split()
    if not entries:
        raise ConfigError(f'{key}="{keys.step_batch_size_schedule}" holds no threshold:batch pair')
    for entry in entries:
        threshold_text, colon, batch_text = entry.partition(":")
        threshold = parse_count(threshold_text) if colon else None
        if threshold is None or not re.fullmatch("0*[1-9][0-9]*", batch_text):
            raise ConfigError(
                f'{key}: "{entry}" is not threshold:batch with a batch of 1 or more, such as '
                "250B:1536 (suffixes K, M, B, T)"
            )
        samples = threshold // keys.max_target_length if tokens else threshold
        if not pairs and threshold != 0:
            raise ConfigError(
                f'{key}: the first threshold "{entry}" must be 0, where training starts'
            )
        if pairs and samples <= pairs[-1][0]:
            unit = f" samples of {keys.max_target_length} tokens" if tokens else " samples"
            raise ConfigError(
                f'{key}: "{entry}" starts at {samples}{unit}, not after the pair before it at '
                f"{pairs[-1][0]}; thresholds must increase"
            )
        pairs.append((samples, int(batch_text)))
    return pairs


_MOST_STAGES = 100_000


def _limit_stages(increments: int, key: str) -> int:
    if increments >= _MOST_STAGES:
        raise ConfigError(
            f"{key} makes {increments + 1} stages, more than {_MOST_STAGES}; use a larger increment"
        )
    return increments
