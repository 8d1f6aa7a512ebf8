"""Keys that say the same thing in several ways: giving one takes the place of the others."""

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys import base


@dataclasses.dataclass(frozen=True)
class Given:
    """What one config file or the command line gives.

    Attributes:
      where: the beginning of an error about it: "FILE: ", "" for the command line.
      values: by key of base.yml, each of the type of its default.
    """

    where: str
    values: dict[str, Any]


# Ways to say something: the keys that choose one -> the keys that only it uses.
_MAXTEXT = ("enable_rampup_batch_size",)
_NOTATIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    _MAXTEXT: (
        "per_device_batch_size_start",
        "per_device_batch_size_increment",
        "global_rampup_samples",
        "gradient_accumulation_steps",
    ),
    ("rampup_batch_size", "global_batch_size"): (),  # NeMo's
    ("step_batch_size_schedule",): ("step_batch_size_unit",),  # Megatron's
    ("rampup_policy",): (
        "rampup_ladder",
        "rampup_rounding",
        "rampup_noise_factor",
        "rampup_decision_samples",
        "rampup_earliest",
        "rampup_latest",
    ),
}
_LENGTHS = {(name,): () for name in ("steps", "total_samples", "total_tokens")}
_SIZES_OF_A_PASS = {(name,): () for name in ("per_device_batch_size", "micro_batch_size")}
_BEGINNINGS = {(name,): () for name in ("load_parameters_path", "load_full_state_path")}


def choose(values: MutableMapping[str, Any], given: Given) -> None:
    """Takes what a file or command line gives, in the place of other ways to say the same.

    Keys that choose another way are unset, and keys that only it uses go back to their defaults.

    Args:
      values: of all keys, before; changed in place.
      given: what the file or command line gives.

    Raises:
      ConfigError: it gives the same thing in two ways.
    """
    values.update(given.values)
    for ways in (_NOTATIONS, _LENGTHS, _SIZES_OF_A_PASS, _BEGINNINGS):
        chosen = {
            way: f"{name}={values[name]}"
            for way, name in _used(ways, values)
            if name in given.values
        }
        if len(chosen) > 1:
            raise ConfigError(
                f"{given.where}{' and '.join(chosen.values())} say the same thing in two ways; "
                "keep one of them"
            )
        if chosen:
            others = _not_used({way: ways[way] for way in ways if way not in chosen})
            values.update({k: v for k, v in others.items() if k not in given.values})


def without_demo(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Makes a batch constant that is given without a ramp: base.yml's ramp is the demo's alone.

    Args:
      values: of all keys.
      given: the keys that files and the command line give beside base.yml.
    """
    ramp = {*_MAXTEXT, *_NOTATIONS[_MAXTEXT]} - {"gradient_accumulation_steps"}
    if "per_device_batch_size" not in given or ramp & given:
        return values
    return values | _not_used({_MAXTEXT: ()})


def none_chosen() -> dict[str, Any]:
    """The keys that give a batch and the length of a run, where none of them does."""
    return _not_used(_NOTATIONS | _LENGTHS)


def of_one_notation() -> dict[str, Any]:
    """The keys that only one notation of a ramp uses, with their defaults."""
    return {name: base.base()[name] for alone in _NOTATIONS.values() for name in alone}


def check_notation(values: Mapping[str, Any]) -> None:
    """Refuses keys that only another notation uses than the one that is given.

    Raises:
      ConfigError: there is one.
    """
    for used, given_by in _used(_NOTATIONS, values)[:1]:
        for way, alone in _NOTATIONS.items():
            for name in alone:
                if way != used and values[name] != base.base()[name]:
                    on = "=True" if base.unset(way[0]) is False else ""
                    raise ConfigError(
                        f"{name}={values[name]} goes with {way[0]}, but the batch is given by "
                        f"{given_by}={values[given_by]}; leave {name} out, or give {way[0]}{on} in "
                        "its place"
                    )


def _used(
    ways: Mapping[tuple[str, ...], Any], values: Mapping[str, Any]
) -> list[tuple[tuple[str, ...], str]]:
    """(the way, the key) of all keys that choose one."""
    return [(way, name) for way in ways for name in way if values[name] != base.unset(name)]


def _not_used(ways: Mapping[tuple[str, ...], tuple[str, ...]]) -> dict[str, Any]:
    """The keys of ways where none of them is used."""
    return {name: base.unset(name) for way in ways for name in way} | {
        name: base.base()[name] for alone in ways.values() for name in alone
    }
