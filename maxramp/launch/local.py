"""Jobs on this machine: real processes that stand for nodes.

No process outlives the launch: each leads a process group of its own that is killed at the end, and
on Linux the kernel kills it when the launcher dies (`bound`).
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

from maxramp.commandline import count, shell_quote
from maxramp.errors import EXIT_CONFIG, EXIT_STAGE_END
from maxramp.launch.jobs import Run
from maxramp.processes.bound import bind
from maxramp.processes.lifeline import ORDERLY

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
    nodes, done = launch.next_nodes, launch.steps_done()
    failures, most = 0, launch.config.launch.max_restarts  # since a job left a newer checkpoint
    while True:
        before = done
        _say(
            f"{count(launch.processes(nodes), 'process')} for {count(nodes, 'node')} of "
            f"{count(launch.config.batch.devices_per_node, 'device')}"
        )
        status = _run_job(launch, nodes, asked)
        if status in (0, EXIT_CONFIG) or asked:
            return status
        done = launch.steps_done()
        if status == EXIT_STAGE_END:
            nodes = json.loads((launch.folder / "next_stage.json").read_bytes())["nodes"]
        failures = 0 if done > before else failures
        if done > before and status in ORDERLY:
            continue
        if failures == most:
            _say(
                f"exit status {status}: gave up after max_restarts={most} starts without a newer "
                "checkpoint"
            )
            return status
        failures += 1
        _say(f"exit status {status}: starting again ({failures} of {most})")


def _run_job(launch: Run, nodes: int, asked: list[int]) -> int:
    """Runs one job; returns its exit status: that of the first process that went wrong."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen] = []
    printers: list[threading.Thread] = []
    try:
        for place in range(launch.processes(nodes)):
            process = subprocess.Popen(
                bind(launch.command()),
                env=_environment(launch, nodes, place, port),
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
        return _wait(processes, launch.config.launch.grace_seconds, asked)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for printer in printers:
            printer.join(5.0)


def _wait(processes: list[subprocess.Popen], grace: float, asked: list[int]) -> int:
    """Waits for the end of a job, and brings it about where it does not come by itself.

    Returns 0 if every process ended so, else the status of the first that crashed, or the largest.
    """
    passed_on, ended, deadline = 0, [], float("inf")
    while len(ended) < len(processes):
        for process in [p for p in processes if p not in ended and p.poll() is not None]:
            ended.append(process)
            patience = grace if process.returncode in ORDERLY else _CRASH_GRACE
            deadline = min(deadline, time.monotonic() + patience)
        if len(asked) > passed_on:
            passed_on = len(asked)
            deadline = time.monotonic() + (grace if passed_on == 1 else 0)
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    # As a shell says that a signal ended a process.
    codes = [128 - p.returncode if p.returncode < 0 else p.returncode for p in ended]
    codes += [128 + signal.SIGKILL] * (len(processes) - len(ended))
    return next((code for code in codes if code not in ORDERLY), max(codes))


def _environment(launch: Run, nodes: int, place: int, port: int) -> dict[str, str]:
    count = launch.config.batch.devices_per_node // launch.config.launch.processes_per_node
    return os.environ | {
        "MAXRAMP_COORDINATOR": f"127.0.0.1:{port}",
        "MAXRAMP_NUM_PROCESSES": str(launch.processes(nodes)),
        "MAXRAMP_PROCESS_ID": str(place),
        "XLA_FLAGS": re.sub(_FAKE_DEVICES, "", os.environ.get("XLA_FLAGS", "")),
        # A process's share: as many fake ones of a CPU, or those GPUs of this machine.
        "JAX_NUM_CPU_DEVICES": str(count),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(place * count, (place + 1) * count))),
        "PYTHONUNBUFFERED": "1",
    }


def _print(stream: IO[str], out: IO[str], place: int) -> None:
    for line in stream:
        if not line.startswith(_CONNECTED):
            print(f"[{place}] {line.rstrip()}", file=out, flush=True)


def _say(line: str) -> None:
    print(f"launch   {line}", flush=True)
