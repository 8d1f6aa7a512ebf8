"""Phases: values that keys take during a run, each from a number of samples or tokens on.

    phases:
      0: {global_batch_tokens: 4194304, row_length: 4096}
      252M: {global_batch_tokens: 8388608}
      2.87T: {global_batch_tokens: 16777216, row_length: 8192}

A key keeps its value until a later phase gives it another. Phase 0 is the keys themselves: what it
gives is taken as if it stood beside `phases`. Imports no JAX.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.keys.numbers import parse_count
from maxramp.parallel.axes import TABLE
from maxramp.stage import ROPE_KEYS

# What a phase may change: a step is made anew for each, and nothing that the run keeps depends on
# them.
MESH_KEYS = tuple(f"ici_{axis.key}_parallelism" for axis in TABLE if "layers" not in axis.divides)
MIXTURE = "grain_train_files"
WARMUP = "warmup_steps_fraction"
KEYS = (
    *("global_batch_size", "global_batch_tokens", "per_device_batch_size", "micro_batch_size"),
    *("gradient_accumulation_steps", "row_length", "remat_policy", "learning_rate", WARMUP),
    *(*MESH_KEYS, *ROPE_KEYS, MIXTURE, "mtp_loss_scaling_factor"),
)
# Why it cannot change others that ask for it.
_REFUSED = {
    "ici_pipeline_parallelism": "other stages hold other layers, and the state keeps its layers in "
    "the order of the stages",
    "max_target_length": "samples are rows of that length; give the longest, and row_length to the "
    "phases before",
    **dict.fromkeys(
        (f"dcn_{axis.key}_parallelism" for axis in TABLE),
        "the state moves to another mesh inside its slices",
    ),
}
_NAME = "phases"
# Of ways to say one thing, the one that a phase gives replaces the other.
_INSTEAD = {
    "global_batch_size": "global_batch_tokens",
    "global_batch_tokens": "global_batch_size",
    "per_device_batch_size": "micro_batch_size",
    "micro_batch_size": "per_device_batch_size",
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """Keys that hold from a sample on."""

    name: str  # the threshold as written
    first_sample: int
    changes: Mapping[str, Any]  # the values that this phase gives
    # those of this phase and of the phases before it, without a warm-up anew and phase 0's
    values: Mapping[str, Any]
    keys: Any  # the BatchKeys with these values

    def __str__(self) -> str:
        return f"{_NAME}.{self.name}"

    @contextlib.contextmanager
    def name_errors(self) -> Iterator[None]:
        """Names the phase in an error raised inside; phase 0 is the keys themselves."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self}: {error}" if self.first_sample else str(error)) from None


def flat(pairs: Iterable[tuple[str, Any]], before: Any) -> Iterator[tuple[str, Any]]:
    """Yields keys and values with all phases in one mapping, and what phase 0 gives beside it.
    Of `pairs`, `phases` replaces the phases `before`, and `phases.252M.KEY` changes one of them.
    Raises a ConfigError for a malformed phase."""
    phases, is_changed = before, False
    for name, value in pairs:
        head, _, rest = name.partition(".")
        if head != _NAME:
            yield name, value
            continue
        is_changed = True
        if not rest:
            phases = base.cast_value(base.show_key(name, value), value, _NAME)
            continue
        threshold, _, key = rest.rpartition(".")
        if not threshold or key[:1].isdigit():  # phases.1.5B={...}
            others = {t: keys for t, keys in phases.items() if _count(t) != _count(rest)}
            phases = others | {rest: value}
            continue
        known = next((t for t in phases if _count(t) == _count(threshold)), threshold)
        own = phases.get(known, {})  # the loop below refuses all but mappings
        phases = phases | {known: {**own, key: value} if isinstance(own, Mapping) else own}
    for threshold, keys in phases.items() if is_changed else ():
        if not isinstance(keys, Mapping):
            raise ConfigError(
                f"{_NAME}.{threshold}={keys} must be a mapping of keys, such as "
                "{global_batch_size: 512}"
            )
        if _count(threshold) == 0:
            for key, value in keys.items():
                _check_key(threshold, key, value)
                yield key, value
    if is_changed:
        yield _NAME, {t: dict(keys) for t, keys in phases.items() if _count(t) != 0}


def _count(threshold: str) -> int:
    """Returns the tokens or samples of a threshold, such as 252M; a ConfigError for another
    text."""
    count = parse_count(threshold.replace("_", ""))
    if count is None:
        raise ConfigError(
            f"{_NAME}.{threshold}: {threshold} is not a whole number of tokens or samples, such as "
            "252M (suffixes K, M, B, T)"
        )
    return count


def _check_key(threshold: str, key: str, value: Any) -> None:
    if key not in KEYS:
        why = "no phase can change it" if key in base.base() else "is not a known key"
        why = f"{why}, as {_REFUSED[key]}" if key in _REFUSED else why
        raise ConfigError(
            f"{_NAME}.{threshold}.{key}={value}: {why}; a phase takes {', '.join(KEYS)}"
        )


def make_phases(keys: Any) -> tuple[Phase, ...]:
    """Makes the phases of `BatchKeys`, the first from the keys, the others from `phases` as `flat`
    leaves them; a ConfigError if they conflict, or one has a key or value that no phase takes."""
    values = {**vars(keys), _NAME: {}}
    phases = [Phase("0", 0, {}, {}, dataclasses.replace(keys, phases={}))]
    for threshold in sorted(keys.phases, key=_count):
        last, sample = phases[-1], _count(threshold)
        unit = "samples"
        if keys.phases_unit == "tokens":
            sample //= keys.max_target_length
            unit = f"samples of {keys.max_target_length} tokens"
        if sample <= last.first_sample:
            raise ConfigError(
                f"{_NAME}.{threshold} begins at {sample} {unit}, not after {last}, which begins at "
                f"{last.first_sample}; thresholds must increase"
            )
        changes = {}
        for key, value in keys.phases[threshold].items():
            _check_key(threshold, key, value)
            shown = f"{_NAME}.{threshold}.{key}={value}"
            changes[key] = base.cast_value(shown, value, key)
            if changes[key] is None:
                raise ConfigError(f"{shown} must be a number; leave it out to keep what it was")
        replaced = {_INSTEAD[key]: base.unset(_INSTEAD[key]) for key in changes if key in _INSTEAD}
        both = [f"{key}={value}" for key, value in changes.items() if key in replaced]
        if both:
            raise ConfigError(
                f"{_NAME}.{threshold}: {' and '.join(both)} say the same thing in two ways; keep "
                "one of them"
            )
        changed = {**last.values, **replaced, **changes}
        try:
            own = type(keys).from_values({**values, **changed})
        except ConfigError as error:
            raise ConfigError(f"{_NAME}.{threshold}: {error}") from None
        if changed.pop(WARMUP, None) is not None:  # of this phase, and no part of the run's curve
            own = dataclasses.replace(own, **{WARMUP: values[WARMUP]})
        phases.append(Phase(threshold, sample, changes, changed, own))
    return tuple(phases)
