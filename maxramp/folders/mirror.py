"""The folder of a run in an object storage: what it writes lies here, and a thread sends it there.

An object cannot be appended to, and a storage may be away for an hour. So the small files of a run
(metrics, event files, plan, pictures) are written to a folder of this machine, as on a disk, and
the thread sends those that have changed: every now and then, and before a checkpoint counts.
"""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable

from maxramp.errors import TrainingError
from maxramp.files.place import ObjectPath
from maxramp.folders.claim import Claim
from maxramp.processes.identity import is_gone, this_process

_PERIOD = 15.0  # seconds from one round to the next
_SHARE = 20  # and so many times as long as the last one took, unless that one failed
_LAST = 60.0  # seconds that the end of a run tries to send what is left
_PREFIX = "maxramp-mirror-"  # of the folders among the system's temporary ones
_OWNER = "process"  # the file in them that says whose they are
_RECORDS = "metrics.jsonl"  # no checkpoint counts without them
_REMOVED = "next_stage.json"  # the only file that a run removes


class Mirror:
    """A run's folder for one process.

    Attributes:
      here: where the process writes its files.
    """

    def __init__(self, folder: ObjectPath, warn: Callable[[str], None], claim: Claim | None):
        """
        Args:
          folder: in the storage.
          warn: takes a line about what went wrong and is no reason to stop.
          claim: of the process that writes the run's own files, and first takes over what is
            there; the others have none, and send what they add.

        Raises:
          OSError: the folder cannot be read.
        """
        _sweep()
        self._folder, self._warn, self._claim = folder, warn, claim
        self._root = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
        (self._root / _OWNER).write_text(json.dumps(this_process()))
        self.here = self._root / folder.name
        self.here.mkdir()
        self._sent: dict[str, tuple[int, int]] = {}  # modified when, and its size
        if claim:
            self._fetch()
        self._sending, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def check(self) -> None:
        """Whether the folder still is the run's, as far as is known without asking.

        Raises:
          TrainingError: another run has taken it.
        """
        if self._claim:
            self._claim.check()

    def publish(self) -> None:
        """Sends all that is written by now, and makes sure that the folder still is the run's.

        Raises:
          OSError: the storage has not taken everything; it is tried again later.
          TrainingError: another run has taken the folder.
        """
        with self._sending:
            if self._claim:
                self._claim.renew()
            self._send()

    def close(self) -> None:
        """Sends what is left, and removes the folder here unless that cannot be done."""
        self._ended.set()
        deadline, left = time.monotonic() + _LAST, None
        while True:
            try:
                self.publish()
                left = None
            except (OSError, TrainingError) as error:
                left = error
            lasting = not isinstance(left, OSError) or isinstance(left, FileNotFoundError)
            if lasting or time.monotonic() > deadline:
                break
            time.sleep(1)
        if left:
            (self._root / _OWNER).unlink(missing_ok=True)  # so that no start removes it
            kept = f"is in {self.here}" if self.here.is_dir() else "is lost"
            self._warn(f"{_text(left)}; what was not sent to {self._folder} {kept}")
        else:
            shutil.rmtree(self._root, ignore_errors=True)
        if self._claim:
            with contextlib.suppress(OSError):
                self._claim.release()

    def _fetch(self) -> None:
        """Takes over the files of earlier starts, event files of TensorBoard among them."""
        found = [*self._folder.iterdir()]
        for name in ("tensorboard", "tensorboard/over_samples"):
            with contextlib.suppress(FileNotFoundError):
                found += (self._folder / name).iterdir()
        for path in found:
            if path.is_file() and path.name != ".lock":
                name = str(path).removeprefix(f"{self._folder}/")
                file = self.here / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(path.read_bytes())
                self._sent[name] = _state(file)

    def _work(self) -> None:
        pause, failing = _PERIOD, False
        while not self._ended.wait(pause):
            began = time.monotonic()
            try:
                self.publish()
                failing = False
            except TrainingError:
                return  # `check` says so
            except OSError as error:
                if not failing:
                    self._warn(f"{_text(error)}; it is tried again, and the run goes on")
                failing = True
            pause = _PERIOD if failing else max(_PERIOD, _SHARE * (time.monotonic() - began))

    def _send(self) -> None:
        """Sends the files that have changed, and removes there what the run has removed here.

        Whoever cleans the system's temporary folder removes nothing there.
        """
        kept = self.here / (_RECORDS if _RECORDS in self._sent else "")
        if not kept.exists():
            raise FileNotFoundError(errno.ENOENT, "removed under the run", str(kept))
        # The records last: what a start cut off them is there before they are without it.
        for path in sorted(self.here.rglob("*"), key=lambda path: path.name == _RECORDS):
            if path.suffix == ".tmp" or not path.is_file():
                continue
            name = str(path.relative_to(self.here))
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                state = _state(path)
                if self._sent.get(name) != state:
                    data = path.read_bytes()
                    (self._folder / name).write_bytes(data)
                    self._sent[name] = state
        if _REMOVED in self._sent and not (self.here / _REMOVED).exists():
            (self._folder / _REMOVED).unlink(missing_ok=True)
            del self._sent[_REMOVED]


def _text(error: Exception) -> str:
    known = isinstance(error, OSError) and error.filename
    return f"{error.filename}: {error.strerror}" if known else str(error) or "no answer"


def _state(path: pathlib.Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _sweep() -> None:
    """Removes what processes that were killed have left on this machine."""
    for root in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            ours = os.stat(root).st_uid == os.getuid()
            if ours and is_gone(json.loads((root / _OWNER).read_text())):
                shutil.rmtree(root, ignore_errors=True)
