"""How a process ends, and with it the job: when it is done, asked to stop, or hangs.

Signals are heard before JAX is imported, which takes a second.
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

from maxramp.errors import EXIT_FAILED, EXIT_LOST, EXIT_PREEMPTED, START_AGAIN
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
    import jax

    status = lifeline.leave(status)
    if status in lifeline.ORDERLY and jax.distributed.is_initialized():
        jax.distributed.shutdown()  # waits for the others, which end with the same step
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Watchdog:
    """Ends the process when nothing gets done for `timeout_seconds`.

    A device, a peer or a file system that hangs raises nothing: the loop waits in it for ever, and
    with it every other process of the job. Each of them has its own watchdog. What counts is the
    time that this process itself was running, so one that was stopped and continued is not ended.

    Use it as a context around everything that can hang.
    """

    def __init__(self, timeout_seconds: float, join_seconds: float = 0.0):
        """A timeout of -1 waits for ever. `join_seconds` more may pass before the first beat."""
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


_REPEATS = 1.0  # seconds in which a signal that comes again is the same wish: a key that is held


class Preemption:
    """Notices a signal and lets the loop end after the step it is in, or where it gives that up.

    Before the first step of a start nothing can be lost, and a signal ends the process at once.
    From then on the first SIGTERM or SIGINT asks the run to save and end; a SIGINT more than a
    second after it ends the process at once. A thread hears the signals: the main thread may be in
    a compile or wait for a device, where Python would not notice them.

    In a job of several processes JAX's own service takes SIGTERM, passes it on, and makes all of
    them stop after the same step; SIGINT is handed to it.

    Make one before JAX is imported, which takes a second.
    """

    def __init__(self):
        self.say: Callable[[str], None] = print  # how a person hears that the wish was noticed
        self._asked = self._has_trained = self._several = self._reached = False
        self._points = itertools.count(1)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, args=(read_end,), name="signals", daemon=True).start()

    def begin(self, several: bool) -> None:
        """Takes note that the processes of the job have joined, and whether they are several."""
        self._several = several

    def ask(self) -> None:
        """Asks for the end as a scheduler would: every process of the job hears of it."""
        self._asked = True
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self, read_end: int) -> None:
        heard = None  # when the first signal came
        while True:
            number = os.read(read_end, 1)[0]
            if heard is None:
                heard = time.monotonic()
                if not (self._several or self._has_trained):
                    self._leave(
                        "stopped by a signal before a step was done; start again to continue"
                    )
                    os._exit(EXIT_PREEMPTED)
                self.ask()
                self.say("saving and stopping (Ctrl-C again ends at once and saves nothing)")
            elif number == signal.SIGINT and time.monotonic() > heard + _REPEATS:
                self._leave("ended at once by a second Ctrl-C: nothing was saved")
                lifeline.end_now(128 + number)

    def _leave(self, line: str) -> None:
        cursor = "\x1b[?25h\n" if sys.stdout.isatty() else ""  # a live line hides it
        print(f"{cursor}{line}", flush=True)

    def should_stop(self, after_step: bool) -> bool:
        """Whether to save and end here; the same answer on every process, and from then on.

        Every process asks at the same points of the run, `after_step` or before the first.
        """
        self._has_trained |= after_step
        if self._several and not self._reached:
            from jax.experimental import multihost_utils

            # JAX agrees on one of the coming points by its number.
            self._reached = multihost_utils.reached_preemption_sync_point(next(self._points))
        return self._reached if self._several else self._asked
