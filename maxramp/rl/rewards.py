"""Rewards: Python functions of prompts and answers, in worker processes with a time limit.

A function is named module:function and takes lists of the same length:

    def correct(prompts: list[str], answers: list[str], truths: list) -> list[float]

It gets the answers to a part of a batch at a time. `truths` holds what the data says about each
prompt, None where it says nothing. Each function has copies of its own, and may start processes,
which end with the worker. A function that fails is called again with single answers, to find the
one that it fails at.
"""

import concurrent.futures
import contextlib
import copy
import importlib.machinery
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from maxramp import console
from maxramp.commandline import count
from maxramp.errors import ConfigError, TrainingError
from maxramp.processes import workers as workers_lib

_SHOWN = 80  # characters of a prompt in an error
_IMPORT_SECONDS = 60.0  # that functions may take to be imported, or as long as their work may


def sources(names: Sequence[str]) -> list[bytes]:
    """Reads the file of each function's module, also from the current folder, but not the files
    that it imports; b"" for a module without a file. Runs none of them."""
    contents = []
    for name in names:
        spec, path = None, ["", *sys.path]
        # Without its packages' names, which would ask for packages without __init__.py as imported.
        for part in name.partition(":")[0].split("."):
            spec = importlib.machinery.PathFinder.find_spec(part, path)
            path = (spec and spec.submodule_search_locations) or []
        has_file = spec and spec.has_location
        contents.append(pathlib.Path(spec.origin).read_bytes() if has_file else b"")
    return contents


class Rewards:
    """Reward functions, in worker processes."""

    def __init__(self, names: Sequence[str], workers: int, timeout: float):
        """Starts the workers, at least one, which import the functions (module:function, also from
        the current folder); a ConfigError if that fails. `timeout` is in seconds, for the answers
        that a worker gets at a time.
        """
        self._timeout, limit = timeout, max(timeout, _IMPORT_SECONDS)
        self._workers: list[_Worker] = []
        self._asker = concurrent.futures.ThreadPoolExecutor(1, "rewards")
        late = (
            f"their modules are not imported after {limit:g} seconds; leave slow work to the "
            "first call, or raise reward_timeout_seconds"
        )
        try:
            for _ in range(workers):
                self._workers.append(_Worker(tuple(names)))
            for worker in self._workers:
                worker.receive(time.monotonic() + limit, late, "while it imported them")
        except BaseException as error:
            self.close()
            if isinstance(error, TrainingError):
                raise ConfigError(str(error)) from None
            raise

    def submit(
        self, prompts: Sequence[str], answers: Sequence[str], truths: Sequence[Any]
    ) -> concurrent.futures.Future:
        """Has the rewards of answers, at least one, computed after those submitted before; returns
        a future of them and of the seconds it took.

        They are float64 [answers, functions]. The future raises a TrainingError if a function
        fails, hangs (which ends its worker for good), or returns anything but one finite number for
        each answer. Later futures are then worth nothing: workers may answer what came before.
        """
        return self._asker.submit(self._compute, prompts, answers, truths)

    def _compute(self, *lists: Sequence) -> tuple[np.ndarray, float]:
        """Returns the rewards [R, F] of answers, in equal parts by the workers, and the seconds; in
        a thread of process 0. Raises as `_Worker.receive`."""
        start, size = time.monotonic(), -(-len(lists[0]) // len(self._workers))
        parts, rewards = [], []
        for worker, first in zip(self._workers, range(0, len(lists[0]), size), strict=False):
            parts.append((worker, [list(values[first : first + size]) for values in lists]))
            worker.send(parts[-1][1])
        for worker, (prompts, *_) in parts:
            answers, to = count(len(prompts), "answer"), f"the first to {shorten(prompts[0])}"
            late = (
                f"{answers} took more than reward_timeout_seconds={self._timeout:g}, {to}; give "
                "them more time, or a limit of their own"
            )
            rewards.append(worker.receive(start + self._timeout, late, f"on {answers}, {to}"))
        return np.concatenate(rewards, 1).T, time.monotonic() - start

    def close(self) -> None:
        for worker in self._workers:
            workers_lib.end(worker.process)
        self._asker.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """A process that holds the functions."""

    def __init__(self, names: tuple[str, ...]):
        """Starts a process with these functions; it may still be importing them, or fail at it."""
        self._names = names
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, names, sys.path), daemon=True)
        with workers_lib.delay_signals():
            self.process.start()
        other.close()

    def send(self, arguments: list) -> None:
        with contextlib.suppress(OSError):  # `receive` says that the process ended
            self._pipe.send(arguments)

    def receive(self, limit: float, late: str, when: str) -> Any:
        """Returns what the process sends until `limit`, on the monotonic clock.

        Raises a TrainingError if that is a text, which describes an error; if it is `late`, which
        says so; or if the process ended `when` it was asked. The latter two end the process.
        """
        try:
            if self._pipe.poll(max(0.0, limit - time.monotonic())):
                message = self._pipe.recv()
                if isinstance(message, str):
                    raise TrainingError(message)
                return message
            workers_lib.end(self.process)
        except (EOFError, OSError):
            workers_lib.end(self.process)  # what it started
            self.process.join(5.0)
            late = f"their process ended (exit status {self.process.exitcode}) {when}"
        raise TrainingError(f"rewards={list(self._names)}: {late}")


@workers_lib.lead_group()
def _serve(pipe: Connection, names: tuple[str, ...], path: list[str]) -> None:
    """Imports the functions, and sends [] or an error; then answers each list of arguments with
    their rewards or an error, until the pipe ends."""
    console.outlive_readers()  # what functions print does not end them
    workers_lib.stay_with_parent()
    os.register_at_fork(after_in_child=pipe.close)  # so that the pipe ends with this process
    # The devices are the trainer's. Its own module may have imported JAX here, which reads the
    # variable at its import.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", "cpu")
    sys.path[:] = ["", *path]
    functions = {}
    try:
        for name in names:
            module, _, attribute = name.partition(":")
            functions[name] = getattr(importlib.import_module(module), attribute)
            if not callable(functions[name]):
                raise TypeError("it is not a function")
    except (Exception, SystemExit) as error:  # a script's, which runs at its import
        pipe.send(
            f"rewards: {name} cannot be imported: {_reason(error)}; write "
            "module:function, of a module in this folder or one that is installed"
        )
        return
    pipe.send([])
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_call_all(functions, *pipe.recv()))


def _call_all(functions: dict[str, Callable], *lists: list) -> list[list[float]] | str:
    """Returns the rewards by each function, or one line about the first that fails."""
    rewards = []
    for name, function in functions.items():
        result = _call(function, *lists)
        if isinstance(result, str):
            for prompt, answer, truth in zip(*lists, strict=True):  # find the answer that fails
                error = _call(function, [prompt], [answer], [truth])
                if isinstance(error, str):
                    to = f"to the prompt {shorten(prompt)}"
                    return f"rewards: {name} {error} on the answer {shorten(answer)} {to}"
            return f"rewards: {name} {result} on {count(len(lists[0]), 'answer')}"
        rewards.append(result)
    return rewards


def _call(function: Callable, *lists: list) -> list[float] | str:
    """Returns the rewards by a function of copies of the lists, or what is wrong with them."""
    try:
        returned = function(*copy.deepcopy(lists))
        if not isinstance(returned, Iterable):
            return f"returned {_format_value(returned)}, which is not a list of rewards,"
        returned = list(returned)
        for value in returned:
            number = np.asarray(value)  # V are the short floats of JAX
            with np.errstate(over="ignore"):  # finite in float32, as advantages are
                is_number = number.dtype.kind in "biufV" and np.isfinite(np.float32(number))
            if number.ndim or not is_number:
                return f"returned {_format_value(value)}, which is not a finite float32 number,"
        if len(returned) != len(lists[0]):
            wanted = count(len(lists[0]), "answer")
            return f"returned {count(len(returned), 'reward')} for {wanted}"
        return [float(value) for value in returned]
    except (Exception, SystemExit) as error:
        return f"raised {_reason(error)}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _format_value(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # such as integers of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
