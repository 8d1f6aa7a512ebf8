"""Ending a process that hangs."""

import faulthandler
import sys
import threading

from maxramp.errors import EXIT_LOST, START_AGAIN
from maxramp.processes import lifeline


class Watchdog:
    """Ends the process when nothing gets done for `timeout_seconds`.

    A device, a peer or a file system that hangs raises nothing: the loop waits in it for ever, and
    with it every other process of the job. Each of them has its own watchdog. What counts is the
    time that this process itself was running, so one that was stopped and continued is not ended.

    Use it as a context around everything that can hang.
    """

    def __init__(self, timeout_seconds: float, join_seconds: float = 0.0):
        """
        Args:
          timeout_seconds: -1 = wait for ever.
          join_seconds: how long the processes of a job may wait for each other before the first
            beat.
        """
        self._timeout = timeout_seconds
        self._tick = min(1.0, timeout_seconds / 10)
        self._waited = -join_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """A step is done or a part of one, or before the first a part of the data is opened."""
        self._waited = 0.0

    def _watch(self) -> None:
        while not self._closed.wait(self._tick):
            self._waited += self._tick
            if self._waited >= self._timeout:
                faulthandler.dump_traceback(all_threads=True)
                print(
                    f"error: no progress for hang_timeout_seconds={self._timeout:g}: this process, "
                    f"its storage or a peer hangs (above, where its threads stand); {START_AGAIN}",
                    file=sys.stderr,
                    flush=True,
                )
                lifeline.end_now(EXIT_LOST)

    def __enter__(self) -> "Watchdog":
        if self._timeout > 0:
            self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._closed.set()
