"""YAML files and key=value -> one checked configuration, and back."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ml_collections
import yaml

from maxramp.commandline import print_note
from maxramp.config import alternatives
from maxramp.config.alternatives import Given
from maxramp.config.keys import Config
from maxramp.config.usage import answer, usage
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys import base, peers
from maxramp.keys.base import CONFIGS
from maxramp.keys.section import is_object_storage
from maxramp.keys.yamlfile import dump, parse, read_yaml
from maxramp.run.keys import PROGRAMS


def load(
    arguments: Sequence[str],
    program: str = "plan",
    doc: str = "python -m maxramp.plan CONFIG.yml [key=value ...]",
    note: Callable[[str], None] = print_note,
) -> Config:
    """Reads CONFIG.yml and key=value arguments.

    Args:
      arguments: the command line after the program's name.
      program: the module's name. One that trains refuses a config for another, says what it does
        not read, and leaves that at its default.
      doc: the module's, which --help prints.
      note: takes a line about what became of another trainer's keys; prints it by default.

    Returns:
      The configuration, checked as far as it can be without devices: `config.resolve` fills in what
      they decide.

    Raises:
      ConfigError: what is wrong, in one line.
      SystemExit: after printing what was asked for: --help, --help-keys or --version.
    """
    answer(arguments, doc)
    if not arguments or ("=" in arguments[0] and not _is_file(arguments[0])):
        raise ConfigError(f"no config file given: {usage(doc)}")
    values = ml_collections.ConfigDict(dict(base.base()), type_safe=True, convert_dict=False)
    values.lock()
    *files, command_line = read(_config_file(arguments[0]), arguments[1:], note)
    files = [given for given in files if given.values != base.base()]  # base.yml gives nothing new
    for given in files:
        _update(values, given)
    model_name = command_line.values.get("model_name", values.model_name)
    if model_name != "default":
        path = CONFIGS / "models" / f"{model_name}.yml"
        if len(model_name) > 100 or not path.is_file():
            names = sorted(p.stem for p in path.parent.glob("*.yml"))
            raise ConfigError(
                f"model_name={model_name} has no file configs/models/{model_name}.yml; "
                f"there are default, {', '.join(names)}"
            )
        model, _ = read(path, (), note)
        _update(values, model)
    _update(values, command_line)
    if program in PROGRAMS:
        if values.program not in ("", program):
            raise ConfigError(
                f"program={values.program}: this config is for maxramp.{values.program}; run that, "
                f"or give program={program}"
            )
        values.program = program
    names = {name for given in (*files, command_line) for name in given.values}
    merged = alternatives.without_demo(values.to_dict(), names)
    config = Config.of(_without_unread(merged, values.program, note))
    config.check()
    return config


def _without_unread(
    values: dict[str, Any], program: str, note: Callable[[str], None]
) -> dict[str, Any]:
    """The values with those that the program does not read at their defaults, and says so."""
    unread, defaults = Config.not_read_by(program), base.base()
    given = [name for name in defaults if name in unread and values[name] != defaults[name]]
    if given:
        shown = ", ".join(base.shortened([f"{name}={values[name]}" for name in given]))
        note(f"maxramp.{program} does not read {shown}")
    return values | {name: defaults[name] for name in given}


def _config_file(text: str) -> Place:
    """The config file of that name: here, or one that comes with the package."""
    path = place(text)
    first, _, rest = text.partition("/")
    is_ours = first == "configs" and not path.exists() and (CONFIGS / rest).is_file()
    return CONFIGS / rest if is_ours else path


def _is_file(text: str) -> bool:
    """Whether what looks like key=value is the path of a config file."""
    return is_object_storage(text) or os.path.isfile(text)


def _update(values: ml_collections.ConfigDict, given: Given) -> None:
    merged = values.to_dict()
    alternatives.choose(merged, given)
    with values.ignore_type():  # a key may be unset
        values.update(merged)


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
        Given(where, {key: base.typed(*given, key) for key, given in taken.items()})
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
            elif not peer and name not in base.base():
                self._unknown.append((given, name))
            else:
                key, value = (peer.key, peer.value) if peer else (name, value)
                if peer and value != base.unset(key):
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
        wrong = [f"{', '.join(base.shortened(given))} {why}" for why, given in self.refused.items()]
        if self._unknown:
            wrong.append(base.unknown_keys(self._unknown))
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
        if isinstance(value, dict) and value and name not in base.base():
            yield from _flat((f"{name}.{inner}", part) for inner, part in value.items())
        else:
            yield name, value


def _split(argument: str) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals or name.startswith("-"):
        raise ConfigError(f'"{argument}" is not of the form key=value (--help-keys lists them)')
    name = name.lstrip("+")  # as Hydra's users write a key that a file does not have
    if isinstance(base.base().get(peers.RENAMED.get(name, name)), str):
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
        named = values.pop("base_config", None)
        files.append((path, values))
        if named in (None, "", "none"):
            return files[::-1]
        if not isinstance(named, str):
            raise ConfigError(f"{path}: base_config={named} must be the path of a config file")
        beside = (
            place(named) if is_object_storage(named) else path.parent / os.path.expanduser(named)
        )
        named_by = path
        shipped = CONFIGS / named
        path = beside if beside.exists() or not shipped.exists() else shipped
        if not path.exists():
            raise ConfigError(f"{named_by}: base_config={named}: no such config file as {path}")


def to_yaml(config: Config) -> str:
    """The configuration as a config file that gives it again, in the order of base.yml."""
    ordered = {name: config.values[name] for name in base.base()}
    # The sizes are written out: naming their file again would let it override them.
    ordered["model_name"] = "default"
    return f"# model_name: {config.run.model_name}\n{dump(ordered)}"
