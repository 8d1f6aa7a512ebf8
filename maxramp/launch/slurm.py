"""A run under SLURM: a batch script, and the supervisor inside its job, which submits it again.

The script lies in `{output folder}/slurm/`: it can be read, changed and submitted by hand.

Jobs on the nodes of the allocation are steps of it (`srun`). For other nodes, or more time, the
supervisor submits the script again, whose supervisor continues. If the run is elastic, SLURM takes
a failed node out of the allocation (`--no-kill`), and the supervisor a drained one.
"""

import collections
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

from maxramp.commandline import command, count, shell_quote
from maxramp.config.load import load
from maxramp.errors import EXIT_PREEMPTED, ConfigError
from maxramp.files.place import write_whole
from maxramp.files.run_folder import Appending
from maxramp.launch import slurm_guard
from maxramp.launch.jobs import Run, write_private
from maxramp.launch.keys import LaunchKeys
from maxramp.launch.supervisor import (
    JobEnd,
    may_be_loss,
    say,
    say_returned,
    steps_done,
    stop_on_signals,
    supervise,
)

_NAME = "job.sh"
_SCRIPT = """#!/usr/bin/env bash
# A job of a run, on any number of its nodes (sbatch --nodes=N). Written by maxramp.launch.
{options}

cd -- {directory} || exit 1
{setup}
exec {supervisor}
"""
_RESTARTS = "MAXRAMP_RESTARTS"  # failures since progress, for the next job
_PERIOD = 10.0  # seconds between two looks at the nodes
_LAST = 2.0  # seconds before the time limit in which the next job is submitted
_TOGETHER = 1.0  # seconds after a loss in which others are lost with it
_WORKING = {"allocated", "mixed", "idle", "completing"}
# SLURM kills the tasks of a job that has lost a node.
_FAILED_NODE = re.compile(r"srun: error: Node failure on (\S+)")
_KILLED_TASK = re.compile(r"srun: error: (\S+): tasks? \S+: (?:Killed|Bus error)")


def launch(run: Run, dry_run: bool) -> int:
    """Submits a run's first job, or prints it; a ConfigError without sbatch, if one is queued, or
    if SLURM or `batch_script` refuses it."""
    folder, script = run.folder / "slurm", batch_script(run)
    if dry_run:
        print(f"### {folder / _NAME}\n{script}\n### then\ncd {shell_quote([folder])}")
        for nodes in run.node_counts():
            line = f"sbatch --nodes={_node_range(run, nodes)} {_NAME}"
            print(f"{line}  # {run.stages_on(nodes)}")
        return 0
    if not shutil.which("sbatch"):
        raise ConfigError(
            "--cluster slurm: no sbatch on the path; launch where SLURM is installed, or use "
            "--cluster local, or --dry-run to see the script"
        )
    for job in _queued_jobs(folder):
        raise ConfigError(
            f"run_name={run.config.run.run_name}: job {job} of this run is in SLURM's queue; "
            f"scancel {job} ends it, another run_name starts another run"
        )
    write_private(folder, {_NAME: script}, mode=0o700)
    (folder / "lost_nodes").unlink(missing_ok=True)  # whoever launches again has seen to them
    job = _submit(run, run.next_nodes)
    print(f"launch   job {job} submitted on {count(run.next_nodes, 'node')}")
    print(f"see      {folder}: the script, and the output of each job")
    return 0


def _queued_jobs(folder: pathlib.Path) -> list[str]:
    """Lists the jobs in SLURM's queue that were submitted from a folder."""
    refusal = "squeue cannot tell which jobs of this run there are"
    lines = _ask("squeue", "-h", "-o", "%A|%Z", refusal=refusal).splitlines()
    jobs = (line.split("|", 1) for line in lines)
    return [job for job, path in jobs if os.path.realpath(path) == os.path.realpath(folder)]


def _ask(*words: str, cwd: str | pathlib.Path | None = None, refusal: str = "") -> str:
    """Returns what a command of SLURM's prints. Where it fails, raises a ConfigError that begins
    with `refusal`; without one, nobody is told."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode and refusal:
        reason = " ".join(done.stderr.replace(f"{words[0]}: error:", "").split())
        raise ConfigError(f"{refusal}: {reason}")
    return done.stdout


def _submit(run: Run, nodes: int, *options: str) -> str:
    """Submits the script, which lies in its folder, on that many nodes, with options of sbatch;
    returns the job's number. A ConfigError if sbatch refuses it."""
    folder = run.folder / "slurm"
    words = ["sbatch", "--parsable", f"--nodes={_node_range(run, nodes)}", *options, _NAME]
    refusal = f"sbatch refused {folder / _NAME}"
    return _ask(*words, cwd=folder, refusal=refusal).strip().partition(";")[0]


def _hostnames(names: str) -> list[str]:
    """Lists the nodes of a text in SLURM's notation, such as n[0-3]."""
    return _ask("scontrol", "show", "hostnames", names).split() if names else []


def batch_script(run: Run) -> str:
    """Returns the text of the script; raises as `_batch_options`."""
    supervisor = [sys.executable, "-m", "maxramp.launch.slurm", *run.arguments]
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in _batch_options(run)),
        directory=shell_quote([pathlib.Path.cwd()]),
        setup="\n".join(run.config.launch.setup_lines),
        supervisor=shell_quote(supervisor),
    )


def _node_range(run: Run, nodes: int) -> str:
    """Returns the value of --nodes of a job that has its stage on `nodes`."""
    if not run.config.launch.elastic:
        return f"{nodes}"
    choices = map(run.node_choices, run.stages)
    fewest = max((min(some) for some in choices if nodes in some), default=nodes)
    return f"{fewest}-{nodes}"


def _batch_options(run: Run) -> list[str]:
    """Lists options of sbatch. Its own reading of quotes is not a shell's: nothing needs any. A
    ConfigError for a folder with % or a backslash."""
    keys = run.config.launch
    if set(str(run.folder)) & {"%", "\\"}:
        raise ConfigError(
            f"{run.folder}: SLURM reads % and \\ in the path of a job's output as its own signs; "
            "take another run_name or base_output_directory"
        )
    tasks = [f"--ntasks-per-node={keys.processes_per_node}"]
    if keys.elastic:  # with a number of tasks, SLURM gives the nodes that the fewest of them need
        tasks = ["--no-kill", f"--mincpus={keys.processes_per_node}"]
    options = [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]+', '-', run.config.run.run_name)}",
        f"--nodes={_node_range(run, run.next_nodes)}",
        *tasks,
        f"--signal=TERM@{keys.grace_seconds}",  # to the trainer, which saves and exits with 76
        "--output=%j.log",
        "--open-mode=append",
        "--requeue",  # when a node fails; the same script continues from the newest checkpoint
    ]
    for name in ("account", "partition", "qos", "time"):
        value = getattr(keys, f"slurm_{name}")
        options += [f"--{name}={value}"] if value else []
    return [*options, *keys.slurm_options]


class SlurmCluster:
    """Starts jobs as steps of this job of SLURM, or submits the next one."""

    def __init__(self, run: Run):
        self._run, self._keys, self._folder = run, run.config.launch, run.folder / "slurm"
        self._id, self._node = os.environ["SLURM_JOB_ID"], os.environ.get("SLURMD_NODENAME", "")
        self._limit = self._read_limit()
        self._file = self._folder / f"{self._id}.nodes"  # for the trainer (`processes.agreement`)
        self._losses = Appending(self._folder / "lost_nodes")  # a line for every loss
        self._away = set[str]()  # lost, and not back yet
        self.is_stopped = False
        self._is_leaving = False  # another job continues
        self._errors: list[tuple[float, str]] = []  # srun's lines of this start, and their times
        # A job that got all that is planned may get more: the queue decides. One that got fewer
        # takes only nodes that become idle later.
        self._others, self._refused = run.config.batch.nodes - run.next_nodes, set[str]()
        if self._keys.elastic and len(self._allocated_nodes()) < run.next_nodes:
            self._others, self._refused = 0, {*self._idle_nodes()}

    def stop(self) -> None:
        self.is_stopped = True

    def available(self) -> int:
        return len(self._usable_nodes())

    def start(self, nodes: int, failures: int) -> bool:
        if self.is_stopped:
            return False
        usable = self._usable_nodes()
        has_nodes = len(usable) == nodes
        if self._keys.elastic:
            has_nodes = len(usable) >= nodes
        if self._is_leaving or not has_nodes:
            self._submit(nodes, failures)
            return False
        self._nodes, self._errors = usable[:nodes], []
        say_returned(self._away, self._nodes)
        self._publish()
        self._srun = subprocess.Popen(
            ["srun", *self._srun_options(), *trainer_command(self._run)],
            env=self._environment(),
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._guard = self._start_guard(usable[-1])
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        return True

    def wait(self) -> JobEnd:
        last_look, is_told = time.monotonic(), False
        while self._srun.poll() is None and not self.is_stopped:
            if self._is_at_limit():
                self._is_leaving = True
                break
            if self._keys.elastic and time.monotonic() > last_look + _PERIOD:
                last_look = time.monotonic()
                self._publish()
                if not is_told and self._draining_nodes() & {*self._nodes}:
                    is_told = True  # the trainer saves and ends
                    _ask("scancel", "-s", "TERM", self._id)
            time.sleep(0.1)
        if self._guard:
            self._guard.terminate()
        if self.is_stopped or self._is_leaving:
            return JobEnd.read(self._run.folder, EXIT_PREEMPTED)
        status = self._srun.returncode
        if status == EXIT_PREEMPTED:
            self._is_leaving = not self._leave_draining()
        lost = self._find_lost() if self._keys.elastic and may_be_loss(status) else []
        if lost:
            say(f"lost {count(len(lost), 'node')}: {' '.join(lost)}")
            self._away |= {*lost}
        for node in lost:
            self._losses.append(f"{node}\n".encode())
        return JobEnd.read(self._run.folder, status, bool(lost))

    def _submit(self, nodes: int, failures: int) -> None:
        """Submits the job that continues this one; it knows the failures by an environment
        variable. A ConfigError if sbatch refuses it."""
        options = []
        if self._keys.elastic:  # its nodes are free before the next job takes some
            nodes, excluded = max(nodes, self._run.next_nodes), sorted(self._excluded_nodes())
            options = [f"--dependency=afterany:{self._id}"]
            options += [f"--exclude={','.join(excluded)}"] if excluded else []
        os.environ[_RESTARTS] = str(failures)
        job = _submit(self._run, nodes, *options)
        say(f"job {job} continues the run on {count(nodes, 'node')}, failed starts: {failures}")

    def _srun_options(self) -> list[str]:
        nodes, keys = self._nodes, self._keys
        return [
            *(f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"),
            f"--ntasks={self._run.processes(len(nodes))}",
            f"--ntasks-per-node={keys.processes_per_node}",
            *("--label", "--kill-on-bad-exit=0", f"--wait={keys.grace_seconds}"),
            *container_options(keys),
        ]

    def _environment(self) -> dict[str, str]:
        """Returns the variables of srun, whose tasks know their numbers by SLURM_PROCID."""
        coordinator = f"{self._nodes[0]}:{20000 + int(self._id) % 20000}"
        variables = self._run.environment(len(self._nodes), coordinator, self._file)
        environment = os.environ | variables
        environment.pop("MAXRAMP_PROCESS_ID", None)
        if self._keys.processes_per_node == 1:  # else JAX gives each process that of SLURM_LOCALID
            devices = range(self._run.config.batch.devices_per_node)
            environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, devices))
        return environment

    def _start_guard(self, node: str) -> subprocess.Popen | None:
        """Starts on a node what starts this job again if that of this supervisor fails; None if the
        run is not elastic, or it is the same node."""
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
        """Lists the nodes that srun's errors name as failed, or else those of killed tasks."""
        self._reader.join(_TOGETHER)
        for pattern in (_FAILED_NODE, _KILLED_TASK):
            matches = [(seconds, pattern.match(line)) for seconds, line in self._errors]
            losses = [(seconds, match[1]) for seconds, match in matches if match]
            if losses:
                last = losses[0][0] + _TOGETHER
                return _hostnames(",".join(name for seconds, name in losses if seconds < last))
        return []

    def _read_limit(self) -> float:
        """Reads the Unix seconds at which SLURM ends this job; infinity if it does not."""
        try:
            (end,) = _ask("squeue", "-h", "-j", self._id, "-o", "%e").split()
            return datetime.datetime.fromisoformat(end).timestamp()
        except ValueError:  # it has none
            return float("inf")

    def _is_at_limit(self) -> bool:
        """Tells whether SLURM is about to end this job, whose limit may have been extended."""
        if time.time() >= self._limit - _LAST:
            self._limit = self._read_limit()
        return time.time() >= self._limit - _LAST

    def _publish(self) -> None:
        """Tells the trainer how many nodes it could have."""
        if self._keys.elastic:
            idle = self._idle_nodes() - self._refused
            available = len(self._usable_nodes()) + len(idle) + self._others
            write_whole(self._file, str(available).encode())

    def _allocated_nodes(self) -> list[str]:
        return _hostnames(_ask("squeue", "-h", "-j", self._id, "-o", "%N").strip())

    def _usable_nodes(self) -> list[str]:
        """Lists the nodes of this job; those that work, if the run is elastic."""
        if not self._keys.elastic:
            return _hostnames(os.environ["SLURM_JOB_NODELIST"])
        states = {node: state.rstrip("+-") for node, state in _node_states()}
        working = {node for node in states if states[node] in _WORKING} - self._excluded_nodes()
        return [node for node in self._allocated_nodes() if node in working]

    def _idle_nodes(self) -> set[str]:
        states = _node_states("-p", os.environ["SLURM_JOB_PARTITION"])
        return {node for node, state in states if state == "idle"} - self._excluded_nodes()

    def _draining_nodes(self) -> set[str]:
        return {node for node, state in _node_states() if re.match("drain(ing|ed)", state)}

    def _leave_draining(self) -> bool:
        """Leaves nodes that drain, if the run is elastic; returns whether this job can continue."""
        draining = self._draining_nodes() if self._keys.elastic else set()
        is_late = time.time() >= self._limit - self._keys.grace_seconds
        if is_late or self._node in draining or not draining & {*self._nodes}:
            return False
        names = ",".join(self._usable_nodes())  # scontrol leaves files where it is called
        _ask("scontrol", "update", f"JobId={self._id}", f"NodeList={names}", cwd="/tmp")
        return True

    def _excluded_nodes(self) -> set[str]:
        """Returns the nodes that were lost too often, or that an option of sbatch excludes; reads
        the file of losses each time."""
        options = dict(option.partition("=")[::2] for option in self._keys.slurm_options)
        losses = collections.Counter((self._folder / "lost_nodes").read_text().split())
        often = {node for node, times in losses.items() if times >= self._keys.max_node_failures}
        return often | {*_hostnames(options.get("--exclude", ""))}


def trainer_command(run: Run) -> list[str]:
    """Returns the command of one process under srun; apptainer begins it, while pyxis takes options
    of srun."""
    keys = run.config.launch
    if not keys.container_image:
        return run.command()
    if keys.container_runtime == "pyxis":
        return run.command("python")
    binds = ["--bind", keys.container_mounts] if keys.container_mounts else []
    return ["apptainer", "exec", "--nv", *binds, keys.container_image, *run.command("python")]


def container_options(keys: LaunchKeys) -> list[str]:
    """Lists the options of srun by which pyxis starts a container."""
    if not keys.container_image or keys.container_runtime != "pyxis":
        return []
    mounts = [f"--container-mounts={keys.container_mounts}"] if keys.container_mounts else []
    options = [f"--container-image={keys.container_image}", "--no-container-mount-home"]
    return [*options, *mounts, f"--container-workdir={pathlib.Path.cwd()}"]


def _node_states(*options: str) -> list[tuple[str, ...]]:
    """Lists the nodes of SLURM with their states, by options of sinfo; [] if it does not answer."""
    lines = _ask("sinfo", "-h", "-N", "-o", "%N/%T", *options).split()
    return [tuple(line.split("/")) for line in lines]


def follow(run: Run) -> int:
    """Runs the jobs of a run that fit into this job of SLURM; returns the status of the last.
    Called in the main thread; raises as `supervise`."""
    cluster = SlurmCluster(run)
    stop_on_signals(cluster)
    nodes = cluster.available()
    if run.config.launch.elastic:
        nodes = run.fit(steps_done(run.folder), nodes)
    return supervise(run, cluster, nodes, int(os.environ.get(_RESTARTS, 0)))


@command
def main(arguments: list[str]) -> int:
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("SLURM_JOB_ID is not set: not in a job of SLURM; submit with sbatch")
    return follow(Run.from_config(load(arguments, "launch"), arguments))


if __name__ == "__main__":
    sys.exit(main())
