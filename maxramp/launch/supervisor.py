"""Follows a run from job to job, the same on every cluster.

A run is a chain of jobs. Each ends with one of the exit statuses of `errors`: 75 before a batch
that the plan gives another number of nodes, 76 when it was stopped and has saved. What comes next
depends on that status, the plan and where the run stands alone, so a chain can be continued at any
time. A cluster starts the jobs, waits for them, and counts its nodes.
"""

import dataclasses
import json
import signal
from collections.abc import Sequence
from typing import Any, Protocol

from maxramp.checkpoints import folder as folder_lib
from maxramp.commandline import count
from maxramp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_PREEMPTED, EXIT_STAGE_END
from maxramp.files.place import Place
from maxramp.launch.jobs import Run
from maxramp.processes.lifeline import ORDERLY
from maxramp.run.jobs import read_jobs


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """How a job ended, and where it left the run."""

    status: int  # of the first process that went wrong; else the largest
    step: int  # from which the next start surely continues (`steps_done`)
    next_nodes: int = 0  # of the next stage, after EXIT_STAGE_END; 0: as planned
    has_lost_nodes: bool = False  # and can continue without them

    @classmethod
    def read(cls, folder: Place, status: int, has_lost_nodes: bool = False) -> "JobEnd":
        """Reads from a run's folder what its last job left."""
        file, nodes = folder / "next_stage.json", 0
        if status == EXIT_STAGE_END and file.exists():
            nodes = json.loads(file.read_bytes())["nodes"]
        return cls(status, steps_done(folder), nodes, has_lost_nodes)


class Cluster(Protocol):
    """Where the jobs of one run are started, one after another."""

    is_stopped: bool  # somebody asked for the end, and not only of a job

    def available(self) -> int:
        """Counts the nodes on which a job can start now."""

    def start(self, nodes: int, failures: int) -> bool:
        """Starts a job as soon as it has its nodes; `failures` are the starts without progress
        before it. Returns False if nothing is left to do here: nodes will not come, somebody asks
        for the end, or another supervisor continues.
        """

    def wait(self) -> JobEnd:
        """Waits for the end of the job, and tells the trainer how many nodes it could have."""

    def stop(self) -> None:
        """Asks the job to save and end; the second time it need not save. For signal handlers."""


def supervise(run: Run, cluster: Cluster, nodes: int, failures: int = 0) -> int:
    """Starts job after job, the first on `nodes`; returns the exit status of the last, or
    EXIT_PREEMPTED if none started. Raises as `Cluster.start` and `Run.reload`.

    It ends when the run is done, its configuration is wrong, somebody stops it, the cluster starts
    no more, or more than max_restarts starts in a row failed, of which `failures` came before. A
    start counts as a failure unless the run got further: to a newer checkpoint, or to a snapshot
    that a start continued from. Lost nodes do not count.
    """
    keys, step, status = run.config.launch, steps_done(run.folder), EXIT_PREEMPTED
    while cluster.start(nodes, failures):
        end, nodes_before = cluster.wait(), nodes
        status = end.status
        if status in (0, EXIT_CONFIG) or cluster.is_stopped:
            return status
        if status == EXIT_STAGE_END:
            nodes = end.next_nodes or run.reload().next_nodes
        elif keys.elastic:
            run_now, available = run.reload(), cluster.available()
            nodes = run_now.fit(end.step, available)
            if reason := run_now.refusal(end.step, nodes, available):
                say(f"on {nodes} of {count(available, 'node')}: {reason}")
        has_progress, step = end.step > step, end.step
        if has_progress:
            failures = 0
        # To other nodes an elastic job may go without a newer checkpoint.
        has_moved = keys.elastic and status == EXIT_STAGE_END and nodes != nodes_before
        if end.has_lost_nodes or has_moved or (has_progress and status in ORDERLY):
            continue
        failures += 1
        restarts = f"max_restarts={keys.max_restarts}"
        if failures > keys.max_restarts:
            say(f"exit status {status}: gave up after {restarts} restarts without progress")
            return status
        say(f"exit status {status}: restart {failures} of {restarts} without progress")
    return EXIT_PREEMPTED if cluster.is_stopped else status


def may_be_loss(status: int) -> bool:
    """Tells whether a job may have ended so because it lost a node."""
    return status not in (*ORDERLY, EXIT_CONFIG, EXIT_FAILED)


def stop_on_signals(cluster: Cluster) -> None:
    """Lets SIGINT and SIGTERM stop a cluster, from here on; called in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: cluster.stop())


def steps_done(folder: Place) -> int:
    """Returns the step from which the next start surely continues: that of the newest checkpoint,
    or of the snapshot that the last start continued from.
    """
    position = folder_lib.newest(folder / "checkpoints")[0]
    starts = [job["first_step"] for job in read_jobs(folder) if job["event"] == "start"]
    return max(position.step if position else 0, *starts[-1:], 0)


def say_returned(away: set[Any], nodes: Sequence[Any]) -> None:
    """Names the lost nodes that a job takes back, which are `away` no more."""
    if returned := sorted(away & {*nodes}):
        say(f"took back node {', '.join(map(str, returned))}")
        away.difference_update(returned)


def say(line: str) -> None:
    print(f"launch   {line}", flush=True)
