"""The backend and the device mesh.

Axes: `data` holds whole copies of the weights, `fsdp` shards of them, `tensor` shards of each
layer's heads and MLP. Rows of a batch are spread over data x fsdp.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh

from maxramp.errors import ConfigError, PeerLostError, TrainingError
from maxramp.parallel import processes
from maxramp.parallel.axes import AXES
from maxramp.parallel.keys import BackendKeys, MeshKeys

# Explicit: the sharding of every array is part of its type, and a matrix product whose result could
# be laid out in two ways does not trace until the code says which.
AXIS_TYPE = AxisType.Explicit

_T = TypeVar("_T")
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def start_backend(keys: BackendKeys) -> None:
    """Joins the processes of the job and starts JAX on the asked-for hardware.

    Raises:
      ConfigError: the hardware is not there, or the processes are described wrongly.
      TrainingError: the processes do not find each other.
    """
    if keys.hardware != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[keys.hardware])
    if keys.jax_cache_dir:
        try:
            os.makedirs(os.path.expanduser(keys.jax_cache_dir), exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"jax_cache_dir={keys.jax_cache_dir}: cannot write there: {error.strerror}; use "
                'another folder, or "" for none'
            ) from None
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(keys.jax_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # On CPUs a program runs in the thread that calls it. With several devices in a process, those
    # dispatched asynchronously can each take the threads that the other's collective waits for, and
    # XLA then aborts the process; with one, each would hold memory of its own.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    processes.join(keys.join_timeout_seconds)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second where no plugin is installed
        reason = str(error).partition("(")[0].strip().rstrip(".:")[:200] or "no such backend"
        remedy = (
            "hardware=auto takes what this machine has"
            if keys.hardware != "auto"
            else f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} may ask for it"
        )
        raise ConfigError(f"hardware={keys.hardware}: {reason}; {remedy}") from None


def together(function: Callable[[], _T]) -> _T:
    """What `function` returns here, once it has failed on no process of the job.

    Raises:
      ConfigError, TrainingError: on every process, what it raised on the first where it failed.
    """
    result, failure = None, None
    try:
        result = function()
    except (ConfigError, TrainingError) as error:
        failure = [isinstance(error, ConfigError), str(error)]
    for other in exchange(failure):
        if other is not None:
            is_config, message = other
            raise (ConfigError if is_config else TrainingError)(message)
    return result


def exchange(value: Any) -> list[Any]:
    """The JSON values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.pad(text, (0, sizes.max() - len(text)))
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(t[:n].tobytes()) for t, n in zip(texts, sizes, strict=True)]


@contextlib.contextmanager
def noticing_lost_peers() -> Iterator[None]:
    """Says in one line that another process of the job has ended.

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
            "another process of the job has ended (its own output says why); start again to go on "
            f"from the last checkpoint; what was noticed here: {' '.join(str(error).split())[:200]}"
        ) from None


def num_slices() -> int:
    """Groups of devices that only the slow network joins: the slices of a TPU multi-slice job.

    On CPUs and GPUs JAX numbers hosts, or GPUs that NVLink joins, in the same attribute. They make
    one group: `fsdp` shards over all of them, as the plan assumes.
    """
    if jax.default_backend() != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in jax.devices()})


def make_mesh(keys: MeshKeys, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The device mesh of a resolved config, over all devices of the job or those given.

    An axis is its dcn part (outer, between slices) times its ici part (inner, inside a slice).
    """
    devices = jax.devices() if devices is None else devices
    ici, dcn = (list(keys.group(group).values()) for group in ("ici", "dcn"))
    if math.prod(dcn) > 1:
        grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    elif devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(ici)
    else:
        grid = mesh_utils.create_device_mesh(ici, devices)
    return Mesh(grid, AXES, axis_types=(AXIS_TYPE,) * len(AXES))
