"""A ramp that may grow, for threads and processes that read ahead of it."""

import copy
import threading
from multiprocessing.managers import BaseManager
from typing import Any

from maxramp.errors import TrainingError
from maxramp.rampup.schedule import RampupBatchManager


class SharedRamp:
    """The ramp as far as it is settled; who asks for a later step waits until that one is.

    Grain's worker processes get a proxy when they start, which asks this object.
    """

    def __init__(self, ramp: RampupBatchManager):
        """Publishes what is settled by now; to be closed."""
        self._changed, self._closed = threading.Condition(), False
        self._ramp, self._address = copy.deepcopy(ramp), None

    def __reduce__(self) -> Any:
        if self._address is None:
            served = _served(self)
            # No socket in a folder, which would be cleaned away under a run of weeks.
            server = served(("127.0.0.1", 0)).get_server()
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._address = server.address
        return _connect, (self._address,)

    def publish(self, ramp: RampupBatchManager) -> None:
        """Lets readers go on as far as the ramp is settled by now. Only one thread may call it."""
        if ramp.settled_steps != self._ramp.settled_steps:
            with self._changed:
                self._ramp = copy.deepcopy(ramp)
                self._changed.notify_all()

    def at(self, step: int) -> RampupBatchManager:
        """A copy of the ramp that says what `step` takes.

        Raises:
          TrainingError: the ramp was closed before the step was settled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step < self._ramp.settled_steps)
            if step >= self._ramp.settled_steps:
                raise TrainingError(f"nobody settled what step {step} takes")
            return self._ramp

    def close(self) -> None:
        """Ends the wait of all who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _served(ramp: SharedRamp | None) -> type[BaseManager]:
    served = type("Served", (BaseManager,), {})
    served.register("ramp", lambda: ramp, exposed=["at"])
    return served


def _connect(address: tuple[str, int]) -> Any:
    manager = _served(None)(address)
    manager.connect()
    return manager.ramp()
