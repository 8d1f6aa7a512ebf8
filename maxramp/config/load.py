"""YAML files and key=value -> one checked configuration, and back."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_collections
import yaml

import maxramp
from maxramp.commandline import print_note
from maxramp.config import alternatives
from maxramp.config.alternatives import Given
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys import base, peers
from maxramp.keys.base import CONFIGS
from maxramp.keys.section import is_object_storage
from maxramp.keys.yamlfile import dump, parse, read_yaml
from maxramp.run.keys import PROGRAMS

_OF_ALL = """
  --help           show this
  --help-keys      list every key with its default, its unit and what it is for (docs/keys.md)
  --version        show the version

A value is YAML: steps=100, learning_rate=3e-4, rampup_batch_size=[16,16,800], packing=false."""


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
    if not arguments or ("=" in arguments[0] and not os.path.isfile(arguments[0])):
        usage = next(line for line in doc.splitlines() if line.startswith("python -m"))
        raise ConfigError(f"no config file given: {usage}")
    *files, command_line = read(_config_file(arguments[0]), arguments[1:], note)
    names = {name for given in (*files, command_line) for name in given.values}
    chosen = [g.values["model_name"] for g in (*files, command_line) if "model_name" in g.values]
    if chosen and chosen[-1] != "default":
        path = CONFIGS / "models" / f"{chosen[-1]}.yml"
        if len(chosen[-1]) > 100 or not path.is_file():
            there = ", ".join(sorted(p.stem for p in path.parent.glob("*.yml")))
            raise ConfigError(
                f"model_name={chosen[-1]} has no file configs/models/{chosen[-1]}.yml; "
                f"there are default, {there}"
            )
        files += read(path, (), note)[:-1]
    values = ml_collections.ConfigDict(dict(base.base()), type_safe=False, convert_dict=False)
    for given in (*files, command_line):
        alternatives.choose(values, given)
    if program in PROGRAMS:
        if values.program not in ("", program):
            raise ConfigError(
                f"program={values.program}: this config is for maxramp.{values.program}; run that, "
                f"or give program={program}"
            )
        values.program = program
    merged = alternatives.without_demo(values.to_dict(), names)
    alternatives.check_notation(merged)
    unread = Config.unread_by(values.program, merged)
    if unread:
        shown = ", ".join(base.shortened([f"{name}={merged[name]}" for name in unread]))
        note(f"maxramp.{values.program} does not read {shown}")
    config = Config.of(merged | unread)
    config.check()
    return config


def _config_file(text: str) -> Place:
    """The config file of that name: here, or one that comes with the package."""
    path = place(text)
    first, _, rest = text.partition("/")
    is_ours = first == "configs" and not path.exists() and (CONFIGS / rest).is_file()
    return CONFIGS / rest if is_ours else path


def read(path: Place, arguments: Sequence[str], note: Callable[[str], None]) -> list[Given]:
    """Reads a config file, the files that it is based on, and key=value arguments.

    Keys of other trainers (`peers`) become ours, are left out or are refused.

    Args:
      path: the config file.
      arguments: key=value; of a key that is given twice the last one counts.
      note: takes a line about keys of other trainers.

    Returns:
      The files that give something else than base.yml, the base first, and the command line last.

    Raises:
      ConfigError: a file cannot be read, or holds a value of another type; or all keys that do not
        exist or that other trainers alone can use, in one line.
    """
    layers = [
        *((f"{file}: ", list(_flat(values.items()))) for file, values in _chain(path)),
        ("", list(_flat(map(_split, arguments)))),
    ]
    places: list[tuple[str, dict[str, tuple[str, Any]]]] = []
    foreign: dict[str, tuple[str, Any]] = {}  # as given last, on the command line or further up
    notes: list[str] = []
    for where, pairs in layers:
        taken: dict[str, tuple[str, Any]] = {}
        places.append((where, taken))
        for name, given_value in pairs:
            given = f"{where}{base.shown(name, given_value)}"
            ours = peers.ours(name, given_value)
            if not ours:
                foreign[name] = given, given_value
                continue
            foreign.pop(name, None)
            key, value = ours
            if where and key in taken and taken[key][1] != value:
                raise ConfigError(
                    f"{taken[key][0]} and {name}={value} both give {key}; keep one of them"
                )
            if ours != (name, given_value) and value != base.unset(key):
                notes.append(f"{given}: taken as {key}={value}")
            taken[key] = given, value
    ignored = peers.check(foreign, [dict(pairs) for _, pairs in layers])
    found = [
        Given(where, {key: base.typed(*given, key) for key, given in taken.items()})
        for where, taken in places
    ]
    if ignored:
        notes.append(f"ignored, as nothing here depends on them: {', '.join(ignored)}")
    for line in notes:
        note(line)
    return [given for given in found[:-1] if given.values != base.base()] + found[-1:]


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


def _chain(path: Place, above: tuple[Place, ...] = ()) -> list[tuple[Place, dict[str, Any]]]:
    """The files of a base_config chain, the base first. Paths are relative to the naming file."""
    values, above = read_yaml(path), (*above, path.resolve())
    named = values.pop("base_config", None)
    if named in (None, "", "none"):
        return [(path, values)]
    if not isinstance(named, str):
        raise ConfigError(f"{path}: base_config={named} must be the path of a config file")
    there = place(named) if is_object_storage(named) else path.parent / os.path.expanduser(named)
    if not there.exists() and (CONFIGS / named).exists():
        there = CONFIGS / named
    if not there.exists():
        raise ConfigError(f"{path}: base_config={named}: no such config file as {there}")
    if there.resolve() in above:
        raise ConfigError(f"{path}: base_config={there} closes a circle; name another file")
    return [*_chain(there, above), (path, values)]


def to_yaml(config: Config) -> str:
    """The configuration as a config file that gives it again, in the order of base.yml."""
    ordered = {name: config.values[name] for name in base.base()}
    # The sizes are written out: naming their file again would let it override them.
    ordered["model_name"] = "default"
    return f"# model_name: {config.run.model_name}\n{dump(ordered)}"


def answer(arguments: Sequence[str], doc: str) -> None:
    """Answers a command line that asks about a command which takes a config.

    Args:
      arguments: after the program's name.
      doc: of the command's module: what it does, `usage`, its options.

    Raises:
      SystemExit: it asked, and has its answer.
    """
    asked = set(arguments)
    if {"-h", "--help", "help"} & asked:
        own = doc.strip("\n")
        print(own + ("" if own.splitlines()[-1].startswith("  ") else "\n") + _OF_ALL)
    elif "--help-keys" in asked:
        print(keys())
    elif "--version" in asked:
        print(f"maxramp {maxramp.__version__}")
    else:
        return
    raise SystemExit(0)


def keys() -> str:
    """Every key with its default and its comment: configs/base.yml."""
    return (CONFIGS / "base.yml").read_text()


def list_keys(parser: argparse.ArgumentParser) -> None:
    """Has a parser of options, with key=value beside them, take --help-keys."""
    text = "list every key with its default"
    parser.add_argument("--help-keys", action="version", version=keys(), help=text)
