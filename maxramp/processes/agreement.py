"""What the processes of a job agree on: values, errors, and that one of them has ended."""

import contextlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # whose client has no public name
from jax.experimental import multihost_utils

from maxramp.errors import NEXT_START, ConfigError, PeerLostError, TrainingError

_T = TypeVar("_T")
_KEYS = itertools.count()  # numbers of keys in the store that all processes share
VARIABLE = "MAXRAMP_AVAILABLE_NODES"  # the path of a file that holds the number of nodes
_MEETING_MS = 3_600_000  # the watchdog ends a process that hangs for as long


def raise_everywhere(function: Callable[[], _T]) -> _T:
    """Calls a function on every process, each in the same order of such calls; returns its own
    result.

    A ConfigError or TrainingError of one is raised on all, as that class and none of its
    subclasses. Another error is raised there alone, and ends the process. For work that may
    take long use `run_on`, in which processes that wait beat.
    """
    return _agree(*_try(function))


def _try(function: Callable[[], _T]) -> tuple[_T | None, list[Any] | None]:
    try:
        return function(), None
    except (ConfigError, TrainingError) as error:
        return None, [isinstance(error, ConfigError), str(error)]


def _agree(result: _T | None, failure: list[Any] | None) -> _T | None:
    for is_config, message in filter(None, all_gather_json(failure)):
        raise (ConfigError if is_config else TrainingError)(message)
    return result


def all_gather_json(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in their order, on each; of a single process the
    value itself, whose tuples stay tuples. A collective on the devices: every process calls it, in
    the same order with other collectives."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    texts = multihost_utils.process_allgather(np.pad(text, (0, sizes.max() - len(text))))
    return [json.loads(t[:n].tobytes()) for t, n in zip(texts, sizes, strict=True)]


def broadcast_json(value: Any, beat: Callable[[], None]) -> Any:
    """Returns the JSON value of the first process, on all, which call it together. The first may
    take any time before: the others wait for its key, and call `beat` meanwhile."""
    if jax.process_count() == 1:
        return value
    is_first, key = jax.process_index() == 0, f"maxramp/first/{next(_KEYS)}"
    if is_first:
        distributed.global_state.client.key_value_set(key, "")
    else:
        _wait_for_key(key, beat)
    text = np.frombuffer(json.dumps(value).encode() if is_first else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = text if is_first else np.zeros(size, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text), np.uint8).tobytes())


def _wait_for_key(key: str, beat: Callable[[], None]) -> None:
    """Waits until a process has set the key, however long, and calls `beat` every 5 seconds; a
    JaxRuntimeError if process 0 is gone."""
    while True:
        try:
            distributed.global_state.client.blocking_key_value_get(key, 5_000)
            return
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        beat()


def meet(name: str, failure: str = "") -> list[str]:
    """Waits, up to an hour, until every process has called it with this `name` (new each time), in
    any thread and not for the devices; returns the failures of all. A JaxRuntimeError if one does
    not come."""
    if jax.process_count() == 1:
        return [failure] if failure else []
    client = distributed.global_state.client
    if failure:
        client.key_value_set(f"{name}/{jax.process_index()}", failure)
    client.wait_at_barrier(name, _MEETING_MS)
    return [text for _, text in client.key_value_dir_get(f"{name}/")]


def decide_on_first(function: Callable[[], Any]) -> Any:
    """Returns on all processes, which call it together, the JSON value of a function on the first,
    or raises its ConfigError or TrainingError."""
    value = raise_everywhere(lambda: function() if jax.process_index() == 0 else None)
    return all_gather_json(value)[0]


def run_on_first(function: Callable[[], _T], beat: Callable[[], None]) -> _T | None:
    """Calls a function on the first process, as `run_on`: others wait, return None, or raise its
    error."""
    return run_on((0,), function, beat)


def run_on(
    process_ids: Sequence[int], function: Callable[[], _T], beat: Callable[[], None]
) -> _T | None:
    """Calls a function on some processes, for as long as that takes. Others, which call this too
    with the same `process_ids`, wait (and call `beat`), return None, or raise its errors as
    `raise_everywhere`."""
    key, outcome = f"maxramp/ran/{next(_KEYS)}", (None, None)
    if jax.process_index() in process_ids:
        outcome = _try(function)
    if jax.process_count() > 1:
        if jax.process_index() in process_ids:
            distributed.global_state.client.key_value_set(f"{key}/{jax.process_index()}", "")
        for process_id in process_ids:
            _wait_for_key(f"{key}/{process_id}", beat)
    return _agree(*outcome)


@contextlib.contextmanager
def report_lost_peers() -> Iterator[None]:
    """Turns what a collective raises when a process has ended into a PeerLostError."""
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        status = re.match(r"[A-Z_]+: ", str(error))  # Gloo's is a ValueError, but with a status too
        if jax.process_count() == 1 or not status or status[0] == "RESOURCE_EXHAUSTED: ":
            raise
        raise PeerLostError(
            f"another process of the job has ended (its own output says why); {NEXT_START}; what "
            f"was noticed here: {' '.join(str(error).split())[:200]}"
        ) from None


def count_nodes() -> int | None:
    """Returns what process 0 reads, on all, which call it together; None if the launcher counts no
    nodes. A ConfigError if its file holds no number."""
    return decide_on_first(_read_nodes) if VARIABLE in os.environ else None


def _read_nodes() -> int:
    path = os.environ[VARIABLE]
    try:
        return int(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{VARIABLE}={path}: {error}; it must hold a number of nodes") from None
