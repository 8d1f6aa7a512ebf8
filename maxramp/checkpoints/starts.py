"""Which start of a run trained which of its steps: `.starts` in the run's folder.

A start that trains on from an earlier state leaves behind what was trained after that state: it
cuts metrics.jsonl there, and a snapshot of those steps never counts again, wherever it lies.
"""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from maxramp.errors import ConfigError
from maxramp.files.place import Place, write_whole

FILE = ".starts"


class Starts(NamedTuple):
    """The starts whose steps a run still holds."""

    first_steps: Sequence[tuple[str, int]] = ()  # the id of each start and its first step, in order
    # `local_checkpoint_directory` of the last one; None where it took no snapshots
    directory: str | None = None

    def hold(self, start: str, step: int) -> bool:
        """Tells whether the run holds the state after `step` steps of a start."""
        ends = [*(first for _, first in self.first_steps[1:]), math.inf]
        return any(
            name == start and first < step <= end
            for (name, first), end in zip(self.first_steps, ends, strict=False)
        )

    def begin(self, start: str, first_step: int, directory: str | None) -> "Starts":
        """Adds a start, and drops those that began at or after its first step."""
        kept = [pair for pair in self.first_steps if pair[1] < first_step]
        return Starts([*kept, (start, first_step)], directory)

    def write(self, run: pathlib.Path) -> None:
        write_whole(run / FILE, json.dumps(self._asdict()).encode())


def read(run: Place) -> Starts:
    """Reads what the last start wrote; no start where the file is missing or damaged, a ConfigError
    if it cannot be read."""
    try:
        return Starts(**json.loads((run / FILE).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return Starts()
    except OSError as error:
        raise ConfigError(f"{run / FILE}: {error.strerror}") from None
