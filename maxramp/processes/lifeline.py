"""How the end of one process reaches the others of its job.

A process that fails alone leaves the others in a collective that never returns. So each keeps the
connection to process 0 for as long as it lives: over it goes the exit status of whoever ends, and
process 0 passes on the first failure. One that closes without a word belonged to a killed process.
"""

import contextlib
import faulthandler
import os
import selectors
import socket
import struct
import sys
import threading
import time
from typing import NoReturn

from maxramp.errors import EXIT_LOST, EXIT_PREEMPTED, EXIT_STAGE_END, START_AGAIN

ORDERLY = (0, EXIT_STAGE_END, EXIT_PREEMPTED)  # all processes end with these, after the same step

_MESSAGE = struct.Struct("!IB")  # a process and its exit status
_GRACE = 2.0  # seconds for a process to reach its own end once it knows of another's

_peers: "_Peers | None" = None


def hold(place: int, links: dict[socket.socket, int]) -> None:
    """Keeps the connections of a process to 0, or of 0 to all: links[connection] is whose."""
    global _peers
    _peers = _Peers(place, links)


def leave(status: int) -> int:
    """Tells the other processes that this one ends; a status not in ORDERLY ends them too, within
    seconds. Returns the status to end with: that of the first process that failed."""
    return status if _peers is None else _peers.leave(status)


def end_now(status: int) -> NoReturn:
    status = leave(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Peers:
    def __init__(self, place: int, links: dict[socket.socket, int]):
        self._place, self._links = place, links
        self._said: set[socket.socket] = set()  # those over which an end was announced
        self._failed: tuple[int, int] | None = None  # the first process that failed, its status
        self._known = threading.Event()
        self._ends_itself = False
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        for link in links:
            link.settimeout(None)
            # Firewalls forget connections that are idle for minutes.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            self._selector.register(link, selectors.EVENT_READ)
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def leave(self, status: int) -> int:
        if status == EXIT_LOST:  # maybe because of the end of another, which is about to be heard
            self._known.wait(1.0)
        if status not in ORDERLY:
            self._fail(self._place, status)
        with self._lock:
            failing = self._ends_itself = self._failed is not None
            place, status = self._failed or (self._place, status)
        self._tell(place, status)
        deadline = time.monotonic() + _GRACE + 1.0
        while failing and self._place == 0 and self._links and time.monotonic() < deadline:
            time.sleep(0.01)  # JAX aborts whoever outlives process 0
        return status

    def _fail(self, place: int, status: int) -> bool:
        with self._lock:
            is_first = self._failed is None
            self._failed = self._failed or (place, status)
        self._known.set()
        return is_first

    def _tell(self, place: int, status: int) -> None:
        for link in list(self._links):
            with contextlib.suppress(OSError):  # it is gone
                link.sendall(_MESSAGE.pack(place, status))

    def _listen(self) -> None:
        while self._links:
            for key, _ in self._selector.select():
                self._hear(key.fileobj)

    def _hear(self, link: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = link.recv(_MESSAGE.size, socket.MSG_WAITALL)
        if closed := len(data) < _MESSAGE.size:
            place, status = self._links.pop(link), EXIT_LOST
            self._selector.unregister(link)
        else:
            place, status = _MESSAGE.unpack(data)
        told = link in self._said
        self._said.add(link)
        if status in ORDERLY or (closed and told) or not self._fail(place, status):
            return
        if self._place == 0:
            self._tell(place, status)
        killed = self._place != 0 and closed  # process 0: JAX is about to abort this one
        hung = status == EXIT_LOST and not closed
        timer = threading.Timer(0.0 if killed else _GRACE, self._end, (place, status, hung))
        timer.daemon = True
        timer.start()

    def _end(self, place: int, status: int, hung: bool) -> None:
        """Ends this process for another, unless it is about to end by itself."""
        if self._ends_itself:
            return
        if hung:  # which of the two made the other wait shows where both stand
            faulthandler.dump_traceback(all_threads=True)
        why = f"ended with exit status {status}; its own output says why"
        if status == EXIT_LOST:
            why = f"was lost (killed, or it hung); {START_AGAIN}"
        print(f"error: process {place} of the job {why}", file=sys.stderr, flush=True)
        end_now(status)
