"""Stopping when somebody asks: SIGTERM from a scheduler, SIGINT from a person."""

import os
import signal
import sys
import threading

import jax
from jax.experimental import multihost_utils

from maxramp.errors import EXIT_PREEMPTED


class Preemption:
    """Notices a signal and lets the loop end after the step it is in.

    Before the first step of a start nothing can be lost, and a signal ends the process at once.
    From then on the first SIGTERM or SIGINT asks the run to save and end; a SIGINT after it ends
    the process at once. A thread hears the signals: the main thread may be in a compile or wait for
    a device, where Python would not notice them.

    In a job of several processes JAX's own service takes SIGTERM, passes it on, and makes all of
    them stop after the same step; SIGINT is handed to it.
    """

    def __init__(self):
        self._asked = self._has_trained = self._several = False
        ears, mouth = os.pipe()
        os.set_blocking(mouth, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, args=(ears,), name="signals", daemon=True).start()

    def begin(self) -> None:
        """The processes of the job have joined."""
        self._several = jax.process_count() > 1

    def ask(self) -> None:
        """Asks for the end as a scheduler would: every process of the job hears of it."""
        self._asked = True
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self, ears: int) -> None:
        while True:
            number = os.read(ears, 1)[0]
            if self._asked and number == signal.SIGINT:
                os._exit(128 + number)
            self.ask()
            if not (self._several or self._has_trained):
                cursor = "\x1b[?25h\n" if sys.stdout.isatty() else ""  # a live line hides it
                line = "stopped by a signal before a step was done; start again to go on"
                os.write(1, f"{cursor}{line}\n".encode())
                os._exit(EXIT_PREEMPTED)

    def reached(self, step: int) -> bool:
        """Whether to save and end after `step` steps; the same answer on every process."""
        self._has_trained = True
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked
