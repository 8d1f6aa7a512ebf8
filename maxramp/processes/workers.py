"""Processes that work for another one, which alone hears signals and ends them. Imports no JAX."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

_ENDS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def delay_signals() -> Iterator[None]:
    """Delays signals that ask for an end, for the start of workers, until `stay_with_parent`."""
    resource_tracker.ensure_running()  # its start, else part of the first worker's, unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_with_parent() -> None:
    """Lets a worker of multiprocessing, which calls it in its main thread, end when its parent
    does, even by a kill, and with it its group if it leads one; and not before it: signals often go
    to all processes of a job, but the parent saves first."""
    for number in _ENDS:
        # A handler that does nothing: programs that a worker starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)

    def watch() -> None:
        multiprocessing.parent_process().join()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def lead_group() -> Iterator[None]:
    """Lets a worker start processes of its own, in its process group, which `end` ends with it. The
    way out kills the group, and with it the worker."""
    os.setpgid(0, 0)
    multiprocessing.current_process().daemon = False  # or multiprocessing refuses to
    # Its signals' handlers do not help a fork, which `Process.terminate` could not end.
    os.register_at_fork(
        after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in _ENDS]
    )
    try:
        yield
    finally:  # mostly because its parent is gone
        os.killpg(0, signal.SIGKILL)


def end(process: multiprocessing.process.BaseProcess) -> None:
    """Ends a worker at once, and if it leads a group all that it started in it."""
    with contextlib.suppress(ProcessLookupError):  # it leads none (yet)
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
