"""A ramp under a real SLURM of four nodes on this machine: it grows, is stopped and killed."""

import fcntl
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import ROOT, command, complete, environment
from jobs import wait_until
from test_launch import NASTY, arguments, rows_of, steps_of
from test_restarts import ends, scripted

from maxramp.run.jobs import read_jobs

pytestmark = pytest.mark.slow
FOLDER = pathlib.Path(__file__).parent
CLUSTER = ROOT / "tests" / "slurm_cluster.sh"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Yields the environment in which SLURM's commands find the cluster."""
    with open("/tmp/maxramp_slurm.lock", "w") as lock:
        # Its ports are fixed, and two of pytest's processes may run tests of this file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from run_cluster()


def run_cluster() -> Iterator[dict]:
    # Not below pytest's own folder, which other users of SLURM (munge) may not enter.
    folder = pathlib.Path(f"/tmp/maxramp_slurm_{os.getpid()}")
    started = subprocess.run([CLUSTER, "start", folder], capture_output=True, text=True)
    if started.returncode == 3:
        pytest.skip(started.stderr.strip().splitlines()[-1])
    assert started.returncode == 0, started.stderr
    yield environment() | {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run([CLUSTER, "stop", folder], check=True)
    left = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True).stdout
    running = [
        line
        for line in left.splitlines()
        if not line.startswith("Z")
        and (str(folder) in line or line.split()[1].endswith(("slurmctld", "slurmd")))
    ]
    assert not running and str(folder) not in pathlib.Path("/etc/hosts").read_text()
    subprocess.run(["rm", "-rf", folder], check=True)


class Chain:
    """A launch under SLURM."""

    def __init__(self, cluster: dict, folder: pathlib.Path, line: list[str]):
        self.cluster, self.folder, self.line = cluster, folder, line

    def launch(self) -> subprocess.CompletedProcess:
        line = command(*self.line, "--cluster", "slurm", module="launch")
        return subprocess.run(line, env=self.cluster, capture_output=True, text=True, timeout=120)

    def slurm(self, *words: str) -> str:
        return subprocess.check_output(words, env=self.cluster, text=True)

    def events(self, event: str) -> list[dict]:
        return [job for job in read_jobs(self.folder) if job["event"] == event]

    def wait_for(self, step: int) -> str:
        """Waits until a step is logged; returns the job that runs."""

        def running() -> str:
            return self.slurm("squeue", "-h", "-t", "RUNNING", "-o", "%A").strip()

        def has_trained() -> bool:
            return any(record["step"] >= step for record in steps_of(self.folder))

        wait_until(lambda: has_trained() and running(), 200)
        return running()

    def wait_for_the_end(self) -> None:
        wait_until(lambda: not self.slurm("squeue", "-h"), 300)

    def text(self) -> str:
        logs = sorted((self.folder / "slurm").glob("*.log"), key=lambda p: int(p.stem))
        return "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in logs)


def test_a_ramp_grows_under_slurm(cluster, tmp_path, cache_dir):
    """1, 2 nodes, a SIGTERM, a killed step: rows of one process; the chain ends by itself."""
    more = ("checkpoint_period=10", "step_batch_size_schedule=0:2 40:4", "steps=320")
    complete(*arguments(tmp_path, cache_dir, *more, "run_name=alone"))
    line = arguments(tmp_path, cache_dir, *more, f"run_name={NASTY}", "grace_seconds=60")
    # SLURM knows a folder by its physical path, and people by any.
    (tmp_path / "linked").symlink_to(tmp_path)
    line = [word.replace(f"={tmp_path}", f"={tmp_path}/linked") for word in line]
    chain = Chain(cluster, tmp_path / NASTY, line)
    launched = chain.launch()
    assert launched.returncode == 0, launched.stderr
    twice = chain.launch()
    assert twice.returncode == 2 and "is in SLURM's queue" in twice.stderr

    job = chain.wait_for(30)
    chain.slurm("scancel", "-s", "TERM", job)
    wait_until(lambda: chain.events("end")[-1]["status"] == 76)
    job = chain.wait_for(steps_of(chain.folder)[-1]["step"] + 10)  # of the next job alone
    chain.slurm("scancel", "-s", "KILL", f"{job}.0")
    chain.wait_for_the_end()

    nodes = [start["nodes"] for start in chain.events("start")]
    assert nodes == [1, 2, 2, 2], chain.text()
    jobs = sorted((chain.folder / "slurm").glob("*.log"))
    assert len(jobs) == 3, chain.text()  # the killed step starts again in its job
    statuses = [end["status"] for end in chain.events("end")]
    assert statuses == [75, 76, 0], chain.text()
    assert rows_of(chain.folder) == rows_of(tmp_path / "alone")
    assert not list(tmp_path.rglob("pwned"))
    assert (chain.folder / "slurm" / "job.sh").stat().st_mode & 0o777 == 0o700


def test_a_refused_job_is_reported_in_one_line(cluster, tmp_path, cache_dir):
    line = arguments(tmp_path, cache_dir, "run_name=x", "slurm_partition=nowhere")
    done = Chain(cluster, tmp_path / "x", line).launch()
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "sbatch refused" in done.stderr and "partition" in done.stderr


def test_jobs_that_leave_no_checkpoint_end_the_chain(cluster, tmp_path):
    """Stopped with 76 before the first step, again and again, they count up to max_restarts=2."""
    run = scripted(tmp_path, [(76, None)])
    folder = run.folder / "slurm"
    folder.mkdir(parents=True)
    program = "import pathlib, sys\nfrom test_restarts import read\n"
    program += "from maxramp.launch import slurm\n"
    program += f"sys.exit(slurm.follow(read(pathlib.Path({str(tmp_path)!r}))))"
    lines = [
        "#!/bin/bash",
        "#SBATCH --output=%j.log",
        f"export PYTHONPATH={ROOT}:{ROOT}/tests:{FOLDER}",
    ]
    script = "\n".join([*lines, shlex.join(["exec", sys.executable, "-c", program])])
    (folder / "job.sh").write_text(script)
    chain = Chain(cluster, run.folder, [])
    subprocess.run(["sbatch", "job.sh"], cwd=folder, env=cluster, check=True)
    chain.wait_for_the_end()
    assert ends(tmp_path) == [76, 76, 76], chain.text()
    assert "gave up after max_restarts=2" in chain.text()


KEYS = (
    *("node_schedule=fixed", "per_device_batch_size=3", "step_batch_size_schedule=0:12"),
    *("ici_data_parallelism=-1", "ici_fsdp_parallelism=1", "checkpoint_period=20", "log_period=1"),
    *("max_target_length=64", "base_mlp_dim=512", "steps=100000", "grace_seconds=60"),
)


class Elastic(Chain):
    """A launch on four nodes that has begun. `starts` are those that were seen to train."""

    def __init__(self, cluster: dict, tmp_path: pathlib.Path, cache_dir: str):
        more = (*KEYS, "elastic=true", "max_node_failures=2", "run_name=elastic")
        super().__init__(cluster, tmp_path / "elastic", arguments(tmp_path, cache_dir, *more))
        launched, self.starts = self.launch(), 0
        assert launched.returncode == 0, launched.stderr
        self.trains_on(4)

    def trains_on(self, nodes: int) -> None:
        """Waits for a new start, on that many nodes, and a step of it."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            starts, records = self.events("start"), steps_of(self.folder)
            is_new = len(starts) > self.starts and starts[-1]["nodes"] == nodes
            # Before it trains, a start drops the steps that it trains again.
            trained = [r for r in records[-1:] if r["nodes"] == nodes]
            if is_new and trained and trained[0]["step"] > starts[-1]["first_step"]:
                self.starts = len(starts)
                return
            time.sleep(0.5)
        raise AssertionError(f"no step on {nodes} nodes\n{starts}\n{self.text()}")

    def set(self, node: str, state: str) -> None:
        self.slurm("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")

    def kill(self, node: str, program: bytes = b"maxramp.train") -> None:
        """Kills what runs on a node; with program b"" all of it but its slurmd."""
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                values = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if (not program or program in words) and f"SLURMD_NODENAME={node}".encode() in values:
                os.kill(int(path.name), signal.SIGKILL)

    def end(self) -> list[tuple]:
        """Cancels the run; returns its rows, each trained on once."""
        self.slurm("scancel", "-u", "root")
        self.wait_for_the_end()
        return rows_of(self.folder)


def train_undisturbed(folder: pathlib.Path, cache_dir: str, steps: int) -> list[tuple]:
    """The rows of the run in one process."""
    keys = (*KEYS, "num_nodes=1", f"steps={steps}", "checkpoint_period=100000", "run_name=alone")
    complete(*arguments(folder, cache_dir, *keys))
    return rows_of(folder / "alone")


def test_a_node_fails_and_comes_back(cluster, tmp_path, cache_dir):
    """The job continues with three, another takes four; a node's second loss leaves it out."""
    chain = Elastic(cluster, tmp_path, cache_dir)
    chain.set("n2", "down")  # until its slurmd reports
    chain.trains_on(3)
    chain.trains_on(4)
    chain.kill("n2")
    chain.trains_on(3)
    rows = chain.end()
    assert rows == train_undisturbed(tmp_path, cache_dir, len(rows))
    assert [start["nodes"] for start in chain.events("start")] == [4, 3, 4, 3]
    assert 75 in [end["status"] for end in chain.events("end")]
    assert (chain.folder / "slurm" / "lost_nodes").read_text() == "n2\nn2\n"
    assert "n2" not in chain.slurm("squeue", "-h", "-t", "all", "-o", "%N").split()[0]


@pytest.mark.long
def test_nodes_drain_and_the_first_one_fails(cluster, tmp_path, cache_dir):
    """A run saves and leaves a node that drains; it restarts if the batch script's node fails."""
    chain = Elastic(cluster, tmp_path, cache_dir)
    chain.set("n1", "drain")
    chain.trains_on(3)
    assert chain.slurm("sinfo", "-h", "-n", "n1", "-o", "%T").strip() == "drained"
    chain.set("n1", "resume")
    chain.trains_on(4)
    slurmd = pathlib.Path(cluster["SLURM_CONF"]).parent / "n0.pid"
    os.kill(int(slurmd.read_text()), signal.SIGKILL)
    chain.kill("n0", b"")
    chain.set("n0", "down")
    chain.trains_on(3)  # SLURM waits two minutes
    rows = chain.end()
    assert rows == train_undisturbed(tmp_path, cache_dir, len(rows))
    assert [end["status"] for end in chain.events("end")][:2] == [76, 75]
    assert [start["nodes"] for start in chain.events("start")] == [4, 3, 4, 3]
