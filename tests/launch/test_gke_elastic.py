"""The JobSets of a run, on a cluster of processes of this machine, whose nodes go and come back."""

import collections
import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from conftest import BASE
from jobs import wait_until
from test_elastic import ELASTIC as SMALL
from test_elastic import same_training, undisturbed  # noqa: F401
from test_gke import TPU, dropped, jobsets, manifests, pod_of, words_of
from test_launch import Launched, arguments, gone, steps_of

from maxramp.checkpoints.pieces import list_files
from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.launch import gke, gke_cluster
from maxramp.launch.gke_cluster import GkeCluster
from maxramp.launch.jobs import Run
from maxramp.launch.supervisor import supervise
from maxramp.run.jobs import read_jobs

# 24 rows divide over 1, 2, 3 and 4 nodes of two GPUs; then 16 over 1, 2 and 4.
ELASTIC = (
    *("elastic=True", "devices_per_node=2", "node_schedule=fixed", "per_device_batch_size=4"),
    *("step_batch_size_schedule=0:24 720:16", "ici_data_parallelism=-1", "ici_fsdp_parallelism=2"),
    *("max_num_checkpoints_to_keep=1", "grace_seconds=1", "run_name=x"),
)
# In place of the supervisor: the pod ends with the status and message that the test writes for it.
POD = """#!/bin/sh
until [ -e "$CLUSTER/ends/$POD" ]; do sleep 0.05; done
read -r status message < "$CLUSTER/ends/$POD"
echo "$message" > "$4"
exit "$status"
"""


def install_kubectl(folder: pathlib.Path, monkeypatch) -> None:
    """Puts the cluster of a folder on the path."""
    (folder / "bin").mkdir(parents=True)
    program = pathlib.Path(__file__).parent / "kubectl.py"
    (folder / "bin" / "kubectl").write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    (folder / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.setenv("TEST_PID", str(os.getpid()))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(gke_cluster, "_PERIOD", 0.1)


class Launch:
    """A launch on this machine's cluster."""

    def __init__(self, folder: pathlib.Path, monkeypatch, *arguments: str):
        self.folder, line = folder, words_of(*ELASTIC, *arguments)
        install_kubectl(folder, monkeypatch)
        (folder / "bin" / "python").write_text(POD)
        (folder / "bin" / "python").chmod(0o755)
        (folder / "ends").mkdir()
        self.run = gke.fill_slices(Run.from_config(load(line), line))
        self.labels, files = gke.manifests(self.run)
        for name, text in files.items():
            (folder / name).write_text(text)
        self.pool = concurrent.futures.ThreadPoolExecutor()

    def start(self) -> None:
        self.cluster = GkeCluster(self.run, self.folder, self.labels, "of=pool")
        nodes = self.cluster.nodes_of_jobset() or self.run.next_nodes
        self.result = self.pool.submit(supervise, self.run, self.cluster, nodes)

    def set(self, *pools: str) -> None:
        """Sets the nodes that are ready, by their pools; those with a "!" take no pods."""
        (self.folder / "new").write_text("\n".join(pools))
        (self.folder / "new").rename(self.folder / "nodes")

    def begin(self) -> "Launch":
        """Starts it where four nodes are ready."""
        self.set("a", "a", "a", "a")
        self.start()
        self.runs(4)
        return self

    def end_pods(self, pods: int, **message: int) -> None:
        """Ends the pods of the JobSet with a status and a message."""
        jobset = self.applied()[-1]
        for index in range(pods):
            new = self.folder / "new"
            new.write_text(f"{message.get('status', 0)} {json.dumps({'step': 1} | message)}\n")
            new.rename(self.folder / "ends" / f"{jobset}-{index}")
        wait_until(lambda: self.result.done() or self.applied()[-1] != jobset)
        for index in range(pods):
            (self.folder / "ends" / f"{jobset}-{index}").unlink()

    def applied(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().split() if log.exists() else []

    def runs(self, *nodes: int) -> None:
        """Waits until JobSets of these nodes have been applied, one after another."""
        wait_until(lambda: [int(x.rpartition("-")[2]) for x in self.applied()] == [*nodes])

    def available(self) -> int:
        (file,) = self.folder.glob("maps/*-nodes/MAXRAMP_AVAILABLE_NODES")
        return int(file.read_text())


def test_a_run_takes_the_nodes_that_are_ready(tmp_path, monkeypatch):
    launch = Launch(tmp_path, monkeypatch)
    launch.set("a", "a", "a")
    launch.start()  # an autoscaler may bring the fourth node
    launch.runs(4)
    assert launch.available() == 4
    launch.set("a", "a", "a", "a")
    wait_until((tmp_path / "whole").exists)
    launch.set("a", "a", "a")
    launch.runs(4, 3)
    wait_until(lambda: launch.available() == 3)
    launch.cluster.stop()  # and started again by hand
    assert launch.result.result(60) == 76
    launch.start()
    wait_until((tmp_path / "whole").exists)
    launch.set("a", "a", "a!")
    launch.runs(4, 3, 2)
    launch.set("a", "a", "a", "a")
    wait_until(lambda: launch.available() == 4)
    launch.end_pods(2, nodes=4)
    launch.runs(4, 3, 2, 4)
    launch.end_pods(4, nodes=2)
    launch.runs(4, 3, 2, 4, 2)
    launch.end_pods(2, nodes=0)
    assert launch.result.result(60) == 0


def test_a_slice_that_loses_a_node_is_lost(tmp_path, monkeypatch):
    keys = [key for key in TPU if not key.startswith(("num_nodes", "devices", "run_name"))]
    keys += ["gke_topology=2x2x2", "devices_per_node=4", "per_device_batch_size=2", "min_nodes=2"]
    keys += ["step_batch_size_schedule=0:32", "ici_fsdp_parallelism=4"]
    launch = Launch(tmp_path, monkeypatch, *keys)
    assert sorted(path.name[-6:] for path in tmp_path.glob("x-*.yaml")) == ["2.yaml", "4.yaml"]
    launch.set("a", "a", "b", "b")
    launch.start()
    launch.runs(4)
    wait_until((tmp_path / "whole").exists)
    launch.set("a", "a", "b", "b!")
    launch.runs(4, 2)
    launch.end_pods(2, nodes=0)
    assert launch.result.result(60) == 0


def test_a_failed_jobset_ends_the_launch_and_the_next_launch_replaces_it(tmp_path, monkeypatch):
    launch = Launch(tmp_path, monkeypatch).begin()
    launch.end_pods(1, status=2, nodes=0)
    assert launch.result.result(60) == 2
    launch.start()
    launch.runs(4, 4)
    launch.end_pods(4, nodes=0)
    assert launch.result.result(60) == 0
    launch.start()  # a completed run is not started again
    assert launch.result.result(60) == 0
    launch.runs(4, 4)


def test_a_deleted_jobset_ends_the_launch(tmp_path, monkeypatch):
    launch = Launch(tmp_path, monkeypatch).begin()
    subprocess.run(["kubectl", "-n", "x", "delete", "jobset", launch.applied()[-1]], check=True)
    assert launch.result.result(60) == 1


def test_a_launch_does_not_start_beside_another_configuration(tmp_path, monkeypatch):
    """Two jobs would write to the folder of one run."""
    launch = Launch(tmp_path / "first", monkeypatch).begin()
    line = words_of(*ELASTIC, "steps=91")
    other = gke.fill_slices(Run.from_config(load([BASE, *line[1:]]), line))
    labels, files = gke.manifests(other)
    (tmp_path / "config.yaml").write_text(files["config.yaml"])
    with pytest.raises(ConfigError, match="delete jobset") as refused:
        GkeCluster(other, tmp_path, labels, "of=pool")
    assert launch.applied()[0] in str(refused.value) and "\n" not in str(refused.value)
    launch.end_pods(4, nodes=0)
    assert launch.result.result(60) == 0
    GkeCluster(other, tmp_path, labels, "of=pool")


def test_pods_read_how_many_nodes_are_available():
    files = manifests(*ELASTIC)
    assert len(jobsets(files)) == 4 and "config.yaml" in files
    for manifest in jobsets(files):
        assert dropped(manifest) == []
    pod = pod_of(jobsets(files)[-1])
    values = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert pathlib.Path(values["MAXRAMP_AVAILABLE_NODES"]).parent == pathlib.Path(mounts["nodes"])
    (launch,) = {v["configMap"]["name"] for v in pod["volumes"] if v["name"] == "config"}
    assert {"name": "nodes", "configMap": {"name": f"{launch}-nodes"}} in pod["volumes"]


@pytest.mark.slow
def test_real_pods_train_as_one_process(undisturbed, tmp_path, cache_dir, monkeypatch):  # noqa: F811
    """A trainer is killed: all start from a snapshot. A node is lost, and taken when it is back."""
    cluster = tmp_path / "cluster"
    install_kubectl(cluster, monkeypatch)
    (cluster / "nodes").write_text("a a a a")
    monkeypatch.setenv("POD", "none")  # each pod has its own
    keys = [*SMALL, "run_name=x", "grace_seconds=20"]
    keys += ["enable_emergency_checkpoint=true", "local_checkpoint_period=3"]
    keys += ["local_checkpoint_directory=$CLUSTER/memory/$POD", "gke_accelerator=nvidia-l4"]
    keys += [f"gke_mount_path={tmp_path}", "gke_volume_claim=disk", "container_image=here"]
    launched = Launched(arguments(tmp_path, cache_dir, *keys), tmp_path / "x", "gke")
    victims = launched.wait_for(8, trainers=4)
    wait_until(lambda: has_whole_snapshot(cluster / "memory", processes=4))
    os.kill(victims[2], signal.SIGKILL)
    wait_until(lambda: len(starts_of(tmp_path / "x")) == 2, 200)
    launched.wait_for(starts_of(tmp_path / "x")[1]["first_step"] + 1, trainers=4)
    (cluster / "nodes").write_text("a a a")
    wait_until(lambda: len(starts_of(tmp_path / "x")) == 3, 200)
    (cluster / "nodes").write_text("a a a a")
    assert launched.end() == 0, launched.text()
    same_training(tmp_path / "x", undisturbed)
    starts = [(start["nodes"], start["from"]) for start in starts_of(tmp_path / "x")]
    assert starts[:2] == [(4, "new"), (4, "snapshot")] and starts[2][0] == 3, starts
    assert starts[3][0] == 4, starts
    assert {record["devices"] for record in steps_of(tmp_path / "x")} >= {3, 4}
    assert gone(launched)


def has_whole_snapshot(memory: pathlib.Path, processes: int) -> bool:
    names = {name for path in memory.glob("*/*") for name in list_files(path)}
    parts = {(name.step, name.process) for name in names}
    return processes in collections.Counter(step for step, _ in parts).values()


def starts_of(folder: pathlib.Path) -> list[dict]:
    return [job for job in read_jobs(folder) if job["event"] == "start"]
