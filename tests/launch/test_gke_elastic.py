"""The run.sh of an elastic run, with a cluster that is a folder: nodes go and come back."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import yaml
from test_gke import TPU, dropped, jobsets, manifests, read_by_schema

# 24 rows divide over 1, 2, 3 and 4 nodes of two GPUs; then 16 over 1, 2 and 4.
ELASTIC = (
    *("elastic=True", "devices_per_node=2", "node_schedule=fixed", "per_device_batch_size=4"),
    *("step_batch_size_schedule=0:24 720:16", "ici_data_parallelism=-1", "ici_fsdp_parallelism=2"),
    *("max_num_checkpoints_to_keep=1", "grace_seconds=1", "run_name=x"),
)

# What run.sh asks of kubectl, answered from files: `nodes` of the cluster, `jobset` that is there
# (`ended` once its pods have), the last words of its pods, and the ConfigMap's `available`.
KUBECTL = """#!/bin/bash
cd "$CLUSTER"
case $* in
    "get nodes"*) cat nodes ;;
    *" create configmap "*) [[ $* =~ nodes=([0-9]+) ]] && echo "available ${BASH_REMATCH[1]}" ;;
    "apply -f -") read -r word count; echo "$count" > available.new; mv available.new available ;;
    "apply -f config.yaml") ;;
    "apply -f "*)
        name=${3%.yaml}
        [ -e "$HERE/$3" ] || exit 1
        [ "$(cat jobset)" = "$name" ] && exit
        rm -f ended words lost_pods
        echo "$name" > jobset
        echo "$name" >> log ;;
    *"get jobset -l"*launch!=*) ;;
    *"get jobset -l"*) cat jobset ;;
    *condition=Completed*) sleep 0.1; [ -e ended ] ;;
    *condition=Failed*) exit 1 ;;
    *"get pods "*Disruption*) cat lost_pods ;;
    *"get pods "*) cat words ;;
    *" delete jobset "*) echo > jobset ;;
    *) echo "unknown: $*" >> log; exit 1 ;;
esac 2> /dev/null
"""


class Cluster:
    def __init__(self, folder: pathlib.Path, *arguments: str):
        self.folder = folder
        for name, text in manifests(*ELASTIC, *arguments).items():
            (folder / name).write_text(text)
        (folder / "bin").mkdir()
        (folder / "bin" / "kubectl").write_text(KUBECTL)
        (folder / "bin" / "kubectl").chmod(0o755)
        self.set(*["a"] * 4)
        self.start()

    def start(self) -> None:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        more = {"PATH": path, "CLUSTER": str(self.folder), "HERE": str(self.folder)}
        script = ["sh", self.folder / "run.sh"]
        self.process = subprocess.Popen(script, env=os.environ | more, start_new_session=True)

    def set(self, *pools: str, rest: str = "") -> None:
        """The nodes that are ready, by their pools; one more of them may be something else."""
        lines = [f"pool-{pool} True \n" for pool in pools]
        (self.folder / "new").write_text("".join(lines) + rest)
        (self.folder / "new").rename(self.folder / "nodes")

    def says(self, words: str) -> None:
        """Completes the JobSet that is there, with last words of its pods."""
        (self.folder / "words").write_text(words)
        (self.folder / "ended").touch()

    def wait_for(self, name: str, content: str) -> None:
        path, deadline = self.folder / name, time.monotonic() + 30
        while time.monotonic() < deadline:
            if path.exists() and path.read_text().split()[-1:] == [content]:
                return
            time.sleep(0.02)
        raise AssertionError((name, content, path.exists() and path.read_text()))

    def runs(self, nodes: int) -> None:
        launch = next(self.folder.glob("*-4.yaml")).name.removesuffix("-4.yaml")
        self.wait_for("log", f"{launch}-{nodes}")


def test_a_run_takes_the_nodes_that_are_ready(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.runs(4)
    cluster.wait_for("available", "4")
    time.sleep(0.5)  # its nodes have been seen
    cluster.set("a", "a", "a", rest="pool-a False \n")
    cluster.runs(3)
    cluster.wait_for("available", "3")
    os.killpg(cluster.process.pid, signal.SIGKILL)  # and started again by hand
    cluster.start()
    cluster.set("a", "a", rest="pool-a True true\npool-a Unknown \n")
    cluster.runs(2)
    cluster.set("a", "a", "a", "a")
    cluster.wait_for("available", "4")
    cluster.says("4 4")
    cluster.runs(4)
    (tmp_path / "lost_pods").write_text("True")  # a pod was evicted, and its node is there
    deadline = time.monotonic() + 30
    while (tmp_path / "log").read_text().count("-4\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    cluster.says("2 2")
    cluster.runs(2)
    cluster.says("")
    assert cluster.process.wait(30) == 0
    names = (tmp_path / "log").read_text().split()
    assert [name.rpartition("-")[2] for name in names] == ["4", "3", "2", "4", "4", "2"]


def test_slices_come_and_go_whole(tmp_path):
    """Two slices of two nodes: one that lost a node is gone."""
    keys = [key for key in TPU if not key.startswith(("num_nodes", "devices", "run_name"))]
    keys += ["gke_topology=2x2x2", "devices_per_node=4", "per_device_batch_size=2", "min_nodes=2"]
    cluster = Cluster(tmp_path, *keys, "step_batch_size_schedule=0:32", "ici_fsdp_parallelism=4")
    assert sorted(path.name[-6:] for path in tmp_path.glob("x-*.yaml")) == ["2.yaml", "4.yaml"]
    cluster.set("a", "a", "b", "b")
    cluster.runs(4)
    time.sleep(0.5)
    cluster.set("a", "a", "b", rest="pool-b False \n")
    cluster.runs(2)
    cluster.says("")
    assert cluster.process.wait(30) == 0


@pytest.mark.parametrize("status, words, seen", [(0, "", 0), (75, "3\n", 0), (76, "", 76)])
def test_last_words(status, words, seen, tmp_path):
    """A pod leaves the nodes of the next stage to run.sh."""
    (tmp_path / "next_stage.json").write_text(json.dumps({"nodes": 3}))
    found = jobsets(files := manifests(*ELASTIC))
    assert len(found) == 4 and "config.yaml" in files
    for manifest in found:
        assert dropped(manifest, read_by_schema(manifest)) == []
    pod = found[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    given = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert given["MAXRAMP_AVAILABLE_NODES"] == f"{mounts['nodes']}/nodes"
    (launch,) = {v["configMap"]["name"] for v in pod["volumes"] if v["name"] == "config"}
    assert {"name": "nodes", "configMap": {"name": f"{launch}-nodes"}} in pod["volumes"]
    assert f"create configmap {launch}-nodes" in files["run.sh"]
    assert yaml.safe_load(files["config.yaml"])["metadata"]["name"] == launch
    shell, dash, script, *_ = pod["containers"][0]["command"]
    script = script.replace("/dev/termination-log", str(tmp_path / "words"))
    script = script.replace("/mnt/shared/runs/x", str(tmp_path))
    script = script.replace("python -c", f"{sys.executable} -c")
    line = [shell, dash, script, "maxramp", "sh", "-c", f"exit {status}"]
    assert subprocess.run(line, timeout=30, check=False).returncode == seen
    assert not words or (tmp_path / "words").read_text() == words
