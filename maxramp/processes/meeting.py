"""How the processes of a job meet.

JAX aborts a process whose peers do not come, with a stack trace. So where the coordinator's address
is known, the processes first meet at it themselves: whoever cannot be met is named in one line,
within a bounded time, and only a complete job is handed to JAX.
"""

import contextlib
import errno
import os
import resource
import socket
import time

import jax

from maxramp.errors import ConfigError, TrainingError
from maxramp.processes import lifeline

# What process 0 answers: all are there, or another process came with the same number.
_GO, _TWICE = b"go", b"2x"

_MAX_FILES = 2**16  # that a process may hold open, where its system allows so many

# What numbers this process where MAXRAMP_PROCESS_ID does not: SLURM, Open MPI, Kubernetes.
_PROCESS_IDS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def join(timeout: float) -> None:
    """Starts jax.distributed where the environment describes a job of several processes.

    Our own MAXRAMP_COORDINATOR (host:port), MAXRAMP_NUM_PROCESSES and MAXRAMP_PROCESS_ID come
    first, then what JAX recognizes by itself (TPU pods, GKE, SLURM, Open MPI). A plain machine has
    neither.

    Args:
      timeout: seconds to wait for the other processes.

    Raises:
      ConfigError: the environment is incomplete, or the coordinator's port is taken.
      TrainingError: other processes did not come.
    """
    _allow_connections()
    names = ("MAXRAMP_COORDINATOR", "MAXRAMP_NUM_PROCESSES", "MAXRAMP_PROCESS_ID")
    values = [os.environ.get(name, "") for name in names]
    if not any(values):
        try:
            jax.distributed.initialize(initialization_timeout=int(timeout))
        except ValueError as error:  # "coordinator_address should be defined": no cluster around us
            if "coordinator_address" not in str(error):
                raise ConfigError(f"jax.distributed: {error}") from None
            return
        lifeline.watch()
        return
    values[2] = next(filter(None, [values[2], *map(os.environ.get, _PROCESS_IDS)]), "")
    host, _, port = values[0].rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    numbers = values[1].isdigit() and values[2].isdigit() and int(values[2]) < int(values[1])
    if not (host and port.isdigit() and 0 < int(port) < 2**16 and numbers):
        shown = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise ConfigError(
            f"{shown}: all three must be set, to host:port, the number of processes and this one's "
            "place among them, from 0 on"
        )
    count, place = int(values[1]), int(values[2])
    bound = values[0] if lifeline.is_loopback(host) else None  # JAX would listen on all addresses
    if place == 0:
        _wait_for_all(host, int(port), count, timeout)
    else:
        _report(host, int(port), place, count, timeout)
    jax.distributed.initialize(
        values[0], count, place, coordinator_bind_address=bound, initialization_timeout=60
    )
    lifeline.watch()


def _allow_connections() -> None:
    """Lets process 0 hold a few connections to each of a thousand others.

    The limit of open files that a program starts with is 1,024 on most systems, for the sake of
    select(2), which nothing here uses; the hard one is what an administrator allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _wait_for_all(host: str, port: int, count: int, timeout: float) -> None:
    """Process 0: waits until every other process has come, and then lets them go on together."""
    shown = f"MAXRAMP_COORDINATOR={os.environ['MAXRAMP_COORDINATOR']}"
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as closing:
        try:
            listener = closing.enter_context(lifeline.listen(host, port, count))
        except OSError as error:
            raise ConfigError(
                f"{shown}: cannot listen there: {os.strerror(error.errno)}; give another port"
            ) from None
        came: dict[int, socket.socket] = {}
        while len(came) < count - 1:
            try:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                peer = closing.enter_context(listener.accept()[0])
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise TrainingError(
                        f"{shown}: process 0 of {count} may open no more files ({len(came)} "
                        "processes came); raise ulimit -Hn to four times the processes"
                    ) from None
                if time.monotonic() < deadline:
                    continue
                missing = [i for i in range(1, count) if i not in came]
                some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise TrainingError(
                    f"{shown}: {len(missing)} of {count} processes did not come within "
                    f"{timeout:g} s (process {some}); are they started, and do they reach this "
                    "host? join_timeout_seconds waits longer"
                ) from None
            try:
                peer.settimeout(5.0)
                place = _place(peer.recv(64), count)
            except (OSError, ValueError):  # somebody else who looked what listens here
                peer.close()
                continue
            if earlier := came.pop(place, None):  # its connection broke, or it is another one
                with contextlib.suppress(OSError):
                    earlier.sendall(_TWICE)
            came[place] = peer
            if len(came) == count - 1:  # some may have ended while they waited
                came = {place: peer for place, peer in came.items() if _is_open(peer)}
        for peer in came.values():
            with contextlib.suppress(OSError):
                peer.sendall(_GO)
        for peer in came.values():  # they close first, which leaves the port free for JAX at once
            with contextlib.suppress(OSError):  # one that ended is missed by JAX
                peer.recv(1)


def _greeting(place: int, count: int) -> bytes:
    """What a process says at the coordinator."""
    return b"maxramp process %d of %d\n" % (place, count)


def _place(greeting: bytes, count: int) -> int:
    """The number of a process of this job.

    Raises:
      ValueError: somebody else, or a process of another job, sent it.
    """
    place = int(greeting.split()[2]) if len(greeting.split()) == 5 else 0
    if not 0 < place < count or greeting != _greeting(place, count):
        raise ValueError(f"{greeting!r} comes from no process of a job of {count}")
    return place


def _is_open(peer: socket.socket) -> bool:
    """Whether the process at the other end, which has nothing more to say, is still there."""
    timeout = peer.gettimeout()
    peer.settimeout(0)
    try:
        return peer.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        peer.settimeout(timeout)


def _report(host: str, port: int, place: int, count: int, timeout: float) -> None:
    """Another process: says that it is there, and waits until all are."""
    shown = f"MAXRAMP_COORDINATOR={os.environ['MAXRAMP_COORDINATOR']}"
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0) as peer:
                peer.sendall(_greeting(place, count))
                peer.settimeout(timeout + 5.0)
                answer = peer.recv(2)
                if answer == _GO:
                    return
                if answer == _TWICE:
                    raise ConfigError(
                        f"MAXRAMP_PROCESS_ID={place}: a second process came to {host}:{port} with "
                        "this number; give each its own"
                    )
                reason = f"it gave up waiting, or does not wait for {count} processes"
                break
        except OSError as error:
            reason = error.strerror or str(error)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
    raise TrainingError(
        f"{shown}: process {place} cannot join there: {reason} (waited up to {timeout:g} s); is "
        "process 0 running on that host, and is the port open?"
    )
