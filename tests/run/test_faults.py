"""Bad days, each brought about for real: signals, hangs, dead peers, full disks, two at once."""

import contextlib
import errno
import functools
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import events
import pytest
from conftest import BASE, TINY, command, complete, environment, run
from forked import Forked
from jobs import member
from object_stores import free_port
from test_metrics import record

from maxramp.checkpoints import folder as folder_lib
from maxramp.errors import EXIT_LOST, EXIT_PREEMPTED
from maxramp.run.metrics import read_records
from maxramp.run.writers import JsonlWriter, tensorboard_writers

SLOW = pytest.mark.slow
# Endless, at a constant batch, of data that needs no files.
KEYS = [
    *TINY,
    *("enable_rampup_batch_size=False", "per_device_batch_size=8", "steps=1000000"),
    *("dataset_type=synthetic", "eval_interval=-1", "checkpoint_period=20", "log_period=10"),
    *("max_num_checkpoints_to_keep=2", "learning_rate=1e-3"),
]


def arguments(folder: pathlib.Path, cache_dir: str, *more: str) -> list[str]:
    keys = [*KEYS, f"jax_cache_dir={cache_dir}", f"base_output_directory={folder}", "run_name=run"]
    return [BASE, *keys, *more]


class Job:
    """Processes of one run."""

    def __init__(
        self, folder, cache_dir, *more, processes=1, largest_file=None, alone=None, optimized=False
    ):
        """`largest_file` = {process: bytes} lets longer files of that process fail; `alone` =
        {process: argument} goes to that process only; `optimized`: compiles take seconds."""
        self.run = folder / "run"
        port = free_port()
        self.processes = []
        for index in range(processes):
            size = (largest_file or {}).get(index)
            job = member(port, processes, index)
            start = subprocess.Popen if "LD_PRELOAD" in os.environ else Forked
            process = start(
                command(*arguments(folder, cache_dir, *more, *(alone or {}).get(index, ()))),
                env=environment(optimized=optimized) | (job if processes > 1 else {}),
                stdout=(folder / f"stdout.{index}").open("wb"),
                stderr=(folder / f"stderr.{index}").open("wb"),
                **({"limits": {resource.RLIMIT_FSIZE: size}} if size else {}),
            )
            self.processes.append(process)
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for process in self.processes:
            process.kill()
            process.wait()

    def printed(self, name="stdout", index=0) -> str:
        return (self.folder / f"{name}.{index}").read_text()

    def wait_for(self, condition, seconds=200):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited too long"
            status = [process.poll() for process in self.processes]
            assert status == [None] * len(status), (status, self.printed("stderr"))
            time.sleep(0.01)

    def train_to(self, step: int):
        path = self.run / "metrics.jsonl"
        self.wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") > step)

    def statuses(self, seconds=200) -> list[int]:
        return [process.wait(seconds) for process in self.processes]

    @property
    def checkpoints(self) -> list[int]:
        return folder_lib.steps_in(self.run / "checkpoints")

    def steps(self) -> list[int]:
        return [r["step"] for r in read_records(self.run / "metrics.jsonl")]


def assert_all_is_saved(job: Job):
    """The newest checkpoint stands where the metrics end, and both are whole."""
    steps = job.steps()
    assert steps == list(range(len(steps)))
    assert job.checkpoints[-1] == len(steps)
    folder_lib.read(job.run / "checkpoints" / str(len(steps)))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW)])
def test_a_signal_saves(tmp_path, cache_dir, number):
    with Job(tmp_path, cache_dir) as job:
        job.train_to(30)
        for _ in range(3):  # within a second: one wish, by a key that is held
            job.processes[0].send_signal(number)
            time.sleep(0.01)
        assert job.statuses() == [EXIT_PREEMPTED]
        assert_all_is_saved(job)
        assert not job.printed("stderr")
        for line in ("saving and stopping", "stopped by a signal after step"):
            assert job.printed().count(line) == 1  # in the order of their threads


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_first_compile_ends_at_once(tmp_path, number):
    """A compile cannot be interrupted, and nothing is lost."""
    with Job(tmp_path, str(tmp_path / "cold"), "scan_layers=False", optimized=True) as job:
        job.wait_for(lambda: "run      " in job.printed())
        job.processes[0].send_signal(number)
        assert job.statuses() == [EXIT_PREEMPTED]
        assert not job.printed("stderr") and job.steps() == [] and job.checkpoints == []
        assert job.printed().splitlines()[-1].startswith("stopped by a signal before a step")


@SLOW
def test_a_second_interrupt_ends_at_once(tmp_path, cache_dir):
    """Also where the loop waits for a peer that hangs, and would never save."""
    with Job(tmp_path, cache_dir, processes=2) as job:
        job.train_to(10)
        job.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert job.processes[0].poll() is None
        deadline = time.monotonic() + 60
        while job.processes[0].poll() is None and time.monotonic() < deadline:
            job.processes[0].send_signal(signal.SIGINT)  # heard late, it may count as the first
            time.sleep(1.5)
        assert job.processes[0].wait(1) == 128 + signal.SIGINT
        assert "ended at once by a second Ctrl-C" in job.printed()


@SLOW
def test_a_signal_in_a_later_compile_saves_on_both(tmp_path):
    """While one of two compiles for the second stage, and the first trains."""
    ramp = ("enable_rampup_batch_size=True", "per_device_batch_size_start=4", "scan_layers=False")
    ramp += ("per_device_batch_size_increment=4", "global_rampup_samples=100000", "log_period=1")
    with Job(tmp_path, str(tmp_path / "cold"), *ramp, processes=2, optimized=True) as job:
        job.train_to(0)
        assert "ready    stage 1" not in job.printed()
        job.processes[1].send_signal(signal.SIGTERM)
        assert job.statuses() == [EXIT_PREEMPTED] * 2, job.printed("stderr")
        assert_all_is_saved(job)


@pytest.mark.slow
@pytest.mark.parametrize("number, to", [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_to_one_of_two_stops_both_at_one_step(tmp_path, cache_dir, number, to):
    with Job(tmp_path, cache_dir, processes=2) as job:
        job.train_to(10)
        job.processes[to].send_signal(number)
        assert job.statuses() == [EXIT_PREEMPTED] * 2
        assert_all_is_saved(job)


@SLOW
def test_a_process_that_hangs_ends_its_peers(tmp_path, cache_dir):
    """SIGSTOP stands for a hang: the other says where it waits; continued, the first ends too."""
    with Job(tmp_path, cache_dir, "hang_timeout_seconds=30", processes=2) as job:
        job.train_to(10)
        job.processes[1].send_signal(signal.SIGSTOP)
        assert job.processes[0].wait(200) == EXIT_LOST
        stderr = job.printed("stderr")
        assert "hang_timeout_seconds=30" in stderr
        assert "maxramp/train.py" in stderr and "most recent call first" in stderr
        job.processes[1].send_signal(signal.SIGCONT)
        assert job.processes[1].wait(200) != 0


@SLOW
@pytest.mark.parametrize("killed", [1, 0])
def test_a_dead_peer_ends_the_job(tmp_path, cache_dir, killed):
    """Soon, with a status that says start again; and so it goes on from the last checkpoint."""
    with Job(tmp_path, cache_dir, "hang_timeout_seconds=60", processes=2) as job:
        job.train_to(45)
        job.processes[killed].kill()
        statuses = job.statuses()
        assert statuses[killed] == -signal.SIGKILL
        assert statuses[1 - killed] in (EXIT_LOST, -signal.SIGABRT), job.printed(
            "stderr", 1 - killed
        )
    folder_lib.read(job.run / "checkpoints" / str(job.checkpoints[-1]))


@pytest.mark.slow
def test_a_stopped_and_continued_process_is_not_ended():
    """Stopped for longer than the timeout; it still ends when it hangs after that."""
    program = """if True:
        import select, sys, time
        from maxramp.processes.ending import Watchdog
        with Watchdog(1.0) as watchdog:
            while not select.select([sys.stdin], [], [], 0.02)[0]:
                watchdog.beat()
                print(time.monotonic(), flush=True)
            time.sleep(600)
    """
    line = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, env=environment(), text=True, **pipes) as process:
        assert process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        process.send_signal(signal.SIGCONT)
        continued = time.monotonic()
        while float(process.stdout.readline()) < continued + 0.5:
            pass
        assert process.communicate("\n", 60)[1].count("hang_timeout_seconds=1:") == 1
        assert process.returncode == EXIT_LOST


@SLOW
def test_fifty_saves_grow_nothing(tmp_path, cache_dir):

    def held(job) -> tuple[int, int]:
        """Threads, and resident MiB."""
        lines = pathlib.Path(f"/proc/{job.processes[0].pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["Threads"]), int(fields["VmRSS"].split()[0]) // 1024

    more = ("steps=1250", "checkpoint_period=25", "enable_tensorboard=True", "log_period=1000")
    with Job(tmp_path, cache_dir, *more) as job:
        seen = []
        for step in range(250, 1225, 75):
            job.train_to(step)
            seen.append(held(job))
        assert job.statuses() == [0]
    threads, memory = zip(*seen, strict=True)
    half = len(seen) // 2
    # Between the halves lie 20 saves. Libraries start a few pool threads when they first need them.
    assert min(threads[half:]) - min(threads[:half]) < 8, seen
    assert max(memory[half:]) - max(memory[:half]) < 16, seen


@pytest.fixture
def mount(tmp_path):
    """Mounts a file system of a few megabytes; remounted read-only on demand."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def do(*options: str):
        line = ["mount", *options, str(folder)]
        if subprocess.run(line, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root")

    do("-t", "tmpfs", "-o", "size=64m", "tmpfs")
    yield folder, functools.partial(do, "-o")
    subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: pathlib.Path):
    """Takes all room but a few kilobytes."""
    with (folder / "filler").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(1_000_000)):
                pass
        file.truncate(file.tell() - 200_000)


def failed_saves(job, index=0) -> list[str]:
    """What a process says of them, whatever else it says: other threads warn at any time."""
    return [line for line in job.printed("stderr", index).splitlines() if "was not saved" in line]


@pytest.mark.slow
def test_a_full_disk_is_outlived(mount, cache_dir):
    """Warned, the run goes on; with room again it saves again, and no step is missing."""
    folder, _ = mount
    with Job(folder, cache_dir, "max_failed_saves=1000000", "checkpoint_period=200") as job:
        job.wait_for(lambda: job.checkpoints)
        fill(folder)
        job.wait_for(lambda: failed_saves(job))
        line = failed_saves(job)[0]
        assert "No space left on device" in line and "the run continues" in line
        stands = int(re.search(r"checkpoint (\d+) stands", line)[1])
        folder_lib.read(job.run / "checkpoints" / str(stands))
        (folder / "filler").unlink()
        job.wait_for(lambda: job.checkpoints and job.checkpoints[-1] > stands)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.statuses() == [EXIT_PREEMPTED]
        assert_all_is_saved(job)
        left = {p.name for p in (job.run / "checkpoints").iterdir()}
        assert left == {str(step) for step in job.checkpoints}, "failed saves leave nothing"


@SLOW
@pytest.mark.parametrize("fault", ["full", "in the way"])
def test_saves_that_keep_failing_end_the_run(mount, cache_dir, tmp_path, fault):
    folder, _ = mount
    more = (f"base_output_directory={folder}", "max_failed_saves=2", "checkpoint_period=200")
    with Job(tmp_path, cache_dir, *more) as job:
        job.run = folder / "run"
        checkpoints = job.run / "checkpoints"
        job.wait_for(lambda: job.checkpoints)
        if fault == "full":
            fill(folder)
        else:
            checkpoints = checkpoints.rename(job.run / "aside")
            (job.run / "checkpoints").write_text("")
        assert job.statuses() == [1]
        lines = job.printed("stderr").splitlines()
        error = next(line for line in lines if line.startswith("error: "))
        assert "max_failed_saves=2 in a row" in error, lines
        assert "(1 of max_failed_saves=2)" in failed_saves(job)[0]
        good = re.search(r"checkpoint (\d+) stands", error)[1]
        folder_lib.read(checkpoints / good)


@SLOW
def test_a_save_that_fails_on_one_of_two_fails_on_both(tmp_path, cache_dir):
    """Soon, and with one line, though Orbax lets the other wait for 20 minutes."""
    more = ("max_failed_saves=2", "checkpoint_period=50")
    with Job(tmp_path, cache_dir, *more, processes=2, largest_file={1: 40_000}) as job:
        assert job.statuses(120) == [1, 1]
        ends = []
        for index in range(2):
            lines = failed_saves(job, index)
            assert lines[0].startswith("warning: ") and "/50 was not saved: process 1: " in lines[0]
            assert "File too large" in lines[0] and "there is none before it" in lines[0]
            ends += lines[1:]
        # The other one's status may come before a process has said so itself.
        assert 1 <= len(ends) <= 2
        for line in ends:
            assert line.startswith("error: ") and "max_failed_saves=2 in a row" in line
            assert "there is none before it" in line
        assert job.checkpoints == []


@SLOW
def test_minutes_are_those_of_the_first_process(tmp_path, cache_dir):
    """Two processes save the same steps, whatever their clocks say."""
    more = ("checkpoint_period=-1", "checkpoint_period_minutes=0.01", "steps=120")
    with Job(tmp_path, cache_dir, *more, "max_num_checkpoints_to_keep=None", processes=2) as job:
        assert job.statuses() == [0, 0], job.printed("stderr")
        assert_all_is_saved(job)
        assert len(job.checkpoints) > 2
        for step in job.checkpoints:
            folder_lib.read(job.run / "checkpoints" / str(step))


def test_a_last_save_that_fails_is_no_success(mount, cache_dir, tmp_path):
    folder, _ = mount
    more = (f"base_output_directory={folder}", "checkpoint_period=1000000")
    with Job(tmp_path, cache_dir, *more) as job:
        job.run = folder / "run"
        job.train_to(10)
        fill(folder)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.statuses() == [1]
        assert "was not saved: No space left on device" in job.printed("stderr")


@pytest.mark.parametrize("fault", ["No space left on device", "Read-only file system"])
def test_a_folder_that_cannot_be_written_is_refused(mount, cache_dir, fault):
    folder, remount = mount
    if fault.startswith("Read-only"):
        remount("remount,ro")
    else:
        with (folder / "filler").open("wb") as file, pytest.raises(OSError):
            file.write(bytes(100_000_000))
    done = run(*arguments(folder, cache_dir))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"base_output_directory={folder}" in done.stderr and fault in done.stderr


@pytest.fixture
def no_locks(tmp_path_factory, monkeypatch):
    """flock fails in every process that is started, with the error number in NO_LOCKS."""
    if not shutil.which("gcc"):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("no_locks")
    (folder / "flock.c").write_text(
        "#include <errno.h>\n#include <stdlib.h>\n"
        'int flock(int fd, int how) { errno = atoi(getenv("NO_LOCKS")); return -1; }\n'
    )
    line = ["gcc", "-shared", "-fPIC", "-o", folder / "flock.so", folder / "flock.c"]
    subprocess.run(line, check=True)
    monkeypatch.setenv("LD_PRELOAD", str(folder / "flock.so"))
    monkeypatch.setenv("NO_LOCKS", str(errno.ENOSYS))


@pytest.mark.slow
def test_a_file_system_without_locks(tmp_path, cache_dir, no_locks):
    """The run warns once and goes on. Without checkpoints nothing is said to be saved, either."""
    with Job(tmp_path, cache_dir, "enable_checkpointing=False") as job:
        job.train_to(10)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.statuses() == [EXIT_PREEMPTED]
    lines = job.printed("stderr").splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning: ") and job.checkpoints == []
    assert "no locks (Function not implemented)" in lines[0] and str(job.run) in lines[0]
    stopped = next(x for x in job.printed().splitlines() if x.startswith("stopped by a signal"))
    assert "not saved (enable_checkpointing=False)" in stopped and "to continue" not in stopped


def test_what_a_file_system_says_that_has_no_locks(tmp_path, no_locks):
    """Every other error ends the start, as does a lock that another process holds."""
    program = """if True:
        import os, sys
        from maxramp.files.place import lock
        with open(sys.argv[1], "w") as file:
            for number in sys.argv[2:]:
                os.environ["NO_LOCKS"] = number
                try:
                    print("warned" if "has no locks" in lock(file) else "silent")
                except OSError as error:
                    print(type(error).__name__)
    """
    numbers = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EWOULDBLOCK)
    line = [sys.executable, "-c", program, tmp_path / "file", *map(str, (*numbers, errno.EIO))]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["warned"] * 4 + ["BlockingIOError", "OSError"]


def test_a_second_run_on_one_folder_is_refused(tmp_path, cache_dir):
    with Job(tmp_path, cache_dir) as job:
        job.train_to(1)
        done = run(*arguments(tmp_path, cache_dir))
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"in use by process {job.processes[0].pid} on " in done.stderr
        job.processes[0].kill()  # the lock goes with it
        job.processes[0].wait()
    complete(*arguments(tmp_path, cache_dir, f"steps={len(job.steps()) + 5}"))


def test_bad_steps_in_a_row_end_the_run(tmp_path, cache_dir):
    more = ("learning_rate=1e30", "opt_type=sgd", "gradient_clipping_threshold=0")
    more += ("warmup_steps_fraction=0", "skip_bad_steps=4", "checkpoint_period=1")
    done = run(*arguments(tmp_path, cache_dir, *more))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    first, last = map(int, re.search(r"steps (\d+) to (\d+) were skipped", done.stderr).groups())
    assert last == first + 3 and "skip_bad_steps=4" in done.stderr
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    counted = [r["bad_steps"] for r in records]
    assert counted[-3:] == [1, 2, 3] and set(counted[:-3]) == {0}
    assert len(re.findall(r"skipped: .* gradient norm (nan|inf)", done.stdout)) == 3


def test_records_wait_for_a_disk_that_is_full(mount, tmp_path):
    """For a while; then every one of them is there once, and whole."""
    folder, _ = mount
    writers = JsonlWriter(folder / "metrics.jsonl"), *tensorboard_writers(folder, 0, 0)
    for step in range(1000):
        if step == 200:
            fill(folder)
            with (folder / "filler").open("ab") as file:
                file.write(bytes(150_000))
        if step == 900:
            for writer in writers[:2]:
                with pytest.raises(OSError, match="No space left"):
                    writer.flush()
            (folder / "filler").unlink()
        for writer in writers:
            writer(record(step))
    for writer in writers:
        writer.close()
    assert [r["step"] for r in read_records(folder / "metrics.jsonl")] == list(range(1000))
    assert sorted(events.shown(folder)["learning/loss"]) == list(range(1000))
