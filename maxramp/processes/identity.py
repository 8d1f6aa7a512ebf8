"""Whether the process that left a mark is still there, as far as this machine can tell."""

import os
import pathlib
from typing import Any


def this_process() -> dict[str, Any]:
    """What tells this process from all others, and where numbers of processes mean what they say.

    On a system without /proc, an empty object: nobody can tell.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return {}
    return {
        "machine": f"{boot} {namespace}",
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def is_gone(process: Any) -> bool:
    """Whether `this_process` of another one says that it has ended; False where nobody can tell."""
    here = this_process()
    if not (here and isinstance(process, dict) and process.get("machine") == here["machine"]):
        return False
    return _started(process.get("pid")) != process.get("started")


def _started(pid: Any) -> str | None:
    """When a process began, None without one that still runs; numbers are given again."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else rest[18]
