"""A command that does not outlive its parent: on Linux the kernel kills it. A program of its own,
because a launcher with threads must run no Python between fork and exec.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable


def bind(command: Iterable[str]) -> list[str]:
    """Returns a command that runs `command`, and is killed when the thread that starts it ends."""
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (linux/prctl.h) outlives exec
        if os.getppid() != int(parent):  # it died before we asked
            sys.exit(1)
    os.execvp(command[0], command)
