"""Jobs on this machine: real processes that stand for nodes.

No process outlives the launch: each leads a process group of its own that is killed at the end, and
on Linux the kernel kills it when the launcher dies (`bound`).
"""

import contextlib
import json
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
from maxramp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_PREEMPTED, EXIT_STAGE_END
from maxramp.launch.elastic import Nodes, find_lost
from maxramp.launch.jobs import Run
from maxramp.launch.keys import LaunchKeys
from maxramp.processes.bound import bind
from maxramp.processes.lifeline import ORDERLY
from maxramp.processes.nodes import VARIABLE

_CRASH_GRACE = 10.0  # seconds that the others have to say why, after one has crashed
_FAKE_DEVICES = r"--xla_force_host_platform_device_count=\d+"
# Gloo, which joins the processes on CPUs, prints such a line in each for every group of devices.
_CONNECTED = "[Gloo] Rank "


def run(launch: Run, dry_run: bool = False) -> int:
    """Runs job after job until the run is finished; returns the exit status of the last.

    The first SIGINT or SIGTERM asks the job to save and end; a second one kills it.
    """
    if dry_run:
        for nodes in launch.node_counts():
            processes = count(launch.processes(nodes), "process")
            print(f"{processes} (stage {launch.stages_on(nodes)}):")
            print(f"  {shell_quote(launch.command())}")
        return 0
    asked: list[int] = []  # the signals so far, by which somebody asked to stop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    with tempfile.TemporaryDirectory(prefix="maxramp-") as folder:
        file = pathlib.Path(folder) / "nodes"
        return _run_chain(
            launch, Nodes(launch.config.launch, launch.config.batch.nodes, file), asked
        )


def _run_chain(launch: Run, nodes: Nodes, asked: list[int]) -> int:
    take, done, elastic = launch.next_nodes, launch.steps_done(), launch.config.launch.elastic
    failures, most = 0, launch.config.launch.max_restarts  # since a job left a newer checkpoint
    status = EXIT_PREEMPTED
    while True:
        there = _wait_for(nodes, take, asked)
        if asked:
            return EXIT_PREEMPTED
        if len(there) < take:
            return status
        before, ran = done, take
        _say(
            f"{count(launch.processes(take), 'process')} for {count(take, 'node')} of "
            f"{count(launch.config.batch.devices_per_node, 'device')}"
        )
        status, lost = _run_job(launch, there[:take], nodes, asked)
        if status in (0, EXIT_CONFIG) or asked:
            return status
        done = launch.steps_done()
        for number in lost:
            _say(f"node {number} was lost, and {nodes.lose(number)}")
        if status == EXIT_STAGE_END:
            take = json.loads((launch.folder / "next_stage.json").read_bytes())["nodes"]
        elif elastic:
            launch = launch.again(len(nodes.available()))
            take = launch.next_nodes
        failures = 0 if done > before else failures
        went_on = done > before and status in ORDERLY
        if went_on or lost or (elastic and status == EXIT_STAGE_END and take != ran):
            continue
        if failures == most:
            _say(
                f"exit status {status}: gave up after max_restarts={most} starts without a newer "
                "checkpoint"
            )
            return status
        failures += 1
        _say(f"exit status {status}: starting again ({failures} of {most})")


def _wait_for(nodes: Nodes, take: int, asked: list[int]) -> list[int]:
    """Waits for that many nodes; returns those that are there, fewer where no more will come or
    somebody asks for the end.
    """
    told = False
    while len(there := nodes.available()) < take <= nodes.remaining and not asked:
        if not told:
            _say(f"waits for {count(take, 'node')}: {len(there)} are there")
        told = True
        time.sleep(0.05)
    if len(there) < take and not asked:
        _say(f"gave up: the run needs {count(take, 'node')}, and {nodes.remaining} are left")
    return there


def _run_job(
    launch: Run, places: Sequence[int], nodes: Nodes, asked: list[int]
) -> tuple[int, list[int]]:
    """Runs one job on the nodes of these numbers; returns its exit status, that of the first
    process that went wrong, and of an elastic run the nodes that were lost.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = launch.config.launch
    processes: list[subprocess.Popen] = []
    printers: list[threading.Thread] = []
    try:
        for place in range(launch.processes(len(places))):
            number = places[place // keys.processes_per_node]
            environment = _environment(launch, len(places), place, number, port)
            if keys.elastic:
                environment[VARIABLE] = str(nodes.file)
            process = subprocess.Popen(
                bind(launch.command()),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            processes.append(process)
            for given in ((process.stdout, sys.stdout, place), (process.stderr, sys.stderr, place)):
                printers.append(threading.Thread(target=_print, args=given, daemon=True))
                printers[-1].start()
        status, ended = _wait(processes, keys, nodes, asked)
        if not keys.elastic or status in (*ORDERLY, EXIT_CONFIG, EXIT_FAILED):
            return status, []
        lost = find_lost(ended, processes)
        return status, list(dict.fromkeys(places[p // keys.processes_per_node] for p in lost))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for printer in printers:
            printer.join(5.0)


def _wait(
    processes: list[subprocess.Popen], keys: LaunchKeys, nodes: Nodes, asked: list[int]
) -> tuple[int, list[subprocess.Popen]]:
    """Waits for the end of a job, and brings it about where it does not come by itself.

    Returns 0 if every process ended so, else the status of the first that crashed, or the largest;
    and the processes that ended by themselves, in order.
    """
    passed_on, ended, deadline = 0, [], float("inf")
    while len(ended) < len(processes):
        for process in [p for p in processes if p not in ended and p.poll() is not None]:
            ended.append(process)
            patience = keys.grace_seconds if process.returncode in ORDERLY else _CRASH_GRACE
            if keys.elastic and process.returncode < 0:
                patience = 0.0  # what is left of the job cannot go on, and the run can
            deadline = min(deadline, time.monotonic() + patience)
        if len(asked) > passed_on:
            passed_on = len(asked)
            deadline = time.monotonic() + (keys.grace_seconds if passed_on == 1 else 0)
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if time.monotonic() >= deadline:
            break
        nodes.publish()
        time.sleep(0.05)
    # As a shell says that a signal ended a process.
    codes = [128 - p.returncode if p.returncode < 0 else p.returncode for p in ended]
    codes += [128 + signal.SIGKILL] * (len(processes) - len(ended))
    return next((code for code in codes if code not in ORDERLY), max(codes)), ended


def _environment(launch: Run, nodes: int, place: int, number: int, port: int) -> dict[str, str]:
    """Of the process at a place, on the node of a number."""
    devices, processes = (
        launch.config.batch.devices_per_node,
        launch.config.launch.processes_per_node,
    )
    count = devices // processes
    first = number * devices + place % processes * count
    return os.environ | {
        "MAXRAMP_COORDINATOR": f"127.0.0.1:{port}",
        "MAXRAMP_NUM_PROCESSES": str(launch.processes(nodes)),
        "MAXRAMP_PROCESS_ID": str(place),
        "XLA_FLAGS": re.sub(_FAKE_DEVICES, "", os.environ.get("XLA_FLAGS", "")),
        # A process's share: as many fake ones of a CPU, or those GPUs of this machine.
        "JAX_NUM_CPU_DEVICES": str(count),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + count))),
        "PYTHONUNBUFFERED": "1",
    }


def _print(stream: IO[str], out: IO[str], place: int) -> None:
    for line in stream:
        if not line.startswith(_CONNECTED):
            print(f"[{place}] {line.rstrip()}", file=out, flush=True)


def _say(line: str) -> None:
    print(f"launch   {line}", flush=True)
