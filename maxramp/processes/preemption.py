"""Stopping when somebody asks: SIGTERM from a scheduler, SIGINT from a person."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from maxramp.errors import EXIT_PREEMPTED
from maxramp.processes import lifeline

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
        self._asked = self._has_trained = self._several = False
        self._points = itertools.count(1)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, args=(read_end,), name="signals", daemon=True).start()

    def begin(self, several: bool) -> None:
        """The processes of the job have joined; `several`: there is more than one."""
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
                    self._leave("stopped by a signal before a step was done; start again to go on")
                    os._exit(EXIT_PREEMPTED)
                self.ask()
                self.say("saving and stopping (Ctrl-C again ends at once and saves nothing)")
            elif number == signal.SIGINT and time.monotonic() > heard + _REPEATS:
                self._leave("ended at once by a second Ctrl-C: nothing was saved")
                lifeline.end_now(128 + number)

    def _leave(self, line: str) -> None:
        cursor = "\x1b[?25h\n" if sys.stdout.isatty() else ""  # a live line hides it
        print(f"{cursor}{line}", flush=True)

    def reached(self, after_step: bool) -> bool:
        """Whether to save and end here; the same answer on every process.

        Every process asks at the same points of the run.

        Args:
          after_step: a step was done, which may be saved.
        """
        self._has_trained |= after_step
        if self._several:
            from jax.experimental import multihost_utils

            # JAX agrees on one of the coming points by its number.
            return multihost_utils.reached_preemption_sync_point(next(self._points))
        return self._asked
