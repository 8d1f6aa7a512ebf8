"""What another trainer's newest version does with a ramp, beside what maxramp does with it.

python benchmarks/rival_ramps.py maxtext|megatron|nemo FILE [DEVICES]

Read in the packages: MaxText 0.2.5 (utils/rampup_batch.py, common/data_loader.py), megatron-core
0.19.2 (core/num_microbatches_calculator.py, training/arguments.py and global_vars.py), and
Megatron-Bridge 0.6.2, which took NeMo's place (training/initialize.py and config.py).
"""

import bisect
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxramp.commandline import command, print_table
from maxramp.config.load import flatten
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys import base
from maxramp.keys.megatron import translate_flags
from maxramp.keys.numbers import parse_count
from maxramp.keys.peers import RENAMED
from maxramp.keys.yamlfile import read_yaml
from maxramp.rampup.notations import Threshold
from maxramp.rampup.schedule import RampupBatchManager, walk

_Batches = list[tuple[int, int]]  # (step from which on, global batch); none where a trainer stops
_Keys = dict[str, Any]


class Trainer(NamedTuple):
    """Another trainer."""

    name: str  # with its version
    read: Callable[[Place], _Keys]  # a file's ramp, in maxramp's keys
    # (keys, devices) -> the batches that it trains with, and what else there is to know
    run: Callable[[_Keys, int | None], tuple[_Batches, list[str]]]


def compare(trainer: str, file: str, devices: int | None) -> dict[str, Any]:
    """Runs a file's ramp by a trainer's arithmetic and by maxramp's.

    Returns `trainer`; `rival` and `ours`, pairs of a step and the global batch from there on;
    `lines` about the rival; `refused`, why maxramp takes the keys for wrong, or ""; `steps` of the
    run, below 1 where the file gives none.
    """
    name, read, run = TRAINERS[trainer]
    path, ours, refused = place(file), [], ""
    if "decrease_batch_size_if_needed" in path.read_text(errors="replace").replace("-", "_"):
        raise ConfigError(
            f"{file}: decrease_batch_size_if_needed changes batches by the devices; leave it out"
        )
    keys = read(path)
    try:
        rival, lines = run(keys, devices)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    try:
        stages = RampupBatchManager(keys, devices or 1).stages
        ours = [(stage.first_step, stage.global_batch_size) for stage in stages]
    except ConfigError as error:
        refused = str(error)
    steps = keys.get("steps", -1)
    if rival and 0 < steps <= rival[-1][0]:
        lines.append(
            f"steps={steps} end the run inside the ramp, which ends at step {rival[-1][0]}"
        )
    both = {"trainer": name, "rival": rival, "ours": ours}
    return both | {"lines": lines, "refused": refused, "steps": steps}


def side_by_side(comparison: Mapping[str, Any]) -> list[tuple[int, int | None, int | None]]:
    """Returns (step, the rival's batch, ours) of each step of the run where one of them changes."""
    sides, end = (comparison["rival"], comparison["ours"]), comparison["steps"]
    steps = sorted({step for side in sides for step, _ in side if end < 1 or step < end})
    return [(step, *(_batch_at(side, step) for side in sides)) for step in steps]


@command
def main(arguments: list[str]) -> int:
    trainer, file, *devices = arguments
    comparison = compare(trainer, file, int(devices[0]) if devices else None)
    rows = [
        [f"{step:,}", *("stops" if n is None else f"{n:,}" for n in sizes)]
        for step, *sizes in side_by_side(comparison)
    ]
    print_table(("from\nstep", comparison["trainer"], "maxramp"), rows)
    for line in comparison["lines"]:
        print(f"{comparison['trainer']}: {line}")
    if comparison["refused"]:
        print(f"maxramp: refuses it: {comparison['refused']}")
    elif comparison["rival"] == comparison["ours"]:
        print("maxramp: the same batches from the same steps on")
    return 0


def _batch_at(batches: _Batches, step: int) -> int | None:
    last = bisect.bisect_right(batches, step, key=lambda pair: pair[0]) - 1
    return batches[last][1] if batches else None


# --- MaxText -------------------------------------------------------------------------------------

# What the ramp asks for, with the defaults of its configs/base.yml.
_MAXTEXT = {
    "per_device_batch_size": 12.0,
    "per_device_batch_size_start": 4.0,
    "per_device_batch_size_increment": 2.0,
    "global_rampup_samples": 500,
    "gradient_accumulation_steps": 1,
    "enable_rampup_batch_size": False,
    "expansion_factor_real_data": -1.0,
    "steps": -1,
}


def _read_maxtext(path: Place) -> _Keys:
    values = read_yaml(path)
    if str(values.get("base_config", "base.yml")).rpartition("/")[2] != "base.yml":
        raise ConfigError(
            f"{path}: base_config={values['base_config']} is not read here; write what it says of "
            f"the ramp into this file: {', '.join(_MAXTEXT)}"
        )
    keys = {
        name: base.cast_value(f"{path}: {name}={values.get(name)}", values.get(name, default), name)
        for name, default in _MAXTEXT.items()
    }
    if keys.pop("expansion_factor_real_data") not in (-1, 1):
        raise ConfigError(f"{path}: a ramp with expansion_factor_real_data is not worked out here")
    return keys


def _run_maxtext(keys: _Keys, devices: int | None) -> tuple[_Batches, list[str]]:
    """Uses floats, as MaxText does."""
    final, start, increment, samples, accumulation, has_ramp, _ = keys.values()
    if not has_ramp:
        raise ConfigError(
            "holds no ramp; a file of MaxText is a config here: python -m maxramp.plan FILE"
        )
    if devices is None:
        raise ConfigError("MaxText's batches follow from the devices: give DEVICES")
    if final < 1 or devices * start < 1 or increment < 0:
        raise ConfigError("what MaxText does with batches below 1 row is not worked out here")
    rise, end = final - start, int(devices * final)
    if increment == 0:
        return [], ["stops with a ZeroDivisionError: per_device_batch_size_increment is 0"]
    if rise <= 0 or rise % increment:
        why = f"{rise:.17g} % {increment:g} is {rise % increment:.3g} in floats"
        return [], [f"stops with a ValueError: {why if rise > 0 else 'the batch does not grow'}"]
    whole, batch, more = end * accumulation, int(devices * start), int(devices * increment)
    if samples <= 0:
        why = f"global_rampup_samples={samples} turns the ramp off without a word"
        return [(0, whole)], [f"trains with a constant batch of {whole:,}: {why}"]
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

# Keys of a ramp, and what NeMo calls them.
_RAMP = (
    *("rampup_batch_size", "global_batch_size", "step_batch_size_schedule", "max_target_length"),
    *("total_samples", "steps"),
)
_NEMO = {
    **{theirs: name for theirs, name in RENAMED.items() if name in _RAMP},
    **{name: name for name in _RAMP},
    **{f"data.{name}": name for name in ("global_batch_size", "rampup_batch_size")},
    "train.step_batch_size_schedule": "step_batch_size_schedule",
    "data.seq_length": "max_target_length",
}


def _read_megatron(path: Place) -> _Keys:
    """Returns the ramp's keys of a command line."""
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        keys, _ = translate_flags(shlex.split(text, comments=True))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: cannot be read as a command line: {error}") from None
    return {name: keys[name] for name in _RAMP if name in keys}


def _read_nemo(path: Place) -> _Keys:
    keys: _Keys = {}
    for key, value in flatten(read_yaml(path).items()):
        if (name := _NEMO.get(key)) and value not in (None, "", -1, False):
            value = base.cast_value(f"{path}: {key}={value}", value, name)
            if keys.setdefault(name, value) != value:
                raise ConfigError(f"{path}: {key}={value} and {name}={keys[name]}: keep one")
    return keys


def _run_megatron(keys: _Keys, devices: int | None) -> tuple[_Batches, list[str]]:
    schedule, row = keys.get("step_batch_size_schedule"), keys.get("max_target_length")
    if schedule is None:
        size = _constant(keys)
        lines = [f"trains with a constant batch of {size:,}"]
        if "rampup_batch_size" not in keys:
            return [(0, size)], lines
        lines[0] += ": since 0.18 nothing reads --rampup-batch-size, and no warning is given"
        if row:
            lines.append(f'--step-batch-size-schedule "{_schedule_text(keys, row)}" ramps there')
        return [(0, size)], lines
    if "global_batch_size" in keys:
        why = "--step-batch-size-schedule with --global-batch-size"
        return [], [f"stops with a ValueError: {why}, which must be left out"]
    if row is None:
        raise ConfigError("the thresholds are tokens there; give --seq-length")
    pairs, lines = [], []
    for entry in schedule.replace(",", " ").split():
        threshold, _, batch = entry.partition(":")
        try:
            tokens, rows = _float_count(threshold), _float_count(batch)
        except (ValueError, OverflowError):
            raise ConfigError(f'"{entry}" is not threshold:batch') from None
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


def _run_bridge(keys: _Keys, devices: int | None) -> tuple[_Batches, list[str]]:
    has_ramp, size = "rampup_batch_size" in keys, _constant(keys)
    if has_ramp and "total_samples" in keys:
        return [], ["stops with an AssertionError: no rampup_batch_size beside train_samples"]
    line = f"trains with a constant batch of {size:,}"
    if not (has_ramp or "step_batch_size_schedule" in keys):
        return [(0, size)], [line]
    why = "megatron-core since 0.18 warns and ignores rampup_batch_size"
    why = why if has_ramp else "step_batch_size_schedule is not passed on"
    return [(0, size)], [f"{line}: {why}", "has no other key that makes a ramp"]


def _constant(keys: _Keys) -> int:
    """Returns the batch without a ramp, or of a ramp that the trainer does not read."""
    if "global_batch_size" not in keys:
        raise ConfigError("holds no global_batch_size, with which it trains or where a ramp ends")
    if keys["global_batch_size"] < 1:
        raise ConfigError(f"global_batch_size={keys['global_batch_size']} must be above 0")
    return keys["global_batch_size"]


def _schedule_text(keys: _Keys, row: int) -> str:
    (start, increment, samples), end = keys["rampup_batch_size"], keys["global_batch_size"]
    count = max(1, (end - start) // max(1, increment))
    pairs = ((-(-i * samples // count) * row, start + i * increment) for i in range(count + 1))
    return " ".join(f"{tokens}:{batch}" for tokens, batch in pairs)


def _float_count(text: str) -> int:
    """Reads a number with a suffix as Megatron does; raises ValueError."""
    text = text.strip().upper()
    power = {"K": 3, "M": 6, "B": 9, "T": 12}.get(text[-1:], 0)
    return int(float(text[: len(text) - bool(power)]) * 10**power)


TRAINERS = {
    "maxtext": Trainer("MaxText 0.2.5", _read_maxtext, _run_maxtext),
    "megatron": Trainer("megatron-core 0.19.2", _read_megatron, _run_megatron),
    "nemo": Trainer("Megatron-Bridge 0.6.2", _read_nemo, _run_bridge),
}

if __name__ == "__main__":
    sys.exit(main())
