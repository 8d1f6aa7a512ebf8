"""A save's thread, and how the processes agree on what became of it."""

import concurrent.futures
import threading
from collections.abc import Callable

import jax

from maxramp.checkpoints.arrays import reason_of
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


def agreed_reason(saving: concurrent.futures.Future) -> str:
    """Why a save failed on some process; "" once it is done on all.

    Where one process fails, Orbax lets the others wait for it for 20 minutes: they learn it here,
    and leave their threads behind.
    """
    several = jax.process_count() > 1
    while True:
        concurrent.futures.wait([saving], timeout=0.2 if several else None)
        own = None  # not yet done
        if saving.done():
            error = saving.exception()
            own = reason_of(error) if error else ""
        reasons = agreement.all_gather_json(own)
        for process, reason in enumerate(reasons):
            if reason:
                return f"process {process}: {reason}" if several else reason
        if None not in reasons:
            return ""


def raiser(error: Exception) -> Callable[[], None]:
    """A save that has failed before its thread began: what raises its error there."""

    def fail() -> None:
        raise error

    return fail
