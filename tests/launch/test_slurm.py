"""A ramp under a real SLURM of four nodes on this machine: it grows, is stopped and killed."""

import fcntl
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import ROOT, command, environment, run
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
        # Its ports are fixed, and the two files of tests that use one may run at the same time.
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
        return subprocess.run(
            command(*self.line, "--cluster", "slurm", module="launch"),
            env=self.cluster,
            capture_output=True,
            text=True,
            timeout=120,
        )

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
    """1, 2, 4 nodes; a SIGTERM in the second job, a killed step in the one that continues it. The
    rows are those of an uninterrupted run in one process, and the chain ends by itself.
    """
    more = ("checkpoint_period=10", "step_batch_size_schedule=0:2 40:4 1240:8", "steps=340")
    alone = run(*arguments(tmp_path, cache_dir, *more, "run_name=alone"))
    assert alone.returncode == 0, alone.stderr
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
    assert nodes == [1, 2, 2, 2, 4], chain.text()
    jobs = sorted((chain.folder / "slurm").glob("*.log"))
    assert len(jobs) == 4, chain.text()  # the killed step starts again in its job
    statuses = [end["status"] for end in chain.events("end")]
    assert statuses == [75, 76, 75, 0], chain.text()
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
    program += "from maxramp.launch import slurm_job\n"
    program += f"sys.exit(slurm_job.follow(read(pathlib.Path({str(tmp_path)!r}))))"
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
