"""Files of text, chats or token ids as the prepared set that training reads: made once, and found
again by what it is made of.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.progress import BarColumn, Progress, TimeRemainingColumn

from maxramp.data import preparation, shards
from maxramp.data.chats.chats import ChatEncoder
from maxramp.data.corpus import hash_of
from maxramp.data.files import prepared
from maxramp.data.files.records import RecordFile
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files.place import place

_SHARD = 128_000_000  # bytes of input
# Of input, below which workers would take longer to start than to work.
_SMALL = 32_000_000


@dataclasses.dataclass(frozen=True)
class CachedSet:
    """The set that stands for an entry of a mixture."""

    name: str  # the entry
    cache: str  # data_cache_dir
    files: Sequence[RecordFile]
    tokenizer: Tokenizer | None  # None where the files hold token ids
    encoder: ChatEncoder | None  # of chats

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """Named by a hash of the files' stamps, and of how they are read."""
        first, *others = self.files
        stamps = [first.stamp]  # of the hub there is one, whose download Ctrl-C can end here
        # Thousands of files on slow storage: in threads.
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            stamps += pool.map(lambda file: file.stamp, others)
        made_of = prepared.VERSION, self._how, stamps
        return place(self.cache) / hash_of(made_of)

    @property
    def _how(self) -> str:
        tokenizer = self.tokenizer.hash if self.tokenizer else ""
        return f"{tokenizer} {self.encoder.made_by if self.encoder else ''}"

    @property
    def is_prepared(self) -> bool:
        return prepared.is_prepared(str(self.folder))

    def prepare(self, beat: Callable[[], None]) -> None:
        """Makes the set, or waits for another process that does; `beat` is called meanwhile."""
        for file in self.files:
            if file.is_empty:
                raise ConfigError(f"{file.path}: holds no records; leave it out")
        label = f"data_cache_dir={self.cache}"
        with shards.sole_writer(self.folder, label, beat) as work:
            if self.is_prepared:
                return
            planned = shards.plan(self.files, self._how, _SHARD, False)
            size = sum(shard.size for shard in planned)
            workers = 0 if size < _SMALL else os.cpu_count()
            given = self.tokenizer, False, planned, self.encoder, workers, 0, self.name, label
            with contextlib.ExitStack() as closing:
                show = lambda *counts: None  # noqa: E731
                if workers:
                    print(f"data     {self.name}: preparing {size / 1e6:,.0f} MB, once", flush=True)
                    show = closing.enter_context(progress(size))

                done = ()

                def tell(*counts: int) -> None:
                    nonlocal done
                    if counts != done:  # what hangs is not kept alive
                        done = counts
                        beat()
                    show(*counts)

                preparation.make(shards.Preparation(work, *given), tell)


@contextlib.contextmanager
def progress(size: int) -> Iterator[preparation.Show]:
    """Shows documents, tokens and bytes: a bar on a terminal, elsewhere a line at every tenth."""
    start, tenths = time.perf_counter(), 0
    columns = (BarColumn(30), "{task.description}", TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("starting", total=size)

        def show(documents: int, tokens: int, done: int) -> None:
            nonlocal tenths
            rate = tokens / (time.perf_counter() - start)
            line = f"{documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s"
            bar.update(task, completed=done, description=line)
            read = min(done * 10 // max(1, size), 9)  # ahead of what is made; `done` has the rest
            if bar.disable and documents and read > tenths:
                tenths = read
                print(f"{tenths:>3}0%       {line}", flush=True)

        yield show
