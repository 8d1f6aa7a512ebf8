"""Keys that belong to a choice: they are read only where other keys have some value.

A table maps a condition to the keys that are read only where it holds, and an error shows the
condition as the table has it:

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

Choices = Mapping[str, tuple[str, ...]]  # condition -> keys; all conditions of a key have to hold
Values = Mapping[str, Any]  # of all keys
_WITHOUT = "without "


def refuse_unread(choices: Choices, given: Collection[str], phases: Sequence[Values]) -> None:
    """A value that is base.yml's default does not count as given. `phases` are the values of all
    keys, first and then with what each later phase changes: a choice may be made in any.
    """
    values, default = phases[0], base()
    for condition, names in choices.items():
        for name in names:
            if name not in given or values[name] == default[name]:
                continue
            if any(is_made(condition, later) for later in phases):
                continue
            raise ConfigError(f"{name}={values[name]} {_explain(condition, values, name)}")


def find_unmade(choices: Choices, given: Collection[str], values: Values) -> dict[str, Any]:
    """The keys of all choices that some given keys have unmade, with their defaults."""
    return {
        name: base()[name]
        for condition, names in choices.items()
        if any(key in given for key, _ in _parts(condition)) and not is_made(condition, values)
        for name in names
    }


def is_made(condition: str, values: Values) -> bool:
    found = any(_holds(key, wanted, values[key]) for key, wanted in _parts(condition))
    return found != condition.startswith(_WITHOUT)


def _parts(condition: str) -> Iterator[tuple[str, str]]:
    for part in condition.removeprefix(_WITHOUT).split(" or "):
        key, _, wanted = part.partition("=")
        yield key, wanted


def _holds(key: str, wanted: str, value: Any) -> bool:
    if wanted:
        return any(fnmatch.fnmatchcase(str(value), pattern) for pattern in wanted.split("|"))
    return bool(value) and value != unset(key)


def _explain(condition: str, values: Values, name: str) -> str:
    if condition.startswith(_WITHOUT):
        key = next(key for key, wanted in _parts(condition) if _holds(key, wanted, values[key]))
        return f"is not read with {key}={values[key]}; leave one of them out"
    key, _ = next(_parts(condition))
    made = condition.replace("|", " or ")
    here = values[key] if values[key] != "" else '""'
    give = f"{key} above {here}" if made == key and type(here) is int else made
    return f"is read only with {made}, and {key}={here} here; give {give}, or leave {name} out"
