"""The nodes of an elastic launch: a lost one rests, and one that keeps failing stays out."""

import collections
import pathlib
import signal
import subprocess
import time
from collections.abc import Sequence

from maxramp.files.place import write_whole
from maxramp.launch.keys import LaunchKeys


class Nodes:
    """The nodes of this machine's launch, by their numbers, and a file that says how many there
    are (`processes.nodes`).
    """

    def __init__(self, keys: LaunchKeys, count: int, file: pathlib.Path):
        self._keys, self.file = keys, file
        self._back = dict.fromkeys(range(count), 0.0)  # when each is there again
        self._losses = collections.Counter()
        self.publish()

    @property
    def remaining(self) -> int:
        """Those that were not left out for good."""
        return len(self._back)

    def available(self) -> list[int]:
        return [number for number, back in self._back.items() if back <= time.monotonic()]

    def publish(self) -> None:
        count = str(len(self.available())).encode()
        if not self.file.exists() or self.file.read_bytes() != count:
            write_whole(self.file, count)

    def lose(self, number: int) -> str:
        """Takes note of a loss; returns what becomes of the node, in a few words."""
        self._losses[number] += 1
        losses, most = self._losses[number], self._keys.max_node_failures
        if losses >= most:
            del self._back[number]
            return f"left out for good after max_node_failures={most}"
        rest = self._keys.node_rest_seconds * 2 ** (losses - 1)
        self._back[number] = time.monotonic() + rest
        return f"rests for {rest} s"


def find_lost(
    ended: Sequence[subprocess.Popen], processes: Sequence[subprocess.Popen]
) -> list[int]:
    """The places of processes that were lost: killed, or hung until the others gave up. `ended` are
    those that ended by themselves, in order.
    """
    by_signal = [p for p in ended if p.returncode < 0]
    # JAX aborts whoever outlives process 0.
    lost = [p for p in by_signal if p.returncode != -signal.SIGABRT] or by_signal[:1]
    lost = lost or [p for p in processes if p not in ended]
    return [processes.index(process) for process in lost]
