"""How a process ends, and with it the job that it belongs to."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from maxramp.errors import EXIT_FAILED
from maxramp.processes import lifeline


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
    """Ends the process, and a job that it ends.

    An interpreter that shut down would abort under a compile, which cannot be interrupted, and wait
    for a save that failed elsewhere; so the process ends at once, with what was printed.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # it is done: no signal changes its status
        signal.signal(number, signal.SIG_IGN)
    status = lifeline.leave(status)
    if status in lifeline.ORDERLY and jax.distributed.is_initialized():
        jax.distributed.shutdown()  # waits for the others, which end with the same step
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
