"""The hardware that JAX runs on: asked for, started, and what it is."""

import logging
import os

import jax

from maxramp.errors import ConfigError

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


def start(hardware: str) -> None:
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


def platform() -> str | None:
    """What the devices of the mesh that is set are: "cpu", "gpu", "tpu"; None where it has none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else None
