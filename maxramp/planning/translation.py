"""Another trainer's file as arguments for maxramp."""

from collections.abc import Sequence
from typing import Any

from maxramp.config.load import MAXTEXT, flatten, read
from maxramp.errors import ConfigError, reason_of
from maxramp.files.place import Place, place
from maxramp.keys import peers
from maxramp.keys.base import cast_value
from maxramp.keys.megatron import split_command, translate_flags
from maxramp.keys.yamlfile import read_yaml

TRAINERS = ("maxtext", "megatron", "nemo")


def translate_file(trainer: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Turns FILE key=value ... of another trainer into arguments for maxramp.

    MaxText's files are configs here. Returns the arguments, and what has no key: Megatron's flags,
    or NeMo's keys, some with a reason. A ConfigError if `trainer` is none of TRAINERS, or there is
    not one file.
    """
    if trainer not in TRAINERS:
        raise ConfigError(f"--trainer {trainer} must be one of {', '.join(TRAINERS)}")
    files = [argument for argument in arguments if "=" not in argument]
    keys = [argument for argument in arguments if "=" in argument]
    if len(files) != 1 or files[0].startswith("-"):
        raise ConfigError(f"{' '.join(arguments)}: --trainer takes one file, and then key=value")
    if trainer == "maxtext":
        sources = read(files[0], keys, lambda line: None)
        if not any(source.where == f"{MAXTEXT}: " for source in sources):
            raise ConfigError(
                f"{files[0]}: nothing in it is MaxText's alone; give it base_config: base.yml, or "
                "what it leaves out is as in maxramp's base.yml"
            )
        return [*files, *keys], []
    translate = _translate_nemo if trainer == "nemo" else _translate_megatron
    values, left_out = translate(place(files[0]))
    texts = (v if isinstance(v, str) else str(v).replace(" ", "") for v in values.values())
    translated = map("=".join, zip(values, texts, strict=True))
    return ["configs/base.yml", *translated, *keys], left_out


def _translate_megatron(path: Place) -> tuple[dict[str, Any], list[str]]:
    """Returns our keys for a file with Megatron's command line, and what has no key; a ConfigError
    if none is in it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
        values, left_out = translate_flags(split_command(text))
    except OSError as error:
        raise ConfigError(f"--trainer megatron: {reason_of(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as a command line: {error}") from None
    if not values:
        raise ConfigError(
            f"{path}: no flag of Megatron is in it; --trainer maxtext reads MaxText's"
        )
    return values, left_out


def _translate_nemo(path: Place) -> tuple[dict[str, Any], list[str]]:
    """Returns our keys for a NeMo file, and its keys that have none, with why; a ConfigError for
    two values of one key."""
    values: dict[str, Any] = {}
    left_out = []
    for name, value in flatten(read_yaml(path).items()):
        if translated := peers.translate(name, value):
            key = translated[0]
            cast = cast_value(f"{path}: {name}={value}", translated[1], key)
            if values.setdefault(key, cast) != cast:
                raise ConfigError(f"{path}: {name}={value} and {key}={values[key]}: keep one")
        elif (reason := peers.refusal(name, value)) != "":
            left_out.append(f"{name} {reason or ''}".rstrip())
    return values, left_out
