"""Names say what a thing is: not what happened to it, nor how it relates to others."""

import ast
import re
from collections.abc import Iterator

import pytest
from conftest import ROOT
from test_architecture import functions, modules

PREPOSITIONS = """
about above after against along among around as at before behind below beneath beside besides
between beyond by during for from in inside into like near of off on onto out outside over past per
since than through to toward towards under until unto up upon via with within without
"""
CONVERTERS = "to as from with without"  # begin the name of one, as in `to_json`
PARTICIPLES = """
begun chosen done drawn found given gone held kept known left lost made meant named said seen sent
shown taken told written
"""
NO_PARTICIPLES = "embed feed need seed shed speed"  # that end as one does
# Alone, and what begins with "of_".
EMPTY = re.compile("_*(found|given|here|made|of|of_.*|said|take|taken|there)_*")


def is_no_name(name: str) -> bool:
    """Tells whether a function's name is a participle alone, or begins with a preposition."""
    first, *others = name.strip("_").split("_")
    if first in PREPOSITIONS.split():
        return not (others and first in CONVERTERS.split())
    is_past = first.endswith("ed") and first not in NO_PARTICIPLES.split()
    return not others and (is_past or first in PARTICIPLES.split())


def test_functions_are_verbs_or_nouns():
    bad = {
        f"{module}:{function.lineno} {function.name}"
        for module, source in modules().items()
        for function in functions(source)
        if is_no_name(function.name)
    }
    assert not bad


def test_a_function_name_that_says_nothing_is_detected():
    bad = ["of", "_at", "of_mesh", "over_stages", "to", "_said", "held", "allowed", "with_"]
    good = ["to_json", "from_config", "without_axis", "_as_rows", "held_out", "seed", "is_found"]
    assert [name for name in [*bad, *good] if is_no_name(name)] == bad


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yields what a node names: variables, parameters, attributes, functions, dictionary keys."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            yield node.name
        case ast.arg() | ast.keyword(arg=str()):
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr
        case ast.Dict():
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))


def empty_names(source: str) -> list[str]:
    return [
        f"{node.lineno} {name}"
        for node in ast.walk(ast.parse(source))
        for name in bound_names(node)
        if isinstance(name, str) and EMPTY.fullmatch(name)
    ]


@pytest.mark.parametrize("folder", ["maxramp", "benchmarks", "tests"])
def test_no_name_says_only_what_happened_to_a_thing(folder):
    bad = {
        f"{path.relative_to(ROOT)}:{name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in empty_names(path.read_text())
    }
    assert not bad


def test_a_name_that_says_nothing_is_detected():
    bad = ["found = 1", "def f(given): pass", "self._made = 1", "x = {'of': 1}", "f(there=1)"]
    bad += ["for of_run in runs: pass", "with open(path) as taken: pass"]
    good = ["offset = found_names = 1", "print(found)"]
    assert [source for source in [*bad, *good] if empty_names(source)] == bad
