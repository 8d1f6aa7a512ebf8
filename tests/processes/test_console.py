"""Readers of a command's output may stop reading, and whoever started it may interrupt it."""

import fcntl
import io
import mmap
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import pytest
from conftest import BASE, TINY, command, environment, steps_of

from maxramp import console
from maxramp.errors import EXIT_PREEMPTED

RUN = (*TINY, "enable_rampup_batch_size=False", "per_device_batch_size=8", "steps=12")
RUN += ("dataset_type=synthetic", "eval_interval=6", "eval_samples=8", "log_period=1")


def start(module: str, *arguments: str, **streams) -> subprocess.Popen:
    streams |= {"stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*arguments, module=module), env=environment(), **streams)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", "pipe", "closed"])
def test_output_that_fails_never_ends_a_run(tmp_path, cache_dir, fault):
    """It is written by the loop, the compiler's thread and that of the metrics."""
    keys = (*RUN, f"jax_cache_dir={cache_dir}", f"base_output_directory={tmp_path}", "run_name=r")
    streams = {
        "full": {"stdout": open("/dev/full", "w")},  # noqa: SIM115
        "pipe": {"stdout": subprocess.PIPE},
        "closed": {"preexec_fn": lambda: os.close(1)},
    }[fault]
    run = start("train", BASE, *keys, **streams)
    if fault == "pipe":
        run.stdout.readline()
        run.stdout.close()
    assert run.stderr.read() == "" and run.wait(200) == 0
    assert [r["step"] for r in steps_of(tmp_path / "r")] == list(range(12))


@pytest.fixture
def small_pipe():
    """A pipe that holds one page: its ends for reading and writing."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)
    yield ends
    for end in ends:
        os.close(end)


def test_a_reader_that_stalls_delays_no_writer(small_pipe):
    """What it (a pager, say) does not read is dropped, until it reads again."""
    reading, writing = small_pipe
    stream = console._Descriptor(writing, patience=0.3)
    start = time.monotonic()
    for _ in range(100):
        assert 0 < stream.write(bytes(1000)) <= 1000
    assert 0.3 <= time.monotonic() - start < 5
    assert len(os.read(reading, 10**6)) <= mmap.PAGESIZE
    assert stream.write(b"again") == 5 and os.read(reading, 100) == b"again"


def test_everything_is_written_where_writing_does_not_block(small_pipe):
    """Another program that shares the terminal or pipe can set that; it is no failure."""
    reading, writing = small_pipe
    os.set_blocking(writing, False)
    text = os.urandom(10**6)
    stream = io.BufferedWriter(console._Descriptor(writing, patience=None))
    thread = threading.Thread(target=lambda: (stream.write(text), stream.flush()))
    thread.start()
    read = b""
    while len(read) < len(text):
        read += os.read(reading, 10**6)
    thread.join()
    assert read == text


@pytest.mark.parametrize(
    "module, words",
    [pytest.param("plan", (BASE,), marks=pytest.mark.slow), ("checkpoint", ("--help",))],
)
def test_a_command_ends_with_its_reader(module, words):
    """It ends quietly, as other tools do; a full disk is an error."""
    plan = start(module, *words, stdout=subprocess.PIPE)
    plan.stdout.close()
    assert (plan.wait(100), plan.stderr.read()) == (128 + signal.SIGPIPE, "")
    with open("/dev/full", "w") as full:
        plan = start(module, *words, stdout=full)
    line = "error: standard output takes no more: No space left on device\n"
    assert (plan.wait(100), plan.stderr.read()) == (1, line)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_after_the_end_of_a_run_change_no_status(tmp_path, cache_dir, number):
    keys = (*RUN, f"jax_cache_dir={cache_dir}", f"base_output_directory={tmp_path}", "run_name=r")
    run = start("train", BASE, *keys, "eval_interval=-1", stdout=subprocess.PIPE)
    while not run.stdout.readline().startswith("done"):
        assert run.poll() is None
    deadline = time.monotonic() + 0.5  # a second after the first, one would end it at once
    while run.poll() is None:
        if number == signal.SIGTERM or time.monotonic() < deadline:
            run.send_signal(number)
        time.sleep(0.005)
    assert (run.returncode, run.stderr.read()) == (0, "")


@pytest.mark.parametrize(
    "module, number, status, line",
    [
        ("train", signal.SIGINT, EXIT_PREEMPTED, "stopped by a signal before a step was done"),
        ("train", signal.SIGTERM, EXIT_PREEMPTED, "stopped by a signal before a step was done"),
        ("plan", signal.SIGINT, -signal.SIGINT, ""),
        ("launch", signal.SIGINT, -signal.SIGINT, ""),
        ("prepare", signal.SIGINT, -signal.SIGINT, ""),
    ],
)
def test_an_interrupt_during_imports_prints_no_traceback(module, number, status, line):
    process = start(module, BASE, stdout=subprocess.PIPE)
    libraries = pathlib.Path(f"/proc/{process.pid}/maps")
    while not re.search("numpy|yaml", libraries.read_text()):  # the slow imports follow
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, "")
    assert printed.startswith(line) and len(printed.splitlines()) == bool(line)
