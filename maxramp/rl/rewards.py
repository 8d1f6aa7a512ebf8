"""Rewards: Python functions of prompts and answers, in worker processes with a time limit.

A function is named module:function and takes lists of the same length:

    def correct(prompts: list[str], answers: list[str], truths: list) -> list[float]

It gets the answers to a part of a batch at a time. `truths` holds what the data says about each
prompt, None where it says nothing. Each function has copies of its own, and may start processes,
which end with the worker. A function that fails is called again with single answers, to find the
one that it fails at.
"""

import concurrent.futures
import copy
import importlib
import multiprocessing
import numbers
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from maxramp import console
from maxramp.commandline import count
from maxramp.errors import ConfigError, TrainingError
from maxramp.processes import workers as workers_lib

_SHOWN = 80  # characters of a prompt in an error
_IMPORT_SECONDS = 60.0  # that functions may take to be imported, or as long as their work may


class Rewards:
    """What reward functions give, worked out in processes of their own."""

    def __init__(self, names: Sequence[str], workers: int, timeout: float):
        """Starts the workers, which import the functions.

        Args:
          names: module:function of each; modules are found in the current folder too.
          workers: processes.
          timeout: seconds that a part of a batch may take.

        Raises:
          ConfigError: a function cannot be imported.
        """
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, "rewards")
        try:
            for _ in range(workers):
                self._workers.append(_Worker(tuple(names)))
            for worker in self._workers:
                worker.ready(timeout)
        except BaseException:
            self.close()
            raise

    def submit(
        self, prompts: Sequence[str], answers: Sequence[str], truths: Sequence[Any]
    ) -> concurrent.futures.Future:
        """Has the rewards of answers worked out: a future (float64 [answers, functions], seconds).

        It raises TrainingError where a function fails, hangs, or returns something else than one
        finite number for each answer.
        """
        count = len(prompts)
        size = -(-count // len(self._workers)) or 1
        parts = [slice(first, first + size) for first in range(0, count, size)]
        futures = [
            self._pool.submit(
                worker.work,
                list(prompts[part]),
                list(answers[part]),
                list(truths[part]),
                self._timeout,
            )
            for worker, part in zip(self._workers, parts, strict=False)
        ]
        joined: concurrent.futures.Future = concurrent.futures.Future()
        left = [len(futures)]
        lock = threading.Lock()

        def done(_: Any) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                rewards, seconds = zip(*(future.result() for future in futures), strict=True)
                joined.set_result((np.concatenate(rewards), max(seconds)))
            except BaseException as error:
                joined.set_exception(error)

        for future in futures:
            future.add_done_callback(done)
        return joined

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """A process that holds the functions."""

    def __init__(self, names: tuple[str, ...]):
        self._names, self._busy = names, threading.Lock()
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_live, args=(other, names, sys.path), daemon=True)
        with workers_lib.starting():
            self._process.start()
        other.close()

    def ready(self, timeout: float) -> None:
        """Waits until the functions are imported."""
        limit = max(timeout, _IMPORT_SECONDS)
        try:
            error = self._receive(limit)
        except TimeoutError:
            error = (
                f"rewards={list(self._names)}: their modules are not imported after {limit:g} "
                "seconds; leave slow work to the first call, or raise reward_timeout_seconds"
            )
        except (EOFError, OSError):
            self.kill()  # what it started
            self._process.join(5.0)
            error = (
                f"rewards={list(self._names)}: their process ended (exit status "
                f"{self._process.exitcode}) while it imported them"
            )
        if error:
            raise ConfigError(error)

    def work(
        self, prompts: list[str], answers: list[str], truths: list[Any], timeout: float
    ) -> tuple[np.ndarray, float]:
        """The rewards, [answers, functions], and the seconds that they took."""
        try:
            with self._busy:
                start = time.perf_counter()
                self._pipe.send((prompts, answers, truths))
                failed, found = self._receive(timeout)
                seconds = time.perf_counter() - start
        except TimeoutError:
            self.kill()
            raise TrainingError(
                f"rewards={list(self._names)}: {len(prompts)} answers took more than "
                f"reward_timeout_seconds={timeout:g}, the first to {shortened(prompts[0])}; "
                "give them more time, or a limit of their own"
            ) from None
        except (EOFError, OSError):
            self.kill()  # what it started
            self._process.join(5.0)
            raise TrainingError(
                f"rewards={list(self._names)}: their process ended (exit status "
                f"{self._process.exitcode}) on {len(prompts)} answers, the first to "
                f"{shortened(prompts[0])}"
            ) from None
        if failed:
            raise TrainingError(found)
        return np.array(found, np.float64).T, seconds

    def kill(self) -> None:
        workers_lib.end(self._process)

    def _receive(self, timeout: float) -> Any:
        if not wait([self._pipe], timeout):
            raise TimeoutError
        return self._pipe.recv()


def _live(pipe: Connection, names: tuple[str, ...], path: list[str]) -> None:
    """A worker's life, from its start."""
    with workers_lib.leading_group():
        _serve(pipe, names, path)


def _serve(pipe: Connection, names: tuple[str, ...], path: list[str]) -> None:
    """Imports the functions, then answers until nobody asks."""
    console.outlive_readers()  # what functions print is no reason to end
    workers_lib.stay_with_parent()
    os.register_at_fork(after_in_child=pipe.close)  # the end of this process is its end
    # The devices are the trainer's. Its own module may have imported JAX here, which reads the
    # variable at its import.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", "cpu")
    sys.path[:] = ["", *path]
    functions = []
    try:
        for name in names:
            module, _, attribute = name.partition(":")
            function = getattr(importlib.import_module(module), attribute)
            if not callable(function):
                raise TypeError("it is no function")
            functions.append(function)
    except (Exception, SystemExit) as error:  # a script's, which runs at its import
        pipe.send(
            f"rewards: {name} cannot be imported: {_reason(error)}; write "
            "module:function, of a module in this folder or one that is installed"
        )
        return
    pipe.send(None)
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_call_all(names, functions, arguments))


def _call_all(names: tuple[str, ...], functions: list, arguments: tuple) -> tuple[bool, Any]:
    found = []
    for name, function in zip(names, functions, strict=True):
        prompts, answers, truths = arguments
        error, values = _call(function, *arguments)
        if not error and len(values) != len(prompts):
            error = f"returned {count(len(values), 'reward')} for {count(len(prompts), 'answer')}"
            return True, f"rewards: {name} {error}, the first to {shortened(prompts[0])}"
        if error:
            for one in zip(prompts, answers, truths, strict=True):  # which of them it is
                of_one, _ = _call(function, *([part] for part in one))
                if of_one:
                    where = f"the answer {shortened(one[1])} to the prompt {shortened(one[0])}"
                    return True, f"rewards: {name} {of_one} on {where}"
            return True, f"rewards: {name} {error} on {len(prompts)} answers"
        found.append(values)
    return False, found


def _call(function: Any, prompts: list, answers: list, truths: list) -> tuple[str, list[float]]:
    """("", rewards), or what is wrong."""
    try:
        returned = function(*copy.deepcopy((prompts, answers, truths)))
        if not isinstance(returned, Iterable):
            return f"returned {_shown(returned)}, which is no list of rewards,", []
        values = list(returned)
    except (Exception, SystemExit) as error:
        return f"raised {_reason(error)}", []
    found = []
    for value in values:
        try:
            found.append(_number(value))
        except Exception:  # of its own conversion, too
            return f"returned {_shown(value)}, which is no finite float32 number,", []
    return "", found


def _number(value: Any) -> float:
    """A reward as a float.

    Raises:
      TypeError, ValueError, OverflowError: it is none.
    """
    if hasattr(value, "__array__"):  # a scalar of NumPy or JAX
        value = np.asarray(value)[()]
    is_real = isinstance(value, numbers.Real | np.generic)
    if not is_real or isinstance(value, np.character | np.complexfloating):
        raise TypeError
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(np.float32(number := float(value)))  # as advantages are
    if not is_finite:
        raise ValueError
    return number


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # as of integers of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def shortened(text: str) -> str:
    """A text as an error shows it: its beginning, in quotes."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
