"""The supervisor of a run inside a job of SLURM, which its batch script starts.

Jobs on the nodes of the allocation are steps of it (`srun`). For other nodes, or more time, it
submits another batch script, whose supervisor continues. Of an elastic run, SLURM takes a failed
node out of the allocation (`--no-kill`), and the supervisor a drained one.
"""

import collections
import datetime
import json
import os
import re
import subprocess
import sys
import threading
import time

from maxramp.commandline import command
from maxramp.config.load import load
from maxramp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_PREEMPTED
from maxramp.files.place import write_whole
from maxramp.files.run_folder import Appending
from maxramp.launch import slurm, slurm_guard
from maxramp.launch.jobs import Run
from maxramp.launch.supervisor import JobEnd, say, steps_done, stop_on_signals, supervise
from maxramp.processes.lifeline import ORDERLY
from maxramp.processes.nodes import VARIABLE

_RESTARTS = "MAXRAMP_RESTARTS"  # failures since progress, for the next job
_PERIOD = 10.0  # seconds between two looks at the nodes
_TOGETHER = 1.0  # seconds after a loss in which others are lost with it
_WORKING = {"allocated", "mixed", "idle", "completing"}
# SLURM kills the tasks of a job that has lost a node.
_FAILED_NODE = re.compile(r"srun: error: Node failure on (\S+)")
_KILLED_TASK = re.compile(r"srun: error: (\S+): tasks? \S+: (?:Killed|Bus error)")


class SlurmCluster:
    """Starts jobs as steps of this job of SLURM, or submits the next one."""

    def __init__(self, run: Run):
        self._run, self._keys, self._folder = run, run.config.launch, run.folder / "slurm"
        self._id, self._node = os.environ["SLURM_JOB_ID"], os.environ.get("SLURMD_NODENAME", "")
        self._limit = self._read_limit()
        self._file = self._folder / f"{self._id}.nodes"  # for the trainer (`processes.nodes`)
        self._chain = Appending(self._folder / slurm.CHAIN)
        self._lost = Appending(self._folder / "lost_nodes")  # a line for every loss
        self._is_asked = False  # to end, by SLURM: at the time limit, or by somebody's scancel
        self._is_leaving = False  # another job continues
        self._errors: list[tuple[float, str]] = []  # srun's lines of this start, and when they came
        # A job that got all that is planned may get more: the queue decides. One that got fewer
        # takes only nodes that become idle later.
        self._others, self._refused = run.config.batch.nodes - run.next_nodes, set[str]()
        if self._keys.elastic and len(self._read_nodes()) < run.next_nodes:
            self._others, self._refused = 0, {*self._idle()}

    @property
    def is_stopped(self) -> bool:
        return self._is_asked and time.time() < self._limit - 2

    def stop(self) -> None:
        self._is_asked = True

    def available(self) -> int:
        return len(self._usable())

    def start(self, nodes: int, failures: int) -> bool:
        if self.is_stopped:
            return False
        usable, elastic = self._usable(), self._keys.elastic
        is_here = len(usable) >= nodes if elastic else len(usable) == nodes
        if self._is_leaving or not is_here:
            self._submit(max(nodes, self._run.next_nodes) if elastic else nodes, failures)
            return False
        self._nodes, self._errors = usable[:nodes], []
        self._publish()
        self._note("start")
        srun = subprocess.Popen(
            ["srun", *self._srun_options(), *slurm.trainer(self._run)],
            env=self._environment(),
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._srun, self._guard = srun, self._start_guard(usable[-1])
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        return True

    def wait(self) -> JobEnd:
        looked, is_told = time.monotonic(), False
        while self._srun.poll() is None and not self._is_asked:
            if self._keys.elastic and time.monotonic() > looked + _PERIOD:
                looked = time.monotonic()
                self._publish()
                if not is_told and self._draining() & {*self._nodes}:
                    is_told = True  # the trainer saves and ends
                    slurm.query("scancel", "-s", "TERM", self._id)
            time.sleep(0.1)
        if self._guard:
            self._guard.terminate()
        if self._is_asked:
            self._is_leaving = not self.is_stopped
            self._note("limit" if self._is_leaving else "cancelled")
            return JobEnd.read(self._run.folder, EXIT_PREEMPTED)
        status = self._srun.returncode
        self._note("end", status)
        if status == EXIT_PREEMPTED:
            self._is_leaving = not self._leave_draining()
        lost = []
        if self._keys.elastic and status not in (*ORDERLY, EXIT_CONFIG, EXIT_FAILED):
            lost = self._find_lost()
        if lost:
            say(f"lost {' '.join(lost)}")
            for node in lost:
                self._lost.append(f"{node}\n".encode())
        return JobEnd.read(self._run.folder, status, bool(lost))

    def _submit(self, nodes: int, failures: int) -> None:
        options = []
        if self._keys.elastic:  # its nodes are free before the next job takes some
            bad = ",".join(sorted(self._find_excluded()))
            options = [f"--dependency=afterany:{self._id}", *([f"--exclude={bad}"] if bad else [])]
        os.environ[_RESTARTS] = str(failures)
        job = slurm.submit_script(self._folder, f"{nodes}-nodes.sh", *options)
        say(f"job {job} continues the run (nodes: {nodes}, failed starts: {failures})")

    def _srun_options(self) -> list[str]:
        nodes, keys = self._nodes, self._keys
        return [
            *(f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"),
            f"--ntasks={self._run.processes(len(nodes))}",
            f"--ntasks-per-node={keys.processes_per_node}",
            *("--label", "--kill-on-bad-exit=0", f"--wait={keys.grace_seconds}"),
            *slurm.container_options(keys),
        ]

    def _environment(self) -> dict[str, str]:
        """Of srun: where the processes find each other. Each knows its number by SLURM_PROCID."""
        devices, processes = self._run.config.batch.devices_per_node, self._keys.processes_per_node
        environment = os.environ | {
            "MAXRAMP_COORDINATOR": f"{self._nodes[0]}:{20000 + int(self._id) % 20000}",
            "MAXRAMP_NUM_PROCESSES": str(self._run.processes(len(self._nodes))),
            "JAX_NUM_CPU_DEVICES": str(devices // processes),
        }
        environment.pop("MAXRAMP_PROCESS_ID", None)
        if processes == 1:  # else JAX gives every process the one of SLURM_LOCALID
            environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(devices)))
        if self._keys.elastic:
            environment[VARIABLE] = str(self._file)
        return environment

    def _start_guard(self, node: str) -> subprocess.Popen | None:
        """Starts what starts this job again if the node of this supervisor fails."""
        if not self._keys.elastic or node == self._node:
            return None
        options = ["--overlap", "--quiet", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
        program = [sys.executable, "-P", slurm_guard.__file__, self._id, self._node]
        return subprocess.Popen(["srun", *options, *program])

    def _read_errors(self) -> None:
        for line in self._srun.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            self._errors.append((time.monotonic(), line))

    def _find_lost(self) -> list[str]:
        """The nodes that srun's errors name as failed, or else those whose tasks were killed."""
        self._reader.join(_TOGETHER)
        for pattern in (_FAILED_NODE, _KILLED_TASK):
            losses = [(at, m[1]) for at, line in self._errors if (m := pattern.match(line))]
            if losses:
                names = [name for at, name in losses if at <= losses[0][0] + _TOGETHER]
                return slurm.hostnames(",".join(names))
        return []

    def _note(self, event: str, status: int | None = None) -> None:
        """Adds a line to chain.jsonl."""
        job = {"job": int(self._id), "nodes": len(self._nodes), "time": int(time.time())}
        job |= {"event": event, "status": status, "samples": slurm.samples_done(self._run.folder)}
        self._chain.append((json.dumps(job) + "\n").encode())

    def _read_limit(self) -> float:
        """Unix seconds at which SLURM ends this job."""
        try:
            (end,) = slurm.query("squeue", "-h", "-j", self._id, "-o", "%e")
            return datetime.datetime.fromisoformat(end).timestamp()
        except ValueError:  # it has none
            return float("inf")

    def _publish(self) -> None:
        """Tells the trainer how many nodes it could have."""
        if self._keys.elastic:
            idle = {*self._idle()} - self._refused
            count = len(self._usable()) + len(idle) + self._others
            write_whole(self._file, str(count).encode())

    def _read_nodes(self) -> list[str]:
        return slurm.hostnames(*slurm.query("squeue", "-h", "-j", self._id, "-o", "%N"))

    def _usable(self) -> list[str]:
        """The nodes of this job; of an elastic run those that work."""
        if not self._keys.elastic:
            return slurm.hostnames(os.environ["SLURM_JOB_NODELIST"])
        states = {node: state.rstrip("+-") for node, state in _node_states()}
        working = {node for node in states if states[node] in _WORKING} - self._find_excluded()
        return [node for node in self._read_nodes() if node in working]

    def _idle(self) -> set[str]:
        partition = ["-p", os.environ["SLURM_JOB_PARTITION"]]
        idle = {node for node, state in _node_states(*partition) if state == "idle"}
        return idle - self._find_excluded()

    def _draining(self) -> set[str]:
        return {node for node, state in _node_states() if re.match("drain(ing|ed)", state)}

    def _leave_draining(self) -> bool:
        """Leaves the nodes that drain, of an elastic run; whether this job can continue."""
        draining = self._draining() if self._keys.elastic else set()
        late = time.time() >= self._limit - self._keys.grace_seconds
        if late or self._node in draining or not draining & {*self._nodes}:
            return False
        names = ",".join(self._usable())  # scontrol leaves files where it is called
        slurm.query("scontrol", "update", f"JobId={self._id}", f"NodeList={names}", cwd="/tmp")
        return True

    def _find_excluded(self) -> set[str]:
        """Nodes that were lost too often, or that an option of sbatch excludes."""
        options = dict(option.partition("=")[::2] for option in self._keys.slurm_options)
        losses = collections.Counter((self._folder / "lost_nodes").read_text().split())
        often = {node for node, times in losses.items() if times >= self._keys.max_node_failures}
        return often | {*slurm.hostnames(options.get("--exclude", ""))}


def _node_states(*options: str) -> list[tuple[str, ...]]:
    lines = slurm.query("sinfo", "-h", "-N", "-o", "%N/%T", *options)
    return [tuple(line.split("/")) for line in lines]


def follow(run: Run) -> int:
    """Runs the jobs of a run that fit into this job of SLURM; returns the status of the last."""
    cluster = SlurmCluster(run)
    stop_on_signals(cluster)
    nodes = cluster.available()
    if run.config.launch.elastic:
        nodes = run.fit(steps_done(run.folder), nodes)
    return supervise(run, cluster, nodes, int(os.environ.get(_RESTARTS, 0)))


@command
def main(arguments: list[str]) -> int:
    return follow(Run.from_config(load(arguments, "launch"), arguments))


if __name__ == "__main__":
    sys.exit(main())
