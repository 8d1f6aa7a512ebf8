"""When checkpoint_period_minutes have passed, the same on every process."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxramp.parallel.mesh import line
from maxramp.parallel.sharding import BY_DEVICE


class Timer:
    """Whether checkpoint_period_minutes have passed since the end of the last save.

    Clocks differ between processes, and all must save the same step, so the first process's clock
    counts. Its answer travels through the devices, dispatched behind one step and read behind the
    next, when it is there without waiting.
    """

    def __init__(self, minutes: float):
        self._seconds = 60 * minutes
        self._pending: jax.Array | None = None
        if minutes > 0 and jax.process_count() > 1:
            self._sharding = NamedSharding(line(), BY_DEVICE)
            self._any = jax.jit(jnp.max)
        self.start()

    def stop(self) -> None:
        """A save begins, on every process after the same step."""
        self._start, self._pending = math.inf, None

    def start(self) -> None:
        """It is written, or has failed."""
        self._start = time.monotonic()

    def is_due(self) -> bool:
        """Whether to save after this step: asked once a step, the same answer on every process."""
        if self._seconds < 0:
            return False
        due = time.monotonic() - self._start >= self._seconds
        if jax.process_count() == 1:
            return due
        before = self._pending
        mine = np.full(jax.local_device_count(), due and jax.process_index() == 0)
        self._pending = self._any(jax.make_array_from_process_local_data(self._sharding, mine))
        return before is not None and bool(before)
