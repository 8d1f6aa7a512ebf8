"""An elastic run under a real SLURM: nodes fail, drain and come back, tasks are killed."""

import os
import pathlib
import signal
import time

import pytest
from conftest import run
from test_launch import arguments, rows_of, steps_of
from test_slurm import Chain, cluster  # noqa: F401

KEYS = (
    *("node_schedule=fixed", "per_device_batch_size=3", "step_batch_size_schedule=0:12"),
    *("ici_data_parallelism=-1", "ici_fsdp_parallelism=1", "checkpoint_period=20", "log_period=1"),
    *("max_target_length=64", "base_mlp_dim=512", "steps=100000", "grace_seconds=60"),
)


class Elastic(Chain):
    """A launch on four nodes that has begun. `starts` are those that were seen to train."""

    def __init__(self, cluster: dict, tmp_path: pathlib.Path, cache_dir: str):  # noqa: F811
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
    done = run(*arguments(folder, cache_dir, *keys))
    assert done.returncode == 0, done.stderr
    return rows_of(folder / "alone")


@pytest.mark.slow
def test_a_node_fails_and_comes_back(cluster, tmp_path, cache_dir):  # noqa: F811
    """The job continues with three nodes, and another takes four at a save. A killed task is the
    second loss of its node, which is left out."""
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
def test_nodes_drain_and_the_first_one_fails(cluster, tmp_path, cache_dir):  # noqa: F811
    """A run saves and leaves a node that drains. The one of the batch script takes the script
    along, and the job starts again."""
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
