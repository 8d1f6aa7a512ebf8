"""A save's thread, and how the processes agree on what became of it."""

import concurrent.futures
import threading
import time
from collections.abc import Callable

import jax

from maxramp.checkpoints.arrays import reason_of
from maxramp.folders.kvstore import bytes_written
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


def agreed_reason(saving: concurrent.futures.Future, patience: float | None = None) -> str:
    """Why a save failed on some process; "" once it is done on all.

    Where one process fails, Orbax lets the others wait for it for 20 minutes: they learn it here,
    and leave their threads behind.

    Args:
      saving: of this process.
      patience: seconds in which a storage takes nothing of any process, after which a save to it
        has failed; None waits for as long as it takes.
    """
    several, written, since = jax.process_count() > 1, None, time.monotonic()
    while True:
        concurrent.futures.wait([saving], timeout=0.2 if several or patience else None)
        own = None  # not yet done
        if saving.done():
            error = saving.exception()
            own = reason_of(error) if error else ""
        elif patience and time.monotonic() - since > patience:
            own = f"the storage has taken nothing for {patience:g} seconds"
        states = agreement.all_gather_json([own, bytes_written() if patience else 0])
        for process, (reason, _) in enumerate(states):
            if reason:
                return f"process {process}: {reason}" if several else reason
        if all(reason == "" for reason, _ in states):
            return ""
        before, written = written, [count for _, count in states]
        if written != before:
            since = time.monotonic()


def raiser(error: Exception) -> Callable[[], None]:
    """A save that has failed before its thread began: what raises its error there."""

    def fail() -> None:
        raise error

    return fail
