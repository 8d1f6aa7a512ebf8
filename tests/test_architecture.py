"""The layers of maxramp/: a module imports only what stands below it."""

import ast
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, environment

PACKAGE = ROOT / "maxramp"

# Bottom up. A module may import from lower layers, and from its own as long as no circle closes.
LAYERS = (
    (
        "errors",
        "locking",
        "console",
        "commandline",
        "rows",
        "yamlfile",
        "defaults",
        "peers",
        "overrides",
        "notations",
        "layout",
        "rampup",
        "config",
        "cost",
        "topology",
        "hlo",
    ),
    ("lifeline", "processes", "heap", "mesh", "saved"),
    ("attention", "loss", "optimizer"),
    ("model",),
    ("step",),
    (
        *("data.storage", "data.records", "data.arrayrecord", "data.formats", "data.megatron"),
        *("data.tokenizers", "data.items", "data.prepared", "data.corpus", "data.mixture"),
        *("data.preparation", "data.sources", "data.packing", "data.opening", "data.order"),
        *("data.prefetch", "data.expansion", "data.loader"),
        *("saving", "stages", "metrics", "memory", "watchdog"),
    ),
    ("picture", "tensorboard", "display", "preemption", "profiling", "resume", "output", "fit"),
    ("train", "plan", "checkpoint", "prepare", "compile"),
    (
        *("launch.bound", "launch.jobs", "launch.local", "launch.slurm", "launch.gke"),
        "launch.__main__",
    ),
    ("__main__",),
)
LAYER = {name: index for index, names in enumerate(LAYERS) for name in names}
PLANNED: set[str] = set()  # in the table before they are written


def name_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules() -> dict[str, str]:
    """Source of every module of the package by its name below maxramp."""
    return {
        name_of(path): path.read_text()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }


def imports(source: str, names: set[str]) -> set[str]:
    """The modules `names` that a source imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import: write it out"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name.removeprefix("maxramp.") for name in found if name.startswith("maxramp.")} & names


def violations(sources: dict[str, str]) -> list[str]:
    """Imports that go up, and imports within a layer that close a circle."""
    graph = {name: imports(source, set(sources)) for name, source in sources.items()}
    wrong = [
        f"{name} (layer {LAYER[name]}) imports {used} (layer {LAYER[used]})"
        for name, uses in graph.items()
        for used in uses
        if LAYER[used] > LAYER[name]
    ]
    # Modules that only import removed ones are removed in turn; what cannot be is on a circle.
    while free := [name for name, uses in graph.items() if not uses & graph.keys()]:
        for name in free:
            del graph[name]
    return sorted(wrong) + ([f"circle among {', '.join(sorted(graph))}"] if graph else [])


def test_every_module_has_a_layer():
    assert modules().keys() <= LAYER.keys()
    assert LAYER.keys() - modules().keys() <= PLANNED


def test_imports_go_down():
    assert violations(modules()) == []


@pytest.mark.parametrize(
    "sources, expected",
    [
        ({"mesh": "from maxramp import model", "model": ""}, "mesh (layer 1) imports model"),
        ({"mesh": "def f():\n    import maxramp.model", "model": ""}, "mesh (layer 1) imports"),
        ({"mesh": "from maxramp.model import Decoder", "model": ""}, "mesh (layer 1) imports"),
        (
            {
                "saving": "from maxramp.data import loader",
                "data.loader": "import maxramp.stages",
            }
            | {"stages": "from maxramp.saving import x"},
            "circle among data.loader, saving, stages",
        ),
    ],
)
def test_the_check_can_fail(sources, expected):
    found = violations(sources)
    assert len(found) == 1 and found[0].startswith(expected)


def test_packages_hold_no_code():
    """So an import of a package drags nothing in."""
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in body), path


@pytest.mark.parametrize("module", ["errors", "commandline", "rampup", "config", "__main__"])
def test_lowest_layer_imports_no_jax(module):
    """A plan can be made where there is no accelerator, and in a tenth of the time."""
    program = f"import sys, maxramp.{module}; print([m for m in sys.modules if 'jax' in m])"
    printed = subprocess.check_output(
        [sys.executable, "-c", program], env=environment(), text=True, timeout=60
    )
    assert printed.strip() == "[]"


def test_no_file_has_two_subjects():
    """A file over 600 lines is one to take apart."""
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    long = {path.name for path in sources if len(path.read_text().splitlines()) > 600}
    assert long == set()
