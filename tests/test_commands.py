"""`python -m maxramp` and the entry point `maxramp`."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys
import time
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BASE, ROOT, command, environment, run

from maxramp import __main__ as commands
from maxramp import __version__, branch, checkpoint, commandline, noise
from maxramp.commandline import amount, config_parser, duration, print_table, run_time, show_wait
from maxramp.config.load import load
from maxramp.errors import ConfigError, reason_of
from maxramp.keys.base import base
from maxramp.launch import __main__ as launch


def start(*line):
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(line, env=environment(), **options)


def test_every_command_is_listed():
    names = set()
    for path in (ROOT / "maxramp").rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = "launch" if path.parent.name == "launch" else path.stem
        has_main = any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body)
        if has_main and named != "__main__":
            names.add(named)
    assert set(commands.COMMANDS) == names


def test_the_list_of_commands():
    done = start(sys.executable, "-X", "importtime", "-m", "maxramp")
    assert done.returncode == 0
    for name, what in commands.COMMANDS.items():
        assert f"  {name:<12}{what}\n" in done.stdout
    assert "maxramp.errors" in done.stderr and "jax" not in done.stderr


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help(name, capsys):
    """What the command does, and every option that its source names; nothing of it is a failure."""
    module = importlib.import_module(
        "maxramp.launch.__main__" if name == "launch" else f"maxramp.{name}"
    )

    def asked(option):
        with pytest.raises(SystemExit) as ended:
            module.main([option])
        printed = capsys.readouterr()
        assert not ended.value.code and not printed.err
        return printed.out

    text = asked("--help")
    assert module.__doc__.partition("\n")[0].rstrip(".") in " ".join(text.split())
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    options = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    options = {str(o) for o in options if re.fullmatch("--[a-z][a-z_-]+", str(o))}
    assert all(re.search(rf"{option}\b", text) for option in options | {"--version"})
    assert "hang_timeout_seconds" not in text and text.count("\n") < 60
    assert asked("--version") == f"maxramp {__version__}\n"
    if "--help-keys" in text:
        assert {line.partition(": ")[0] for line in asked("--help-keys").splitlines()} >= {*base()}


def test_a_config_that_comes_with_the_package(tmp_path, capsys, monkeypatch):
    """By its name in a clone, wherever one is; a file that is here is meant first."""
    monkeypatch.chdir(tmp_path)
    assert load(["configs/models/llama3-8b.yml"]).model.base_emb_dim == 4096
    assert load(["configs/post_train/rl.yml"]).run.program == "grpo"
    with pytest.raises(ConfigError, match="no such config file"):
        load(["configs/nonesuch.yml"])
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.yml").write_text("steps: 7\n")
    assert load(["configs/base.yml"]).batch.steps == 7


def test_a_config_and_options_in_any_order():
    parser = config_parser(launch.__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot")
    line = ["--json", "a.yml", "--plot", "x", "b=[1, 2]", "--plot=y", "+c=-3", "--json"]
    options = parser.parse_intermixed_args(line)
    assert options.arguments == ["a.yml", "b=[1, 2]", "+c=-3"]
    assert (options.json, options.plot) == (True, "y")


def test_a_launch_without_its_config_or_cluster(capsys):
    assert launch.main(["--cluster", "local"]) == 2
    assert "CONFIG.yml comes first" in capsys.readouterr().err
    assert launch.main(["configs/base.yml"]) == 2
    assert "--cluster" in capsys.readouterr().err


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
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.endswith("(--help lists the options, --help-keys the keys of key=value)\n")
    assert message.count("\n") == 1


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
    program = "import sys; from maxramp.__main__ import main; sys.exit(main())"
    for name, arguments in (("plan", [BASE, "--json"]), ("train", [BASE, "stpes=3"])):
        module = run(*arguments, module=name)
        entry = [sys.executable, "-c", program, name, *arguments]
        for line in (command(name, *arguments, module="__main__"), entry):
            done = start(*line)
            assert (done.returncode, done.stdout) == (module.returncode, module.stdout)
            assert done.stderr == module.stderr
    assert done.returncode == 2 and "did you mean steps?" in done.stderr


AMOUNTS = {51648.7: "51,649", 50.43: "50.4", 0.2131: "0.21", 8.53e-05: "<0.01", 0: "0"}
DURATIONS = {0.032: "0.03s", 0: "0s", 45.4: "45s", 200: "3m20s", 7500: "2h05m", 270000: "3d03h"}
TIMES = {8.53e-05: "0.3s", 0.5: "30m00s", 50.43: "50.4 hours"}


@pytest.mark.parametrize(
    "form, table", [(amount, AMOUNTS), (duration, DURATIONS), (run_time, TIMES)]
)
def test_numbers_have_the_digits_that_people_read(form, table):
    assert {number: form(number) for number in table} == table


def test_a_long_wait_shows_that_it_gets_on_and_a_short_one_nothing(monkeypatch):
    monkeypatch.setattr(commandline, "_PERIOD", 0.02)
    lines = []
    with show_wait(lines.append, "still compiling", 0.01):
        while len(lines) < 3:
            time.sleep(0.01)
    with show_wait(lines.append, "nothing", 5.0):
        pass
    assert {*lines} and all(line.startswith("still compiling, for 0.") for line in lines)


def test_a_table_shows_names_as_they_are(capsys):
    print_table(["run[a]", "[/b]"], [["[bold]x", ":smile:"]])
    assert {"run[a]", "[/b]", "[bold]x", ":smile:"} <= {*capsys.readouterr().out.split()}


def too_much_for_the_device():
    jnp.zeros((2**20, 2**26)).block_until_ready()


def too_much_for_the_host():
    np.ones(2**50)


@pytest.mark.parametrize("allocate", [too_much_for_the_device, too_much_for_the_host])
def test_too_little_memory_is_one_line_with_the_remedy(allocate):
    with pytest.raises((jax.errors.JaxRuntimeError, MemoryError)) as caught:
        allocate()
    line = reason_of(caught.value)
    assert re.match(r"out of memory: \w.*\d.*; use a smaller per_device_batch_size", line), line
    assert "remat_policy=full" in line and "ici_fsdp_parallelism" in line
    assert reason_of(ValueError("a\nb")) == "a b" and reason_of(KeyError()) == "KeyError"
