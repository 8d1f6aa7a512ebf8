"""Saves checkpoints in the background, one at a time."""

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxramp.checkpoints import arrays
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.errors import PeerLostError, TrainingError
from maxramp.files.place import Place, is_near
from maxramp.parallel.mesh import line
from maxramp.parallel.sharding import BY_DEVICE
from maxramp.processes import agreement


class Poll:
    """A vote of all processes that never waits: a question that is asked after one step travels
    through the devices and is answered after the next. Every process asks at the same steps.
    """

    def __init__(self):
        self._any, self._answer = jax.jit(jnp.max), None

    def ask(self, vote: bool) -> None:
        """Asks all processes, which call it together; the answer to the question before is lost."""
        by_device = NamedSharding(line(), BY_DEVICE)
        answers = np.full(jax.local_device_count(), vote)
        self._answer = self._any(jax.make_array_from_process_local_data(by_device, answers))

    def answer(self) -> bool:
        """Tells whether some process voted yes to the last question; False if nobody has asked."""
        answer, self._answer = self._answer, None
        return answer is not None and bool(answer)


class Saves:
    """Writes checkpoints in the background."""

    def __init__(self, folder: Place, keys: CheckpointKeys, warn: Callable[[str], None]):
        self._folder, self._keys, self._warn = folder, keys, warn
        self.newest: int | None = None  # the step of the newest that is whole
        self._failed_in_a_row = 0
        self._current: tuple[int, concurrent.futures.Future] | None = None
        self._late: int | None = None  # the save that a warning called late
        self._due = Poll()
        self.restart_clock()

    def settle_alone(self) -> int | None:
        """Counts the last save if this process has done it, as the first does last; returns the
        step of one that still runs. For the end of a job whose processes agree on nothing more.
        """
        if self._current and _state_of(self._current[1]) == "":
            self.newest, self._current = self._current[0], None
        return self._current and self._current[0]

    def restart_clock(self) -> None:
        self._since = time.monotonic()

    def is_time(self) -> bool:
        """Tells whether checkpoint_period_minutes have passed since the end of the last save.

        Asked once a step; the same answer on every process. Their clocks differ, and all must save
        the same step, so the first process's clock counts.
        """
        if self._keys.checkpoint_period_minutes < 0:
            return False
        due = time.monotonic() - self._since >= 60 * self._keys.checkpoint_period_minutes
        if jax.process_count() == 1:
            return due
        before = self._due.answer()
        self._due.ask(due and jax.process_index() == 0)
        return before

    def is_late(self, step: int) -> bool:
        """Tells whether the last save still runs at `step` and the loop must not wait for it; warns
        once. Every process asks.

        The loop waits for a disk. An object storage may be away for an hour: then checkpoints are
        skipped until the save is done on all processes, or has failed on one.
        """
        if is_near(self._folder) or self._current is None:
            return False
        slow, saving = self._current
        states = agreement.all_gather_json(_state_of(saving))
        if any(states) or None not in states:
            return False
        if jax.process_index() == 0 and slow != self._late:
            self._warn(
                f"{self._folder / str(slow)} is still being written: no checkpoint after step "
                f"{step}, and none until it is done"
            )
        self._late = slow
        return True

    def begin(self, step: int, write: Callable[[], None]) -> None:
        """Runs `write` in a thread, on all processes; the last save must have been settled.
        `settle` tells of what it raises."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def work() -> None:
            try:
                try:
                    write()
                finally:
                    self.restart_clock()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        self._since, self._due = math.inf, Poll()
        # Not of a pool: nothing may wait for this thread at the end of the process.
        threading.Thread(target=work, name="save", daemon=True).start()
        self._current = step, future

    def check(self) -> None:
        """Raises a TrainingError if too many saves in a row have failed. Several processes look in
        `settle` alone.
        """
        if self._current and jax.process_count() == 1 and self._current[1].done():
            self.settle()

    def settle(self, last: bool = False) -> None:
        """Waits until the last save is done on every process, or has failed on one: Orbax would let
        the others wait for it for 20 minutes. Raises a TrainingError if it has failed and is the
        run's `last`, or one too many in a row. All processes call it together."""
        if self._current is None:
            return
        (step, saving), self._current = self._current, None
        states: list[str | None] = [None]
        while None in states and not any(states):
            concurrent.futures.wait([saving], 0.2 if jax.process_count() > 1 else None)
            states = agreement.all_gather_json(_state_of(saving))
        if not any(states):
            self.newest, self._failed_in_a_row = step, 0
            return
        self._failed_in_a_row += 1
        process, reason = next((p, state) for p, state in enumerate(states) if state)
        reason = f"process {process}: {reason}" if len(states) > 1 else reason
        stands = f"checkpoint {self.newest} stands" if self.newest else "there is none before it"
        line = f"{self._folder / str(step)} was not saved: {reason}; {stands}"
        most = f"max_failed_saves={self._keys.max_failed_saves}"
        if last or self._failed_in_a_row >= self._keys.max_failed_saves:
            raise TrainingError(
                f"{line}; make room or mend the storage and start again"
                + ("" if last else f" ({most} in a row have failed)")
            )
        self._warn(f"{line}; the run continues ({self._failed_in_a_row} of {most})")

    def finish(self, error: BaseException | None) -> None:
        """Waits until this process has written, and warns if that failed; not after an `error` that
        says that a peer may be lost: then it never would have."""
        if self._current is None or isinstance(error, PeerLostError):
            return  # the last save of a run that comes to its end was waited for
        step, saving = self._current
        concurrent.futures.wait([saving])
        if reason := _state_of(saving):
            self._warn(f"{self._folder / str(step)} was not saved: {reason}")


def _state_of(saving: concurrent.futures.Future) -> str | None:
    """Returns why a save has failed, "" if it is done, None while it runs."""
    if not saving.done():
        return None
    return arrays.reason_of(error) if (error := saving.exception()) else ""
