"""Standard output and error: when nobody reads them any more, and when somebody presses Ctrl-C.

To be called before the slow imports of a command, which a person may interrupt too.
"""

import io
import os
import signal
import sys
from collections.abc import Callable


def outlive_readers() -> None:
    """For programs that run for hours: makes printing safe, for them and for any library.

    What can no longer be written (to a closed pipe, a full disk, a terminal that is gone) is
    dropped.
    """
    _replace_streams(lambda error: None)


def end_with_readers() -> None:
    """For commands that only print: ends them when nobody reads their output any more.

    When a pipe is closed they end quietly, as other tools do (`| head`); when the disk is full they
    end with one line. Ctrl-C prints no traceback.
    """
    _replace_streams(_end)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise SystemExit(128 + signal.SIGPIPE)
    raise SystemExit(f"error: standard output takes no more: {error.strerror}")


def _replace_streams(on_failure: Callable[[OSError], None]) -> None:
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
            io.BufferedWriter(_Descriptor(descriptor, on_failure if descriptor == 1 else None)),
            encoding=before.encoding if before else "utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)


class _Descriptor(io.RawIOBase):
    """A file descriptor to which writing never fails."""

    def __init__(self, number: int, on_failure: Callable[[OSError], None] | None):
        """`on_failure` gets the error of the first write that fails; later ones are dropped."""
        self._number, self._on_failure = number, on_failure

    def write(self, data: memoryview) -> int:
        try:
            return os.write(self._number, data)
        except OSError as error:
            tell, self._on_failure = self._on_failure, None
            if tell:
                tell(error)
            return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)
