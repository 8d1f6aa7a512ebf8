"""Sets that stand for files of text, chats or token ids in a mixture: prepared once, and recognized
by what they are made of.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool

from maxramp.data import preparation
from maxramp.data.chats.chats import ChatEncoder
from maxramp.data.corpus import hash_of
from maxramp.data.files import prepared
from maxramp.data.files.records import RecordFile
from maxramp.data.shards import Preparation
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files.place import place


def plan_cached(
    name: str,
    cache: str,
    files: Sequence[RecordFile],
    tokenizer: Tokenizer | None,
    encoder: ChatEncoder | None = None,
) -> Preparation:
    """Returns the set for files, in a folder of data_cache_dir (`cache`) that is named by a hash of
    the files' stamps and of how they are read.
    """
    first, *others = files
    stamps = [first.stamp]  # of the hub there is one, whose download Ctrl-C can end here
    # Thousands of files on slow storage: in threads.
    with ThreadPool(16) as pool:
        stamps += pool.map(lambda file: file.stamp, others)
    how = describe_reading(tokenizer.hash if tokenizer else "", encoder)
    folder = place(cache) / hash_of((prepared.VERSION, how, stamps))
    label = f"data_cache_dir={cache}"
    return Preparation(folder, label, name, files, how, tokenizer, encoder)


def describe_reading(tokenizer: str, encoder: ChatEncoder | None) -> str:
    """Returns what decides, besides the files, the tokens of a set."""
    return f"{tokenizer} {encoder.made_by if encoder else ''}"


def prepare(work: Preparation, beat: Callable[[], None]) -> None:
    """Makes a set, or waits for another process that does; `beat` is called meanwhile."""
    for file in work.files:
        if file.is_empty:
            raise ConfigError(f"{file.path}: holds no records; leave it out")
    done = ()

    def show(*counts: int) -> None:
        nonlocal done
        if counts != done:  # what hangs is not kept alive
            done = counts
            beat()
        show_progress(*counts)

    with work.lock(beat), contextlib.ExitStack() as closing:
        if work.is_prepared:
            return
        show_progress = lambda *counts: None  # noqa: E731
        if work.processes:
            print(f"data     {work.name}: preparing {work.size / 1e6:,.0f} MB, once", flush=True)
            show_progress = closing.enter_context(progress(work.size))
        preparation.make(work, show)


@contextlib.contextmanager
def progress(size: int) -> Iterator[preparation.Show]:
    """Shows documents, tokens and bytes: a bar on a terminal, elsewhere a line at every tenth."""
    from rich.progress import BarColumn, Progress, TimeRemainingColumn  # most starts show none

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
