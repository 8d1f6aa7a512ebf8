"""The saves of a run, one at a time, and how the processes agree on what became of each."""

import concurrent.futures
import threading
from collections.abc import Callable

import jax

from maxramp.checkpoints.arrays import reason_of
from maxramp.errors import PeerLostError, TrainingError
from maxramp.files.place import Place, is_near
from maxramp.processes import agreement


class Saves:
    """Writes checkpoints in the background.

    Attributes:
      newest: the step of the newest that is whole; None without one.
    """

    def __init__(self, folder: Place, max_failed: int, warn: Callable[[str], None]):
        """
        Args:
          folder: of the checkpoints.
          max_failed: saves in a row that fail end the run.
          warn: takes a line about what went wrong and is no reason to stop.
        """
        self._folder, self._max_failed, self._warn = folder, max_failed, warn
        self.newest: int | None = None
        self._failed_in_a_row = 0
        self._current: tuple[int, concurrent.futures.Future] | None = None
        self._late: int | None = None  # the save of which it was said that it takes long

    def is_late(self, step: int) -> bool:
        """Whether the last save goes on at `step` and must not be waited for; says so once.

        A disk is waited for. An object storage may be away for an hour: then checkpoints are left
        out until the save is done on all processes, or has failed on one.
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
        """Runs `write` in a thread; the last save must have been settled."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(write())
            except BaseException as error:
                future.set_exception(error)

        # Not of a pool: nothing may wait for this thread at the end of the process.
        threading.Thread(target=work, name="save", daemon=True).start()
        self._current = step, future

    def check(self) -> None:
        """Notices a save that has failed by now, where one process can tell.

        Raises:
          TrainingError: too many in a row have failed.
        """
        if self._current and jax.process_count() == 1 and self._current[1].done():
            self.settle()

    def settle(self, last: bool = False) -> None:
        """Waits until the last save is done on every process, or has failed on one.

        Where one process fails, Orbax lets the others wait for it for 20 minutes: they learn it
        here.

        Args:
          last: no save comes after it, which could make up for it.

        Raises:
          TrainingError: it has failed, and is the last or one too many.
        """
        if self._current is None:
            return
        (step, saving), self._current = self._current, None
        while True:
            concurrent.futures.wait([saving], 0.2 if jax.process_count() > 1 else None)
            states = agreement.all_gather_json(_state_of(saving))
            if any(states):
                break
            if None not in states:
                self.newest, self._failed_in_a_row = step, 0
                return
        self._failed_in_a_row += 1
        reasons = [
            f"process {process}: {reason}" for process, reason in enumerate(states) if reason
        ]
        reason = reasons[0] if len(states) > 1 else states[0]
        stands = f"checkpoint {self.newest} stands" if self.newest else "there is none before it"
        line = f"{self._folder / str(step)} was not saved: {reason}; {stands}"
        if last or self._failed_in_a_row >= self._max_failed:
            raise TrainingError(
                f"{line}; make room or mend the storage and start again"
                + ("" if last else f" (max_failed_saves={self._max_failed} in a row have failed)")
            )
        self._warn(
            f"{line}; the run goes on ({self._failed_in_a_row} of "
            f"max_failed_saves={self._max_failed})"
        )

    def close(self, error: BaseException | None) -> None:
        """Waits until this process has written; with a lost peer it never would have."""
        if self._current is None or isinstance(error, PeerLostError):
            return  # the last save of a run that comes to its end was waited for
        step, saving = self._current
        if reason := _reason(saving):
            self._warn(f"{self._folder / str(step)} was not saved: {reason}")


def _state_of(saving: concurrent.futures.Future) -> str | None:
    """Why a save has failed, "" where it is done; None while it goes on."""
    return _reason(saving) if saving.done() else None


def _reason(saving: concurrent.futures.Future) -> str:
    error = saving.exception()
    return reason_of(error) if error else ""
