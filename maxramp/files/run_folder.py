"""The folder of a run, on a disk or in an object storage: one process claims it, all write to it.

An object cannot be appended to, and a storage may be away for an hour. So a run's small files
(metrics, event files, plan, pictures) are written to a local folder, and a thread sends those that
have changed, every few seconds and before a checkpoint counts.

An object storage has no locks. A claim is an object that is written only as its writer last saw it
(by its generation on Google's storage, its ETag on S3), so of two that want it one gets it. Its
owner rewrites it every few seconds. A run that finds it unchanged for some time takes it over, and
the owner, if it still runs, learns so at its next write. No clocks of two machines are compared; a
claim names its process, so its own machine can tell whether that has ended.
"""

import collections
import contextlib
import errno
import json
import os
import pathlib
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import tensorstore

from maxramp.commandline import count
from maxramp.errors import TrainingError, reason_of
from maxramp.files.place import ObjectPath, Place, failure, lock, make_folder

_PERIOD = 15.0  # seconds from one round to the next
_SHARE = 20  # a round starts no sooner than this many times what the last one took
_END_SECONDS = 60.0  # that the end of a run tries to send the rest
_RECORDS = "metrics.jsonl"  # no checkpoint counts without them
_REMOVED = "next_stage.json"  # the only file that a run removes

_BEAT = 5.0  # seconds from one write of a claim's owner to the next
_SILENCE = 30.0  # seconds after which an owner counts as gone
_TIMEOUT = 60.0  # seconds that an answer may take


class Claim:
    """A run's claim to its folder, until `release` or the end of the process."""

    def __init__(self, path: ObjectPath, owner: str):
        """Claims the folder of the object `path`. Waits for half a minute where its owner may have
        been killed; a BlockingIOError names one that lives, an OSError says that no answer came."""
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
        """Writes the claim again if its last write is `_BEAT` seconds old; a TrainingError if
        another run has taken the folder, an OSError if the storage gives no answer. Any thread may
        call it."""
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
        """Raises a TrainingError if another run is known to have taken the folder."""
        if self._lost:
            raise TrainingError(
                f"{self._path.parent} was taken over by {self._lost}, as this run was not heard "
                f"of for {_SILENCE:.0f} seconds; it writes nothing more"
            )

    def release(self) -> None:
        """Removes the claim, unless it is lost; an OSError if the storage gives no answer."""
        self._ending.set()
        with self._writing:
            if not self._lost:
                self._answer(self._store.write(self._path.name, None, if_equal=self._generation))

    def _keep(self) -> None:
        while not (self._lost or self._ending.wait(_BEAT)):
            # As long as the storage is away, nobody else gets an answer either.
            with contextlib.suppress(OSError, TrainingError):
                self.renew()

    def _read(self) -> tuple[dict[str, Any], bytes]:
        """Reads the claim's content, empty without one, and its generation."""
        claim = self._answer(self._store.read(self._path.name))
        try:
            content = json.loads(claim.value) if claim.state == "value" else {}
        except ValueError:
            content = {"owner": "another program"}
        return content, claim.stamp.generation

    def _write(self, expected: bytes) -> bool:
        """Writes the claim if it still is what was expected; returns whether it was."""
        self._content["beat"] += 1
        data, began = json.dumps(self._content).encode(), time.monotonic()
        stamp = self._answer(self._store.write(self._path.name, data, if_equal=expected))
        if stamp.generation:
            self._generation, self._renewed = stamp.generation, began
        return bool(stamp.generation)

    def _answer(self, future: Any) -> Any:
        """Waits `_TIMEOUT` seconds for TensorStore's result; its errors come as OSErrors."""
        try:
            return future.result(timeout=_TIMEOUT)
        except Exception as error:
            raise failure(error, self._path) from None


class Appending:
    """A file that grows; what a full disk does not take for a while waits in memory. Whatever the
    package appends to a file goes through here: a last line that a kill or a power loss tore is
    ended first, and swallows none of the new ones.
    """

    def __init__(self, path: pathlib.Path):
        self._file = path.open("a+b", buffering=0)
        self._unwritten: collections.deque[bytes] = collections.deque()
        if size := self._file.seek(0, os.SEEK_END):
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":
                self.append(b"\n")

    def append(self, record: bytes) -> None:
        """Appends a record, of a text with its line feed. What a full disk does not take waits;
        only `flush` and `close` raise."""
        self._unwritten.append(record)
        with contextlib.suppress(OSError):  # `flush` says so
            self.flush()

    def flush(self) -> None:
        """Hands everything to the file system; an OSError says that it takes no more."""
        while self._unwritten:
            written = self._file.write(self._unwritten[0])
            self._unwritten[0] = self._unwritten[0][written:]
            if not self._unwritten[0]:
                self._unwritten.popleft()

    def sync(self) -> None:
        """Waits until what was handed over outlives this machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. An OSError names it, and says how many records are lost."""
        try:
            self.flush()
        except OSError as error:
            lost = f"{error.strerror}; lost: {count(len(self._unwritten), 'record')}"
            raise OSError(error.errno, lost, self._file.name) from None
        finally:
            self._file.close()


class RunFiles:
    """The small files of a run, in its folder on a disk."""

    def __init__(self, folder: pathlib.Path, locked: IO | None = None):
        self.local = folder  # where the process writes: here the folder itself
        self._locked = locked  # until it is closed or the process ends
        self.record_files: list[Appending] = []  # the files that records go to

    def check(self) -> None:
        """Raises a TrainingError if another run has taken over the folder, which the lock of a disk
        rules out."""

    def close(self) -> None:
        """Sends the rest, where the folder is in a storage; raises nothing. The lock stays until
        the process ends."""

    def publish(self) -> None:
        """Waits until the records outlive this machine, as checkpoints and snapshots do; an OSError
        if they do not."""
        for file in self.record_files:
            file.sync()

    def flush(self) -> Callable[[], None]:
        """Hands all records to the file system, or raises an OSError: a checkpoint stands for steps
        that are recorded. Returns what waits, in another thread than the loop's, until they are in
        the run's folder."""
        for file in self.record_files:
            file.flush()
        return self.publish


class MirroredFiles(RunFiles):
    """The small files of a run in an object storage, which a process writes to a local folder."""

    def __init__(self, folder: ObjectPath, warn: Callable[[str], None], claim: Claim | None):
        """Begins to send files. The process with a `claim` writes the run's own, and first fetches
        those of earlier starts, or raises an OSError; the others only send what they add. `warn`
        takes a line about a fault that need not end the run."""
        self._folder, self._warn, self._claim = folder, warn, claim
        super().__init__(pathlib.Path(tempfile.mkdtemp(prefix="maxramp-mirror-"), folder.name))
        self.local.mkdir()
        self._sent: dict[str, tuple[int, int]] = {}  # modified when, and its size
        if claim:
            self._fetch()
        self._sending, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def check(self) -> None:
        if self._claim:
            self._claim.check()

    def publish(self) -> None:
        """Sends what has changed. An OSError says that something is still to be sent, which is
        tried again later; a TrainingError, that another run has taken the folder.
        """
        with self._sending:
            if self._claim:
                self._claim.renew()
            self._send()

    def close(self) -> None:
        """Sends the rest, trying for a minute, and removes the folder here and the claim; warns if
        it cannot be sent, and raises nothing."""
        self._ended.set()
        deadline, failure = time.monotonic() + _END_SECONDS, self._try_to_publish()
        while failure and time.monotonic() < deadline:
            if isinstance(failure, TrainingError | FileNotFoundError):
                break  # it would fail again
            time.sleep(1)
            failure = self._try_to_publish()
        if failure:
            rest = f"is in {self.local}" if self.local.is_dir() else "is lost"
            self._warn(f"{reason_of(failure)}; what was not sent to {self._folder} {rest}")
        else:
            shutil.rmtree(self.local.parent, ignore_errors=True)
        if self._claim:
            with contextlib.suppress(OSError):
                self._claim.release()

    def _fetch(self) -> None:
        """Fetches the small files of earlier starts, not the checkpoints; an OSError if the storage
        fails."""
        for part in ("", "tensorboard", "tensorboard/over_samples"):
            with contextlib.suppress(FileNotFoundError):
                for path in (self._folder / part).iterdir():
                    if path.is_file() and path.name != ".lock":
                        name = str(path.relative_to(self._folder))
                        file = self.local / name
                        file.parent.mkdir(exist_ok=True)
                        file.write_bytes(path.read_bytes())
                        self._sent[name] = _state(file)

    def _work(self) -> None:
        """Sends what has changed, in the thread `mirror`, until `close`; warns once for each
        outage."""
        pause, failure = _PERIOD, None
        while not self._ended.wait(pause):
            began, failed_before = time.monotonic(), failure is not None
            failure = self._try_to_publish()
            if isinstance(failure, TrainingError):
                return  # `check` raises it
            if failure and not failed_before:
                self._warn(f"{reason_of(failure)}; it is tried again, and the run continues")
            pause = _PERIOD if failure else max(_PERIOD, _SHARE * (time.monotonic() - began))

    def _try_to_publish(self) -> OSError | TrainingError | None:
        try:
            self.publish()
        except (OSError, TrainingError) as error:
            return error

    def _send(self) -> None:
        """Sends the files that have changed, and removes from the storage what the run has removed.
        What a cleaner of /tmp has removed stays there; a FileNotFoundError if that is the records
        or the whole folder. For `publish`, whose lock it needs."""
        needed = self.local / (_RECORDS if _RECORDS in self._sent else "")
        if not needed.exists():
            raise FileNotFoundError(errno.ENOENT, "removed under the run", str(needed))
        # The records last: the file of those that a start dropped arrives before they are cut.
        for path in sorted(self.local.rglob("*"), key=lambda path: path.name == _RECORDS):
            if path.suffix != ".tmp" and path.is_file():
                name = str(path.relative_to(self.local))
                try:
                    state = _state(path)
                    if self._sent.get(name) == state:
                        continue
                    content = path.read_bytes()
                except FileNotFoundError:  # removed meanwhile
                    continue
                (self._folder / name).write_bytes(content)
                self._sent[name] = state
        if _REMOVED in self._sent and not (self.local / _REMOVED).exists():
            (self._folder / _REMOVED).unlink()
            del self._sent[_REMOVED]


def claim_folder(folder: Place, owner: str, warn: Callable[[str], None]) -> RunFiles:
    """Makes the folder of a run and claims it for its first process. A BlockingIOError names
    another `owner` that writes the folder, another OSError says that it cannot be written."""
    make_folder(folder / "checkpoints")
    if isinstance(folder, ObjectPath):
        return MirroredFiles(folder, warn, Claim(folder / ".lock", owner))
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
    return RunFiles(folder, file)


def join_folder(folder: Place, warn: Callable[[str], None]) -> RunFiles:
    """Opens the folder of a run that another process of the job has claimed: what this one adds
    arrives there too.
    """
    return MirroredFiles(folder, warn, None) if isinstance(folder, ObjectPath) else RunFiles(folder)


def _state(path: pathlib.Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def this_process() -> dict[str, Any]:
    """Identifies this process among all others; empty on a system without /proc."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return {}
    pid = os.getpid()
    return {"machine": f"{boot} {namespace}", "pid": pid, "started": start_time(pid)}


def is_gone(process: Any) -> bool:
    """Tells whether a process, identified by its `this_process`, has ended; False if nobody can
    tell.
    """
    own = this_process()
    if not (own and isinstance(process, dict) and process.get("machine") == own["machine"]):
        return False
    return start_time(process.get("pid")) != process.get("started")


def start_time(pid: Any) -> str | None:
    """Returns when a process began, None if it has ended: process ids are used again."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else rest[18]
