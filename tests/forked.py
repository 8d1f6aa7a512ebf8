"""Commands in processes that are forked from one which has imported everything: 1.7 s less each.

They are processes of their own in all else. A test that is about imports, standard streams or the
end of the interpreter starts Python instead.
"""

import atexit
import contextlib
import multiprocessing
import os
import pathlib
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

_CONTEXT = multiprocessing.get_context("forkserver")
_COMMANDS = [f"maxramp.{name}" for name in ("train", "plan", "prepare")]
_PICTURES = ["matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin"]
_CONTEXT.set_forkserver_preload([*_COMMANDS, *_PICTURES])  # pictures are imported when drawn
_at_start: dict[str, dict[str, str]] = {}  # variables that a process reads once, of the server


class Forked:
    """A running command, with what the tests use of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
        cwd: str | os.PathLike[str] | None = None,
        limits: Mapping[int, int] | None = None,
    ):
        """`command`: Python with -m, with -c or with a script's path; `stdout` and `stderr`: files
        with a name, else `communicate` returns what is written; `limits`: those of setrlimit."""
        at_start = {name: env[name] for name in env if name.startswith(("JAX_", "LD_"))}
        assert _at_start.setdefault("environment", at_start) == at_start, "needs a start of Python"
        self.args = list(command)
        self._files = [file or tempfile.NamedTemporaryFile() for file in (stdout, stderr)]  # noqa: SIM115
        names = [file.name for file in self._files]
        arguments = (self.args[1:], dict(env), names, cwd or os.getcwd(), limits or {})
        self._process = _CONTEXT.Process(target=_execute, args=arguments)
        with _as_environment(env):  # the first one starts the server, which imports in it
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        stdout, stderr = (pathlib.Path(file.name).read_text() for file in self._files)
        return stdout, stderr

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(command: Sequence[str], env: Mapping[str, str], timeout: float = 240, **options):
    """`subprocess.run` of a forked command; what it writes is text."""
    process = Forked(command, env, **options)
    try:
        stdout, stderr = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@contextlib.contextmanager
def _as_environment(variables: Mapping[str, str]):
    before = dict(os.environ)
    _set_environment(variables)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _execute(arguments, variables, files, cwd, limits) -> None:
    for path, number in zip(files, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)  # two streams may share it
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    _set_environment(variables)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    try:
        match arguments:
            case ["-m", module, *_]:
                sys.argv = arguments[1:]
                sys.modules.pop(module, None)  # else runpy warns that it was imported
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", program, *rest]:
                sys.argv = ["-c", *rest]
                exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
            case [path, *_]:
                sys.argv = arguments
                sys.path.insert(0, os.path.dirname(path))
                runpy.run_path(path, run_name="__main__")
    finally:  # multiprocessing ends its processes without these
        threading._shutdown()
        atexit._run_exitfuncs()
