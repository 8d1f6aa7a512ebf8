"""What the processes of a job agree on: values, errors, and that one of them has ended."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxramp.errors import START_AGAIN, ConfigError, PeerLostError, TrainingError

_T = TypeVar("_T")


def raise_everywhere(function: Callable[[], _T]) -> _T:
    """Calls a function on every process; an error on one of them is raised on all.

    Returns:
      What `function` returned on this process.

    Raises:
      ConfigError, TrainingError: on every process, what it raised on the first where it failed.
    """
    result, failure = None, None
    try:
        result = function()
    except (ConfigError, TrainingError) as error:
        failure = [isinstance(error, ConfigError), str(error)]
    for other in all_gather_json(failure):
        if other is not None:
            is_config, message = other
            raise (ConfigError if is_config else TrainingError)(message)
    return result


def all_gather_json(value: Any) -> list[Any]:
    """The JSON values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    texts = multihost_utils.process_allgather(np.pad(text, (0, sizes.max() - len(text))))
    return [json.loads(t[:n].tobytes()) for t, n in zip(texts, sizes, strict=True)]


def from_first(value: Any) -> Any:
    """The JSON value of the first process, on all of them; what the others give is not read."""
    if jax.process_count() == 1:
        return value
    is_first = jax.process_index() == 0
    text = np.frombuffer(json.dumps(value).encode() if is_first else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = text if is_first else np.zeros(size, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text), np.uint8).tobytes())


@contextlib.contextmanager
def noticing_lost_peers() -> Iterator[None]:
    """Turns what a collective raises when a process has ended into one line that says so.

    Raises:
      PeerLostError: in place of what the interrupted collective raised.
    """
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        status = re.match(r"[A-Z_]+: ", str(error))  # Gloo's is a ValueError, but with a status too
        if jax.process_count() == 1 or not status or status[0] == "RESOURCE_EXHAUSTED: ":
            raise
        raise PeerLostError(
            f"another process of the job has ended (its own output says why); {START_AGAIN}; what "
            f"was noticed here: {' '.join(str(error).split())[:200]}"
        ) from None
