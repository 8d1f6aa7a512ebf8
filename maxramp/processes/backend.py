"""The start of JAX in a process of a job, on the hardware that was asked for."""

import logging
import os

import jax

from maxramp.errors import ConfigError
from maxramp.keys.section import is_address
from maxramp.processes import meeting
from maxramp.processes.keys import BackendKeys

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def take_hardware(hardware: str) -> None:
    """Makes JAX take this hardware: cpu, gpu or tpu; auto leaves it to JAX.

    Call it before anything runs. With "cpu" no plugin for accelerators starts: none takes a device
    that somebody trains on, and none complains of one that is not there. So a program that needs no
    device takes "cpu".
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_in_one_line)
    if hardware != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[hardware])


def start_devices(hardware: str) -> None:
    """Starts JAX's backend on the hardware that was taken.

    Raises:
      ConfigError: it is not there.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second where no plugin is installed
        reason = str(error).partition("(")[0].strip().rstrip(".:")[:200] or "no such backend"
        remedy = (
            "hardware=auto takes what this machine has"
            if hardware != "auto"
            else f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} may ask for it"
        )
        raise ConfigError(f"hardware={hardware}: {reason}; {remedy}") from None


def _in_one_line(record: logging.LogRecord) -> bool:
    """What JAX says of a plugin that does not start, without the traceback."""
    if record.exc_info:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {reason}", (), None
    return True


def start(keys: BackendKeys) -> None:
    """Joins the processes of the job and starts JAX on the asked-for hardware.

    Raises:
      ConfigError: the hardware is not there, or the processes are described wrongly.
      TrainingError: the processes do not find each other.
    """
    take_hardware(keys.hardware)
    if keys.jax_cache_dir:
        try:
            if not is_address(keys.jax_cache_dir):  # JAX writes to storages too
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
    meeting.join(keys.join_timeout_seconds)
    start_devices(keys.hardware)
