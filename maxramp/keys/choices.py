"""Keys that belong to a choice: they are read only if other keys have certain values.

A table maps a condition to the keys that are read only if it holds. Errors show the condition as
the table has it:

    lora_rank                           the key is set
    opt_type=adamw|muon                 it has one of these values, in which * is any text
    use_sft=True or use_dpo=True        one of several holds
    without rampup_policy or phases     none of them does
"""

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys.base import base, unset

Choices = Mapping[str, tuple[str, ...]]  # condition -> keys; all conditions of a key must hold
Values = Mapping[str, Any]  # of all keys
_WITHOUT = "without "


def refuse_unread(choices: Choices, names: Collection[str], phases: Sequence[Values]) -> None:
    """Raises a ConfigError for the first of the keys `names` that differs from base.yml's default
    and that nothing reads in any phase. `phases`, at least one, are the values of all keys from
    each phase on; messages show the first's.
    """
    values, default = phases[0], base()
    for condition, keys in choices.items():
        for name in keys:
            is_set = name in names and values[name] != default[name]
            if is_set and not any(is_made(condition, phase) for phase in phases):
                raise ConfigError(f"{name}={values[name]} {_explain(condition, values, name)}")


def find_unmade(choices: Choices, changed: Collection[str], values: Values) -> dict[str, Any]:
    """Returns the defaults of keys that nothing reads any more since the keys `changed` changed;
    `values` are those of all keys after the change."""
    return {
        name: base()[name]
        for condition, names in choices.items()
        if any(key in changed for key, _ in _parts(condition)) and not is_made(condition, values)
        for name in names
    }


def is_made(condition: str, values: Values) -> bool:
    """Tells whether a condition holds for the values; a KeyError if they lack one of its keys."""
    holds = any(_holds(key, wanted, values[key]) for key, wanted in _parts(condition))
    return holds != condition.startswith(_WITHOUT)


def _parts(condition: str) -> Iterator[tuple[str, str]]:
    for part in condition.removeprefix(_WITHOUT).split(" or "):
        key, _, wanted = part.partition("=")
        yield key, wanted


def _holds(key: str, wanted: str, value: Any) -> bool:
    if wanted:
        return any(fnmatch.fnmatchcase(str(value), pattern) for pattern in wanted.split("|"))
    return bool(value) and value != unset(key)


def _explain(condition: str, values: Values, name: str) -> str:
    """Says why nothing reads the key `name`, whose `condition` does not hold."""
    if condition.startswith(_WITHOUT):
        key = next(key for key, wanted in _parts(condition) if _holds(key, wanted, values[key]))
        return f"is not read with {key}={values[key]}; leave one of them out"
    key, _ = next(_parts(condition))
    choice = condition.replace("|", " or ")
    current = values[key] if values[key] != "" else '""'
    give = f"{key} above {current}" if choice == key and type(current) is int else choice
    return f"is read only with {choice}, and {key}={current} here; give {give}, or leave {name} out"
