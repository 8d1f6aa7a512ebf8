"""How the end of one process reaches the others of its job.

A process that fails alone leaves the others in a collective that never returns. So every process
holds a connection to process 0 for as long as it lives: over it goes the exit status of whoever
ends, process 0 passes on that of the first that failed, and all end with it. A connection that
closes without a word belonged to a process that was killed.
"""

import faulthandler
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from typing import NoReturn

from jax._src import distributed  # for its key-value store, which has no public name

from maxramp.errors import EXIT_LOST, EXIT_PREEMPTED, EXIT_STAGE_END, START_AGAIN

ORDERLY = (0, EXIT_STAGE_END, EXIT_PREEMPTED)  # all processes end with these, after the same step

_MESSAGE = struct.Struct("!IB")  # a process and its exit status
_SECRET_BYTES = 16
_GRACE = 2.0  # seconds for a process to reach its own end once it knows of another's

_peers: "_Peers | None" = None


def watch() -> None:
    """Connects the processes of a job of several; jax.distributed has just been initialized."""
    global _peers
    state = distributed.global_state
    if state.num_processes == 1:
        return
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    if state.process_id == 0:
        listener = listen(host, 0, state.num_processes)
        secret = secrets.token_bytes(_SECRET_BYTES)
        state.client.key_value_set(
            "maxramp/lifeline", f"{listener.getsockname()[1]} {secret.hex()}"
        )
        _peers = _Peers(0, listener=listener, secret=secret, to_come=state.num_processes - 1)
        return
    port, secret = state.client.blocking_key_value_get("maxramp/lifeline", 60_000).split()
    try:
        link = socket.create_connection((host, int(port)), timeout=10.0)
        link.sendall(bytes.fromhex(secret) + _MESSAGE.pack(state.process_id, 0))
        link.settimeout(None)
    except OSError as error:
        print(
            f"warning: process {state.process_id} cannot reach process 0 at {host}:{port}: "
            f"{error.strerror or error}; without it the end of one process reaches the others "
            "only after minutes; open the ports between the hosts",
            file=sys.stderr,
        )
        return
    _peers = _Peers(state.process_id, link=link)


def is_loopback(host: str) -> bool:
    """Whether only processes on this machine can reach a host of this name."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(host: str, port: int, count: int) -> socket.socket:
    """Listens on process 0, by IPv4 and IPv6, for `count` processes that know it as `host`.

    Nobody outside of this machine has business with a job on a loopback address.

    Raises:
      OSError: the port is taken.
    """
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=count)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=count)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=count, dualstack_ipv6=True
    )


def leave(status: int) -> int:
    """Tells the other processes that this one ends, before it does.

    Args:
      status: its exit status; any but those in ORDERLY ends the others too, within seconds.

    Returns:
      The status to end with: that of the first process that failed.
    """
    return status if _peers is None else _peers.leave(status)


def end_now(status: int) -> NoReturn:
    """Ends this process at once, from any thread, and with it the others of the job."""
    status = leave(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Peers:
    """The connections of this process: process 0's to all others, another's to process 0."""

    def __init__(
        self,
        place: int,
        link: socket.socket | None = None,
        listener: socket.socket | None = None,
        secret: bytes = b"",
        to_come: int = 0,
    ):
        self._place, self._secret, self._to_come = place, secret, to_come
        self._links: set[socket.socket] = set()
        self._said: set[socket.socket] = set()  # those over which an end was announced
        self._failed: tuple[int, int] | None = None  # the first process that failed, its status
        self._known = threading.Event()
        self._ends_itself = self._hung = False
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        if listener:
            self._selector.register(listener, selectors.EVENT_READ, self._admit)
        else:
            self._add(link, 0)
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def leave(self, status: int) -> int:
        if status == EXIT_LOST:  # maybe because of the end of another, which is about to be heard
            self._known.wait(1.0)
        with self._lock:
            if status not in ORDERLY and self._failed is None:
                self._failed = self._place, status
                self._known.set()
            self._ends_itself = failing = self._failed is not None
            place, status = self._failed or (self._place, status)
        self._tell(place, status)
        if failing and self._place == 0:  # JAX aborts whoever outlives process 0
            deadline = time.monotonic() + _GRACE + 1.0
            while self._links and time.monotonic() < deadline:
                time.sleep(0.01)
        return status

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _admit(self, listener: socket.socket) -> None:
        """Another process comes; or somebody else, who does not know the secret."""
        try:
            link, _ = listener.accept()
            link.settimeout(5.0)
            hello = _receive(link, _SECRET_BYTES + _MESSAGE.size)
            link.settimeout(None)
        except OSError:
            time.sleep(0.1)  # without a free file descriptor it comes back at once
            return
        if not hmac.compare_digest(hello[:_SECRET_BYTES], self._secret):
            return
        place, _ = _MESSAGE.unpack(hello[_SECRET_BYTES:])
        self._add(link, place)
        self._to_come -= 1
        if not self._to_come:
            self._selector.unregister(listener)
            listener.close()
        if self._failed:
            self._tell(*self._failed)

    def _add(self, link: socket.socket, place: int) -> None:
        # Firewalls forget connections that are idle for minutes.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        self._links.add(link)
        self._selector.register(link, selectors.EVENT_READ, lambda link: self._hear(link, place))

    def _hear(self, link: socket.socket, place: int) -> None:
        try:
            place, status = _MESSAGE.unpack(_receive(link, _MESSAGE.size))
            self._hung = status == EXIT_LOST
        except OSError:  # closed
            status = EXIT_LOST
            self._selector.unregister(link)
            self._links.discard(link)
            if link in self._said:
                return
        self._said.add(link)
        if status in ORDERLY:
            return
        with self._lock:
            if self._failed is not None:
                return
            self._failed = place, status
        self._known.set()
        if self._place == 0:
            self._tell(place, status)
        killed = self._place != 0 and not self._links  # process 0: JAX is about to abort this one
        timer = threading.Timer(0.0 if killed else _GRACE, self._end)
        timer.daemon = True
        timer.start()

    def _tell(self, place: int, status: int) -> None:
        for link in list(self._links):
            try:
                link.sendall(_MESSAGE.pack(place, status))
            except OSError:  # it is gone
                continue

    def _end(self) -> None:
        """Ends this process for another, unless it is about to end by itself."""
        if self._ends_itself:
            return
        place, status = self._failed
        if self._hung:  # which of the two made the other wait shows where both stand
            faulthandler.dump_traceback(all_threads=True)
        why = (
            f"was lost (killed, or it hung); {START_AGAIN}"
            if status == EXIT_LOST
            else f"ended with exit status {status}; its own output says why"
        )
        print(f"error: process {place} of the job {why}", file=sys.stderr, flush=True)
        end_now(status)


def _receive(link: socket.socket, size: int) -> bytes:
    """So many bytes.

    Raises:
      OSError: the connection was closed, or took too long.
    """
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data
