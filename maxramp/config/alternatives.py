"""Keys that say the same thing in several ways: giving one takes the place of the others."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Way:
    """One of several ways to say something.

    Attributes:
      chosen_by: the keys that choose it.
      alone: the keys that only it uses.
    """

    chosen_by: tuple[str, ...]
    alone: tuple[str, ...] = ()


_MAXTEXT = Way(
    chosen_by=("enable_rampup_batch_size",),
    alone=(
        "per_device_batch_size_start",
        "per_device_batch_size_increment",
        "global_rampup_samples",
        "gradient_accumulation_steps",
    ),
)
_NEMO = Way(chosen_by=("rampup_batch_size", "global_batch_size"))
_MEGATRON = Way(chosen_by=("step_batch_size_schedule",), alone=("step_batch_size_unit",))
_POLICY = Way(
    chosen_by=("rampup_policy",),
    alone=(
        "rampup_ladder",
        "rampup_rounding",
        "rampup_noise_factor",
        "rampup_decision_samples",
        "rampup_earliest",
        "rampup_latest",
    ),
)

_NOTATIONS = (_MAXTEXT, _NEMO, _MEGATRON, _POLICY)
_LENGTHS = tuple(Way((name,)) for name in ("steps", "total_samples", "total_tokens"))
_BEGINNINGS = (Way(("load_parameters_path",)), Way(("load_full_state_path",)))
_SIZES_OF_A_PASS = tuple(Way((name,)) for name in ("per_device_batch_size", "micro_batch_size"))


def choose(values: dict[str, Any], given: Given) -> None:
    """Takes what a file or command line gives, in the place of other ways to say the same.

    Keys that choose another way are unset, and keys that only it uses go back to their defaults.

    Args:
      values: of all keys, before; changed in place.
      given: what the file or command line gives.

    Raises:
      ConfigError: it gives the same thing in two ways.
    """
    values |= given.values
    for ways in (_NOTATIONS, _LENGTHS, _SIZES_OF_A_PASS, _BEGINNINGS):
        chosen = [
            (way, name) for way in ways for name in _given(way, values) if name in given.values
        ]
        if not chosen:
            continue
        if any(way is not chosen[0][0] for way, _ in chosen):
            names = dict(chosen).values()  # one of each way
            shown = " and ".join(f"{name}={values[name]}" for name in names)
            raise ConfigError(
                f"{given.where}{shown} say the same thing in two ways; keep one of them"
            )
        for way in ways:
            if way is chosen[0][0]:
                continue
            values |= {k: v for k, v in _not_used(way).items() if k not in given.values}


def without_demo(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Makes a batch constant that is given without a ramp: base.yml's ramp is the demo's alone.

    Args:
      values: of all keys.
      given: the keys that files and the command line give beside base.yml.
    """
    ramp = {*_MAXTEXT.chosen_by, *_MAXTEXT.alone} - {"gradient_accumulation_steps"}
    if "per_device_batch_size" not in given or ramp & given:
        return values
    return values | {name: base.unset(name) for name in _MAXTEXT.chosen_by}


def none_chosen() -> dict[str, Any]:
    """The keys that give a batch and the length of a run, where none of them does."""
    return {k: v for way in (*_NOTATIONS, *_LENGTHS) for k, v in _not_used(way).items()}


def of_one_notation() -> list[str]:
    """The keys that only one notation of a ramp uses."""
    return [name for way in _NOTATIONS for name in way.alone]


def check_notation(values: dict[str, Any]) -> None:
    """Refuses keys that only another notation uses than the one that is given.

    Raises:
      ConfigError: there is one.
    """
    chosen = [(way, name) for way in _NOTATIONS for name in _given(way, values)]
    if not chosen:
        return
    used, given_by = chosen[0]
    for way in _NOTATIONS:
        for name in way.alone:
            if way is not used and values[name] != base.base()[name]:
                chooses = way.chosen_by[0]
                on = "=True" if base.unset(chooses) is False else ""
                raise ConfigError(
                    f"{name}={values[name]} goes with {chooses}, but the batch is given by "
                    f"{given_by}={values[given_by]}; leave {name} out, or give "
                    f"{chooses}{on} in its place"
                )


def _given(way: Way, values: dict[str, Any]) -> list[str]:
    return [name for name in way.chosen_by if values[name] != base.unset(name)]


def _not_used(way: Way) -> dict[str, Any]:
    """The keys of a way where it is not the one that is used."""
    defaults = base.base()
    unset = {name: base.unset(name) for name in way.chosen_by}
    return unset | {name: defaults[name] for name in way.alone}
