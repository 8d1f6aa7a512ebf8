"""How the end of one process reaches the others of its job.

A process that fails alone leaves the others in a collective that never returns. So each keeps the
connection to process 0 for as long as it lives: whoever ends sends its exit status over it, and
process 0 passes on the first failure. If one closes without a status, its process was killed.
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

from maxramp.errors import EXIT_LOST, EXIT_PREEMPTED, EXIT_STAGE_END, NEXT_START

ORDERLY = (0, EXIT_STAGE_END, EXIT_PREEMPTED)  # all processes end with these, after the same step

_MESSAGE = struct.Struct("!IB")  # a process and its exit status
_GRACE = 2.0  # seconds for a process to reach its own end once it knows of another's

_peers: "_Peers | None" = None


def register(process_id: int, links: dict[socket.socket, int]) -> None:
    """Keeps the connections of a process to 0, or of 0 to all: links[connection] is a process."""
    global _peers
    _peers = _Peers(process_id, links)


def announce_exit(status: int) -> int:
    """Tells the other processes that this one ends; a status not in ORDERLY ends them too, within
    seconds. Returns the status to end with: that of the first process that failed."""
    return status if _peers is None else _peers.announce_exit(status)


def end_now(status: int) -> NoReturn:
    """Ends this process at once, and tells the others."""
    status = announce_exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Peers:
    def __init__(self, process_id: int, links: dict[socket.socket, int]):
        self._process_id, self._links = process_id, links
        self._announced: set[socket.socket] = set()  # links over which an end was announced
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

    def announce_exit(self, status: int) -> int:
        """Tells the other processes that this one ends; returns the status to end with, that of the
        first that failed. If one failed, process 0 waits until the others have ended, `_GRACE`
        seconds and one more at most."""
        if status == EXIT_LOST:  # maybe because of the end of another, which is about to be heard
            self._known.wait(1.0)
        if status not in ORDERLY:
            self._set_failed(self._process_id, status)
        with self._lock:
            failing = self._ends_itself = self._failed is not None
            process_id, status = self._failed or (self._process_id, status)
        self._send(process_id, status)
        deadline = time.monotonic() + _GRACE + 1.0
        while failing and self._process_id == 0 and self._links and time.monotonic() < deadline:
            time.sleep(0.01)  # JAX aborts whoever outlives process 0
        return status

    def _set_failed(self, process_id: int, status: int) -> bool:
        """Notes that a process failed; returns whether it is the first."""
        with self._lock:
            is_first = self._failed is None
            self._failed = self._failed or (process_id, status)
        self._known.set()
        return is_first

    def _send(self, process_id: int, status: int) -> None:
        for link in list(self._links):
            with contextlib.suppress(OSError):  # it is gone
                link.sendall(_MESSAGE.pack(process_id, status))

    def _listen(self) -> None:
        while self._links:
            for key, _ in self._selector.select():
                self._receive(key.fileobj)

    def _receive(self, link: socket.socket) -> None:
        """Reads the end of a process from its link, in the thread `lifeline`; a link that closes
        without a status is that of a killed one. The first failure ends this process, too."""
        data = b""
        with contextlib.suppress(OSError):
            data = link.recv(_MESSAGE.size, socket.MSG_WAITALL)
        closed, was_announced = len(data) < _MESSAGE.size, link in self._announced
        self._announced.add(link)
        if closed:
            process_id, status = self._links.pop(link), EXIT_LOST
            self._selector.unregister(link)
            if was_announced:
                return
        else:
            process_id, status = _MESSAGE.unpack(data)
        if status in ORDERLY or not self._set_failed(process_id, status):
            return
        if self._process_id == 0:
            self._send(process_id, status)
        killed = self._process_id != 0 and closed  # process 0: JAX is about to abort this one
        hung = status == EXIT_LOST and not closed
        timer = threading.Timer(0.0 if killed else _GRACE, self._end, (process_id, status, hung))
        timer.daemon = True
        timer.start()

    def _end(self, process_id: int, status: int, hung: bool) -> None:
        """Ends this process at once because another one ended with `status` (`hung`: its watchdog
        ended it), unless it ends by itself already."""
        if self._ends_itself:
            return
        if hung:  # where both stand shows which of the two made the other wait
            faulthandler.dump_traceback(all_threads=True)
        why = f"ended with exit status {status}; its own output says why"
        if status == EXIT_LOST:
            why = f"was lost (killed, or it hung); {NEXT_START}"
        print(f"error: process {process_id} of the job {why}", file=sys.stderr, flush=True)
        end_now(status)
