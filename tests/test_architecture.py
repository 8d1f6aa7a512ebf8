"""The floors of maxramp/: a folder imports only what stands below it."""

import ast
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, environment

PACKAGE = ROOT / "maxramp"

# Bottom up. A room is a folder, or a module beside them; rooms of one text do not know each other.
# Of rooms that take a whole config, the section alone stands below it.
FLOORS = (
    *("errors console", "keys", "commandline", "files", "drawing", "parallel processes", "stage"),
    *("rampup model", "objectives", "data", "huggingface", "training", "checkpoints", "run"),
    *("planning.keys launch.keys rl.keys", "config", "planning handover"),
    *("measuring job launch generation", "rl evaluation"),
    "train plan compile prepare checkpoint noise generate evaluate grpo convert report branch "
    "suggest launch.__main__ __main__",
)
FLOOR = {room: index for index, rooms in enumerate(FLOORS) for room in rooms.split()}


def room_of(module: str) -> str:
    return module if module in FLOOR else module.split(".")[0]


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
    """Returns which of the modules `names` a source imports, wherever in the file it does so."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import: write it out"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    own = {name for name in imported if name.startswith("maxramp.")}
    return {name.removeprefix("maxramp.") for name in own} & names


def violations(sources: dict[str, str]) -> list[str]:
    """Imports that go up or to a room beside, and circles of modules."""
    graph = {name: imports(source, set(sources)) for name, source in sources.items()}
    wrong = [
        f"{name} (floor {FLOOR[room_of(name)]}) imports {used} (floor {FLOOR[room_of(used)]})"
        for name, uses in graph.items()
        for used in uses
        if room_of(name) != room_of(used) and FLOOR[room_of(used)] >= FLOOR[room_of(name)]
    ]
    # Modules that only import removed ones are removed in turn; what cannot be is on a circle.
    while free := [name for name, uses in graph.items() if not uses & graph.keys()]:
        for name in free:
            del graph[name]
    return sorted(wrong) + ([f"circle among {', '.join(sorted(graph))}"] if graph else [])


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in modules()} == FLOOR.keys()


def test_imports_go_down():
    assert violations(modules()) == []


@pytest.mark.parametrize(
    "sources, expected",
    [
        *(
            ({"model.a": source, "run.b": ""}, "model.a (floor 7) imports run.b (floor 13)")
            for source in ("from maxramp.run import b", "def f():\n    import maxramp.run.b")
        ),
        ({"processes.a": "from maxramp.parallel import b", "parallel.b": ""}, "processes.a (floor"),
        (
            {"data.a": "from maxramp.data import b", "data.b": "import maxramp.data.c"}
            | {"data.c": "from maxramp.data.a import x"},
            "circle among data.a, data.b, data.c",
        ),
    ],
)
def test_the_check_can_fail(sources, expected):
    problems = violations(sources)
    assert len(problems) == 1 and problems[0].startswith(expected)


def builds_specs(source: str) -> bool:
    """Whether a source imports PartitionSpec, or calls it by any of its names."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
    called = {ast.unparse(n.func).split(".")[-1] for n in nodes if isinstance(n, ast.Call)}
    return "PartitionSpec" in imported or not called.isdisjoint({"PartitionSpec", "P", "Spec"})


def test_only_sharding_builds_specs():
    assert {name for name, text in modules().items() if builds_specs(text)} == {"parallel.sharding"}


def test_a_spec_is_found():
    assert builds_specs("from jax.sharding import Mesh, PartitionSpec as P")
    assert builds_specs("def f():\n    from jax import P\n    return P()")
    for call in ("jax.sharding.PartitionSpec('data')", "jax.P('data')", "Spec('data')"):
        assert builds_specs(call)
    assert not builds_specs("from maxramp.parallel.sharding import Spec\ndef f(spec: Spec): pass")


def test_no_mesh_is_global():
    """A program's mesh is set while it is traced, lowered or called, and nothing reads another."""
    for name, text in modules().items():
        nodes = list(ast.walk(ast.parse(text)))
        scoped = {
            id(item.context_expr) for n in nodes if isinstance(n, ast.With) for item in n.items
        }
        for call in (n for n in nodes if isinstance(n, ast.Call) and id(n) not in scoped):
            assert ast.unparse(call.func) not in ("jax.set_mesh", "jax.sharding.get_mesh"), name


def test_packages_hold_no_code():
    """So an import of a package drags nothing in; `rampup` alone names what programs use."""
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        nodes = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not nodes or path.parent.name == "rampup", path


@pytest.mark.parametrize(
    "module", ["errors", "commandline", "rampup", "config", "prepare", "__main__"]
)
def test_what_runs_without_devices_imports_no_jax(module):
    """It works where there is no accelerator, and starts in a tenth of the time."""
    program = f"import sys, maxramp.{module}; print([m for m in sys.modules if 'jax' in m])"
    printed = subprocess.check_output(
        [sys.executable, "-c", program], env=environment(), text=True, timeout=60
    )
    assert printed.strip() == "[]"


def test_no_file_has_two_subjects():
    """A file over 450 lines (of tests: over 600) is one to take apart."""
    limits = {PACKAGE: 450, ROOT / "tests": 600}
    long = {
        path.name
        for folder, limit in limits.items()
        for path in folder.rglob("*.py")
        if len(path.read_text().splitlines()) > limit
    }
    assert long == set()


def test_what_is_read_first_stays_short():
    """The README in lines, and the tour of the code in words."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "docs" / "architecture.md").read_text().split()) <= 1800


MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 450, 70, 6


def functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]


def too_large(sources: dict[str, str]) -> set[str]:
    """Returns the files, functions and constructors over the limits."""
    problems = set()
    for module, source in sources.items():
        if source.count("\n") > MOST_LINES:
            problems.add(f"lines of {module}")
        for function in functions(source):
            lines, args = function.end_lineno - function.lineno + 1, function.args
            if lines > MOST_LINES_OF_A_FUNCTION:
                problems.add(f"lines of {module}.{function.name}")
            count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) - 1  # self
            if function.name == "__init__" and count > MOST_PARAMETERS:
                problems.add(f"parameters of {module}")
    return problems


def test_nothing_is_too_large():
    assert not too_large(modules())


def test_what_is_too_large_is_found():
    arguments = ", ".join(f"x{i}" for i in range(7))
    source = f"class A:\n    def __init__(self, {arguments}):\n" + "        pass\n" * 450
    assert too_large({"a": source}) == {"lines of a", "lines of a.__init__", "parameters of a"}
