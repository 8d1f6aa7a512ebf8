"""Snapshots in the memory of nodes: processes with a folder each, which are killed and lose it."""

import json
import os
import re
import shutil
import signal
import sys

import jax
import numpy as np
import pytest
from conftest import BASE, TINY, environment, make_mesh, steps_of
from forked import Forked
from jobs import finish, member
from object_stores import free_port
from test_checkpoint import Folder, config_of, first_state

from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.pieces import FileName, list_files, verify, write_parts, write_pieces
from maxramp.checkpoints.starts import Starts
from maxramp.errors import EXIT_CONFIG, EXIT_LOST
from maxramp.files.place import place
from maxramp.run.writers import JsonlWriter

# Trains, and kills its process where a function is called for the nth time, or fills its memory.
# A step waits for the snapshot before it if calls of `write_parts` are to count snapshots.
PROGRAM = """
import importlib, os, signal, sys, threading
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
    if last == "full":
        raise OSError(28, "No space left on device")
    if calls == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given)
if whole:
    setattr(module, name, function)
step_at_once = train.Pretrainer.step
def step(*given):
    [x.join() for x in threading.enumerate() if x.name == "snapshot"]
    return step_at_once(*given)
if name == "write_parts":
    train.Pretrainer.step = step
end_process(train.main(sys.argv[4:]))
"""
NEVER = ("snapshots", "nothing", "0")
# 13 steps on batches of 12 and 24 rows, and sizes that 2, 3 and 4 nodes divide.
KEYS = [
    *TINY,
    *("base_emb_dim=48", "base_mlp_dim=96", "step_batch_size_schedule=0:12, 60:24"),
    *("step_batch_size_unit=samples", "steps=13", "micro_batch_size=6", "eval_interval=5"),
    *("eval_samples=12", "eval_per_device_batch_size=12", "log_period=1", "checkpoint_period=1000"),
    *("checkpoint_stage_ends=False", "enable_emergency_checkpoint=True"),
    *("local_checkpoint_period=2", "hardware=cpu"),
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
            variables = environment() | member(port, len(nodes), i) | {"NODE": node}
            job.append(Forked(line, variables))
        return finish(job)

    def train_alone(self, node, at=NEVER, **options):
        """Runs a job of one node; returns its output and its errors. It is killed, or finishes."""
        ((output, errors, status),) = self.train(node, node, at, **options)
        assert status == (0 if at is NEVER else -signal.SIGKILL), errors
        return output, errors

    def files(self, node):
        return [name for path in (self.folder / node).glob("*") for name in list_files(path)]

    def newest_whole(self, nodes):
        """The last step of which these nodes have the files of all four processes."""
        names = {name for node in nodes for name in self.files(node)}
        held = {name[:3] for name in names}
        return max(n.step for n in names if {(*n[:2], p) for p in range(4)} <= held)

    def records(self):
        return steps_of(self.run)


def resumed_from(output):
    match = re.search(r"resume   from step (\d+) \(snapshot\)", output)
    return int(match[1]) if match else None


@pytest.fixture(scope="module")
def calm(tmp_path_factory, cache_dir):
    """The records of an undisturbed run on four nodes."""
    cluster = Cluster(tmp_path_factory.mktemp("calm"), cache_dir)
    for _, err, status in (done := cluster.train("abcd")):
        assert status == 0, err
    snapshot_steps = {r["step"] for r in cluster.records() if "snapshot_seconds" in r}
    assert {2} <= snapshot_steps <= {2, 4, 6, 8, 10, 12}  # a slow machine leaves some out
    line = r"snapshot .* MB of this process, copied in .*: .*% of the time"
    assert bool(re.search(line, done[0][0])) == (len(snapshot_steps) >= 4)
    assert not any(cluster.files(node) for node in "abcd")  # the end is saved
    return cluster.records()


def check(cluster, calm, same_devices):
    records = cluster.records()
    exact, wanted = ([[r[name] for name in EXACT] for r in run] for run in (records, calm))
    assert exact == wanted
    losses, expected = ([r["loss"] for r in run] for run in (records, calm))
    assert losses == expected if same_devices else losses == pytest.approx(expected, rel=1e-4)


PHASES = {
    "copy": (("snapshots", "_copy_piece", "40"), "abcd"),
    "write": (("pieces", "os.fsync", "5"), "acd"),
    "rename": (("pieces", "os.replace", "5"), "ac"),
    "pull": (("peers", "Peer.read", "5"), "acd"),
    "copied": (("pieces", "os.replace", "6"), "abcd"),
}


def lose_one(cluster, node, phase="write"):
    done = cluster.train("abcd", node, PHASES[phase][0])
    assert -signal.SIGKILL in [status for *_, status in done]
    assert {status for *_, status in done} <= {EXIT_LOST, -signal.SIGKILL, 1}, done
    shutil.rmtree(cluster.folder / node)


def finish_run(cluster, nodes):
    done = cluster.train(nodes)
    assert {status for *_, status in done} == {0}, done
    return done[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", [p if p == "pull" else pytest.param(p, marks=pytest.mark.long) for p in PHASES]
)
def test_a_node_is_lost(tmp_path, cache_dir, calm, phase):
    """In any phase of a snapshot: the others hold a whole one, on which fewer nodes continue."""
    after = PHASES[phase][1]
    cluster = Cluster(tmp_path, cache_dir)
    lose_one(cluster, "b", phase)
    expected = cluster.newest_whole("acd")
    out, *_ = finish_run(cluster, after)
    assert resumed_from(out) == expected >= 2
    check(cluster, calm, same_devices=after == "abcd")


@pytest.mark.slow
def test_a_node_is_lost_while_its_job_restores(tmp_path, cache_dir, calm):
    """It is another one than the first, and not its neighbour: what it had is with a third."""
    cluster = Cluster(tmp_path, cache_dir)
    lose_one(cluster, "d")
    expected = cluster.newest_whole("abc")
    done = cluster.train("abc", "b", ("snapshots", "read_part", "9"))
    assert done[1][2] == -signal.SIGKILL
    shutil.rmtree(tmp_path / "b")
    out, *_ = finish_run(cluster, "ac")
    assert resumed_from(out) == expected
    check(cluster, calm, same_devices=False)


IN_A_SNAPSHOT = ("pieces", "write_parts", "4")  # of step 8, as step 6 has one
SAVES = ["checkpoint_period=5", "async_checkpointing=False"]


@pytest.mark.slow
def test_nodes_that_come_back_bring_no_old_snapshot(tmp_path, cache_dir):
    """Three nodes are killed, one of them begins alone and saves: then that is the run."""
    cluster = Cluster(tmp_path, cache_dir)
    done = cluster.train("abc", "c", IN_A_SNAPSHOT)
    assert -signal.SIGKILL in [status for *_, status in done]
    assert {name.step for name in cluster.files("b")} >= {6}
    _, errors = cluster.train_alone("a", IN_A_SNAPSHOT, keys=SAVES)
    assert "no snapshot is whole, the newest is after step" in errors
    shutil.rmtree(tmp_path / "a")
    output, errors, _ = finish_run(cluster, "abc")
    assert "resume   from step 5," in output and "node was lost" not in errors
    assert [r["step"] for r in cluster.records()] == [*range(13)]


@pytest.mark.slow
def test_a_snapshot_is_found_by_any_path_to_its_run(tmp_path, cache_dir):
    cluster = Cluster(tmp_path, cache_dir)
    cluster.train_alone("a", IN_A_SNAPSHOT)
    (tmp_path / "link").symlink_to("runs")
    other = ["base_output_directory={}/link", "data_shuffle_seed=5"]
    ((_, errors, status),) = cluster.train("a", keys=[key.format(tmp_path) for key in other])
    assert status == EXIT_CONFIG
    assert errors.startswith("error: the snapshot after step 6: trained with data_shuffle_seed=0")
    output, _ = cluster.train_alone("a", keys=[other[0].format(tmp_path)])
    assert resumed_from(output) == 6
    assert not cluster.files("a")


def test_starts_hold_the_steps_that_the_records_do():
    """A state after step k counts if the start that took it trained that step, as records say."""
    rng = np.random.default_rng(0)
    starts, records, states = Starts(), [], []
    for number in range(300):
        held = [step for step, start in states if starts.hold(start, step)]
        assert held == [n for n, start in states if records[n - 1 : n] == [start]]
        first, start = int(rng.choice([0, *held])), str(number)
        starts = starts.begin(start, first, "/dev/shm")
        records = [*records[:first], *[start] * rng.integers(0, 9)]
        steps = range(first + 1, len(records) + 1)
        states += [(n, start) for n in steps if rng.random() < 0.3]


def test_a_snapshot_counts_until_a_start_goes_back_behind_it(tmp_path):
    """Starts of one run in this process, each with the state of step 12 to keep or to find."""
    memory = "enable_emergency_checkpoint=True", f"local_checkpoint_directory={tmp_path}/memory"

    def start(*keys, recorded=12, trains=True):
        folder = Folder(tmp_path / "checkpoints", config := config_of(*keys))
        with jax.set_mesh(make_mesh(config)):
            position = folder.checkpoints.latest(recorded=recorded)
            if trains:
                folder.checkpoints.start_saving()
        return folder, position

    start()[0].save(8)
    folder, position = start(*memory)
    with jax.set_mesh(make_mesh(folder.config)):
        folder.checkpoints.take_snapshot(folder.record(12), first_state())
        folder.checkpoints.snapshots.wait()
    assert (position.step, start(*memory)[1].step) == (8, 12)
    for keys, recorded, why in (
        (memory, 11, "metrics.jsonl, which holds 11 steps"),
        ((memory[0], f"local_checkpoint_directory={tmp_path}/other"), 12, f"{tmp_path}/other"),
    ):
        folder, position = start(*keys, recorded=recorded, trains=False)
        (warning,) = folder.warnings
        assert position.step == 8
        assert why in warning and "the snapshot after step 12 in" in warning
    folder, position = start()
    assert position.step == 8
    assert "=False passes over the snapshot after step 12 in" in folder.warnings[0]
    (held,) = (tmp_path / "memory").iterdir()
    (held / ".13.x.0.1.tmp").touch()  # which a killed start was writing
    folder, position = start(*memory)
    assert position.step == 8 and not folder.warnings and not [*held.iterdir()]


@pytest.mark.parametrize("kind", ["snapshot", "checkpoint"])
def test_records_are_on_the_disk_before_a_state_counts(tmp_path, monkeypatch, kind):
    """A power loss leaves what was synced before it: no state whose steps have no records."""
    memory = "enable_emergency_checkpoint=True", f"local_checkpoint_directory={tmp_path}/memory"
    folder = Folder(tmp_path / "checkpoints", config_of(*memory))
    done, sync, replace = [], os.fsync, os.replace

    def log_sync(number):
        sync(number)
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))

    def log_replace(source, target):
        replace(source, target)
        done.append(os.path.basename(target))

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(os, "replace", log_replace)
    with jax.set_mesh(make_mesh(folder.config)), folder.checkpoints as checkpoints:
        checkpoints.latest()
        checkpoints.start_saving()
        writer = JsonlWriter(tmp_path / "metrics.jsonl")
        writer({"step": 11})
        folder.files.record_files.append(writer)
        if kind == "snapshot":
            checkpoints.take_snapshot(folder.record(12), first_state())
            checkpoints.snapshots.wait()
            (counts,) = map(str, list_files(checkpoints.snapshots._folder))
        else:
            folder.begin(12, first_state(), last=True)
            counts = "checkpoint.json"
    assert done.index("metrics.jsonl") < done.index(counts)


@pytest.mark.slow
def test_a_run_does_not_end_with_a_snapshot_alone(tmp_path, cache_dir):
    """Fewer steps than it stands after leave no weights that anybody can read."""
    cluster = Cluster(tmp_path, cache_dir)
    cluster.train("a", killed="a", at=("pieces", "write_parts", "3"))
    stands = cluster.files("a")[-1].step
    ((_, errors, status),) = cluster.train("a", keys=[f"steps={stands}"])
    assert status == EXIT_CONFIG and "a snapshot and no checkpoint" in errors
    ((output, _, status),) = cluster.train("a", keys=[f"steps={stands + 1}"])
    assert status == 0 and resumed_from(output) == stands
    assert (cluster.run / "checkpoints" / str(stands + 1)).is_dir()


FIRST = {  # the key that gives the first weights, where all runs are, and the nodes
    "weights": ("load_parameters_path", "disk", "a"),
    "state": ("load_full_state_path", "disk", "ab"),
    "state in a storage": ("load_full_state_path", "gs", "ab"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["weights", *(pytest.param(x, marks=pytest.mark.long) for x in [*FIRST][1:])]
)
def test_the_first_weights_stay_where_their_run_trains_on(tmp_path, cache_dir, storages, first):
    """Before the first checkpoint, too: what the first start began with is with the snapshots."""
    key, where, nodes = FIRST[first]
    runs = place(tmp_path / "runs" if where == "disk" else f"{storages(where).address}/first")
    cluster = Cluster(tmp_path, cache_dir, f"base_output_directory={runs}")
    cluster.run = runs / "run"
    run, begin = ("run_name=model", "steps={}"), f"{key}={runs / 'model'}"
    for name, *keys in (["model", *run], ["calm", "run_name=calm", begin]):
        for _, errors, status in cluster.train(nodes, keys=[key.format(3) for key in keys]):
            assert status == 0, (name, errors)
    cluster.train(nodes, killed=nodes[-1], at=IN_A_SNAPSHOT, keys=[begin])
    stands = min(name.step for name in cluster.files(nodes[-1]))
    ((_, errors, status),) = cluster.train("c", keys=[key.format(5) for key in run])
    assert status == 0, errors
    done = cluster.train(nodes, keys=[begin])
    assert {status for *_, status in done} == {0}, done
    assert resumed_from(done[0][0]) == stands
    losses = [r["loss"] for r in steps_of(runs / "calm")]
    assert [r["loss"] for r in cluster.records()] == losses
    saved = json.loads((cluster.run / "checkpoints" / "13" / "checkpoint.json").read_bytes())
    assert saved["config"][key] == str(runs / "model" / "checkpoints" / "3")


@pytest.mark.long
def test_a_damaged_file_is_left_out(tmp_path, cache_dir, calm):
    """The next node's copy takes its place; a new folder of the same run takes none of them."""
    cluster = Cluster(tmp_path, cache_dir)
    lose_one(cluster, "d")
    expected = cluster.newest_whole("abc")
    path = next((tmp_path / "b").glob(f"*/*/{expected}.*.1.4"))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    out, *_ = finish_run(cluster, "abc")
    assert resumed_from(out) == expected
    check(cluster, calm, same_devices=False)
    shutil.rmtree(cluster.run)
    lose_one(cluster, "d")
    shutil.rmtree(cluster.run)
    out, *_ = finish_run(cluster, "abc")
    assert "resume" not in out
    check(cluster, calm, same_devices=False)


def test_nothing_half_written_counts(tmp_path):
    """A file that was cut, changed in one bit or not renamed; what was given up leaves nothing."""
    record = Checkpoint(tmp_path / "4", 4, 48, [], "", {}, {}, saved="x")
    path = tmp_path / str(FileName(4, "x", 0, 1))
    write_pieces(path, record, {"a": ("uint8", [40])}, [("a", [0], np.arange(40, dtype="uint8"))])
    whole = path.read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert verify(path) is None
    for at in (0, 39, len(whole) - 1):
        path.write_bytes(bytes(b ^ (i == at) for i, b in enumerate(whole)))
        assert verify(path) is None

    def parts():
        yield b"half"
        assert [p.name for p in tmp_path.iterdir() if p != path] == [".5.x.0.1.tmp"]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_parts(tmp_path / "5.x.0.1", parts())
    assert list(tmp_path.iterdir()) == [path] and len(list_files(tmp_path)) == 1


@pytest.mark.long
def test_memory_that_is_full_costs_a_line(tmp_path, cache_dir, calm):
    cluster = Cluster(tmp_path, cache_dir)
    done = cluster.train("ab", "b", ("pieces", "os.fsync", "full"))
    assert [status for *_, status in done] == [0, 0], done
    line = "the snapshot after step 2 was not kept: process 1: No space left on device; the run"
    assert done[0][1].count("was not kept") == 1 and line in done[0][1]
    check(cluster, calm, same_devices=False)
