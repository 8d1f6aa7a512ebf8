"""Keys that say the same thing in several ways: giving one takes the place of the others."""

import dataclasses
from typing import Any

from maxramp.config.overrides import Given
from maxramp.errors import ConfigError
from maxramp.keys import base


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
_SIZES_OF_A_PASS = tuple(Way((name,)) for name in ("per_device_batch_size", "micro_batch_size"))


def choose(values: dict[str, Any], given: Given) -> None:
    """Lets the ways that a file or command line gives take the place of those below it.

    Keys that choose another way are unset, and keys that only it uses go back to their defaults.

    Args:
      values: of all keys, those given included; changed in place.
      given: what the file or command line gives.

    Raises:
      ConfigError: it gives the same thing in two ways.
    """
    for ways in (_NOTATIONS, _LENGTHS, _SIZES_OF_A_PASS):
        chosen = [
            (way, name) for way in ways for name in _given(way, values) if name in given.values
        ]
        if not chosen:
            continue
        if any(way is not chosen[0][0] for way, _ in chosen):
            shown = " and ".join(f"{name}={values[name]}" for name in _first_of_each(chosen))
            raise ConfigError(
                f"{given.where}{shown} say the same thing in two ways; keep one of them"
            )
        for way in ways:
            if way is chosen[0][0]:
                continue
            values |= {name: base.unset(name) for name in way.chosen_by}
            left = [name for name in way.alone if name not in given.values]
            values |= {name: base.base()[name] for name in left}


def check_notation(values: dict[str, Any]) -> None:
    """Refuses keys that only another notation uses than the one that is given.

    Raises:
      ConfigError: there is one.
    """
    active = [(way, name) for way in _NOTATIONS for name in _given(way, values)]
    for way in _NOTATIONS if active else ():
        for name in way.alone:
            if active[0][0] is not way and values[name] != base.base()[name]:
                chooses = way.chosen_by[0]
                on = "=True" if base.unset(chooses) is False else ""
                raise ConfigError(
                    f"{name}={values[name]} goes with {chooses}, but the batch is given by "
                    f"{active[0][1]}={values[active[0][1]]}; leave {name} out, or give "
                    f"{chooses}{on} in its place"
                )


def _given(way: Way, values: dict[str, Any]) -> list[str]:
    return [name for name in way.chosen_by if values[name] != base.unset(name)]


def _first_of_each(chosen: list[tuple[Way, str]]) -> list[str]:
    """The last key that chooses each way."""
    return list({id(way): name for way, name in chosen}.values())
