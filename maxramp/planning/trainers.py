"""What another trainer's newest version does with a ramp, beside what maxramp does with it.

Read in the packages: MaxText 0.2.5 (utils/rampup_batch.py, common/data_loader.py), megatron-core
0.19.2 (core/num_microbatches_calculator.py, training/arguments.py and global_vars.py), and
Megatron-Bridge 0.6.2, which took NeMo's place (training/initialize.py and config.py).
"""

import bisect
import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys.peers import RENAMED
from maxramp.keys.yamlfile import read_yaml
from maxramp.rampup.numbers import parse_count
from maxramp.rampup.schedule import RampupBatchManager

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

    Raises:
      ConfigError: the file holds no ramp, or something about it that is not understood here.
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


def _number(path: Place, name: str, value: Any, kind: type) -> Any:
    """A value of a file, as the number that the trainer takes it for."""
    whole = kind is int and isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not isinstance(value, int | kind) and not whole:
        raise ConfigError(
            f"{path}: {name}={value} is no {'whole ' * (kind is int)}number; give one"
        )
    return kind(value)


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
    keys = {
        name: _number(path, name, given.get(name, default), type(default))
        for name, default in _MAXTEXT.items()
    }
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

# maxramp's keys that its arguments stand for, and how many numbers each takes.
_MEGATRON = {
    "--rampup-batch-size": ("rampup_batch_size", 3),
    "--global-batch-size": ("global_batch_size", 1),
    "--step-batch-size-schedule": ("step_batch_size_schedule", 1),
    "--seq-length": ("max_target_length", 1),
    "--train-samples": ("total_samples", 1),
    "--train-iters": ("steps", 1),
}
_NAMES = dict(_MEGATRON.values())
_NEMO = RENAMED | {
    **{f"data.{name}": name for name in ("global_batch_size", "rampup_batch_size")},
    **{f"train.{name}": name for name in ("step_batch_size_schedule",)},
    "data.seq_length": "max_target_length",
}
_DECREASE = "decrease_batch_size_if_needed"


def _megatron(path: Place, devices: int | None) -> Theirs:
    try:
        text = path.read_text(encoding="utf-8")
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a command line: {error}") from None
    words = [part for word in words for part in _halves(word)]
    keys: dict[str, Any] = {}
    for index, word in enumerate(words):
        if word == f"--{_DECREASE.replace('_', '-')}":
            raise ConfigError(f"{path}: {word} changes batches by the devices; leave it out")
        name, count = _MEGATRON.get(word, ("", 0))
        if not name:
            continue
        if name in keys:
            raise ConfigError(f"{path}: {word} stands twice; keep one")
        values = words[index + 1 : index + 1 + count]
        if name != "step_batch_size_schedule":
            if len(values) < count or not all(v.isascii() and v.isdigit() for v in values):
                shown = " ".join(values)
                raise ConfigError(f"{path}: {word} {shown}: not {count} whole numbers; write them")
            values = [*map(int, values)]
        elif not values:
            raise ConfigError(f"{path}: {word} has no value")
        keys[name] = values if count > 1 else values[0]
    batches, lines = _ramp_of_megatron(path, keys)
    return Theirs("megatron-core 0.19.2", batches, lines, _ours(keys))


def _halves(word: str) -> Sequence[str]:
    """--name=value is --name value."""
    name, equals, value = word.partition("=")
    return (name, value) if equals and name in _MEGATRON else (word,)


def _nemo(path: Place, devices: int | None) -> Theirs:
    keys: dict[str, Any] = {}
    for given, value in _flat("", read_yaml(path)):
        name = _NEMO.get(given, given)
        if given.rpartition(".")[2] == _DECREASE and value is True:
            raise ConfigError(f"{path}: {given} changes batches by the devices; leave it out")
        if name not in _NAMES or value in (None, "", -1):
            continue
        if name in keys and keys[name] != value:
            raise ConfigError(f"{path}: {given}={value} and {name}={keys[name]}: keep one of them")
        if _NAMES[name] == 3:
            if not isinstance(value, list) or len(value) != 3:
                raise ConfigError(f"{path}: {given}={value} is not [start, increment, samples]")
            value = [_number(path, given, part, int) for part in value]
        elif name != "step_batch_size_schedule":
            value = _number(path, given, value, int)
        keys[name] = value
    batches, lines = _ramp_of_bridge(path, keys)
    return Theirs("Megatron-Bridge 0.6.2", batches, lines, _ours(keys))


def _flat(above: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs = ((f"{above}{name}", value) for name, value in values.items())
    return [
        found
        for name, value in pairs
        for found in (_flat(f"{name}.", value) if isinstance(value, dict) else [(name, value)])
    ]


def _ours(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The ramp in maxramp's keys: with a list of thresholds no other batch."""
    if "step_batch_size_schedule" in keys:
        left_out = ("global_batch_size", "rampup_batch_size")
        return {name: value for name, value in keys.items() if name not in left_out}
    return {name: value for name, value in keys.items() if name != "max_target_length"}


def _ramp_of_megatron(path: Place, keys: Mapping[str, Any]) -> tuple[_Batches, list[str]]:
    schedule, size = keys.get("step_batch_size_schedule"), keys.get("global_batch_size")
    if schedule is None:
        size = _constant(path, keys)
        why = "since 0.18 nothing reads --rampup-batch-size, and no warning is given"
        lines = [f"trains with a constant batch of {size:,}: {why}"]
        if row := keys.get("max_target_length"):
            lines.append(f'--step-batch-size-schedule "{_as_schedule(keys, row)}" ramps there')
        return [(0, size)], lines
    if size is not None:
        why = "--step-batch-size-schedule with --global-batch-size"
        return [], [f"stops with a ValueError: {why}, which must be left out"]
    row = keys.get("max_target_length")
    if row is None:
        raise ConfigError(f"{path}: the thresholds are tokens there; give --seq-length")
    pairs, lines = [], []
    for entry in schedule.replace(",", " ").split():
        threshold, colon, batch = entry.partition(":")
        try:
            tokens, rows = _in_floats(threshold), _in_floats(batch)
        except (ValueError, OverflowError):
            raise ConfigError(f'{path}: "{entry}" is no threshold:batch') from None
        if (meant := parse_count(threshold)) not in (None, tokens):
            lines.append(f"takes {threshold} for {tokens:,}, by way of floats, not {meant:,}")
        pairs.append((tokens // row, rows))
    pairs.sort(key=lambda pair: pair[0])
    places = [place for place, _ in pairs]
    if not pairs or places[0] or len({*places}) < len(places) or min(b for _, b in pairs) < 1:
        why = "thresholds must begin at 0 and rise in samples, batches be above 0"
        return [], [f"stops with an AssertionError: {why}"]
    batches, consumed, step = [], 0, 0
    for (_, batch), end in zip(pairs, [*places[1:], math.inf], strict=True):
        if consumed >= end:
            continue  # a step went past the whole of it
        batches.append((step, batch))
        if end < math.inf:
            steps = -(-(end - consumed) // batch)
            step, consumed = step + steps, consumed + steps * batch
    return batches, lines


def _ramp_of_bridge(path: Place, keys: Mapping[str, Any]) -> tuple[_Batches, list[str]]:
    ramp = keys.get("rampup_batch_size")
    if ramp is not None and "total_samples" in keys:
        return [], ["stops with an AssertionError: no rampup_batch_size beside train_samples"]
    if ramp is None and "step_batch_size_schedule" in keys:
        if "global_batch_size" not in keys:
            raise ConfigError(f"{path}: holds no global_batch_size, which Megatron-Bridge takes")
        size, why = keys["global_batch_size"], "step_batch_size_schedule is not passed on"
    else:
        size = _constant(path, keys)
        why = "megatron-core since 0.18 warns and ignores rampup_batch_size"
    lines = [f"trains with a constant batch of {size:,}: {why}"]
    return [(0, size)], [*lines, "has no other key that makes a ramp"]


def _constant(path: Place, keys: Mapping[str, Any]) -> int:
    """The batch that is left of a ramp that nothing reads."""
    if "rampup_batch_size" not in keys:
        raise ConfigError(f"{path}: holds no ramp: no rampup_batch_size, no thresholds")
    if "global_batch_size" not in keys:
        raise ConfigError(f"{path}: holds no global batch size, where the ramp ends")
    return keys["global_batch_size"]


def _as_schedule(keys: Mapping[str, Any], row: int) -> str:
    """A ramp of three numbers as thresholds in tokens."""
    (start, increment, samples), end = keys["rampup_batch_size"], keys["global_batch_size"]
    count = max(1, (end - start) // max(1, increment))
    pairs = ((-(-i * samples // count) * row, start + i * increment) for i in range(count + 1))
    return " ".join(f"{tokens}:{batch}" for tokens, batch in pairs)


def _in_floats(text: str) -> int:
    """A number with a suffix as Megatron reads it; raises ValueError."""
    text = text.strip().upper()
    power = {"K": 3, "M": 6, "B": 9, "T": 12}.get(text[-1:], 0)
    return int(float(text[: len(text) - bool(power)]) * 10**power)


TRAINERS: dict[str, Callable[[Place, int | None], Theirs]] = {
    "maxtext": _maxtext,
    "megatron": _megatron,
    "nemo": _nemo,
}
