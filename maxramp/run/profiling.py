"""A profile of some steps, for TensorBoard's profile plugin, XProf or Perfetto."""

import pathlib
from collections.abc import Callable

import jax

from maxramp.run.keys import ProfilerKeys


class Profiler:
    """With `profiler=xplane`, traces `profiler_steps` steps into the run's TensorBoard folder.

    Each process writes its own trace. Keys and defaults are MaxText's.
    """

    def __init__(
        self, keys: ProfilerKeys, folder: pathlib.Path, first_step: int, settle: Callable[[], None]
    ):
        """Counts the steps to skip from `first_step`, the first of this start of the run.

        `settle` waits for the devices, so that a trace holds whole steps and those alone.
        """
        self._folder, self._settle = folder, settle
        first = first_step + keys.skip_first_n_steps_for_profiler if keys.profiler else -1
        self._first, self._last, self._running = first, first + keys.profiler_steps, False

    def annotate_step(self, step: int) -> jax.profiler.StepTraceAnnotation:
        """Starts or ends the trace where its time has come; the context to run the step in."""
        if step == self._first:
            self._settle()
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        if self._running and step == self._last:
            self._settle()
            self.close()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def close(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
