"""How the processes of a job meet: who is missing, who came twice, who does not belong."""

import concurrent.futures
import contextlib
import pathlib
import resource
import socket
import subprocess
import sys
import time

import pytest
from conftest import BASE, TINY, command, environment
from forked import Forked
from jobs import member, wait_until
from object_stores import free_port

from maxramp.errors import ConfigError, TrainingError
from maxramp.processes import backend

KEYS = (*TINY, "hardware=cpu", "dataset_type=synthetic", "enable_rampup_batch_size=False")
KEYS += ("join_timeout_seconds=3", "steps=2", "run_name=x")


def start(folder, cache_dir, process_id: int, count: int, port: int, host="127.0.0.1", **keys):
    """Starts one process of a job."""
    line = [BASE, *KEYS, f"jax_cache_dir={cache_dir}", f"base_output_directory={folder}"]
    line += [f"{name}={value}" for name, value in keys.items()]
    return Forked(command(*line), environment() | member(port, count, process_id, host))


def one_line(process: Forked, status: int, *parts: str) -> None:
    out, err = process.communicate(timeout=200)
    assert process.returncode == status, err
    lines = [line for line in err.splitlines() if line and not line.startswith("[Gloo]")]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    for part in parts:
        assert part in lines[0]


def test_an_address_without_a_port_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost")
    for name, value in {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1.0;tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="JAX_COORDINATOR_ADDRESS=localhost: must be host:port"):
        backend.join(1.0)


def test_a_port_in_use_is_refused(tmp_path, cache_dir):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        process = start(tmp_path, cache_dir, 0, 2, port)
        one_line(process, 2, f"127.0.0.1:{port}", "in use", "another port")


@pytest.mark.slow
@pytest.mark.parametrize("host, reason", [("127.0.0.1", "refused"), ("nowhere.invalid", "")])
def test_a_coordinator_that_cannot_be_reached_is_named(host, reason, tmp_path, cache_dir):
    port = free_port()
    process = start(tmp_path, cache_dir, 1, 2, port, host=host)
    one_line(process, 1, f"{host}:{port}", "process 1", reason)


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(tmp_path, cache_dir):
    """Both processes that came report it: 0 names the missing one."""
    port = free_port()
    # The watchdog leaves them the time to wait for each other.
    processes = [start(tmp_path, cache_dir, i, 3, port, hang_timeout_seconds=2) for i in (0, 1)]
    one_line(processes[0], 1, "1 of 3 processes did not come within 3 s (process 2)")
    one_line(processes[1], 1, f"127.0.0.1:{port}")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1"])
def test_more_processes_join_than_files_may_be_open(host):
    """The usual limit of 1,024 files is below a thousand processes; on IPv6 alone, too."""
    port, count = free_port(), 100
    program = (
        "from maxramp.processes import backend\n"
        "backend.allow_many_files()\n"
        f"backend._wait_for_all('{host}:{port}', {count}, 120.0)"
    )
    waiting = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ),
    )
    with contextlib.ExitStack() as closing:
        calls = []
        for process_id in range(1, count):
            text = b"maxramp process %d of %d\n" % (process_id, count)
            calls.append(closing.enter_context(call(port, text, host.strip("[]"))))
        for connection in calls:
            assert connection.recv(2) == b"go"
    assert waiting.wait(120) == 0


# Whom the processes of a job of three have a connection to.
MET = [[1, 2], [0], [0]]


@pytest.fixture
def meeting():
    """Yields the port of process 0 of a job of three, its future, and what starts another."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(backend._wait_for_all, address, 3, 20.0)

        def come(process_id: int, count: int = 3) -> concurrent.futures.Future:
            return pool.submit(backend._report, address, process_id, count, 20.0)

        yield port, waiting, come


def call(port: int, text: bytes, host: str = "127.0.0.1") -> socket.socket:
    """Connects to the meeting and sends a text."""
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=10)
            connection.sendall(text)
            return connection
        except ConnectionRefusedError:  # process 0 does not listen yet
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_only_the_processes_of_the_job_are_counted(meeting):
    """Other programs, another job's processes and one that has ended do not count."""
    port, waiting, come = meeting
    texts = [b"1", b"99", b"-1", b"GET / HTTP/1.1\r\n\r\n", b"maxramp process 3 of 3\n"]
    texts += [b"maxramp process 0 of 3\n", b"maxramp process 1 of 4\n"]
    for text in texts:
        with call(port, text) as connection:
            assert connection.recv(2) == b""  # sent away
    with pytest.raises(TrainingError, match="does not wait for 4 processes"):
        come(2, count=4).result(20)
    call(port, b"maxramp process 1 of 3\n").close()
    second = come(2)
    time.sleep(0.3)
    assert not waiting.done() and not second.done()
    first = come(1)
    assert [sorted(each.result(20).values()) for each in (waiting, first, second)] == MET


def test_the_first_of_two_processes_with_one_number_fails(meeting):
    """If its connection had only broken, the later one is the same process."""
    port, waiting, come = meeting
    twins = [come(1), come(1)]
    ((earlier,), (later,)) = concurrent.futures.wait(
        twins, timeout=20, return_when=concurrent.futures.FIRST_COMPLETED
    )
    with pytest.raises(ConfigError, match="MAXRAMP_PROCESS_ID=1: a second process came"):
        earlier.result()
    assert not waiting.done()
    second = come(2)
    assert [sorted(each.result(20).values()) for each in (waiting, later, second)] == MET


@pytest.mark.slow
def test_an_output_folder_that_is_not_shared_is_refused(tmp_path, cache_dir):
    """Two folders of the same job stand for two hosts' own disks."""
    port = free_port()
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    processes = [start(folder, cache_dir, i, 2, port) for i, folder in enumerate(folders)]
    for folder, process in zip(folders, processes, strict=True):
        name = f"base_output_directory={folder}"
        one_line(process, 2, name, "not the same folder on every host", "process 1 of 2")
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_it_listens_on_the_loopback_address_alone(tmp_path, cache_dir):
    port = free_port()
    process = start(tmp_path, cache_dir, 0, 2, port)
    wait_until(lambda: addresses(port))
    assert addresses(port) == {"0100007F"}  # 127.0.0.1
    process.kill()
    process.communicate()


def addresses(port: int) -> set[str]:
    """Returns the local addresses, in hex, on which somebody listens on a port."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [local.partition(":") for _, local, _, state, *_ in lines if state == "0A"]
    return {address for address, _, number in listening if int(number, 16) == port}
