"""How a process ends, and with it the job: when it is done, asked to stop, or hangs. It listens to
signals before JAX is imported, which takes a second.
"""

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from maxramp.errors import EXIT_FAILED, EXIT_LOST, EXIT_PREEMPTED, NEXT_START
from maxramp.processes import lifeline


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a program of a job, in the main thread, and ends the process with its exit status, below
    256. An exception is printed and ends the process too, with EXIT_FAILED: a normal shutdown would
    wait for the other processes.
    """
    try:
        status = main()
    except SystemExit as end:  # after the help that was asked for
        status = end.code or 0
        if not isinstance(status, int):  # the text of sys.exit("text")
            print(status, file=sys.stderr)
            status = EXIT_FAILED
    except BaseException:
        traceback.print_exc()
        status = EXIT_FAILED
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Ends the process, in its main thread: with a status of `lifeline.ORDERLY` once the others end
    too, else at once, and the others with it. The interpreter does not shut down: that aborts if
    something compiles, and waits for a save that failed elsewhere."""
    for number in (signal.SIGINT, signal.SIGTERM):  # no signal changes the status any more
        signal.signal(number, signal.SIG_IGN)
    import jax

    status = lifeline.announce_exit(status)
    if status in lifeline.ORDERLY and jax.distributed.is_initialized():
        jax.distributed.shutdown()  # waits for the others, which end with the same step
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Watchdog:
    """Ends the process when it makes no progress for `timeout_seconds`: what hangs raises nothing.
    Only time in which the process ran counts, so one may be suspended and continued.
    """

    def __init__(self, timeout_seconds: float, join_seconds: float = 0.0):
        """Waits for ever if the timeout is -1, and `join_seconds` more for the first beat."""
        self._timeout = timeout_seconds
        self._tick = min(1.0, timeout_seconds / 10)
        self._waited = -join_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """Notes progress: a step or a part of it is done, or a part of the data is opened."""
        self._waited = 0.0

    def _watch(self) -> None:
        """Prints the threads' stacks and ends the process with EXIT_LOST when no beat has come for
        the timeout; in a thread."""
        while not self._closed.wait(self._tick):
            self._waited += self._tick
            if self._waited >= self._timeout:
                faulthandler.dump_traceback(all_threads=True)
                print(
                    f"error: no progress for hang_timeout_seconds={self._timeout:g}: this process, "
                    f"its storage or a peer hangs (above, where its threads stand); {NEXT_START}",
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


_REPEATS = 1.0  # seconds in which a repeated signal is the same request: a key that is held down


class Preemption:
    """Notices a signal and lets the loop end after its current step. Make one before JAX is
    imported.

    Before the first step a signal ends the process at once. Then the first SIGTERM or SIGINT asks
    the run to save and end; a SIGINT more than a second after it ends the process. A thread listens
    to signals, as the main thread may be in a compile. In a job of several processes JAX's own
    service handles SIGTERM and stops all after the same step; a SIGINT is sent on as a SIGTERM.
    """

    def __init__(self):
        self.say: Callable[[str], None] = print  # tells the user that the signal was noticed
        self._asked = self._has_trained = self._is_distributed = self._reached = False
        self._points = itertools.count(1)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, args=(read_end,), name="signals", daemon=True).start()

    def begin(self, is_distributed: bool) -> None:
        """Learns, once the processes are joined, whether there are several: then a signal before
        the first step, too, ends all after the same one."""
        self._is_distributed = is_distributed

    def ask(self) -> None:
        """Asks for the end as a scheduler would, of every process of the job."""
        self._asked = True
        if self._is_distributed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self, read_end: int) -> None:
        """Acts on signals, in a thread: before the first step of a job of one process it ends the
        process; else it asks for the end, and a second Ctrl-C ends the process at once."""
        first_signal = None  # when it came
        while True:
            number = os.read(read_end, 1)[0]
            if first_signal is None:
                first_signal = time.monotonic()
                if not (self._is_distributed or self._has_trained):
                    self._print_last(
                        "stopped by a signal before a step was done; the next start continues"
                    )
                    os._exit(EXIT_PREEMPTED)
                self.ask()
                self.say("saving and stopping (Ctrl-C again ends at once and saves nothing)")
            elif number == signal.SIGINT and time.monotonic() > first_signal + _REPEATS:
                self._print_last("ended at once by a second Ctrl-C: nothing was saved")
                lifeline.end_now(128 + number)

    def _print_last(self, line: str) -> None:
        cursor = "\x1b[?25h\n" if sys.stdout.isatty() else ""  # a live line hides it
        print(f"{cursor}{line}", flush=True)

    def should_stop(self, after_step: bool) -> bool:
        """Tells whether to save and end here: the same on every process, and once True always.
        Every process asks at the same points, `after_step` or before the first.
        """
        self._has_trained |= after_step
        if self._is_distributed and not self._reached:
            from jax.experimental import multihost_utils

            # JAX agrees on one of the coming points by its number.
            self._reached = multihost_utils.reached_preemption_sync_point(next(self._points))
        return self._reached if self._is_distributed else self._asked
