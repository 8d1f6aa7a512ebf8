"""Reading ahead: whole elements (batches, mostly) in threads or processes, in order."""

import collections
import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxramp.data.keys import ReadingKeys
from maxramp.data.workers import Workers, read


class ReadAhead(Iterator[Any]):
    """Elements by their index, in order, read ahead of who takes them; to be closed.

    An index says all that its element depends on. So what comes next is decided here alone, and
    worker processes hold nothing that could change while they run.
    """

    def __init__(
        self,
        elements: Any,
        indices: Sequence[Any],
        reading: ReadingKeys,
        size_of: Callable[[Any], int],
        workers: int,
    ):
        """Starts to read.

        Args:
          elements: `elements[index]` is one, and their text says what one is; picklable where there
            are worker processes.
          indices: of the elements to read. The list may grow at its end.
          reading: in how many threads, and how far ahead: grain_prefetch_buffer_size elements or
            grain_prefetch_buffer_gib, whichever is less, but always one.
          size_of: bytes of the element of an index.
          workers: processes that read, which take seconds to start; 0 = threads of this process.
        """
        self._indices, self._next, self._size_of = indices, 0, size_of
        self._most = reading.grain_prefetch_buffer_size
        self._most_bytes = reading.grain_prefetch_buffer_gib * 2**30
        threads, workers = reading.grain_num_threads, min(workers, self._most)
        self._workers = Workers(elements, workers, threads) if workers else None
        self._read = self._workers.read if workers else lambda index: read(elements, index)
        threads = min(threads * max(1, workers), self._most)
        self._threads = concurrent.futures.ThreadPoolExecutor(threads, "read")
        self._ahead: collections.deque[tuple[concurrent.futures.Future, int]] = collections.deque()
        self._read_on()

    def _read_on(self) -> None:
        """Asks for as many elements as may be read ahead."""
        held = sum(size for _, size in self._ahead)
        while len(self._ahead) < self._most and self._next < len(self._indices):
            index = self._indices[self._next]
            size = self._size_of(index)
            if self._ahead and held + size > self._most_bytes:
                return
            self._ahead.append((self._threads.submit(self._read, index), size))
            self._next, held = self._next + 1, held + size

    def __next__(self) -> Any:
        """The next element.

        Raises:
          ConfigError: a file is not what it should be.
          TrainingError: an element cannot be read for another reason, a worker's death for one.
          MemoryError: the host has too little for it.
        """
        self._read_on()  # the list may have grown
        if not self._ahead:
            raise StopIteration
        element, _ = self._ahead.popleft()
        self._read_on()
        return element.result()

    def close(self) -> None:
        """Stops reading."""
        if self._workers:
            self._workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
