"""Stopping when somebody asks: SIGTERM from a scheduler, SIGINT from a person."""

import os
import signal

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Notices a signal and lets the loop end after the step it is in.

    The first SIGTERM or SIGINT asks the run to save and end; a second one ends it at once. In a job
    of several processes JAX's own service passes a SIGTERM of any of them on, and makes all of them
    stop after the same step.
    """

    def __init__(self):
        self._asked = False
        self._several = jax.process_count() > 1
        signals = (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            signal.signal(number, self._ask)

    def ask(self) -> None:
        """Asks for the end as a scheduler would: every process of the job hears of it."""
        os.kill(os.getpid(), signal.SIGTERM)

    def _ask(self, number: int, frame) -> None:
        self._asked = True
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )

    def reached(self, step: int) -> bool:
        """Whether to save and end after `step` steps; the same answer on every process."""
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked
