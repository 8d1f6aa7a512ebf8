"""A save's thread, and how the processes agree on what became of it."""

import concurrent.futures
import threading
import time
from collections.abc import Callable

import jax

from maxramp.checkpoints.arrays import reason_of
from maxramp.commandline import clock_in
from maxramp.folders.kvstore import QUIET, bytes_written
from maxramp.parallel import agreement, processes


def in_thread(function: Callable[[], None]) -> concurrent.futures.Future:
    """What a thread of its own makes of a function; nothing waits for the thread at the end."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=processes.SAVING, daemon=True).start()
    return future


class Patience:
    """How long the end of a run waits for a storage that takes nothing.

    The clock runs over all that it waits for, and anew when any process has written something.
    """

    def __init__(self, seconds: float, say: Callable[[str], None]):
        """
        Args:
          seconds: after which it is over.
          say: takes, once, the time of day at which it is over if the storage takes nothing more;
            not called for a storage that is done within seconds.
        """
        self.seconds, self._say, self._said = seconds, say, False
        self._began = self._since = time.monotonic()
        self._written: list[int] | None = None

    def is_over(self, written: list[int]) -> bool:
        """Whether the storage has taken nothing for so long.

        Args:
          written: bytes that it has taken of each process.
        """
        now = time.monotonic()
        if written != self._written:
            self._written, self._since = written, now
        if now - self._began > QUIET and not self._said:
            self._said = True
            self._say(clock_in(self._since + self.seconds - now))
        return now - self._since > self.seconds


def agreed_reason(saving: concurrent.futures.Future, patience: Patience | None = None) -> str:
    """Why a save failed on some process; "" once it is done on all.

    Where one process fails, Orbax lets the others wait for it for 20 minutes: they learn it here,
    and leave their threads behind.

    Args:
      saving: of this process.
      patience: after which a save to a storage has failed; None waits for as long as it takes.
    """
    several, over = jax.process_count() > 1, False
    while True:
        concurrent.futures.wait([saving], timeout=0.2 if several or patience else None)
        own = None  # not yet done
        if saving.done():
            error = saving.exception()
            own = reason_of(error) if error else ""
        elif over:
            own = f"the storage has taken nothing for {patience.seconds:g} seconds"
        states = agreement.all_gather_json([own, bytes_written() if patience else 0])
        for process, (reason, _) in enumerate(states):
            if reason:
                return f"process {process}: {reason}" if several else reason
        if all(reason == "" for reason, _ in states):
            return ""
        over = patience is not None and patience.is_over([count for _, count in states])


def raiser(error: Exception) -> Callable[[], None]:
    """A save that has failed before its thread began: what raises its error there."""

    def fail() -> None:
        raise error

    return fail
