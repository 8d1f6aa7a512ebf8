"""Safe YAML with the numbers of YAML 1.2, and errors in one line."""

import difflib
import pathlib
import re
from typing import Any

import yaml

from maxramp.errors import ConfigError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # libyaml's is ten times as fast
    """Constructs no objects and refuses duplicate keys. 3e-4 is a number, 1e6 and 150_001 are
    integers, 010 is ten; dates and 1:30 are text.
    """


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*(?:[eE]\+?[0-9]+)?", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    """Makes an integer of 1e6, too; a float from 1e31 on, so that a short text makes no huge
    integer."""
    text = loader.construct_scalar(node)
    mantissa, _, exponent = text.lower().partition("e")
    return int(mantissa) * 10 ** int(exponent or 0) if int(exponent or 0) <= 30 else float(text)


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
    """Makes a mapping of names; a number is one where it is the threshold of a phase. A YAMLError
    for other keys, and for one that stands twice."""
    mapping = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if type(key) in (int, float) and isinstance(value_node, yaml.MappingNode):
            key = key_node.value  # the threshold of a phase, as written
        wrong = "" if isinstance(key, str) else f"key {key!r} is not a name"
        if not wrong and key in mapping:
            wrong = f'the key "{key}" stands twice; keep one'
        if wrong:
            raise yaml.constructor.ConstructorError(problem=wrong, problem_mark=key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as something else."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=100)


def parse(text: str) -> Any:
    """Parses YAML; raises yaml.YAMLError whatever is wrong with the text."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # From constructors, for a tag that does not fit its value: !!int abc.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise yaml.YAMLError(f"{text.strip()[:60]}: {reason[:120]}") from None


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config file; {} if it is empty. A ConfigError if it is missing or not valid."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        files = [other.name for other in path.parent.glob("*.yml")]
        near = difflib.get_close_matches(path.name, files, 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such config file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config file: {error}") from None
    try:
        values = parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {' '.join(problem.split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a config file holds `key: value` lines, one key to a line")
    return values
