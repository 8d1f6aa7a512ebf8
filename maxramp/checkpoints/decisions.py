"""decisions.json: the rungs that a run with rampup_policy=noise has taken.

Written before the first step that uses a rung, and binding from then on: a restart keeps them, also
where it continues from an earlier checkpoint. A run that left no checkpoint begins anew.
"""

import contextlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from maxramp.checkpoints.folder import Checkpoint
from maxramp.errors import ConfigError
from maxramp.files.place import Place, write_whole
from maxramp.rampup import adaptive
from maxramp.rampup.keys import BatchKeys

FILE = "decisions.json"


def read(run: Place) -> list[dict[str, Any]]:
    path = run / FILE
    try:
        found = json.loads(path.read_bytes())["decisions"]
        samples, sizes = ([d[k] for d in found] for k in ("first_sample", "global_batch_size"))
        numbers = all(type(n) is int and n >= 0 for n in samples + sizes)
        if not numbers or samples != sorted(set(samples)):
            raise ValueError
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not as a run wrote it"
        raise ConfigError(
            f"{path}: {reason}; it says which batches this run has taken: put it back"
        ) from None


class DecisionsFile:
    """The file of a job that runs; what a full disk does not take waits in memory."""

    def __init__(self, run: pathlib.Path):
        self._path, self._unwritten = run / FILE, b""
        self.taken = read(run)

    def write(self, taken: Sequence[dict[str, Any]], first: int | None) -> None:
        """Writes all decisions, or keeps them until `flush`. `first` are the rows of the run's
        first batch; None for a run that no single ramp repeats, as its schedule began after its
        first step.
        """
        self.taken, self._unwritten = list(taken), _text(taken, first)
        with contextlib.suppress(OSError):  # `flush` says so
            self.flush()

    def flush(self) -> None:
        """Writes what waits, or raises an OSError."""
        if self._unwritten:
            write_whole(self._path, self._unwritten)
            self._unwritten = b""


def _text(taken: Sequence[dict[str, Any]], first: int | None) -> bytes:
    written: dict[str, Any] = {"decisions": list(taken)}
    if first is not None:
        sizes = [(0, first), *((d["first_sample"], d["global_batch_size"]) for d in taken)]
        written["as_fixed_ramp"] = {
            "step_batch_size_schedule": " ".join(f"{sample}:{size}" for sample, size in sizes),
            "step_batch_size_unit": "samples",
            "batch_size_lr_scaling": "sqrt",
            "batch_size_lr_reference": "initial",
        }
    return (json.dumps(written, indent=2) + "\n").encode()


def binding(
    keys: BatchKeys, recorded: Sequence[dict[str, Any]], position: Checkpoint | None
) -> list[tuple[int, int]]:
    """(first sample, global batch size) of what was decided before this start.

    A run that continues from another's checkpoint, in a folder of its own, takes over what that
    one had decided, above the first rung of its own ladder.
    """
    if keys.rampup_policy != "noise":
        return []
    found, source = recorded, FILE
    below = recorded[0].get("previous_batch_size") if recorded else None
    if not recorded and position and position.config.get("rampup_policy") == "noise":
        first, least = position.config["rampup_ladder"][0], keys.rampup_ladder[0]
        found = [
            stage
            for stage in position.stages
            if stage["global_batch_size"] != first and stage["global_batch_size"] > least
        ]
        source = f"checkpoint {position}"
    pairs = [(stage["first_sample"], stage["global_batch_size"]) for stage in found]
    return adaptive.check_decisions(keys, pairs, below, source)
