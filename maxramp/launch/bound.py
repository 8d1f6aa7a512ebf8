"""A command that does not outlive its parent.

python -m maxramp.launch.bound PARENT COMMAND [ARGUMENT ...]

On Linux the kernel kills it when process PARENT dies, whatever of. A program of its own, because
nothing of ours may run between the fork and the exec of a launcher that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; it outlives exec


def main() -> None:
    """Becomes the command."""
    parent, *command = sys.argv[1:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before we asked
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
