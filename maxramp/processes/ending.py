"""How a process ends, and with it the job that it belongs to."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from maxramp.errors import EXIT_FAILED
from maxramp.processes import lifeline

# Names of threads that a process cannot wait for when it ends.
COMPILING, SAVING = "compile", "save"

_left_behind = threading.Event()


def leave_threads_behind() -> None:
    """Says that threads of a library may wait forever: the end of the process must not join them.

    Orbax's do after a save that failed.
    """
    _left_behind.set()


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a program of a job and ends the process with the exit status that it returns.

    What it raises is printed and ends the process too: an interpreter that shut down by itself
    would wait for the other processes.
    """
    try:
        status = main()
    except SystemExit as end:  # after the help that was asked for
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = EXIT_FAILED
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Ends the process, also while a program is being compiled, and a job that it ends.

    A compile cannot be interrupted, and an interpreter that shuts down under one aborts; a save
    that failed elsewhere waits for it; and one that shuts down in a job waits for the others,
    which is right only where all end in good order.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the interpreter takes its handlers away first
        signal.signal(number, signal.SIG_IGN)
    status = lifeline.leave(status)
    several = jax.distributed.is_initialized()
    alone = several and status not in lifeline.ORDERLY
    busy = any(thread.name in (COMPILING, SAVING) for thread in threading.enumerate())
    if alone or busy or _left_behind.is_set():
        if several and not alone:
            jax.distributed.shutdown()  # as the interpreter would: the others wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
