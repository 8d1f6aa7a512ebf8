"""A command that does not outlive its parent.

On Linux the kernel kills it when its parent dies, whatever the cause. It is a program of its own,
because nothing of ours may run between the fork and the exec of a launcher that has threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable


def bind(command: Iterable[str]) -> list[str]:
    """The command line of a process that ends when this one does."""
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (linux/prctl.h) outlives exec
        if os.getppid() != int(parent):  # it died before we asked
            sys.exit(1)
    os.execvp(command[0], command)
