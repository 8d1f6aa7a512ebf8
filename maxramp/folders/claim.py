"""Keeping two runs from writing one folder of an object storage, which has no locks.

A claim is an object that is written only as its writer last saw it (by its generation on Google's
storage, its ETag on S3), so of two that want it one gets it. Its owner writes it anew every few
seconds. Who finds it unchanged for some time takes it over, and the owner, if there still is one,
learns so at its next write. No clock of one machine is compared with another's. A claim says which
process left it: whether that has ended its own machine can tell.
"""

import contextlib
import json
import os
import pathlib
import secrets
import threading
import time
from typing import Any

import tensorstore

from maxramp.errors import TrainingError
from maxramp.files.place import ObjectPath, failure

_BEAT = 5.0  # seconds from one write of the owner to the next
_SILENCE = 30.0  # after so many an owner counts as gone
_TIMEOUT = 60.0  # seconds that an answer may take


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
        self._path, self._renewed, self._lost = path, 0.0, ""
        # No two writes are alike, as an ETag is made from the content.
        self._content = {"owner": owner, "token": secrets.token_hex(8), "beat": 0}
        self._content["process"] = this_process()
        self._store = self._answer(tensorstore.KvStore.open(path.parent.spec()))
        self._writing, self._ending = threading.Lock(), threading.Event()
        content, generation = self._read()
        if not is_gone(content.get("process")):
            deadline, first = time.monotonic() + _SILENCE, generation
            while content and time.monotonic() < deadline:
                time.sleep(1)
                content, generation = self._read()
                if content and generation != first:
                    raise BlockingIOError(content["owner"])
        if not self._write(generation):
            raise BlockingIOError(self._read()[0].get("owner", "another run"))
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
            content, generation = self._read()
            if content.get("token") == self._content["token"]:  # written: the answer was lost
                self._generation = generation
                return
            self._lost = content.get("owner", "another run")
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
        with self._writing:
            if not self._lost:
                name = self._path.name
                self._answer(self._store.write(name, None, if_equal=self._generation))

    def _keep(self) -> None:
        while not (self._lost or self._ending.wait(_BEAT)):
            # As long as the storage is away, nobody else gets an answer either.
            with contextlib.suppress(OSError, TrainingError):
                self.renew()

    def _read(self) -> tuple[dict[str, Any], bytes]:
        """What the claim says, nothing where there is none, and its generation."""
        found = self._answer(self._store.read(self._path.name))
        try:
            content = json.loads(found.value) if found.state == "value" else {}
        except ValueError:
            content = {"owner": "another program"}
        return content, found.stamp.generation

    def _write(self, expected: bytes) -> bool:
        """Writes the claim if it still is what was expected; whether it was."""
        self._content["beat"] += 1
        data, began = json.dumps(self._content).encode(), time.monotonic()
        found = self._answer(self._store.write(self._path.name, data, if_equal=expected))
        if found.generation:
            self._generation, self._renewed = found.generation, began
        return bool(found.generation)

    def _answer(self, future: Any) -> Any:
        try:
            return future.result(timeout=_TIMEOUT)
        except Exception as error:
            raise failure(error, self._path) from None


def this_process() -> dict[str, Any]:
    """What tells this process from all others, and where numbers of processes mean what they say.

    On a system without /proc, an empty object: nobody can tell.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return {}
    return {
        "machine": f"{boot} {namespace}",
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def is_gone(process: Any) -> bool:
    """Whether `this_process` of another one says that it has ended; False where nobody can tell."""
    here = this_process()
    if not (here and isinstance(process, dict) and process.get("machine") == here["machine"]):
        return False
    return _started(process.get("pid")) != process.get("started")


def _started(pid: Any) -> str | None:
    """When a process began, None without one that still runs; numbers are given again."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else rest[18]
