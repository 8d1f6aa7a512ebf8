"""The base class of the configuration's sections: a field for each key, with its bound.

A section is a frozen dataclass in the folder that reads it; `config.keys` joins them all. The
default and the meaning of a key stand only in configs/base.yml.
"""

import dataclasses
import datetime
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from maxramp.errors import ConfigError


def limit(
    holds: Callable[[Any], bool], text: str, refused: Mapping[str, str] = types.MappingProxyType({})
) -> Any:
    """Makes a field with a bound; an error is "KEY=VALUE" and `text`, in which KEY is the key.
    `holds` gets values of the key's type; `refused` has other texts for some values, by str(value).
    """
    return dataclasses.field(metadata={"holds": holds, "text": text, "refused": refused})


def one_of(*choices: str, **refused: str) -> Any:
    """Makes a field with these values; `refused` explains others that users may know."""
    listed = ", ".join(choice or '""' for choice in choices)
    return limit(lambda value: value in choices, f"is not one of {listed}", refused)


def some_of(*choices: str, fewest: int = 0) -> Any:
    return limit(
        lambda value: len(value) >= fewest and all(text in choices for text in value),
        f"must be some of {', '.join(choices)}",
    )


def minimum(bound: int) -> Any:
    """Makes a field for numbers from `bound` up, or unset if the key may be."""
    return limit(lambda value: value is None or value >= bound, f"must be {bound} or more")


def positive_or_open(meaning: str = "see --help-keys") -> Any:
    """Makes a field for numbers from 1 up, or -1, which leaves it open."""
    return limit(lambda value: value >= 1 or value == -1, f"must be 1 or more, or -1 ({meaning})")


# Each makes a field for numbers within bounds.
above_zero = functools.partial(limit, lambda value: value is None or value > 0, "must be above 0")
above_zero_or_open = functools.partial(
    limit, lambda value: value > 0 or value == -1, "must be above 0, or -1 (see --help-keys)"
)
fraction = functools.partial(limit, lambda value: 0 <= value <= 1, "must lie between 0 and 1")
share = functools.partial(limit, lambda value: 0 < value <= 1, "must lie above 0 and be at most 1")
below_one = functools.partial(limit, lambda value: 0 <= value < 1, "must be at least 0 and below 1")


def _is_day(value: str) -> bool:
    try:
        return datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


day = functools.partial(limit, _is_day, "must be a day, such as 2026-01-31")
path_or_storage = functools.partial(
    limit,
    lambda value: is_object_storage(value) or not is_address(value),
    "must be a path, or an address such as gs://bucket/folder or s3://bucket/folder, with no part "
    ". or ..",
)


def is_object_storage(path: str) -> bool:
    """Tells whether an address can hold runs. It must not contain . or .., which are plain names to
    a storage but not to all of its clients.
    """
    return re.match(r"(gs|s3)://[^/]", path) is not None and not {".", ".."} & {*path.split("/")}


def is_address(path: str) -> bool:
    """Tells whether a path is a storage's address: gs://bucket, or pathlib's gs:/bucket."""
    return re.match(r"\w[\w.+-]+:/", path) is not None


def form(pattern: str, text: str) -> Any:
    """Makes a field for a text of this form, or a list of such texts; each may be empty."""

    def holds(value: Any) -> bool:
        texts = [value] if isinstance(value, str) else value
        return all(isinstance(t, str) and re.fullmatch(f"({pattern})?", t) for t in texts)

    return limit(holds, text)


# Makes a field for a mapping of names, which become parts of metrics' names, to texts.
named_texts = functools.partial(
    limit,
    lambda value: all(
        isinstance(text, str) and text and re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII)
        for name, text in value.items()
    ),
    "must give names of letters, digits, _, . and - a text each, such as {code: FILES}",
)


def uint32(least: int = 0) -> Any:
    text = f"must be {least} or more and below 2^32 = {2**32}"
    return limit(lambda value: least <= value < 2**32, text)


# Whether a relation between keys is broken, and the error. `refuse` raises the first: later ones
# may rely on those before.
Relations = Iterator[tuple[Any, str]]


def refuse(relations: Relations) -> None:
    for broken, text in relations:
        if broken:
            raise ConfigError(text)


class Keys:
    """A section of the configuration. Subclasses are frozen dataclasses."""

    @classmethod
    @functools.cache
    def _bounds(cls) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        return tuple((field.name, field.metadata) for field in dataclasses.fields(cls))

    @classmethod
    @functools.cache
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Makes the section of the values of all keys, which have their types (`cast_value`);
        refuses those out of bounds. Keys of other sections may be there too; a KeyError if one of
        its own is missing."""
        for name, bound in cls._bounds():
            if bound and not bound["holds"](values[name]):
                text = bound["refused"].get(str(values[name]), bound["text"])
                raise ConfigError(f"{name}={values[name]} {text.replace('KEY', name)}")
        return cls(**{name: values[name] for name in cls.names()})
