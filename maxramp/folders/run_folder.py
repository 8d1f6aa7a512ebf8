"""The folder of a run, wherever it is: one process takes it, all write under a path of theirs."""

import pathlib
from collections.abc import Callable
from typing import IO

from maxramp.files.locking import lock
from maxramp.files.place import ObjectPath, Place, make_folder
from maxramp.folders.claim import Claim
from maxramp.folders.mirror import Mirror


class Disk:
    """A run's folder on a disk.

    Attributes:
      here: where the process writes its files: the folder itself.
    """

    def __init__(self, folder: pathlib.Path, held: IO | None = None):
        """
        Args:
          folder: of the run.
          held: the locked file, which the system unlocks when it is closed or the process ends.
        """
        self.here, self._held = folder, held

    def check(self) -> None:
        """It is locked."""

    def publish(self) -> None:
        """What is written is there."""

    def close(self) -> None:
        """Leaves the lock to the end of the process."""


def take(folder: Place, owner: str, warn: Callable[[str], None]) -> Disk | Mirror:
    """Makes a run's folder if it is not there, and keeps other runs out of it.

    Args:
      folder: of the run.
      owner: who this is, in a few words for others.
      warn: takes a line about what went wrong and is no reason to stop.

    Raises:
      BlockingIOError: another run writes it; says which.
      OSError: it cannot be written.
    """
    make_folder(folder / "checkpoints")
    if isinstance(folder, ObjectPath):
        return Mirror(folder, warn, Claim(folder / ".lock", owner))
    file = (folder / ".lock").open("a+")
    try:
        if warning := lock(file):
            warn(warning)
    except BlockingIOError:
        file.seek(0)
        raise BlockingIOError(file.read()) from None
    file.truncate(0)
    file.write(owner)
    file.flush()
    return Disk(folder, file)


def follow(folder: Place, warn: Callable[[str], None]) -> Disk | Mirror:
    """The folder of a run that another process has taken: what this one adds gets there too."""
    return Mirror(folder, warn, None) if isinstance(folder, ObjectPath) else Disk(folder)
