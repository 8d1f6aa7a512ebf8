"""The base of the configuration's sections: one field a key, with its bound beside it.

A section is a frozen dataclass, declared in the room that reads it; `config.keys` puts all of them
together. Every field has its line, its default and its reason in configs/base.yml, and none here.
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
    """What a value has to be, and how an error says so after "KEY=VALUE"; KEY in it is the key."""
    return dataclasses.field(metadata={"holds": holds, "text": text, "refused": refused})


def one_of(*choices: str, **refused: str) -> Any:
    """For others that users know, `refused` says why not."""
    listed = ", ".join(choice or '""' for choice in choices)
    return limit(lambda value: value in choices, f"is not one of {listed}", refused)


def some_of(*choices: str, fewest: int = 0) -> Any:
    return limit(
        lambda value: len(value) >= fewest and all(text in choices for text in value),
        f"must be some of {', '.join(choices)}",
    )


def minimum(bound: int) -> Any:
    """A number from `bound` up, or unset where the key may be."""
    return limit(lambda value: value is None or value >= bound, f"must be {bound} or more")


def positive_or_open(meaning: str = "see --help-keys") -> Any:
    """A number from 1 up, or -1, which leaves it open."""
    return limit(lambda value: value >= 1 or value == -1, f"must be 1 or more, or -1 ({meaning})")


# Numbers within bounds: each makes the field of a key.
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
    """Whether runs can be kept there. To a storage . and .. are names like any other, and some of
    its clients resolve them: so none.
    """
    return re.match(r"(gs|s3)://[^/]", path) is not None and not {".", ".."} & {*path.split("/")}


def is_address(path: str) -> bool:
    """Whether a path is a storage's address: gs://bucket, or gs:/bucket as pathlib has it."""
    return re.match(r"\w[\w.+-]+:/", path) is not None


def form(pattern: str, text: str) -> Any:
    """A text of this form, or a list of such texts; each may be empty."""

    def holds(value: Any) -> bool:
        texts = [value] if isinstance(value, str) else value
        return all(isinstance(t, str) and re.fullmatch(f"({pattern})?", t) for t in texts)

    return limit(holds, text)


# A mapping of names, which come into the names of metrics, to texts.
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


# Whether a relation between keys is broken, and what the error says.
Relations = Iterator[tuple[Any, str]]


def refuse(relations: Relations) -> None:
    for broken, text in relations:
        if broken:
            raise ConfigError(text)


class Keys:
    """A section of the configuration. Subclasses are frozen dataclasses."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        of_section = {field: values[field.name] for field in dataclasses.fields(cls)}
        refuse(
            (True, f"{field.name}={value} {text.replace('KEY', field.name)}")
            for field, value in of_section.items()
            if (bound := field.metadata) and not bound["holds"](value)
            for text in [bound["refused"].get(str(value), bound["text"])]
        )
        return cls(**{field.name: value for field, value in of_section.items()})
