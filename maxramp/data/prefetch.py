"""Reading ahead: whole elements (batches, mostly) in threads or processes, in order."""

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from maxramp.data.keys import ReadingKeys
from maxramp.errors import ConfigError, TrainingError
from maxramp.processes.workers import stay_with_parent


class ReadAhead(Iterator[Any]):
    """Elements first .. last - 1, read ahead of who takes them; to be closed."""

    def __init__(
        self,
        elements: Sequence[Any],
        first: int,
        last: int,
        reading: ReadingKeys,
        element_bytes: int,
        workers: int,
    ):
        """Starts to read.

        Args:
          elements: with random access, whose text says what one is, and picklable where there are
            worker processes.
          first, last: which of them.
          reading: in how many threads, and how far ahead: grain_prefetch_buffer_size elements or
            grain_prefetch_buffer_gib, whichever is less.
          element_bytes: of the largest element.
          workers: processes that read, which take seconds to start; 0 = threads of this process.
        """
        self._elements, self._next, self._shared = elements, first, workers > 0
        bound = int(reading.grain_prefetch_buffer_gib * 2**30) // max(1, element_bytes)
        buffer = max(1, min(reading.grain_prefetch_buffer_size, bound))
        # A worker holds what its threads have read and one more, on its way.
        workers = min(workers, max(1, buffer // 2))
        per_worker = max(1, buffer // workers - 1) if workers else buffer
        threads = min(reading.grain_num_threads, per_worker)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=per_worker)
        dataset = grain.MapDataset.source(elements)[first:last].to_iter_dataset(options)
        if workers:
            if not flags.FLAGS.is_parsed():  # Grain hands its flags on to the workers
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(workers, 1)
            dataset = dataset.mp_prefetch(options, worker_init_fn=lambda *_: stay_with_parent())
        self._iterator = iter(dataset)
        self._iterator.start_prefetch()

    def __next__(self) -> Any:
        """The next element.

        Raises:
          ConfigError: a file is not what it should be.
          TrainingError: an element cannot be read for another reason, a worker's death for one.
          MemoryError: the host has too little for it.
        """
        try:
            element = next(self._iterator)
        except (StopIteration, MemoryError):
            raise
        except (ConfigError, TrainingError) as error:
            raise type(error)(str(error)) from None  # without what Grain adds to it
        except Exception as error:  # whatever a file, a library or a worker died of
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise TrainingError(
                f"{self._elements} {self._next} could not be read: {reason}"
            ) from None
        self._next += 1
        # A copy, since what workers share is not freed while a device array lies on it.
        return jax.tree.map(np.copy, element) if self._shared else element

    def close(self) -> None:
        """Stops reading."""
        self._iterator.close()
