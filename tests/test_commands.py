"""`python -m maxramp` and the entry point `maxramp`."""

import ast
import subprocess
import sys
import tomllib

import pytest
from conftest import BASE, ROOT, command, environment, run

from maxramp import __main__ as commands
from maxramp import branch, checkpoint, noise
from maxramp.launch import __main__ as launch


def maxramp(*arguments):
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "maxramp", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_command_is_listed():
    """Modules that run a main are commands, and those alone."""
    there = set()
    for path in (ROOT / "maxramp").rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = "launch" if path.parent.name == "launch" else path.stem
        has_main = any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body)
        if has_main and named != "__main__":
            there.add(named)
    assert set(commands.COMMANDS) == there


def test_the_list_of_commands():
    """In one line each, and before JAX is imported."""
    done = maxramp()
    assert done.returncode == 0
    for name, what in commands.COMMANDS.items():
        assert f"  {name:<12}{what}\n" in done.stdout
    assert "maxramp.errors" in done.stderr and "jax" not in done.stderr


def test_help_is_no_failure():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "") and "hang_timeout_seconds" in done.stdout


def test_the_usage_of_a_launch_names_its_cluster(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--help"])
    usage = "python -m maxramp.launch CONFIG.yml --cluster local|slurm|gke [key=value ...]\n"
    assert capsys.readouterr().out.startswith(f"usage: {usage}")
    assert launch.main(["--cluster", "local"]) == 2
    assert capsys.readouterr().err == f"error: no config file given: {usage}"


@pytest.mark.parametrize(
    ("command", "arguments"),
    (
        (branch, ["run", "--at", "two", "--sizes", "8,16"]),
        (branch, ["run", "--at", "2", "--size", "8,16"]),
        (checkpoint, ["list", "run"]),
        (noise, ["run", "--block", "3"]),
    ),
)
def test_a_wrong_option_is_one_line(command, arguments, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.endswith("(--help lists what there is)\n")
    assert said.count("\n") == 1


def test_a_command_that_is_not_there(capsys):
    assert commands.main(["tran", "configs/base.yml"]) == 2
    assert (
        capsys.readouterr().err == "error: tran is not a command of maxramp; did you mean train?\n"
    )
    assert commands.main(["configs/base.yml"]) == 2
    assert "there are train, plan," in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_by_its_name_is_its_module():
    """The same output, errors and exit status; through the function that the entry point names."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["scripts"] == {"maxramp": "maxramp.__main__:main"}
    entry = [
        sys.executable,
        "-c",
        "import sys; from maxramp.__main__ import main; sys.exit(main())",
    ]
    for name, arguments in (("plan", [BASE, "--json"]), ("train", [BASE, "stpes=3"])):
        module = run(*arguments, module=name)
        for start in (command(name, *arguments, module="__main__"), [*entry, name, *arguments]):
            done = subprocess.run(
                start, env=environment(), capture_output=True, text=True, timeout=120, check=False
            )
            assert (done.returncode, done.stdout) == (module.returncode, module.stdout)
            assert done.stderr == module.stderr
    assert done.returncode == 2 and "did you mean steps?" in done.stderr
