"""Snapshots of the train state in the memory of the nodes, each with a copy on the next node.

Every `local_checkpoint_period` steps a process copies its pieces of the state from the devices. A
thread writes them into the node's folder, and pulls those of the node before. Processes that share
a folder are one node. When all files of all processes are there twice, the snapshot before is
removed: so after the loss of any one node a whole one is left.

The folder is LOCAL/maxramp-RUN-HASH, with a hash of the run's path. A snapshot counts if the run
still holds its step of the start that took it (`Starts.hold`), and the records of all its steps.
"""

import contextlib
import errno
import functools
import hashlib
import math
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from maxramp.checkpoints import arrays
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.checkpoints.peers import Peer, Server
from maxramp.checkpoints.pieces import (
    Arrays,
    FileName,
    Piece,
    Snapshot,
    Values,
    list_files,
    read_part,
    verify,
    write_parts,
    write_pieces,
)
from maxramp.checkpoints.saving import Poll
from maxramp.checkpoints.starts import Starts
from maxramp.errors import ConfigError
from maxramp.files.place import Place, is_unfinished, place
from maxramp.keys.base import expand_path
from maxramp.model.pipeline import order_by_layer
from maxramp.processes import agreement
from maxramp.training.state import TrainState

_MEMORY = "/dev/shm"
_MEASURED = 4  # the first copies, of which the log tells the cost
_SHARE = 0.01  # of the loop's time for copies, for which the log names the period
_END_SECONDS = 60.0  # that the end of a job waits for the thread


class Snapshots:
    """Takes, finds and removes the snapshots of a run."""

    def __init__(
        self,
        keys: CheckpointKeys,
        run: Place,
        start: str,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ):
        """Joins the processes of the job, which all call it; a ConfigError if one cannot write.
        `run` is the run's folder, `start` the id of this start; `say` and `warn` take a line."""
        self._period, self._say, self._warn = keys.local_checkpoint_period, say, warn
        self._me, self._is_first = jax.process_index(), jax.process_index() == 0
        self._start = start
        self._resumed = 0, ""  # the snapshot that the job continues from: step and start
        secret = agreement.decide_on_first(lambda: secrets.token_hex(32))
        self._folder = local_folder(keys.local_checkpoint_directory, run)
        agreement.raise_everywhere(self._make_folder)
        self._server, stat = Server(self._folder, secret.encode()), self._folder.stat()
        node = f"{_boot_id()} {stat.st_dev} {stat.st_ino}"
        addresses, nodes = zip(
            *agreement.all_gather_json([self._server.address, node]), strict=True
        )
        self._connect = [
            functools.partial(Peer, process, address, secret.encode())
            for process, address in enumerate(addresses)
        ]
        processes_by_node = {name: [] for name in nodes}
        for process, name in enumerate(nodes):
            processes_by_node[name].append(process)
        self._on_node = processes_by_node[node]  # the processes of this node
        self._rank = self._on_node.index(self._me)
        # The processes of the node before whose files this process copies.
        index = list(processes_by_node).index(node)
        before = list(processes_by_node.values())[index - 1] if len(processes_by_node) > 1 else []
        self._copied_from = before[self._rank :: len(self._on_node)]
        self._poll, self._thread = Poll(), threading.Thread()
        # The first copies: after which step, when, and their seconds.
        self._copies: list[tuple[int, float, float]] = []
        self._is_warned = False

    def _make_folder(self) -> None:
        """Makes the folder of this node's snapshots; a ConfigError of this process alone where it
        cannot be written."""
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):  # another user's
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(
                f"local_checkpoint_directory: process {self._me} cannot write to {self._folder}: "
                f"{error.strerror}; give a folder in the node's memory or on its disk"
            ) from None

    def is_due(self, done: int) -> bool:
        """Tells whether to take one after `done` steps: not while the last one is still written on
        some process. Asked after every step; the same answer on every process.
        """
        is_due = done % self._period == 0 and not self._poll.answer()
        if (done + 1) % self._period == 0:
            self._poll.ask(self._thread.is_alive())
        return is_due

    def save(self, record: Checkpoint, state: TrainState, prepared: Callable[[], None]) -> float:
        """Copies the state of a finished step, and keeps it in the background; returns the seconds
        of the copy. `prepared` waits, on the first process, for what a restart needs besides. Every
        process calls it where `is_due` says so."""
        begin = time.perf_counter()
        kinds, pieces = _copy(state)
        seconds = time.perf_counter() - begin
        self._report_cost(record.step, begin, seconds, sum(x.nbytes for _, _, x in pieces))

        def write() -> None:
            if self._is_first:
                prepared()
            path = self._folder / str(self._name(record.step, self._me))
            write_pieces(path, record, kinds, pieces)
            pieces.clear()

        # Not of a pool: nothing may wait for this thread at the end of the process.
        keep = functools.partial(self._keep, record.step, write)
        self._thread = threading.Thread(target=keep, name="snapshot", daemon=True)
        self._thread.start()
        return seconds

    def _name(self, step: int, process: int) -> FileName:
        return FileName(step, self._start, process, jax.process_count())

    def _report_cost(self, step: int, begin: float, seconds: float, size: int) -> None:
        """Says once, after the first copies, what share of the time the slowest of them costs. Is
        told of each copy: when it began, its seconds and its bytes."""
        if len(self._copies) == _MEASURED:
            return
        self._copies.append((step, begin, seconds))
        if len(self._copies) == _MEASURED and self._is_first:
            first_step, first_begin, _ = self._copies[0]
            copies = [seconds for *_, seconds in self._copies]
            step_seconds = (begin - first_begin - sum(copies[:-1])) / (step - first_step)
            share = max(copies) / step_seconds
            self._say(
                f"snapshot {size / 1e6:,.1f} MB of this process, copied in {max(copies):.2g} s: "
                f"{share / self._period:.1%} of the time, and {_SHARE:.0%} at "
                f"local_checkpoint_period={math.ceil(share / _SHARE)}"
            )

    def _keep(self, step: int, write: Callable[[], None]) -> None:
        """Writes this process's file and copies those of another node; in the thread `snapshot`, on
        every process. Then only this snapshot is kept or, where a process failed (the first one
        warns), those before; errors of the disk or a peer are not raised."""

        def pull() -> None:
            for process in self._copied_from:
                name = str(self._name(step, process))
                write_parts(self._folder / name, self._connect[process]().read_file(name))

        point = f"maxramp/snapshot/{step}"
        try:
            failures = agreement.meet(f"{point}/written", _failure_of(write))
            failures = failures or agreement.meet(f"{point}/copied", _failure_of(pull))
        except jax.errors.JaxRuntimeError:  # a process has ended, and so does the job
            return
        if failures and self._is_first and not self._is_warned:
            self._warn(
                f"the snapshot after step {step} was not kept: {failures[0]}; the run "
                "continues, and tries it again at the next one"
            )
        self._is_warned = bool(failures)
        self._clean(lambda name: (name[:2] == (step, self._start)) != bool(failures))

    def _clean(self, keeps: Callable[[FileName], bool]) -> None:
        """Removes files of this node but those that it `keeps`; its first process does."""
        for name in list_files(self._folder) if self._rank == 0 else ():
            if not keeps(name):
                (self._folder / str(name)).unlink(missing_ok=True)

    def wait(self) -> None:
        """Waits until the last snapshot is kept, for a minute at most."""
        if self._thread.ident:
            self._thread.join(_END_SECONDS)

    def close(self, error: BaseException | None, saved: int | None) -> None:
        """Removes the snapshots up to a step whose checkpoint is `saved`, after an orderly end."""
        if error is not None or saved is None:
            return
        self.wait()
        self._clean(lambda name: name.step > saved)
        with contextlib.suppress(OSError):  # something is left in it, or it is gone
            self._folder.rmdir()

    def find(
        self, checkpoints: Place, starts: Starts, before: Checkpoint | None, recorded: int
    ) -> Snapshot | None:
        """Finds, on all processes, the newest whole snapshot that these `starts` hold, after the
        checkpoint `before` and of at most `recorded` steps; `begin` then keeps it. None, with a
        warning if there are parts of some. `checkpoints` is the folder its checkpoint would be in.
        """
        own = [x for x in list_held(self._folder, starts, before) if x.step <= recorded]
        newer = {name[:2] for names in agreement.all_gather_json(own) for name in map(tuple, names)}
        snapshot = None
        for step, start in sorted(newer, reverse=True):
            if snapshot := self._open(checkpoints / str(step), start, own):
                self._resumed = step, start
                break
        if newer and not snapshot and self._is_first:
            self._warn(
                f"no snapshot is whole, the newest is after step {max(newer)[0]}: more than one "
                f"node was lost; continuing from {before or 'the start'}"
            )
        return snapshot

    def begin(self) -> None:
        """Removes all snapshots but that which the job continues from, as it trains now, and files
        that a kill left unfinished."""
        self._clean(lambda name: name[:2] == self._resumed)
        for path in filter(is_unfinished, self._folder.iterdir() if self._rank == 0 else ()):
            path.unlink(missing_ok=True)

    def _open(self, path: Place, start: str, own: Sequence[FileName]) -> Snapshot | None:
        """Opens a snapshot, on all processes, if every file of it is whole on some node, else None;
        `path` ends in its step, `own` are this node's files."""
        wanted = int(path.name), start
        on_node = [name for name in own if name[:2] == wanted]
        indices = {}  # of the files that this process finds whole
        for name in map(str, on_node[self._rank :: len(self._on_node)]):
            if index := verify(self._folder / name):
                indices[name] = index
        files: dict[str, tuple[list[Piece], list[int]]] = {}  # pieces, and processes that have them
        listed = {name: index["pieces"] for name, index in indices.items()}
        for process, pieces_by_file in enumerate(agreement.all_gather_json(listed)):
            for name, pieces in pieces_by_file.items():
                files.setdefault(name, ([Piece(*x) for x in pieces], []))[1].append(process)
        count = next((int(name.rpartition(".")[2]) for name in files), -1)
        if len(files) != count:
            return None
        source = min(process for _, processes in files.values() for process in processes)
        described = None
        if self._me == source:
            index = next(iter(indices.values()))
            described = index["checkpoint"], index["arrays"]
        record, kinds = agreement.all_gather_json(described)[source]
        return Snapshot(path, **record, arrays=kinds, read=self._reader(kinds, files))

    def _reader(
        self, kinds: Arrays, files: Mapping[str, tuple[list[Piece], list[int]]]
    ) -> Callable[[str, Sequence[int], Sequence[int]], np.ndarray]:
        """Makes `Snapshot.read`, which reads pieces from this node, else from a process that has
        them, or raises a PeerLostError."""
        connect = functools.cache(lambda process: self._connect[process]())
        by_array: dict[str, list[tuple[str, Piece]]] = {}
        for name, (pieces, _) in files.items():
            for piece in pieces:
                by_array.setdefault(piece.array, []).append((name, piece))

        @functools.lru_cache(1)  # for the next device of this process
        def read_piece(name: str, offset: int, size: int) -> bytes:
            processes = files[name][1]
            if {*processes} & {*self._on_node}:
                return read_part(self._folder / name, offset, size)
            return connect(processes[self._me % len(processes)]).read(name, offset, size)

        def read(array: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
            dtype, _ = kinds[array]
            values = np.empty(shape, dtype)
            for name, piece in by_array.get(array, ()):
                if both := piece.overlap(start, shape):
                    data = read_piece(name, piece.offset, piece.size)
                    values[both[1]] = np.frombuffer(data, dtype).reshape(piece.shape)[both[0]]
            return values

        return read


def local_folder(directory: str, run: Place) -> pathlib.Path:
    """Returns the folder of a run's snapshots on this node, the same by any path to the run."""
    run = run.resolve()
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    directory = expand_path("local_checkpoint_directory", directory) or _MEMORY
    root = pathlib.Path(place(directory)).absolute()
    return root / f"maxramp-{run.name}-{digest}"


def list_held(folder: pathlib.Path, starts: Starts, before: Checkpoint | None) -> list[FileName]:
    """Lists the files of snapshots after a checkpoint that a run still holds, the newest last."""
    after = before.step if before else 0
    return [n for n in list_files(folder) if n.step > after and starts.hold(n.start, n.step)]


def _copy(state: TrainState) -> tuple[Arrays, list[Values]]:
    """Returns the dtypes and shapes of all arrays, and this process's pieces on the host. Of the
    devices that hold the same piece one copies it, and the next one that of the next array.
    """
    leaves = arrays.named_leaves(order_by_layer(arrays.items_of(state)))
    chosen = []
    for number, (name, x) in enumerate(leaves.items()):
        shape = x.sharding.shard_shape(x.shape)
        pieces = math.prod(n // m for n, m in zip(x.shape, shape, strict=True))
        replica = number % (len(x.sharding.device_set) // pieces)
        for shard in x.addressable_shards:
            if shard.replica_id == replica:
                shard.data.copy_to_host_async()
                chosen.append((name, [s.start or 0 for s in shard.index], shard.data))
    kinds = {name: (str(x.dtype), list(x.shape)) for name, x in leaves.items()}
    return kinds, [(name, start, _copy_piece(x)) for name, start, x in chosen]


def _copy_piece(x: jax.Array) -> np.ndarray:
    """Copies a piece also where `np.asarray` returns a view of memory that the next step reuses."""
    (device,) = x.devices()
    return np.array(x) if device.platform == "cpu" else np.asarray(x)


def _failure_of(work: Callable[[], None]) -> str:
    """Runs `work`; returns in a line whatever it raises, which ends a snapshot and not the run."""
    try:
        work()
        return ""
    except Exception as error:
        return f"process {jax.process_index()}: {arrays.reason_of(error)}"


def _boot_id() -> str:
    """Returns an id that no other machine has, nor this one after it boots again."""
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
