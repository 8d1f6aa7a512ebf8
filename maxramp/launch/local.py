"""Jobs on this machine: real processes play the nodes.

No process outlives the launch: each leads a process group of its own that is killed at the end, and
on Linux the kernel kills it when the launcher dies (`bound`).
"""

import collections
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO

from maxramp.commandline import count, shell_quote
from maxramp.files.place import write_whole
from maxramp.launch.jobs import Run
from maxramp.launch.supervisor import (
    JobEnd,
    may_be_loss,
    say,
    say_returned,
    stop_on_signals,
    supervise,
)
from maxramp.processes.bound import bind
from maxramp.processes.lifeline import ORDERLY

_CRASH_GRACE = 10.0  # seconds that the others have to say why, after one has crashed
# Seconds after a loss in which others are lost with it. The rest cannot continue, and the run can.
_LOSS_GRACE = 0.25
_PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
_FAKE_DEVICES = r"--xla_force_host_platform_device_count=\d+"
# Gloo, which joins the processes on CPUs, prints such a line in each for every group of devices;
# JAX's coordination prints the others when process 0 is lost, as our own line says.
_NOISE = re.compile(
    r"\[Gloo\] Rank |[WEF]\d{4} .* (preemption_sync_manager|coordination_service_agent|client)\."
    "|Additional GRPC error information from remote target coordination_service"
    "|:UNKNOWN:Error received from peer"
)


def launch(run: Run, dry_run: bool = False) -> int:
    """Runs job after job until the run is finished, or prints their commands; returns the exit
    status of the last. Called in the main thread; raises as `supervise`.

    The first SIGINT or SIGTERM asks the job to save and end; a second one kills it.
    """
    if dry_run:
        for nodes in run.node_counts():
            processes = count(run.processes(nodes), "process")
            print(f"{processes} ({run.stages_on(nodes)}):")
            print(f"  {shell_quote(run.command())}")
        return 0
    with tempfile.TemporaryDirectory(prefix="maxramp-") as folder:
        cluster = LocalCluster(run, pathlib.Path(folder) / "nodes")
        stop_on_signals(cluster)
        return supervise(run, cluster, run.next_nodes)


class LocalCluster:
    """Starts the processes of jobs. A node that an elastic run loses rests, longer each time, and
    one that keeps failing is left out.
    """

    def __init__(self, run: Run, file: pathlib.Path):
        """Takes the `file` that tells the trainer how many nodes it could have (`nodes`)."""
        self._run, self._keys, self._file = run, run.config.launch, file
        # From when on each node can be used.
        self._usable_from = dict.fromkeys(range(run.config.batch.nodes), 0.0)
        self._losses, self._away = collections.Counter(), set[int]()
        self._stops = 0  # signals by which somebody asked for the end
        self._job: list[subprocess.Popen] = []
        self._nodes: list[int] = []  # of the job, by their numbers

    @property
    def is_stopped(self) -> bool:
        return self._stops > 0

    def stop(self) -> None:
        self._stops += 1

    def available(self) -> int:
        return len(self.usable_nodes())

    def usable_nodes(self) -> list[int]:
        return [node for node, since in self._usable_from.items() if since <= time.monotonic()]

    def start(self, nodes: int, failures: int) -> bool:
        if nodes > len(self._usable_from):
            left = len(self._usable_from)
            say(f"gave up: the run needs {count(nodes, 'node')}, and {left} are left")
            return False
        if self.available() < nodes and not self._stops:
            say(f"waiting for {count(nodes, 'node')}: {self.available()} are available")
        while self.available() < nodes and not self._stops:
            time.sleep(0.05)
        if self._stops:
            return False
        processes = count(self._run.processes(nodes), "process")
        devices = count(self._run.config.batch.devices_per_node, "device")
        say(f"{processes} for {count(nodes, 'node')} of {devices}")
        self._nodes = self.usable_nodes()[:nodes]
        say_returned(self._away, self._nodes)
        self._publish()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._job = []
        for process_id in range(self._run.processes(nodes)):
            process = subprocess.Popen(
                bind(self._run.command()),
                env=self._environment(process_id, port),
                stdin=subprocess.DEVNULL,
                **_PIPES,
                start_new_session=True,
            )
            self._job.append(process)
        return True

    def wait(self) -> JobEnd:
        printers = [
            threading.Thread(target=_print, args=(stream, out, process_id), daemon=True)
            for process_id, process in enumerate(self._job)
            for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for printer in printers:
            printer.start()
        try:
            status, ended = self._wait()
        finally:
            for process in self._job:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for printer in printers:
                printer.join(5.0)
        lost = []
        if self._keys.elastic and may_be_loss(status) and not self.is_stopped:
            lost = find_lost(ended, self._job)
        for node in dict.fromkeys(self._nodes[p // self._keys.processes_per_node] for p in lost):
            say(f"lost node {node}: {self.lose(node)}")
        return JobEnd.read(self._run.folder, status, bool(lost))

    def _wait(self) -> tuple[int, list[subprocess.Popen]]:
        """Waits for the end of the job, and brings it about where it does not come by itself.

        Returns 0 if every process ended so, else the status of the first that crashed, or the
        largest; and the processes that ended by themselves, in order.
        """
        stops, ended, deadline = 0, [], float("inf")
        while len(ended) < len(self._job):
            for process in [p for p in self._job if p not in ended and p.poll() is not None]:
                ended.append(process)
                is_orderly = process.returncode in ORDERLY
                patience = self._keys.grace_seconds if is_orderly else _CRASH_GRACE
                if self._keys.elastic and process.returncode < 0:
                    patience = _LOSS_GRACE
                deadline = min(deadline, time.monotonic() + patience)
            if self._stops > stops:
                stops = self._stops
                deadline = time.monotonic() + (self._keys.grace_seconds if stops == 1 else 0)
                for process in self._job:
                    process.send_signal(signal.SIGTERM)
            if time.monotonic() >= deadline:
                break
            self._publish()
            time.sleep(0.05)
        # A process that a signal ended has the exit status that a shell gives it.
        codes = [128 - p.returncode if p.returncode < 0 else p.returncode for p in ended]
        codes += [128 + signal.SIGKILL] * (len(self._job) - len(ended))
        return next((code for code in codes if code not in ORDERLY), max(codes)), ended

    def _publish(self) -> None:
        text = str(self.available()).encode()
        if not self._file.exists() or self._file.read_bytes() != text:
            write_whole(self._file, text)

    def lose(self, node: int) -> str:
        """Leaves a lost node out for node_rest_seconds, doubled at each loss, or after
        max_node_failures for good; returns what to print about it."""
        self._losses[node] += 1
        self._away.add(node)
        losses, most = self._losses[node], self._keys.max_node_failures
        if losses >= most:
            del self._usable_from[node]
            return f"left out for good after max_node_failures={most}"
        rest = self._keys.node_rest_seconds * 2 ** (losses - 1)
        self._usable_from[node] = time.monotonic() + rest
        return f"it rests for {rest} s"

    def _environment(self, process_id: int, port: int) -> dict[str, str]:
        """Returns the environment of one of the job's processes, by its number. A node's devices
        are shared out evenly among its processes (processes_per_node divides devices_per_node);
        they keep the node's own numbers, so a node that is left out leaves its GPUs idle.
        """
        devices, processes = self._run.config.batch.devices_per_node, self._keys.processes_per_node
        share = devices // processes
        first = self._nodes[process_id // processes] * devices + process_id % processes * share
        variables = self._run.environment(len(self._nodes), f"127.0.0.1:{port}", self._file)
        return {
            **os.environ,
            **variables,
            "MAXRAMP_PROCESS_ID": str(process_id),
            # JAX_NUM_CPU_DEVICES, of the run's variables, counts a process's CPU devices.
            "XLA_FLAGS": re.sub(_FAKE_DEVICES, "", os.environ.get("XLA_FLAGS", "")),
            # Chooses among the machine's GPUs; CPU devices are a process's own.
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + share))),
            "PYTHONUNBUFFERED": "1",
        }


def find_lost(
    ended: Sequence[subprocess.Popen], processes: Sequence[subprocess.Popen]
) -> list[int]:
    """Lists the numbers of processes that were lost: killed, or hung until the others gave up.
    `ended` are those that ended by themselves, in order.
    """
    by_signal = [p for p in ended if p.returncode < 0]
    # JAX aborts whoever outlives process 0.
    lost = [p for p in by_signal if p.returncode != -signal.SIGABRT] or by_signal[:1]
    lost = lost or [p for p in processes if p not in ended]
    return [processes.index(process) for process in lost]


def _print(stream: IO[str], out: IO[str], process_id: int) -> None:
    for line in stream:
        if not _NOISE.match(line):
            print(f"[{process_id}] {line.rstrip()}", file=out, flush=True)
