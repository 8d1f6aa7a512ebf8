"""Keeping two runs from writing one folder of an object storage, which has no locks.

A claim is an object that is written only as its writer last saw it (by its generation on Google's
storage, its ETag on S3), so of two that want it one gets it. Its owner writes it anew every few
seconds. Who finds it unchanged for some time takes it over, and the owner, if there still is one,
learns so at its next write. No clock of one machine is compared with another's.
"""

import json
import secrets
import threading
import time
from typing import Any

from maxramp.errors import TrainingError
from maxramp.files.kvstore import TIMEOUT, open_store, storing
from maxramp.files.place import ObjectPath
from maxramp.processes.identity import is_gone, this_process

_BEAT = 5.0  # seconds from one write of the owner to the next
_SILENCE = 30.0  # after so many an owner counts as gone


class Claim:
    """A run's claim to its folder, until `release` or the end of the process."""

    def __init__(self, path: ObjectPath, owner: str):
        """Takes it, after a wait where its owner may have been killed on another machine.

        Args:
          path: of the object.
          owner: who this is, in a few words for others.

        Raises:
          BlockingIOError: another process holds it; says which.
          OSError: the storage does not answer.
        """
        self._path, self._owner, self._token = path, owner, secrets.token_hex(8)
        self._store, self._beats, self._renewed = open_store(path.parent), 0, 0.0
        self._writing, self._ending, self._lost = threading.Lock(), threading.Event(), ""
        while True:
            found = self._read()
            if found.state == "value":
                self._wait_for_its_end(found)
            if self._write(found.stamp.generation):
                break  # else another was faster: look again
        threading.Thread(target=self._keep, name="claim", daemon=True).start()

    def renew(self) -> None:
        """Makes sure that the folder still is this run's, as of the last few seconds.

        Raises:
          TrainingError: another run has taken it.
          OSError: the storage does not answer.
        """
        with self._writing:
            self.check()
            if time.monotonic() - self._renewed < _BEAT or self._write(self._generation):
                return
            found = self._read()
            if _content(found).get("token") == self._token:  # written, but the answer was lost
                self._generation = found.stamp.generation
                return
            self._lost = _content(found).get("owner", "another program")
            self.check()

    def check(self) -> None:
        """Asks nobody: what is known by now.

        Raises:
          TrainingError: another run has taken the folder.
        """
        if self._lost:
            raise TrainingError(
                f"{self._path.parent} was taken over by {self._lost}, as this run was not heard "
                f"of for {_SILENCE:.0f} seconds; it writes nothing more"
            )

    def release(self) -> None:
        """Gives it up; whoever comes next does not wait."""
        self._ending.set()
        with self._writing, storing(self._path):
            if not self._lost:
                self._store.write(self._path.name, None, if_equal=self._generation).result(
                    timeout=TIMEOUT
                )

    def _keep(self) -> None:
        while not self._ending.wait(_BEAT):
            try:
                self.renew()
            except TrainingError:
                return
            except OSError:
                pass  # as long as the storage is away, nobody else gets an answer either

    def _wait_for_its_end(self, found: Any) -> None:
        """Returns when the claim's owner is gone, or it has been given up."""
        content = _content(found)
        if is_gone(content.get("process")):
            return
        deadline = time.monotonic() + _SILENCE
        while time.monotonic() < deadline:
            time.sleep(1)
            now = self._read()
            if now.state != "value":
                return
            if now.stamp.generation != found.stamp.generation:
                raise BlockingIOError(content.get("owner", "another program"))

    def _read(self) -> Any:
        with storing(self._path):
            return self._store.read(self._path.name).result(timeout=TIMEOUT)

    def _write(self, expected: bytes) -> bool:
        """Writes the claim if it still is what was expected; whether it was."""
        self._beats += 1  # an ETag is made from the content: no two are alike
        content = {
            "owner": self._owner,
            "token": self._token,
            "process": this_process(),
            "beat": self._beats,
        }
        data, began = json.dumps(content).encode(), time.monotonic()
        with storing(self._path):
            stamp = self._store.write(self._path.name, data, if_equal=expected)
            generation = stamp.result(timeout=TIMEOUT).generation
        if not generation:
            return False
        self._generation, self._renewed = generation, began
        return True


def _content(found: Any) -> dict[str, Any]:
    try:
        content = json.loads(found.value) if found.state == "value" else {}
    except ValueError:
        content = {}
    return content if isinstance(content, dict) else {}
