"""Command lines in this process, for those that are refused: a start takes most of their time."""

import contextlib
import importlib
import io
import pathlib
import subprocess
import time
import types
from collections.abc import Mapping

import jax
import pytest


def run_here(
    *arguments: str,
    module: str = "train",
    devices: int = 1,
    cwd: pathlib.Path | None = None,
    environment: Mapping[str, str] | None = None,
    cpu_seconds: float | None = None,
) -> subprocess.CompletedProcess:
    """What `conftest.run` returns of a command that sees this many of this process's devices. It
    hears no signals, and its module is not `__main__`, where it would load the keys once more."""
    main = importlib.import_module(f"maxramp.{module}").main
    visible_devices = jax.devices()[:devices]
    deaf = types.SimpleNamespace(
        say=print, begin=lambda several: None, reached=lambda after_step: False, ask=lambda: None
    )
    options = {"preemption": deaf} if module in ("train", "grpo") else {}
    printed, output = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if cwd:
            patch.chdir(cwd)
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda: visible_devices)
        for name in ("device_count", "local_device_count"):
            patch.setattr(jax, name, lambda: devices)
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(output))
        begin = time.process_time()
        status = main(list(arguments), **options)
        seconds = time.process_time() - begin
    assert cpu_seconds is None or seconds < cpu_seconds
    return subprocess.CompletedProcess(arguments, status, printed.getvalue(), output.getvalue())
