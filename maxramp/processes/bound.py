"""A command that does not outlive its parent.

python -m maxramp.launch.bound PARENT COMMAND [ARGUMENT ...]

On Linux the kernel kills it when process PARENT dies, whatever of. A program of its own, because
nothing of ours may run between the fork and the exec of a launcher that has threads.
"""

import ctypes
import os
import signal
import sys

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (linux/prctl.h) outlives exec
        if os.getppid() != int(parent):  # it died before we asked
            sys.exit(1)
    os.execvp(command[0], command)
