"""Jobs of several processes on this machine."""

from conftest import environment
from forked import Forked
from object_stores import free_port


def start(command, processes, devices, folders, optimized=False, process=Forked):
    """Starts a job; process i stands in folders[i]."""
    port, job = free_port(), []
    for i in range(processes):
        job.append(
            process(
                command,
                env=environment(devices, optimized)
                | {"MAXRAMP_COORDINATOR": f"127.0.0.1:{port}"}
                | {"MAXRAMP_NUM_PROCESSES": str(processes), "MAXRAMP_PROCESS_ID": str(i)},
                cwd=folders[i],
            )
        )
    return job


def finish(job, timeout=300):
    """(exit status, stdout, stderr) of every process."""
    try:
        return [(*p.communicate(timeout=timeout), p.returncode) for p in job]
    finally:
        for p in job:
            p.kill()
