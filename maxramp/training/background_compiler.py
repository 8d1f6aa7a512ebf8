"""Programs that are compiled before they are needed.

The main thread lowers, one program at a time, while devices are busy and where the mesh is set. A
background thread compiles, in the order of use, which is the same on every host.
"""

import concurrent.futures
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import Mesh

from maxramp.commandline import show_wait
from maxramp.errors import StepError, reason_of
from maxramp.processes import heap
from maxramp.training.device_memory import GIB, compiled_bytes

_SILENT = 3.0  # seconds of waiting for a compiler before a line says so


class BackgroundCompiler:
    """Compiles programs in the background, in the order in which they are announced."""

    def __init__(
        self, memory_limit: int, say: Callable[[str], None], on_failure: Callable[[], None]
    ):
        """Starts the thread. It warns of a program that needs more than `memory_limit` bytes of a
        device (0 = unknown), and calls `say` with lines, and `on_failure` for each that fails; both
        in that thread."""
        self._memory_limit = memory_limit
        self.say, self._on_failure = say, on_failure
        self._failure: StepError | None = None
        self._waiting: dict[Hashable, tuple] = {}  # not yet lowered
        self._compiled: dict[Hashable, concurrent.futures.Future] = {}  # or being compiled
        self._names: dict[Hashable, str] = {}  # of all programs
        self._largest = 0  # bytes that a step takes
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compile")

    def announce(self, key: Hashable, name: str, mesh: Mesh, lower: Callable[[], Any]) -> None:
        """Queues a program to be compiled, unless its key is known. `lower` is called in the main
        thread where the mesh is set, and returns a lowered program or a tree of them."""
        if key not in self:
            self._waiting[key], self._names[key] = (mesh, lower), name

    def __contains__(self, key: Hashable) -> bool:
        return key in self._waiting or key in self._compiled

    def get(self, key: Hashable) -> tuple[Any, float]:
        """Returns a program, or a tree of them, and the seconds spent waiting; called in the main
        thread. Raises StepError if it does not compile, KeyError if it was not announced."""
        compiled = self._compiled.get(key)
        if compiled and compiled.done():
            return compiled.result(), 0.0
        start, name = time.perf_counter(), self._names[key]
        with show_wait(self.say, f"wait     {name}: still compiling", _SILENT):
            while key in self._waiting:
                self._lower_next()
            compiled = self._compiled[key]
            compiled.exception()
        return compiled.result(), time.perf_counter() - start

    def lower(self) -> None:
        """Lowers one more program, if any waits. Call it between two steps."""
        if self._waiting:
            self._lower_next()

    def raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Stops compiling, and gives the program that is being compiled a second to finish."""
        self._waiting.clear()
        for compiled in self._compiled.values():
            compiled.cancel()
        concurrent.futures.wait(self._compiled.values(), timeout=1.0)

    def _lower_next(self) -> None:
        key = next(iter(self._waiting))
        mesh, lower = self._waiting.pop(key)
        with jax.set_mesh(mesh):
            self._compiled[key] = self._thread.submit(self._compile, self._names[key], lower())

    def _compile(self, name: str, lowered: Any) -> Any:
        """Compiles what is lowered, in the compiler's thread. A failure asks the job for its end,
        is kept for `raise_failure` if it is the first, and raised as a StepError to who waits."""
        start = time.perf_counter()
        try:
            compiled = jax.tree.map(lambda x: x.compile(), lowered)
            programs = jax.tree.leaves(compiled)
            seconds = time.perf_counter() - start
            needed = max(map(compiled_bytes, programs)) / GIB
            self.say(
                f"ready    {name}: compiled in {seconds:.1f} s, needs {needed:.3g} GiB a device"
            )
            if 0 < self._memory_limit < needed * GIB:
                self.say(
                    f"warning  {name} needs {needed:.3g} GiB a device, which has "
                    f"{self._memory_limit / GIB:.3g}: it will not run; start again with a smaller "
                    "per_device_batch_size and more gradient_accumulation_steps, or "
                    "remat_policy=full"
                )
            sizes = [x.memory_analysis().temp_size_in_bytes for x in programs]
            self._largest = max(self._largest, *sizes)
            heap.keep(self._largest)
        except Exception as error:  # whatever the compiler raises is for whoever waits
            failure = StepError(f"the program of {name} did not compile: {reason_of(error)}")
            self._failure = self._failure or failure
            self._on_failure()
            raise failure from None
        return compiled
