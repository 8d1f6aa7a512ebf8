"""YAML files and key=value -> one checked configuration, and back."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from maxramp.commandline import print_note
from maxramp.config import alternatives, overrides
from maxramp.config.checks import check
from maxramp.config.keys import Config
from maxramp.config.overrides import Given
from maxramp.config.usage import answer, usage
from maxramp.errors import ConfigError
from maxramp.folders.place import Place, place
from maxramp.keys import base
from maxramp.keys.base import CONFIGS
from maxramp.keys.section import is_object_storage
from maxramp.keys.yamlfile import dump
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
    values = ml_collections.ConfigDict(base.base(), type_safe=True, convert_dict=False)
    values.lock()
    *files, command_line = overrides.read(_config_file(arguments[0]), arguments[1:], note)
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
        model, _ = overrides.read(path, (), note)
        _update(values, model)
    _update(values, command_line)
    if program in PROGRAMS:
        values.program = _checked(values.program, program)
    names = {name for given in (*files, command_line) for name in given.values}
    merged = alternatives.without_demo(values.to_dict(), names)
    config = Config.of(_without_unread(merged, values.program, note))
    check(config)
    return config


def _checked(given: str, program: str) -> str:
    """The program that runs, which the config may name."""
    if given not in ("", program):
        raise ConfigError(
            f"program={given}: this config is for maxramp.{given}; run that, or give "
            f"program={program}"
        )
    return program


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


def to_yaml(config: Config) -> str:
    """The configuration as a config file that gives it again, in the order of base.yml."""
    ordered = {name: config.values[name] for name in base.base()}
    # The sizes are written out: naming their file again would let it override them.
    ordered["model_name"] = "default"
    return f"# model_name: {config.run.model_name}\n{dump(ordered)}"
