"""Programs that are compiled before they are needed.

Lowering takes tenths of a second of the main thread: one program at a time, while the devices are
busy, where the program's mesh is set. Compiling takes seconds to minutes and needs no mesh: one
background thread does it, in the order of use, which is the same on every host.
"""

import collections
import concurrent.futures
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from maxramp.errors import StepError, reason_of
from maxramp.parallel import cpu
from maxramp.training.device_memory import GIB, compiled_bytes


@dataclasses.dataclass
class _Program:
    """A program on its way: lowered, then compiled."""

    name: str
    mesh: Mesh
    lower: Callable[[], jax.stages.Lowered]
    compiled: concurrent.futures.Future


class Ahead:
    """Compiles programs in the background, in the order in which they are announced."""

    def __init__(
        self,
        options: Mapping[str, Any],
        memory_limit: int,
        say: Callable[[str], None],
        on_failure: Callable[[], None],
    ):
        """
        Args:
          options: of the compiler (`programs.compiler_options`), beside those of a program.
          memory_limit: bytes of a device, beyond which a program is warned of; 0 = not known.
          say: takes a line about each program when it is compiled, in the background thread.
          on_failure: called in the background thread when a program does not compile.
        """
        self._options, self._memory_limit = dict(options), memory_limit
        self._say, self._on_failure = say, on_failure
        self._failure: StepError | None = None
        self._programs: dict[Hashable, _Program] = {}
        self._waiting: collections.deque[_Program] = collections.deque()  # not yet lowered
        self._work: queue.SimpleQueue = queue.SimpleQueue()  # lowered, not yet compiled
        self._sizes: collections.deque[int] = collections.deque()  # compiled, memory not prepared
        self._thread = threading.Thread(target=self._compile_all, name="compile", daemon=True)
        self._thread.start()

    def announce(
        self, key: Hashable, name: str, mesh: Mesh, lower: Callable[[], jax.stages.Lowered]
    ) -> None:
        """Has a program compiled after those that wait to be, unless one of that key is known.

        Args:
          key: by which it is asked for.
          name: in lines about it.
          mesh: to lower it for.
          lower: called in the main thread, where the mesh is set.
        """
        if key not in self:
            self._programs[key] = _Program(name, mesh, lower, concurrent.futures.Future())
            self._waiting.append(self._programs[key])

    def __contains__(self, key: Hashable) -> bool:
        """Whether a program of that key is announced."""
        return key in self._programs

    def get(self, key: Hashable) -> tuple[jax.stages.Compiled, float]:
        """A program, and the seconds spent waiting for it.

        Raises:
          StepError: it does not compile.
        """
        program = self._programs[key]
        if program.compiled.done():
            return program.compiled.result(), 0.0
        start = time.perf_counter()
        while program in self._waiting:
            self._lower_next()
        return program.compiled.result(), time.perf_counter() - start

    def lower(self) -> None:
        """Lowers one program more, or prepares the memory of one: what to do between two steps."""
        if self._waiting:
            self._lower_next()
        elif self._sizes:
            cpu.prepare(self._sizes.popleft())

    def raise_failure(self) -> None:
        """Says why a program that was compiled ahead did not compile, if there is one.

        Raises:
          TrainingError: there is one.
        """
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Compiles nothing more, and gives the program in work a second to be done."""
        self._waiting.clear()
        self._work.put(None)
        for program in self._programs.values():
            program.compiled.cancel()
        self._thread.join(1.0)

    def _lower_next(self) -> None:
        program = self._waiting.popleft()
        with jax.set_mesh(program.mesh):
            self._work.put((program, program.lower()))

    def _compile_all(self) -> None:
        while item := self._work.get():
            program, lowered = item
            if not program.compiled.set_running_or_notify_cancel():
                continue
            start = time.perf_counter()
            try:
                compiled = lowered.compile(self._options or None)
                self._report(program.name, compiled, time.perf_counter() - start)
                self._sizes.append(compiled.memory_analysis().temp_size_in_bytes)
            except Exception as error:  # whatever the compiler raises is the answer to who asks
                failure = StepError(
                    f"the program of {program.name} did not compile: {reason_of(error)}"
                )
                self._failure = self._failure or failure
                self._on_failure()
                program.compiled.set_exception(failure)
            else:
                program.compiled.set_result(compiled)

    def _report(self, name: str, compiled: jax.stages.Compiled, seconds: float) -> None:
        needed, limit = compiled_bytes(compiled), self._memory_limit
        self._say(
            f"ready    {name}: compiled in {seconds:.1f} s, needs {needed / GIB:.3g} GiB a device"
        )
        if limit and needed > limit:
            self._say(
                f"warning  {name} needs {needed / GIB:.3g} GiB a device, which has "
                f"{limit / GIB:.3g}: it will not run; start again with a smaller "
                "per_device_batch_size and more gradient_accumulation_steps, or remat_policy=full"
            )
