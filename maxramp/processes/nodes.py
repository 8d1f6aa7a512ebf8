"""The nodes that a run could have, as its launcher counts them while nodes come and go."""

import os
import pathlib

from maxramp.errors import ConfigError
from maxramp.processes import agreement

VARIABLE = "MAXRAMP_AVAILABLE_NODES"  # the path of a file that holds their number


def count_nodes() -> int | None:
    """Returns what process 0 reads, on all; None if the launcher counts no nodes."""
    return agreement.decide_on_first(_read) if VARIABLE in os.environ else None


def _read() -> int:
    path = os.environ[VARIABLE]
    try:
        return int(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{VARIABLE}={path}: {error}; it must hold a number of nodes") from None
