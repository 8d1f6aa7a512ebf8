"""Reading ahead, in threads or processes: whole elements in order."""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from maxramp.data.keys import ReadingKeys
from maxramp.errors import ConfigError, TrainingError, one_line
from maxramp.processes.workers import stay_with_parent

Read = Callable[[int], Any]  # an element by its number


class ReadAhead(Iterator[Any]):
    """The elements of some numbers, in order, read ahead; close it."""

    def __init__(self, what: str, read: Read, numbers: range, reading: ReadingKeys, size: int):
        """Reads grain_prefetch_buffer_size elements or grain_prefetch_buffer_gib ahead, whichever
        is less, in processes, which take seconds to start, or with grain_worker_count=0 in threads.

        Args:
          what: an element is, for a person.
          read: is pickled for processes; Grain leaves out an element that is None.
          size: bytes of the largest element.
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
        """Returns the next element; a ConfigError or TrainingError says why it cannot be read, for
        instance as a worker died.
        """
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
