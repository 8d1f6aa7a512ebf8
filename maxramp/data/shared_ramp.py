"""A ramp that may grow, for threads and processes that read ahead of it."""

import contextlib
import pathlib
import pickle
import shutil
import tempfile
import time
from typing import Any

from maxramp.data.files.storage import write_whole
from maxramp.errors import TrainingError
from maxramp.parallel.locking import lock
from maxramp.rampup.schedule import RampupBatchManager

_POLL_SECONDS = 0.01
_PREFIX = "maxramp-"  # of the folder's name


class SharedRamp:
    """The ramp as far as it is settled; who asks for a later step waits until that one is.

    It lies in a small file and not in this object, of which Grain's worker processes get a copy
    when they start: so they see the ramp grow.
    """

    def __init__(self, ramp: RampupBatchManager):
        """Publishes what is settled by now; to be closed."""
        _remove_leftovers()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._held = (self._folder / "held").open("w")
        with contextlib.suppress(OSError):
            lock(self._held)  # as long as this process lives
        self._read: RampupBatchManager | None = None
        self._published = -1
        self.publish(ramp)

    def __getstate__(self) -> dict[str, Any]:
        """What readers in other processes get."""
        return {"_folder": self._folder, "_read": None}

    def publish(self, ramp: RampupBatchManager) -> None:
        """Lets readers go on as far as the ramp is settled by now. Only one thread may call it."""
        if ramp.settled_steps != self._published:
            write_whole(self._folder / "ramp", pickle.dumps(ramp))
            self._published = ramp.settled_steps

    def at(self, step: int) -> RampupBatchManager:
        """A copy of the ramp that says what `step` takes.

        Raises:
          TrainingError: the ramp was closed before the step was settled.
        """
        ramp = self._read
        while ramp is None or step >= ramp.settled_steps:
            try:
                ramp = pickle.loads((self._folder / "ramp").read_bytes())
            except FileNotFoundError:
                raise TrainingError(f"nobody settled what step {step} takes") from None
            self._read = ramp
            if step >= ramp.settled_steps:
                time.sleep(_POLL_SECONDS)
        return ramp

    def close(self) -> None:
        """Ends the wait of all who wait."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._held.close()


def _remove_leftovers() -> None:
    """Removes the folders of processes that were killed, which hold them no more."""
    for ramp in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/ramp"):
        with contextlib.suppress(OSError), (ramp.parent / "held").open() as held:
            if not lock(held):  # else nobody knows who holds it
                shutil.rmtree(ramp.parent)
