"""Stopping when somebody asks: SIGTERM from a scheduler, SIGINT from a person."""

import os
import signal
import sys

import jax
from jax.experimental import multihost_utils

from maxramp.errors import EXIT_PREEMPTED


class Preemption:
    """Notices a signal and lets the loop end after the step it is in.

    Before the first step of a start nothing can be lost, and a signal ends the process at once,
    also in the middle of a compile, which cannot be interrupted. From then on the first SIGTERM or
    SIGINT asks the run to save and end; a second one is left to the operating system, which ends it
    at once.

    In a job of several processes JAX's own service takes SIGTERM, passes it on, and makes all of
    them stop after the same step; SIGINT is handed to it.
    """

    def __init__(self):
        self._asked = self._has_trained = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def ask(self) -> None:
        """Asks for the end as a scheduler would: every process of the job hears of it."""
        os.kill(os.getpid(), signal.SIGTERM)

    def begin(self) -> None:
        """JAX has joined the processes of the job."""
        self._several = jax.process_count() > 1

    def _ask(self, number: int, frame) -> None:
        signal.signal(number, signal.SIG_DFL)
        self._asked = True
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self._has_trained:
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
