"""The start of JAX in a process of a job: on the hardware that was asked for, with all others.

JAX aborts a process whose peers do not come, with a stack trace. So the processes first meet at the
coordinator's address themselves: a missing one is named in one line, in bounded time. The
connections stay open, as the lifelines of the job.
"""

import contextlib
import logging
import os
import select
import socket
import time
import types

import jax

# Clusters that JAX knows, without joining one; what keeps compiled programs; the machine's devices.
# No public name does.
from jax._src import clusters, compiler, hardware_utils

from maxramp.errors import ConfigError, TrainingError
from maxramp.files.storage import allow_many_files
from maxramp.keys.section import is_address
from maxramp.processes import lifeline
from maxramp.processes.keys import BackendKeys

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def take_hardware(hardware: str) -> None:
    """Makes JAX take cpu, gpu or tpu; auto leaves it to JAX. Call it before anything runs. With
    "cpu" no plugin starts: none takes a device that somebody trains on, none complains.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_shorten_plugin_error)
    if hardware != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[hardware])
    elif "TPU_SKIP_MDS_QUERY" in os.environ:  # JAX sees no TPU, and libtpu complains without these
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")


def start_devices(hardware: str) -> None:
    """Starts JAX's backend after `take_hardware`; a ConfigError if the machine lacks that
    hardware."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second where no plugin is installed
        reason = str(error).partition("(")[0].strip().rstrip(".:")[:200] or "no such backend"
        remedy = "hardware=auto takes what this machine has"
        if hardware == "auto":
            remedy = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} may ask for it"
        raise ConfigError(f"hardware={hardware}: {reason}; {remedy}") from None


def _shorten_plugin_error(record: logging.LogRecord) -> bool:
    """Filters JAX's log: a plugin's error becomes one line; CUDA's is left out where there is no
    GPU."""
    if record.exc_info:
        if "xla_cuda" in record.getMessage() and not hardware_utils.has_visible_nvidia_gpu():
            return False
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {reason}", (), None
    return True


def start(keys: BackendKeys) -> None:
    """Starts JAX with its cache of compiled programs, and joins the processes of the job; called
    before JAX runs anything. A ConfigError if the cache cannot be written or the hardware is
    missing, a TrainingError if a process is."""
    take_hardware(keys.hardware)
    if keys.hardware == "cpu" and keys.devices_per_node != -1:
        devices = max(1, keys.devices_per_node // keys.processes_per_node)
        with contextlib.suppress(RuntimeError):  # JAX runs already in this process
            jax.config.update("jax_num_cpu_devices", devices)
    if keys.jax_cache_dir:
        try:
            if not is_address(keys.jax_cache_dir):  # JAX writes to storages too
                os.makedirs(os.path.expanduser(keys.jax_cache_dir), exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"jax_cache_dir={keys.jax_cache_dir}: cannot write there: {error.strerror}; use "
                'another folder, or "" for none'
            ) from None
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(keys.jax_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # On CPUs a program runs in the thread that calls it. If a process has several devices, programs
    # that run asynchronously can take the threads that each other's collectives wait for, and XLA
    # aborts the process; if it has one, each of them holds memory of its own.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    join(keys.join_timeout_seconds)
    start_devices(keys.hardware)
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # JAX lets process 0 alone keep compiled programs. On CPUs its key for a program names the
        # process, so that the others would find none.
        alone = types.SimpleNamespace(process_id=0, client=None)
        compiler.distributed = types.SimpleNamespace(global_state=alone)


# What process 0 answers: all have come, or another process came with the same number.
_GO, _TWICE = b"go", b"2x"

# The number of this process if MAXRAMP_PROCESS_ID is not set: SLURM, Open MPI, Kubernetes.
_PROCESS_IDS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def join(timeout: float) -> None:
    """Starts jax.distributed where the environment describes a job of several processes; a
    TrainingError if they do not come, a ConfigError if it does not say how many they are, or where.

    MAXRAMP_COORDINATOR (host:port), MAXRAMP_NUM_PROCESSES and MAXRAMP_PROCESS_ID come first, then
    what JAX recognizes (TPU pods, GKE, SLURM, Open MPI). Waits `timeout` seconds for the others.
    """
    if tasks := os.environ.get("SLURM_STEP_NUM_TASKS"):
        # JAX reads the tasks of the whole job. A step that salloc opened for a person has one.
        os.environ["SLURM_NTASKS"] = tasks
    known = os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, int(timeout)
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, count, process_id = _read_variables() or detect(*known)[:3]
    if address is None:
        return
    if count is None:
        raise ConfigError(
            f"JAX_COORDINATOR_ADDRESS={address}: JAX knows no cluster here that says how many "
            "processes there are; set MAXRAMP_COORDINATOR, MAXRAMP_NUM_PROCESSES and "
            "MAXRAMP_PROCESS_ID"
        )
    if count == 1:
        return
    if not _is_address(address):
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address}: must be host:port")
    allow_many_files()  # process 0 holds a connection to each of a thousand others
    if process_id == 0:
        links = _wait_for_all(address, count, timeout)
    else:
        links = _report(address, process_id, count, timeout)
    lifeline.register(process_id, links)
    host, _ = _split_address(address)
    bound = address if _is_loopback(host) else None  # JAX would listen everywhere
    jax.distributed.initialize(
        address, count, process_id, coordinator_bind_address=bound, initialization_timeout=60
    )


def _read_variables() -> tuple[str, int, int] | None:
    """Reads address, number of processes and process id; None if no variable is set, a ConfigError
    if one is missing or wrong."""
    address = os.environ.get("MAXRAMP_COORDINATOR", "")
    count = os.environ.get("MAXRAMP_NUM_PROCESSES", "")
    process_id = os.environ.get("MAXRAMP_PROCESS_ID", "")
    if not (address or count or process_id):
        return None
    for name in _PROCESS_IDS:
        process_id = process_id or os.environ.get(name, "")
    are_numbers = count.isdigit() and process_id.isdigit() and int(process_id) < int(count)
    if not (_is_address(address) and are_numbers):
        raise ConfigError(
            f"MAXRAMP_COORDINATOR={address} MAXRAMP_NUM_PROCESSES={count} "
            f"MAXRAMP_PROCESS_ID={process_id}: all three must be set, to host:port, the number of "
            "processes and the number of this one, from 0 on"
        )
    return address, int(count), int(process_id)


def _describe_address(address: str) -> str:
    is_set = "MAXRAMP_COORDINATOR" in os.environ
    return f"MAXRAMP_COORDINATOR={address}" if is_set else f"the cluster's coordinator {address}"


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)  # of an IPv6 address


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(host: str, port: int, count: int) -> socket.socket:
    """Listens for `count` processes that know this one as `host`; by loopback only locally."""
    both = not _is_loopback(host) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    address = (host if _is_loopback(host) else "", port)
    return socket.create_server(address, family=family, backlog=count, dualstack_ipv6=both)


def _wait_for_all(address: str, count: int, timeout: float) -> dict[socket.socket, int]:
    """Waits, as process 0, until every other process has come, else a TrainingError (ConfigError:
    it cannot listen); then lets all continue. Returns which process each connection leads to."""
    shown, deadline = _describe_address(address), time.monotonic() + timeout
    known = {_greeting(other, count): other for other in range(1, count)}
    came: dict[int, socket.socket] = {}
    try:
        listener = _listen(*_split_address(address), count)
    except OSError as error:
        raise ConfigError(
            f"{shown}: cannot listen there: {os.strerror(error.errno)}; give another port"
        ) from None
    with listener:
        while len(came) < count - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                missing = [str(other) for other in known.values() if other not in came]
                some = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                raise TrainingError(
                    f"{shown}: {len(missing)} of {count} processes did not come within "
                    f"{timeout:g} s (process {some}); are they started, and do they reach this "
                    "host? join_timeout_seconds waits longer"
                ) from None
            other = None
            with contextlib.suppress(OSError):
                peer.settimeout(5.0)
                other = known.get(peer.recv(64))
            if other is None:  # no process of this job
                peer.close()
                continue
            if other in came:  # its connection broke, or two have the same number
                with contextlib.suppress(OSError):
                    came[other].sendall(_TWICE)
            came[other] = peer
            if len(came) == count - 1:  # some may have ended while they waited
                came = {other: peer for other, peer in came.items() if _is_open(peer)}
    for peer in came.values():
        with contextlib.suppress(OSError):  # its lifeline shows at once that it has ended
            peer.sendall(_GO)
    return {peer: other for other, peer in came.items()}


def _report(address: str, process_id: int, count: int, timeout: float) -> dict[socket.socket, int]:
    """Reports to process 0, and waits until all processes have, else a TrainingError (ConfigError:
    another has the same id); returns the connection to it."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            peer = socket.create_connection(_split_address(address), timeout=5.0)
            peer.sendall(_greeting(process_id, count))
            peer.settimeout(timeout + 5.0)
            answer = peer.recv(2)
            reason = f"it gave up waiting, or does not wait for {count} processes"
            break
        except OSError as error:
            reason, answer = error.strerror or str(error), b""
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
    if answer == _TWICE:
        raise ConfigError(
            f"MAXRAMP_PROCESS_ID={process_id}: a second process came to {address} with this "
            "number; give each its own"
        )
    if answer != _GO:
        raise TrainingError(
            f"{_describe_address(address)}: process {process_id} cannot join there: {reason} "
            f"(waited up to {timeout:g} s); is process 0 running on that host, and is the port "
            "open?"
        )
    return {peer: 0}


def _greeting(process_id: int, count: int) -> bytes:
    return b"maxramp process %d of %d\n" % (process_id, count)


def _is_open(peer: socket.socket) -> bool:
    """Tells whether the process at the other end, which sends nothing more, has not ended."""
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    return not poll.poll(0)
