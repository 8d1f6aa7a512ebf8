"""Starts an elastic job again whose first node failed, as nothing on that node can: SLURM puts it
back into its queue. A program of its own, which another node of the job runs without the package.
"""

import signal
import subprocess
import sys
import time


def check(job: str, node: str) -> None:
    """Ends this program, and the job with it, if the job has lost a node."""
    names = _ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%N")
    nodes = _ask("scontrol", "show", "hostnames", *names)
    if nodes and node not in nodes:
        _ask("scontrol", "requeue", job)
        sys.exit()


def _ask(*words: str) -> list[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(check(*sys.argv[1:])))
    while True:
        time.sleep(10)
        check(*sys.argv[1:])
