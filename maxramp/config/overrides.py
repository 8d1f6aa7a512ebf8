"""What the config files and the command line give: values for keys of base.yml."""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import yaml

from maxramp.errors import ConfigError
from maxramp.folders.place import Place, place
from maxramp.keys import base as defaults
from maxramp.keys import peers
from maxramp.keys.section import is_object_storage
from maxramp.keys.yamlfile import parse, read_yaml


@dataclasses.dataclass(frozen=True)
class Given:
    """What one config file or the command line gives.

    Attributes:
      where: the beginning of an error about it: "FILE: ", "" for the command line.
      values: by key of base.yml, each of the type of its default.
    """

    where: str
    values: dict[str, Any]


def read(path: Place, arguments: Sequence[str], note: Callable[[str], None]) -> list[Given]:
    """Reads a config file, the files that it is based on, and key=value arguments.

    Keys of other trainers (`peers`) become ours, are left out or are refused.

    Args:
      path: the config file.
      arguments: key=value; of a key that is given twice the last one counts.
      note: takes a line about keys of other trainers.

    Returns:
      The files, the base first, and the command line last.

    Raises:
      ConfigError: a file cannot be read, or holds a value of another type; or all keys that do not
        exist or that other trainers alone can use, in one line.
    """
    layers = [
        *((f"{file}: ", list(_flat(values.items()))) for file, values in _chain(path)),
        ("", list(_flat(map(_split, arguments)))),
    ]
    sorter = _Sorter(name for _, pairs in layers for name, _ in pairs)
    places = [(where, sorter.take(where, pairs)) for where, pairs in layers]
    for shown, why in _between_keys(layers):
        sorter.refused.setdefault(why, []).append(shown)
    sorter.check()
    found = [
        Given(where, {key: defaults.typed(*given, key) for key, given in taken.items()})
        for where, taken in places
    ]
    for line in sorter.notes():
        note(line)
    return found


class _Sorter:
    """Tells our keys from those of other trainers, and both from those that do not exist.

    Attributes:
      refused: the keys that other trainers alone can use, as given, by what is wrong with them.
    """

    def __init__(self, names: Iterable[str]):
        """
        Args:
          names: of all that is given, in all places.
        """
        self._left = collections.Counter(names)
        self._unknown: list[tuple[str, str]] = []  # as given, name
        self._translated: list[str] = []
        self._ignored: list[str] = []
        self.refused: dict[str, list[str]] = {}

    def take(self, where: str, pairs: list[tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        """Our keys that one place gives: key -> as given, value. Places come in their order.

        Raises:
          ConfigError: a file gives a key twice, by two names and with two values.
        """
        taken: dict[str, tuple[str, Any]] = {}
        for name, value in pairs:
            given = f"{where}{name}={_short(value)}"
            peer = peers.look_up(name, value)
            self._left[name] -= 1
            if peer and not peer.key and self._left[name]:
                continue  # overridden further up or later
            if peer and peer.refusal:
                self.refused.setdefault(f"({peer.owner}'s): {peer.refusal}", []).append(given)
            elif peer and not peer.key:
                self._ignored.append(name)
            elif not peer and not defaults.is_key(name):
                self._unknown.append((given, name))
            else:
                key, value = (peer.key, peer.value) if peer else (name, value)
                if peer and value != defaults.unset(key):
                    self._translated.append(f"{given}: taken as {key}={value}")
                if where and key in taken and taken[key][1] != value:
                    raise ConfigError(
                        f"{taken[key][0]} and {name}={value} both give {key}; keep one of them"
                    )
                taken[key] = given, value
        return taken

    def check(self) -> None:
        """Refuses what cannot be taken.

        Raises:
          ConfigError: all of it, in one line.
        """
        wrong = [
            f"{', '.join(defaults.shortened(given))} {why}" for why, given in self.refused.items()
        ]
        if self._unknown:
            wrong.append(defaults.unknown_keys(self._unknown))
        if wrong:
            raise ConfigError(". ".join(wrong))

    def notes(self) -> list[str]:
        """What became of the keys of other trainers, in lines."""
        if not self._ignored:
            return self._translated
        ignored = ", ".join(self._ignored)
        return [*self._translated, f"ignored, as nothing here depends on them: {ignored}"]


def _between_keys(layers: list[tuple[str, list[tuple[str, Any]]]]) -> Iterator[tuple[str, str]]:
    """(as given, why) of what several keys of another trainer refuse together."""
    last: dict[str, Any] = {}
    left_open: set[str] = set()
    for _, pairs in layers:
        last |= dict(pairs)
        if "model.num_attention_heads" in dict(pairs):
            left_open |= peers.DERIVED.keys()
        left_open -= {name for name in peers.DERIVED if peers.RENAMED[name] in dict(pairs)}
    for name in peers.DERIVED:
        if name in left_open and name not in last:
            yield (
                name,
                f"(NeMo's): is not given, and is {peers.DERIVED[name]} there; give that number",
            )
    if last.get("normalize_embedding_logits") and last.get("logits_via_embedding"):
        yield (
            "normalize_embedding_logits=True with logits_via_embedding=True",
            "(MaxText's): not supported: logits are the product alone; use False",
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flat(pairs: Any) -> Iterator[tuple[str, Any]]:
    """NeMo nests its keys: trainer: {max_steps: 100} is trainer.max_steps=100."""
    for name, value in pairs:
        if isinstance(value, dict) and value and not defaults.is_key(name):
            yield from _flat((f"{name}.{inner}", part) for inner, part in value.items())
        else:
            yield name, value


def _split(argument: str) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals or name.startswith("-"):
        raise ConfigError(f'"{argument}" is not of the form key=value (--help-keys lists them)')
    name = name.lstrip("+")  # as Hydra's users write a key that a file does not have
    if defaults.is_text(peers.RENAMED.get(name, name)):
        return name, text  # as written: run_name=007 or 1e5 is a name
    try:
        return name, parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"{argument}: the value is not valid YAML; quote it?") from None


def _chain(path: Place) -> list[tuple[Place, dict[str, Any]]]:
    """The files of a base_config chain, the base first. Paths are relative to the naming file."""
    files: list[tuple[Place, dict[str, Any]]] = []
    seen = []
    while True:
        if path.resolve() in seen:
            raise ConfigError(
                f"{files[-1][0]}: base_config={path} closes a circle; name another file"
            )
        seen.append(path.resolve())
        values = read_yaml(path)
        base = values.pop("base_config", None)
        files.append((path, values))
        if base in (None, "", "none"):
            return files[::-1]
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base_config={base} must be the path of a config file")
        beside = place(base) if is_object_storage(base) else path.parent / os.path.expanduser(base)
        named_by = path
        shipped = defaults.CONFIGS / base
        path = beside if beside.exists() or not shipped.exists() else shipped
        if not path.exists():
            raise ConfigError(f"{named_by}: base_config={base}: no such config file as {path}")
