"""How often a launch starts real processes again: progress resets the count of starts without."""

import concurrent.futures
import json
import os
import pathlib
import re
import signal

import pytest
from conftest import BASE, TINY
from jobs import wait_until

from maxramp.checkpoints.folder import Checkpoint, commit
from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.launch import gke_cluster, local, slurm
from maxramp.launch.jobs import Run

# What each job does: its exit status, the step of the checkpoint that it leaves before it ends, and
# the step that it starts from (of a snapshot, if no checkpoint has it). The last entry repeats.
# With max_restarts=2.
NO = None
CHAINS = {
    "starts from newer snapshots": (
        [(1, NO, 0), (1, NO, 25), (1, NO, 50), (1, NO, 75), (1, NO, 100), (0, 120, 110)],
        [1, 1, 1, 1, 1, 0],
    ),
    "starts from one snapshot": ([(1, NO, 0), (1, NO, 25), (1, NO, 25)], [1, 1, 1, 1]),
    "starts from an older snapshot": ([(1, NO, 25), (1, NO, 0)], [1, 1, 1]),
    "finished": ([(0, 10)], [0]),
    "wrong configuration": ([(2, NO)], [2]),
    "crashes with progress": ([(1, 10), (1, 20), (137, 30), (1, 40), (0, 50)], [1, 1, 137, 1, 0]),
    "crashes without": ([(1, NO)], [1, 1, 1]),
    "crashes without progress after some": ([(1, 10), (1, NO)], [1, 1, 1]),
    "stopped with progress": ([(76, 1), (76, 2), (76, 3), (0, 4)], [76, 76, 76, 0]),
    "stopped before the first step": ([(76, NO)], [76, 76, 76]),
    "progress in between": (
        [(1, NO), (76, NO), (76, 10), (1, NO), (1, NO), (0, 20)],
        [1, 76, 76, 1, 1, 0],
    ),
}
CONFIG = [
    *TINY,
    *("hardware=cpu", "num_nodes=1", "devices_per_node=1", "max_restarts=2"),
    *("enable_rampup_batch_size=False", "per_device_batch_size=2", "run_name=x"),
]
JOB = """
cd "$0" || exit 99
echo >> started
n=$(wc -l < started)
set -- $(sed -n "${n}p" script) $(tail -n 1 script)
[ "$2" = - ] || mkdir -p "x/checkpoints/$2"
[ "$2" = - ] || sed "s/@STEP@/$2/" metadata > "x/checkpoints/$2/checkpoint.json"
[ "$3" = - ] || sed "s/@STEP@/$3/" start >> x/jobs.jsonl
echo "$1" >> ended
exit "$1"
"""


class Scripted(Run):
    """A run with jobs that do what the file `script` says."""

    def command(self, python: str = "") -> list[str]:
        return ["sh", "-c", JOB, str(self.folder.parent)]


def scripted(folder: pathlib.Path, entries: list[tuple], *more: str) -> Scripted:
    lines = [(*entry, *[NO] * (3 - len(entry))) for entry in entries]
    words = [" ".join("-" if x is NO else str(x) for x in line) for line in lines]
    (folder / "script").write_text("\n".join([*words, ""]))
    (folder / "x" / "checkpoints").mkdir(parents=True)
    (folder / "saved").mkdir()
    commit(Checkpoint(folder / "saved", 1, 2, [], "", {}, {}))
    metadata = (folder / "saved" / "checkpoint.json").read_text()
    start = '{"event": "start", "time": 1, "first_step": @STEP@, "nodes": 1, "devices": 1}'
    (folder / "start").write_text(f"{start}\n")
    (folder / "metadata").write_text(metadata.replace('"step": 1,', '"step": @STEP@,'))
    return read(folder, *more)


def read(folder: pathlib.Path, *more: str) -> Scripted:
    line = [BASE, *CONFIG, f"base_output_directory={folder}", *more]
    return Scripted.from_config(load(line), line)


def ends(folder: pathlib.Path) -> list[int]:
    path = folder / "ended"
    return [int(status) for status in path.read_text().split()] if path.exists() else []


@pytest.fixture
def signals():
    """Puts back what a launch does with signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


# What a supervisor needs of SLURM: `srun` runs the command, `sbatch` notes what is submitted.
FAKES = {
    "scontrol": "echo localhost",
    "squeue": 'echo "$END"',
    "srun": 'while case $1 in --*) ;; *) false ;; esac; do shift; done; exec "$@"',
    "sbatch": 'echo "$MAXRAMP_RESTARTS $2 $3" > "$NEXT"; echo 7',
}


def under_slurm(folder: pathlib.Path, run: Run) -> dict[str, str]:
    """Writes the fakes; returns the environment of a job."""
    (run.folder / "slurm").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, text in FAKES.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return {
        **{"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NEXT": str(folder / "next")},
        **{"END": "2099-01-01T00:00:00", "SLURM_JOB_ID": "6", "SLURM_JOB_NODELIST": "n0"},
        "MAXRAMP_RESTARTS": "0",
    }


def follow_slurm(folder: pathlib.Path, run: Run, monkeypatch) -> int:
    """Runs job after job of SLURM, as far as each submits the next."""
    for name, value in under_slurm(folder, run).items():
        monkeypatch.setenv(name, value)
    for _ in range(9):
        status = slurm.follow(run)
        if not (folder / "next").exists():
            return status
        restarts, *words = (folder / "next").read_text().split()
        (folder / "next").unlink()
        monkeypatch.setenv("MAXRAMP_RESTARTS", restarts)
        assert words == ["--nodes=1", "job.sh"]
    raise AssertionError("the chain does not end")


def follow_here(folder: pathlib.Path, run: Run, monkeypatch) -> int:
    return local.launch(run)


def follow_in_pod(folder: pathlib.Path, run: Run, monkeypatch) -> int:
    status = gke_cluster.follow(run, 1, folder / "message")
    step = int(max(["0", *os.listdir(run.folder / "checkpoints")], key=int))
    message = json.loads((folder / "message").read_text())
    assert message["step"] >= step and message["nodes"] == 0
    return status


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("follow", [follow_here, follow_slurm, follow_in_pod])
def test_what_follows_a_job(follow, name, tmp_path, capfd, monkeypatch, signals):
    entries, expected = CHAINS[name]
    # A chain that would not end is stopped by a status that no job has.
    entries = [*entries, *[entries[-1]] * (9 - len(entries)), (0, NO)]
    status = follow(tmp_path, scripted(tmp_path, entries), monkeypatch)
    last = expected[-1]
    if follow is follow_in_pod and last not in (0, 2):
        last = 1  # no other status fails a JobSet
    assert (status, ends(tmp_path)) == (last, expected)
    printed = capfd.readouterr().out
    assert ("gave up after max_restarts=2 restarts without progress" in printed) == (
        expected[-1] in (1, 76)
    ), printed


def test_a_stage_on_other_nodes_is_handed_over(tmp_path, monkeypatch, signals):
    """Under SLURM to the next job, in a pod to whoever reads its last message."""
    run = scripted(tmp_path, [(75, 10), (75, 20)])
    (run.folder / "next_stage.json").write_text('{"nodes": 3}')
    for name, value in under_slurm(tmp_path, run).items():
        monkeypatch.setenv(name, value)
    assert slurm.follow(run) == 75
    assert (tmp_path / "next").read_text().split() == ["0", "--nodes=3", "job.sh"]
    assert gke_cluster.follow(run, 1, tmp_path / "message") == 0
    assert json.loads((tmp_path / "message").read_text()) == {"step": 20, "nodes": 3}
    assert ends(tmp_path) == [75, 75]


@pytest.mark.parametrize("code", [76, 77])
def test_a_pod_that_is_taken_away_ends_with_76_whatever_its_trainer_does(
    code, tmp_path, monkeypatch, signals
):
    trap = f"trap 'exit {code}' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done"
    monkeypatch.setattr(Scripted, "command", lambda self, python: ["sh", "-c", trap])
    run = scripted(tmp_path, [])

    def take_away() -> None:
        wait_until((tmp_path / "up").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(take_away)
        assert gke_cluster.follow(run, 1, tmp_path / "message") == 76
        asked.result()


def test_a_pod_that_is_taken_away_while_its_trainer_starts_ends_it(tmp_path, monkeypatch, signals):
    def command(self, python: str) -> list[str]:
        os.kill(os.getpid(), signal.SIGTERM)  # before the process that it could be sent to
        return ["sleep", "300"]

    monkeypatch.setattr(Scripted, "command", command)
    assert gke_cluster.follow(scripted(tmp_path, []), 1, tmp_path / "message") == 76


def test_a_queue_that_cannot_be_read_starts_nothing(tmp_path, monkeypatch):
    """The run may be in it."""
    run = scripted(tmp_path, [(0, NO)])
    monkeypatch.setenv("NEXT", str(tmp_path / "next"))
    monkeypatch.setenv("PATH", under_slurm(tmp_path, run)["PATH"])
    down = "Unable to contact slurm controller (connect failure)"
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\necho 'squeue: error: {down}' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=rf"squeue .*: {re.escape(down)}$"):
        slurm.launch(run, dry_run=False)
    assert not (tmp_path / "next").exists()
    squeue.write_text("#!/bin/sh\n")
    assert slurm.launch(run, dry_run=False) == 0 and (tmp_path / "next").exists()


@pytest.mark.parametrize("checkpoint, restarts", [(NO, "2"), (10, "0")])
def test_a_time_limit_that_comes_before_any_progress_counts(
    checkpoint, restarts, tmp_path, monkeypatch, signals
):
    """Otherwise a limit that is shorter than a start would make the chain endless."""
    run = scripted(tmp_path, [(0, NO)])
    for name, value in (under_slurm(tmp_path, run) | {"MAXRAMP_RESTARTS": "1"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\necho $$ > $NEXT.srun\nexec sleep 300\n")
    srun = tmp_path / "next.srun"

    def reach_the_limit() -> None:
        wait_until(lambda: srun.exists() and srun.read_text())
        if checkpoint:
            path = run.folder / "checkpoints" / str(checkpoint)
            path.mkdir(parents=True)
            commit(Checkpoint(path, checkpoint, 2, [], "", {}, {}))
        monkeypatch.setattr(slurm, "_LAST", float("inf"))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        reached = pool.submit(reach_the_limit)
        assert slurm.follow(run) == 76
        reached.result()
    os.kill(int(srun.read_text()), signal.SIGKILL)
    assert (tmp_path / "next").read_text().split() == [restarts, "--nodes=1", "job.sh"]
