"""The supervisor of a run inside a pod, which the pod's command starts.

Every pod of a JobSet has one, for its process of a job, and all decide the same. For another number
of nodes they end with success, and their last message says how many the launch shall apply.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

from maxramp.commandline import command
from maxramp.config.load import load
from maxramp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_PREEMPTED
from maxramp.files.place import Place
from maxramp.launch.jobs import Run
from maxramp.launch.supervisor import JobEnd, stop_on_signals, supervise


class PodCluster:
    """Starts this pod's process of jobs on the nodes of its JobSet."""

    def __init__(self, run: Run, nodes: int):
        self._run, self._nodes = run, nodes
        self._process: subprocess.Popen | None = None
        self.is_stopped = False
        self.end = JobEnd(0, 0)  # of the last job; `next_nodes` are those for another JobSet

    def available(self) -> int:
        return self._nodes

    def start(self, nodes: int, failures: int) -> bool:
        has_nodes = nodes == self._nodes
        self.end = dataclasses.replace(self.end, next_nodes=0 if has_nodes else nodes)
        if self.is_stopped or not has_nodes:
            return False
        self._process = subprocess.Popen(self._run.command("python"))
        if self.is_stopped:  # asked while it started
            self._process.terminate()
        return True

    def wait(self) -> JobEnd:
        code = self._process.wait()
        self.end = JobEnd.read(self._run.folder, 128 - code if code < 0 else code)
        return self.end

    def stop(self) -> None:
        self.is_stopped = True
        if self._process:
            self._process.terminate()


def follow(run: Run, nodes: int, message: Place) -> int:
    """Runs the jobs of a run that take `nodes`, and writes the pod's last `message`; returns the
    exit status of the pod.
    """
    cluster = PodCluster(run, nodes)
    stop_on_signals(cluster)
    status = supervise(run, cluster, nodes)
    message.write_text(json.dumps({"step": cluster.end.step, "nodes": cluster.end.next_nodes}))
    if cluster.end.next_nodes or status in (0, EXIT_CONFIG):
        return 0 if cluster.end.next_nodes else status
    # Whatever its trainer ended with: Kubernetes takes the pod away, or the supervisor gave up.
    return EXIT_PREEMPTED if cluster.is_stopped else EXIT_FAILED


@command
def main(arguments: list[str]) -> int:
    nodes, message, *config = arguments
    run = Run.from_config(load(config, "launch"), config)
    return follow(run, int(nodes), pathlib.Path(message))


if __name__ == "__main__":
    sys.exit(main())
