"""Reading ahead, in threads or processes: whole elements in order, along a ramp that may grow."""

import copy
import threading
from collections.abc import Callable, Iterator
from multiprocessing.managers import BaseManager
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from maxramp.data.keys import ReadingKeys
from maxramp.errors import ConfigError, TrainingError, one_line
from maxramp.processes.workers import stay_with_parent
from maxramp.rampup.schedule import RampupBatchManager

Read = Callable[[int], Any]  # an element by its number


class SharedRamp:
    """The ramp as far as it is settled; asking for a later step waits. Grain's worker processes get
    a proxy that asks this object.
    """

    def __init__(self, ramp: RampupBatchManager):
        self._changed, self._closed = threading.Condition(), False
        self._ramp, self._proxy = copy.deepcopy(ramp), None

    def __reduce__(self) -> Any:
        if self._proxy is None:
            served = type("Served", (BaseManager,), {})
            served.register("ramp", lambda: self, exposed=["wait_for_step"])
            # No socket in a folder, which would be cleaned away under a run of weeks.
            server = served(("127.0.0.1", 0)).get_server()
            threading.Thread(target=server.serve_forever, daemon=True).start()
            client = served(server.address)
            client.connect()
            self._proxy = client.ramp()
        return self._proxy.__reduce__()

    def publish(self, ramp: RampupBatchManager) -> None:
        """Only one thread may call it."""
        if ramp.settled_steps != self._ramp.settled_steps:
            with self._changed:
                self._ramp = copy.deepcopy(ramp)
                self._changed.notify_all()

    def wait_for_step(self, step: int) -> RampupBatchManager:
        """A copy of the ramp that has the step's stage; a TrainingError if it is closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step < self._ramp.settled_steps)
            if step >= self._ramp.settled_steps:
                raise TrainingError(f"nobody settled what step {step} takes")
            return self._ramp

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ReadAhead(Iterator[Any]):
    """The elements of some numbers, in order, read ahead; close it."""

    def __init__(self, what: str, read: Read, numbers: range, reading: ReadingKeys, size: int):
        """`what` an element is, for a person; `size` are the bytes of the largest. Reads
        grain_prefetch_buffer_size elements or grain_prefetch_buffer_gib ahead, whichever is less,
        in processes, which take seconds to start, or with grain_worker_count=0 in threads.
        """
        workers = reading.grain_worker_count
        self._what, self._next, self._shared = what, numbers.start, workers > 0
        bound = int(reading.grain_prefetch_buffer_gib * 2**30) // max(1, size)
        buffer = max(1, min(reading.grain_prefetch_buffer_size, bound))
        # A worker holds what its threads have read and one more, on its way.
        workers = min(workers, max(1, buffer // 2))
        per_worker = max(1, buffer // workers - 1) if workers else buffer
        threads = min(reading.grain_num_threads, per_worker)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=per_worker)
        dataset = grain.MapDataset.source(numbers).map(read).to_iter_dataset(options)
        if workers:
            if not flags.FLAGS.is_parsed():  # Grain hands its flags on to the workers
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(workers, 1)
            dataset = dataset.mp_prefetch(options, worker_init_fn=lambda *_: stay_with_parent())
        self._iterator = iter(dataset)
        self._iterator.start_prefetch()

    def __next__(self) -> Any:
        """A TrainingError says that an element cannot be read, for instance as a worker died."""
        try:
            element = next(self._iterator)
        except (StopIteration, MemoryError):
            raise
        except (ConfigError, TrainingError) as error:
            raise type(error)(str(error)) from None  # without what Grain adds to it
        except Exception as error:  # whatever a file, a library or a worker died of
            what = f"{self._what} {self._next} could not be read: {one_line(error, 300)}"
            raise TrainingError(what) from None
        self._next += 1
        # A copy, since what workers share is not freed while a device array lies on it.
        return jax.tree.map(np.copy, element) if self._shared else element

    def close(self) -> None:
        self._iterator.close()
