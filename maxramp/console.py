"""Standard output and error: what a command does when nobody reads on, or somebody says stop.

To be called before the slow imports of a command, which a person may interrupt too.
"""

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable

_PATIENCE = 10.0  # seconds that a reader may keep a program waiting that works for hours


def outlive_readers() -> None:
    """For programs that work for hours: nothing that they, or a library, say can fail.

    What no one can read any more (a pipe that was closed, a full disk, a terminal that is gone) is
    dropped, and so is what no one reads for a while (a pager that waits, a terminal that was
    stopped). Ctrl-C ends the program without a traceback, until it sets a handler of its own.
    """
    _replace_streams(lambda error: None, _PATIENCE)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_readers() -> None:
    """For commands whose output is all they do: they end with whoever reads it.

    Where a pipe is closed, they end quietly, as other tools do (`| head`); where there is no room,
    with one line; and Ctrl-C is no traceback.
    """
    _replace_streams(_end, None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise SystemExit(128 + signal.SIGPIPE)
    raise SystemExit(f"error: standard output takes no more: {error.strerror}")


def _replace_streams(on_failure: Callable[[OSError], None], patience: float | None) -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by who started this: the next file opened would take its place
            os.open(os.devnull, os.O_RDWR)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is not None:
            before.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(
                _Descriptor(descriptor, on_failure if descriptor == 1 else None, patience)
            ),
            encoding=before.encoding if before else "utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)


class _Descriptor(io.RawIOBase):
    """A file descriptor that can always be written to."""

    def __init__(
        self,
        number: int,
        on_failure: Callable[[OSError], None] | None,
        patience: float | None,
    ):
        """
        Args:
          number: of the descriptor.
          on_failure: told of the first write that failed; what it leaves unsaid is dropped.
          patience: seconds to wait for a reader before what he does not take is dropped; None waits
            for ever.
        """
        self._number, self._on_failure = number, on_failure
        self._patience, self._reader_stalls = patience, False

    def write(self, data: memoryview) -> int:
        try:
            while True:
                self._reader_stalls = not self._has_room()
                if self._reader_stalls:
                    return len(data)
                with contextlib.suppress(BlockingIOError):  # made so by who shares a terminal
                    return os.write(self._number, data[: select.PIPE_BUF])
        except OSError as error:
            tell, self._on_failure = self._on_failure, None
            if tell:
                tell(error)
            return len(data)

    def _has_room(self) -> bool:
        """Waits until so much can be written at once, or nobody has read for too long."""
        poll = select.poll()
        poll.register(self._number, select.POLLOUT)
        patience = 0.0 if self._reader_stalls else self._patience
        return bool(poll.poll(None if patience is None else 1000 * patience))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)
