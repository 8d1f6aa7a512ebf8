"""A ramp that may grow, for threads and processes that read ahead of it."""

import pickle
import struct
import threading
import time
import zlib
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from maxramp.errors import TrainingError
from maxramp.rampup.schedule import RampupBatchManager

_POLL_SECONDS = 0.01
_HEADER = struct.Struct("<II")  # the length of the pickled ramp, 0 when it is closed; its checksum
_ROOM = 1 << 20  # bytes for the stages that a ramp may still add


class SharedRamp:
    """The ramp as far as it is settled; who asks for a later step waits until that one is.

    Grain's worker processes get a copy of this object when they start. The copy reads memory that
    the processes share: a file would be cleaned away under a run of weeks.
    """

    def __init__(self, ramp: RampupBatchManager):
        """Publishes what is settled by now; to be closed."""
        self._changed, self._closed = threading.Condition(), False
        self._memory: SharedMemory | None = None
        self._data, self._ramp = b"", None
        self.publish(ramp)

    def __reduce__(self) -> Any:
        if self._memory is None:
            self._memory = SharedMemory(create=True, size=len(self._data) + _ROOM)
            self._share(self._data)
        return _Reader, (self._memory,)

    def publish(self, ramp: RampupBatchManager) -> None:
        """Lets readers go on as far as the ramp is settled by now. Only one thread may call it."""
        if self._ramp is None or ramp.settled_steps != self._ramp.settled_steps:
            self._data = pickle.dumps(ramp)
            self._share(self._data)
            with self._changed:
                self._ramp = pickle.loads(self._data)
                self._changed.notify_all()

    def at(self, step: int) -> RampupBatchManager:
        """A copy of the ramp that says what `step` takes.

        Raises:
          TrainingError: the ramp was closed before the step was settled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step < self._ramp.settled_steps)
            if step >= self._ramp.settled_steps:
                raise _unsettled(step)
            return self._ramp

    def close(self) -> None:
        """Ends the wait of all who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._memory is not None:
            self._share(b"")
            self._memory.unlink()

    def _share(self, data: bytes) -> None:
        if self._memory is not None:
            written = _HEADER.pack(len(data), zlib.crc32(data)) + data
            self._memory.buf[: len(written)] = written


class _Reader:
    """A `SharedRamp` in another process."""

    def __init__(self, memory: SharedMemory):
        self._memory, self._ramp = memory, None

    def at(self, step: int) -> RampupBatchManager:
        while self._ramp is None or step >= self._ramp.settled_steps:
            length, checksum = _HEADER.unpack_from(self._memory.buf)
            data = bytes(self._memory.buf[_HEADER.size : _HEADER.size + length])
            if not data:
                raise _unsettled(step)
            if zlib.crc32(data) == checksum:  # else it is being written
                self._ramp = pickle.loads(data)
            if self._ramp is None or step >= self._ramp.settled_steps:
                time.sleep(_POLL_SECONDS)
        return self._ramp


def _unsettled(step: int) -> TrainingError:
    return TrainingError(f"nobody settled what step {step} takes")
