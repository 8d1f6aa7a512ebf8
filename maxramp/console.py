"""Standard output and error of commands: closed pipes, full disks, Ctrl-C.

Commands call this before their slow imports, which a person may interrupt too.
"""

import contextlib
import io
import os
import select
import signal
import sys


def outlive_readers(patience: float | None = 10.0) -> None:
    """Makes prints never fail, for programs that run for hours; called in the main thread.

    Drops what no one can read any more (a closed pipe, a full disk, a terminal that is gone), and
    what no one reads for `patience` seconds (a pager that waits, a stopped terminal); with None see
    `end_with_readers`. Ctrl-C ends the program without a traceback, until it sets a handler of its
    own.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by the parent: the next file would get its number
            os.open(os.devnull, os.O_RDWR)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")
        raw = io.BufferedWriter(_Descriptor(descriptor, patience))
        stream = io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_readers() -> None:
    """Makes commands that only print end with their readers: quietly when the reader closes the
    pipe (`| head`), with one line on a full disk, and without a traceback after Ctrl-C.
    """
    outlive_readers(patience=None)


class _Descriptor(io.FileIO):
    """A file descriptor that can always be written to."""

    def __init__(self, number: int, patience: float | None):
        """Opens a descriptor. Without `patience` it waits for ever, and ends the program if stdout
        fails.
        """
        super().__init__(number, "w", closefd=False)
        self._patience, self._reader_stalls = patience, False
        self._ends_program = patience is None and number == 1

    def write(self, data: memoryview) -> int:
        """Writes a part of the data, and returns its bytes. Where nobody reads any more, the
        program ends (SystemExit), unless it must not: then the data is dropped."""
        try:
            while self._has_room():
                with contextlib.suppress(BlockingIOError):  # made so by who shares a terminal
                    return os.write(self.fileno(), data[: select.PIPE_BUF])
        except OSError as error:
            if self._ends_program:
                self._ends_program = False  # the rest is dropped
                if isinstance(error, BrokenPipeError):
                    raise SystemExit(128 + signal.SIGPIPE) from None
                line = f"error: standard output takes no more: {error.strerror}"
                print(line, file=sys.stderr)
                raise SystemExit(1) from None
        return len(data)

    def _has_room(self) -> bool:
        """Waits until PIPE_BUF bytes can be written at once, or nobody has read for too long."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        patience = 0.0 if self._reader_stalls else self._patience
        self._reader_stalls = not poll.poll(None if patience is None else 1000 * patience)
        return not self._reader_stalls
