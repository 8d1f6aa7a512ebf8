"""What another trainer's newest version does with a ramp, beside what maxramp does with it.

Read in the packages: MaxText 0.2.5 (utils/rampup_batch.py, common/data_loader.py), megatron-core
0.19.2 (core/num_microbatches_calculator.py, training/arguments.py and global_vars.py), and
Megatron-Bridge 0.6.2, which took NeMo's place (training/initialize.py and config.py).
"""

import bisect
import dataclasses
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys.peers import RENAMED
from maxramp.keys.yamlfile import read_yaml
from maxramp.rampup.notations import Threshold
from maxramp.rampup.numbers import parse_count
from maxramp.rampup.schedule import RampupBatchManager, walk

_Batches = list[tuple[int, int]]  # (step from which on, global batch); none where a trainer stops


@dataclasses.dataclass(frozen=True)
class Theirs:
    """A ramp as a trainer runs it."""

    trainer: str  # with its version
    batches: _Batches
    lines: list[str]  # what else there is to know
    ours: dict[str, Any]  # the same notation in maxramp's keys
    devices: int = 1  # that the notation depends on


def compare(trainer: str, file: str, devices: int | None) -> dict[str, Any]:
    """What a trainer and maxramp do with the ramp of a file.

    Args:
      trainer: a key of TRAINERS.
      file: its config; of Megatron, a file that holds the command line.
      devices: that the run has, where they are known.

    Returns:
      `trainer`; `theirs` and `ours`, pairs of a step and the global batch from there on; `lines`
      about theirs; `refused`, why maxramp takes the keys for wrong, or "".
    """
    if trainer not in TRAINERS:
        raise ConfigError(f"--trainer {trainer} must be one of {', '.join(TRAINERS)}")
    theirs = TRAINERS[trainer](place(file), devices)
    ours, refused = [], ""
    try:
        stages = RampupBatchManager(theirs.ours, theirs.devices).stages
        ours = [(stage.first_step, stage.global_batch_size) for stage in stages]
    except ConfigError as error:
        refused = str(error)
    found = {"trainer": theirs.trainer, "theirs": theirs.batches, "lines": theirs.lines}
    return found | {"ours": ours, "refused": refused}


def side_by_side(found: Mapping[str, Any]) -> list[tuple[int, int | None, int | None]]:
    """(step, their batch, ours) of every step where one of the two changes."""
    sides = found["theirs"], found["ours"]
    steps = sorted({step for side in sides for step, _ in side})
    return [(step, *(_batch_at(side, step) for side in sides)) for step in steps]


def _batch_at(batches: _Batches, step: int) -> int | None:
    if not batches:
        return None
    return batches[bisect.bisect_right(batches, step, key=lambda pair: pair[0]) - 1][1]


# --- MaxText -------------------------------------------------------------------------------------

# What the ramp asks for, with the defaults of its configs/base.yml.
_MAXTEXT = {
    "per_device_batch_size": 12.0,
    "per_device_batch_size_start": 4.0,
    "per_device_batch_size_increment": 2.0,
    "global_rampup_samples": 500,
    "gradient_accumulation_steps": 1,
    "expansion_factor_real_data": -1.0,
}


def _maxtext(path: Place, devices: int | None) -> Theirs:
    given = read_yaml(path)
    if str(given.get("base_config", "base.yml")).rpartition("/")[2] != "base.yml":
        raise ConfigError(
            f"{path}: base_config={given['base_config']} is not read here; write what it says of "
            f"the ramp into this file: {', '.join(_MAXTEXT)}"
        )
    if given.get("enable_rampup_batch_size") is not True:
        raise ConfigError(f"{path}: holds no ramp; MaxText's has enable_rampup_batch_size=True")
    keys = {}
    for name, default in _MAXTEXT.items():
        value, kind = given.get(name, default), type(default)
        if type(value) not in (int, float) or kind(value) != value:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{path}: {name}={value} is not {what}; give one")
        keys[name] = kind(value)
    if devices is None:
        raise ConfigError(
            "MaxText's batches follow from the devices: give num_nodes=N devices_per_node=N"
        )
    wrong = [
        f"{name}={keys[name]:g}"
        for name, least in (
            ("per_device_batch_size", 1),
            ("per_device_batch_size_start", 1 / devices),
            ("per_device_batch_size_increment", 0),
        )
        if keys[name] < least
    ]
    if (factor := keys.pop("expansion_factor_real_data")) not in (-1, 1):
        wrong.append(f"expansion_factor_real_data={factor:g}")
    if wrong:
        raise ConfigError(
            f"{path}: {', '.join(wrong)}: what MaxText's ramp does there is not worked out here"
        )
    ours = keys | {"enable_rampup_batch_size": True}
    return Theirs("MaxText 0.2.5", *_ramp_of_maxtext(keys, devices), ours, devices)


def _ramp_of_maxtext(keys: Mapping[str, Any], devices: int) -> tuple[_Batches, list[str]]:
    """In floats, as there."""
    final, start, increment, samples, accumulation = keys.values()
    rise, end = final - start, int(devices * final)
    if increment == 0:
        return [], ["stops with a ZeroDivisionError: per_device_batch_size_increment is 0"]
    if rise <= 0 or rise % increment:
        why = f"{rise:.17g} % {increment:g} is {rise % increment:.3g} in floats"
        return [], [f"stops with a ValueError: {why if rise > 0 else 'the batch does not grow'}"]
    whole = end * accumulation
    if samples <= 0:
        why = f"global_rampup_samples={samples} turns the ramp off without a word"
        return [(0, whole)], [f"trains with a constant batch of {whole:,}: {why}"]
    batch, more = int(devices * start), int(devices * increment)
    if not more:
        why = "the increment is less than a row on all devices, and rounded to none"
        return [(0, batch)], [f"trains with a constant batch of {batch:,}: {why}"]
    share, batches, step, used = samples / (rise // increment), [], 0, 0
    while batch < end:
        batches.append((step, batch))
        steps = math.ceil(share / batch)
        step, used = step + steps, used + steps * batch
        batch = min(batch + more, end)
    # It takes the first `end` rows of every batch that is loaded, and leaves the rest of the last.
    loaded, lines = -(-used // end) * whole, []
    if used < loaded:
        rows = f"{used:,} of the {loaded:,} rows"
        lines.append(f"trains on {rows} that its ramp loads, and drops the rest")
    if accumulation > 1:
        lines.append(
            f"leaves gradient_accumulation_steps={accumulation} out of the ramp's batches; after "
            f"it a batch is {whole:,}"
        )
    lines.append("compiles at every change of the batch, while training waits")
    lines.append("counts the learning rate in steps, whatever their batch")
    return [*batches, (step, whole)], lines


# --- Megatron, and NeMo, which is Megatron-Bridge ------------------------------------------------

# maxramp's keys that their arguments and keys stand for.
_MEGATRON = {
    "--rampup-batch-size": "rampup_batch_size",
    "--global-batch-size": "global_batch_size",
    "--step-batch-size-schedule": "step_batch_size_schedule",
    "--seq-length": "max_target_length",
    "--train-samples": "total_samples",
    "--train-iters": "steps",
}
_NEMO = RENAMED | {
    **{name: name for name in _MEGATRON.values()},
    **{f"data.{name}": name for name in ("global_batch_size", "rampup_batch_size")},
    "train.step_batch_size_schedule": "step_batch_size_schedule",
    "data.seq_length": "max_target_length",
}


def _megatron(path: Place, devices: int | None) -> Theirs:
    try:
        text = path.read_text(encoding="utf-8")
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a command line: {error}") from None
    words = [part for word in words for part in _halves(word)]
    pairs = []
    for index, word in enumerate(words):
        values = words[index + 1 : index + (4 if word == "--rampup-batch-size" else 2)]
        values = [int(v) if v.isascii() and v.isdigit() else v for v in values] or [None]
        pairs.append((word, values if len(values) > 1 else values[0]))
    keys = _parse_keys(path, pairs, _MEGATRON)
    return Theirs("megatron-core 0.19.2", *_ramp_of_megatron(path, keys), _maxramp_keys(keys))


def _halves(word: str) -> Sequence[str]:
    """--name=value is --name value."""
    name, equals, value = word.partition("=")
    return (name, value) if equals and name in _MEGATRON else (word,)


def _nemo(path: Place, devices: int | None) -> Theirs:
    keys = _parse_keys(path, _flat("", read_yaml(path)), _NEMO)
    return Theirs("Megatron-Bridge 0.6.2", *_ramp_of_bridge(path, keys), _maxramp_keys(keys))


def _flat(above: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{above}{name}.", value)
        elif value not in (None, "", -1, False):
            yield f"{above}{name}", value


def _parse_keys(
    path: Place, pairs: Iterable[tuple[str, Any]], names: Mapping[str, str]
) -> dict[str, Any]:
    """The ramp that a file gives, by maxramp's keys."""
    keys: dict[str, Any] = {}
    for given, value in pairs:
        if given.rpartition(".")[2].strip("-").replace("-", "_") == "decrease_batch_size_if_needed":
            raise ConfigError(f"{path}: {given} changes batches by the devices; leave it out")
        if not (name := names.get(given)):
            continue
        if keys.get(name, value) != value:
            raise ConfigError(f"{path}: {given} {value} and {name}={keys[name]}: keep one of them")
        numbers = value if isinstance(value, list) else [value]
        count = 3 if name == "rampup_batch_size" else 1
        if name == "step_batch_size_schedule":
            keys[name] = str(value)
        elif len(numbers) != count or any(type(n) not in (int, float) or n % 1 for n in numbers):
            what = "3 whole numbers" if count == 3 else "a whole number"
            raise ConfigError(f"{path}: {given} {value} is not {what}; give one")
        else:
            keys[name] = [*map(int, numbers)] if count == 3 else int(value)
    return keys


def _maxramp_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The ramp in maxramp's keys: with a list of thresholds no other batch."""
    by_list = "step_batch_size_schedule" in keys
    out = ("global_batch_size", "rampup_batch_size") if by_list else ("max_target_length",)
    return {name: value for name, value in keys.items() if name not in out}


def _ramp_of_megatron(path: Place, keys: Mapping[str, Any]) -> tuple[_Batches, list[str]]:
    schedule, row = keys.get("step_batch_size_schedule"), keys.get("max_target_length")
    if schedule is None:
        size = _constant(path, keys)
        why = "since 0.18 nothing reads --rampup-batch-size, and no warning is given"
        lines = [f"trains with a constant batch of {size:,}: {why}"]
        if row:
            lines.append(f'--step-batch-size-schedule "{_schedule_text(keys, row)}" ramps there')
        return [(0, size)], lines
    if "global_batch_size" in keys:
        why = "--step-batch-size-schedule with --global-batch-size"
        return [], [f"stops with a ValueError: {why}, which must be left out"]
    if row is None:
        raise ConfigError(f"{path}: the thresholds are tokens there; give --seq-length")
    pairs, lines = [], []
    for entry in schedule.replace(",", " ").split():
        threshold, _, batch = entry.partition(":")
        try:
            tokens, rows = _float_count(threshold), _float_count(batch)
        except (ValueError, OverflowError):
            raise ConfigError(f'{path}: "{entry}" is not threshold:batch') from None
        if (meant := parse_count(threshold)) not in (None, tokens):
            lines.append(f"takes {threshold} for {tokens:,}, by way of floats, not {meant:,}")
        pairs.append(Threshold(tokens // row, rows))
    pairs.sort(key=lambda pair: pair.first_sample)
    places = [pair.first_sample for pair in pairs]
    least = min((pair.global_batch_size for pair in pairs), default=0)
    if least < 1 or places[0] or len({*places}) < len(places):
        why = "thresholds must begin at 0 and rise in samples, batches be above 0"
        return [], [f"stops with an AssertionError: {why}"]
    return [(one.first_step, one.threshold.global_batch_size) for one in walk(pairs, 0, 0)], lines


def _ramp_of_bridge(path: Place, keys: Mapping[str, Any]) -> tuple[_Batches, list[str]]:
    has_ramp, size = "rampup_batch_size" in keys, _constant(path, keys)
    if has_ramp and "total_samples" in keys:
        return [], ["stops with an AssertionError: no rampup_batch_size beside train_samples"]
    why = "megatron-core since 0.18 warns and ignores rampup_batch_size"
    why = why if has_ramp else "step_batch_size_schedule is not passed on"
    lines = [f"trains with a constant batch of {size:,}: {why}"]
    return [(0, size)], [*lines, "has no other key that makes a ramp"]


def _constant(path: Place, keys: Mapping[str, Any]) -> int:
    """The batch that is left of a ramp that nothing reads."""
    if not {"rampup_batch_size", "step_batch_size_schedule"} & {*keys}:
        raise ConfigError(f"{path}: holds no ramp: no rampup_batch_size, no thresholds")
    if "global_batch_size" not in keys:
        raise ConfigError(f"{path}: holds no global_batch_size, where the ramp ends")
    return keys["global_batch_size"]


def _schedule_text(keys: Mapping[str, Any], row: int) -> str:
    """A ramp of three numbers as thresholds in tokens."""
    (start, increment, samples), end = keys["rampup_batch_size"], keys["global_batch_size"]
    count = max(1, (end - start) // max(1, increment))
    pairs = ((-(-i * samples // count) * row, start + i * increment) for i in range(count + 1))
    return " ".join(f"{tokens}:{batch}" for tokens, batch in pairs)


def _float_count(text: str) -> int:
    """A number with a suffix as Megatron reads it; raises ValueError."""
    text = text.strip().upper()
    power = {"K": 3, "M": 6, "B": 9, "T": 12}.get(text[-1:], 0)
    return int(float(text[: len(text) - bool(power)]) * 10**power)


TRAINERS: dict[str, Callable[[Place, int | None], Theirs]] = {
    "maxtext": _maxtext,
    "megatron": _megatron,
    "nemo": _nemo,
}
