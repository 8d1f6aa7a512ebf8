"""Snapshots in the memory of the nodes: processes on this machine that play nodes, each with a
folder of its own, which are killed and lose it."""

import json
import re
import shutil
import signal
import sys

import numpy as np
import pytest
from conftest import BASE, TINY, environment
from forked import Forked
from jobs import finish
from object_stores import free_port

from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.pieces import (
    FileName,
    Piece,
    list_files,
    read_part,
    verify,
    write_parts,
    write_pieces,
)
from maxramp.errors import EXIT_LOST
from maxramp.run.metrics import read_records

# Trains, and kills its process where a function is called for the nth time.
PROGRAM = """
import importlib, os, signal, sys
from maxramp import train
from maxramp.processes.ending import end_process
module, name, last = sys.argv[1:4]
calls, module = 0, importlib.import_module(f"maxramp.checkpoints.{module}")
if "." in name:
    module, name = getattr(module, name.split(".")[0]), name.split(".")[1]
whole = getattr(module, name, None)
def function(*given):
    global calls
    calls += 1
    if calls == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given)
if whole:
    setattr(module, name, function)
end_process(train.main(sys.argv[4:]))
"""
NEVER = ("snapshots", "nothing", "0")
# Eight devices in the whole, 13 steps on batches of 8 and 16 rows.
KEYS = [
    *TINY,
    "step_batch_size_schedule=0:8, 40:16",
    "step_batch_size_unit=samples",
    "steps=13",
    "micro_batch_size=4",
    "eval_interval=5",
    "eval_samples=8",
    "eval_per_device_batch_size=8",
    "log_period=1",
    "checkpoint_period=1000",
    "checkpoint_stage_ends=False",
    "enable_emergency_checkpoint=True",
    "local_checkpoint_period=2",
    "hardware=cpu",
]
EXACT = "step", "batch_fingerprint", "consumed_samples", "learning_rate", "global_batch_size"


class Cluster:
    """Nodes of one process each; a node's memory is the folder of its name."""

    def __init__(self, folder, cache_dir, *keys):
        self.folder, self.run = folder, folder / "runs" / "run"
        self._keys = [BASE, *KEYS, f"jax_cache_dir={cache_dir}", f"text_files={folder}/text"]
        self._keys += [f"base_output_directory={folder}/runs", "run_name=run", *keys]
        self._keys += [f"local_checkpoint_directory={folder}/$NODE"]
        (folder / "text").write_text(" ".join(str(i * i % 997) for i in range(4000)))

    def train(self, nodes, killed=None, at=NEVER, keys=()):
        """Runs a job on nodes by their names; returns (output, errors, status) of each."""
        port, job = free_port(), []
        for i, node in enumerate(nodes):
            where = at if node == killed else NEVER
            line = [sys.executable, "-c", PROGRAM, *where, *self._keys, *keys]
            place = {"MAXRAMP_COORDINATOR": f"127.0.0.1:{port}", "MAXRAMP_PROCESS_ID": str(i)}
            place |= {"MAXRAMP_NUM_PROCESSES": str(len(nodes)), "NODE": node}
            job.append(Forked(line, environment() | place))
        return finish(job)

    def lose(self, node):
        shutil.rmtree(self.folder / node)

    def files(self, node):
        return [name for path in (self.folder / node).glob("*/*") for name in list_files(path)]

    def records(self):
        return [r for r in read_records(self.run / "metrics.jsonl") if "loss" in r]


def resumed_from(output):
    found = re.search(r"resume   from step (\d+) \(snapshot\)", output)
    return int(found[1]) if found else None


@pytest.fixture(scope="module")
def calm(tmp_path_factory, cache_dir):
    """The records of an undisturbed run on three nodes."""
    cluster = Cluster(tmp_path_factory.mktemp("calm"), cache_dir)
    for _, err, status in (done := cluster.train("abcd")):
        assert status == 0, err
    assert re.search(r"snapshot .* MB of this process, copied in .*: .*% of the time", done[0][0])
    assert all("snapshot_seconds" in r for r in cluster.records()[2:12:2])
    assert not any(cluster.files(node) for node in "abcd")  # the end is saved
    return cluster.records()


def check(cluster, calm, same_devices):
    records = cluster.records()
    assert [[r[name] for name in EXACT] for r in records] == [
        [r[name] for name in EXACT] for r in calm
    ]
    losses, expected = ([r["loss"] for r in of] for of in (records, calm))
    assert losses == expected if same_devices else losses == pytest.approx(expected, rel=1e-4)


PHASES = {
    "copy": (("snapshots", "_on_host", "40"), {4}),
    "write": (("pieces", "os.fsync", "5"), {4}),
    "rename": (("pieces", "os.replace", "5"), {4}),
    "pull": (("peers", "Peer.read", "5"), {4, 6}),
    "copied": (("pieces", "os.replace", "6"), {4, 6}),
}


@pytest.mark.parametrize("after", ["abcd", "acd", "ac"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_node_is_lost(tmp_path, cache_dir, calm, phase, after):
    """In any phase of a snapshot: the others hold a whole one, on which fewer nodes can go on."""
    at, steps = PHASES[phase]
    cluster = Cluster(tmp_path, cache_dir)
    done = cluster.train("abcd", "b", at)
    assert [status for *_, status in done] == [EXIT_LOST, -signal.SIGKILL, EXIT_LOST, EXIT_LOST]
    cluster.lose("b")
    done = cluster.train(after)
    assert {status for *_, status in done} == {0}, done
    assert resumed_from(done[0][0]) in steps
    check(cluster, calm, same_devices=after == "abcd")
