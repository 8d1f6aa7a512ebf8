"""A run's JobSets on a Kubernetes cluster, one after another.

The supervisors in the pods (`follow`) restart a job on the same nodes. Here the JobSet for other
nodes follows: after a stage, and when an elastic run loses a node. Such a run takes as many nodes
as its plan gives it, for the cluster to bring, until it loses one; then those that are ready, until
all are back. A launch that was ended continues when it is started again.

A pod's command starts this module. Every pod of a JobSet has a supervisor, for its process of a
job, and all decide the same. For another number of nodes they end with success, and their last
message says how many the launch shall apply.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from maxramp.commandline import command
from maxramp.config.load import load
from maxramp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_PREEMPTED,
    EXIT_STAGE_END,
    ConfigError,
)
from maxramp.files.place import Place
from maxramp.launch.jobs import Run
from maxramp.launch.supervisor import JobEnd, say, stop_on_signals, supervise
from maxramp.processes.agreement import VARIABLE

_PERIOD = 3.0  # seconds between two looks at the cluster
_POOL = "cloud.google.com/gke-nodepool"


class GkeCluster:
    """Applies the JobSets of a launch, which are files `{name}-{nodes}.yaml`."""

    def __init__(self, run: Run, folder: pathlib.Path, labels: dict[str, str], selector: str):
        """Applies the configuration; a ConfigError if a job of another launch of this run is
        active, or kubectl fails. `labels` are the launch's, and `selector` chooses nodes by theirs.
        """
        self._run, self._keys, self._folder = run, run.config.launch, folder
        self._name, self._selector = labels["maxramp/launch"], selector
        # Files, which outlive this program: the JobSet has had all its nodes; the number of nodes
        # of the JobSet that first lost one.
        self._whole, self._lost = folder / "whole", folder / "lost"
        self._step, self._has_waited, self.is_stopped = 0, False, False
        selected = f"maxramp/run={labels['maxramp/run']}"
        self._jobset = ""
        for jobset in json.loads(self._ask("get", "jobset", "-l", selected, "-o", "json"))["items"]:
            name, has_ended = jobset["metadata"]["name"], _is(jobset, "Completed", "Failed")
            if jobset["metadata"]["labels"]["maxramp/launch"] == self._name:
                self._jobset = name
                self._has_waited = _is(jobset, "Failed")  # and begins again
            elif not has_ended:
                raise ConfigError(
                    f"{name} of this run is active with another configuration; kubectl -n "
                    f"{self._keys.gke_namespace} delete jobset {name} ends it"
                )
        self._ask("apply", "-f", str(folder / "config.yaml"))

    def nodes_of_jobset(self) -> int:
        """Returns the nodes of the JobSet that an earlier start of this launch applied, or 0."""
        return int(self._jobset.rpartition("-")[2] or 0)

    def stop(self) -> None:
        self.is_stopped = True
        say(f"stopped; JobSet {self._jobset} continues, and the same launch follows it")

    def available(self) -> int:
        """Counts the nodes that are ready, of TPUs in whole slices."""
        pools = collections.Counter()
        for node in self._items("nodes", self._selector):
            if _is(node, "Ready") and not node["spec"].get("unschedulable"):
                pools[node["metadata"]["labels"].get(_POOL)] += 1
        return sum(count - count % self._run.nodes_per_slice for count in pools.values())

    def start(self, nodes: int, failures: int) -> bool:
        """Applies the JobSet of as many nodes, which the plan wrote; as `Cluster.start`, and a
        ConfigError if the plan has none."""
        name, elastic = f"{self._name}-{nodes}", self._keys.elastic
        file = self._folder / f"{name}.yaml"
        if not file.exists():
            raise ConfigError(f"{file}: the plan had no job on these nodes; launch again")
        if self._jobset and (self._has_waited or self._jobset != name):
            self._delete()
            if self._lost.exists() and nodes >= int(self._lost.read_text()):
                self._lost.rename(self._whole)
        while elastic and not self.is_stopped:
            if self._publish() >= nodes or not self._lost.exists():
                break
            time.sleep(_PERIOD)
        if self.is_stopped:
            return False
        self._ask("apply", "-f", str(file))
        say(f"JobSet {name}, {self._run.stages_on(nodes)}")
        self._jobset, self._has_waited = name, False
        return True

    def wait(self) -> JobEnd:
        self._has_waited, name = True, self._jobset
        while not self.is_stopped:
            jobsets = self._items("jobset", f"maxramp/launch={self._name}")
            if self.is_stopped:  # the cluster may not have answered
                break
            jobset = next((one for one in jobsets if one["metadata"]["name"] == name), {})
            if _is(jobset, "Completed"):
                nodes = max((message["nodes"] for message in self._read_messages()), default=0)
                return JobEnd(EXIT_STAGE_END if nodes else 0, self._step, nodes)
            if not jobset or _is(jobset, "Failed"):
                return self._fail("failed" if jobset else "was deleted")
            if self._keys.elastic and self._has_lost_node():
                return JobEnd(EXIT_LOST, self._step, has_lost_nodes=True)
            time.sleep(_PERIOD)
        return JobEnd(EXIT_PREEMPTED, self._step)

    def _fail(self, what: str) -> JobEnd:
        """Ends the launch: the supervisors in the pods gave up, or are gone. `what` follows the
        JobSet's name. The status is EXIT_CONFIG if a pod's was, or else the pods' largest."""
        self.is_stopped = True
        codes = {end["exitCode"] for end in self._pod_ends()}
        codes -= {0, EXIT_PREEMPTED}  # of pods that were replaced, too
        describe = f"kubectl -n {self._keys.gke_namespace} describe jobset {self._jobset}"
        say(f"{self._jobset} {what} ({describe}); launch again to continue")
        failed = EXIT_CONFIG if EXIT_CONFIG in codes else max(codes, default=EXIT_FAILED)
        return JobEnd(failed, self._step)

    def _has_lost_node(self) -> bool:
        """Tells whether the JobSet has lost a node, of those that it once had or of those planned
        after an earlier loss; notes it in the launch's files."""
        nodes, ready = self.nodes_of_jobset(), self._publish()
        if self.is_stopped:  # the cluster may not have answered
            return False
        if ready >= nodes:
            self._whole.touch()
        is_short = ready < nodes and (self._whole.exists() or self._lost.exists())
        if not is_short and not any(_is(pod, "DisruptionTarget") for pod in self._pods()):
            return False
        say(f"{self._jobset} lost a node; {ready} are ready")
        self._read_messages()
        if not self._lost.exists():
            self._lost.write_text(str(nodes))
        return True

    def _publish(self) -> int:
        """Tells the trainer, unless kubectl fails, how many nodes it could have; returns how many
        are ready, once the cluster answers. 0 if the launch was stopped meanwhile."""
        ready = self.available()
        if self.is_stopped:
            return 0
        count = ready if self._lost.exists() else self._run.config.batch.nodes
        metadata = {"namespace": self._keys.gke_namespace, "name": f"{self._name}-nodes"}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        text = json.dumps(config_map | {"data": {VARIABLE: str(count)}})
        self._kubectl("apply", "-f", "-", text=text)
        return ready

    def _delete(self) -> None:
        """Deletes the JobSet, and waits until its pods are gone; forces those that outlast the
        grace."""
        options = ("--cascade=foreground", f"--timeout={self._keys.grace_seconds + 60}s")
        if self._kubectl("delete", "jobset", self._jobset, *options).returncode:
            self._kubectl("delete", "pods", "-l", self._pod_selector(), "--force")
        self._whole.unlink(missing_ok=True)

    def _pod_selector(self) -> str:
        return f"jobset.sigs.k8s.io/jobset-name={self._jobset}"

    def _pods(self) -> list[dict[str, Any]]:
        return self._items("pods", self._pod_selector())

    def _pod_ends(self) -> list[dict[str, Any]]:
        """Lists how the containers of the JobSet's pods ended, of those that did."""
        statuses = [pod.get("status", {}).get("containerStatuses", ()) for pod in self._pods()]
        states = [status.get("state", {}) for status in itertools.chain(*statuses)]
        return [state["terminated"] for state in states if "terminated" in state]

    def _read_messages(self) -> list[dict[str, int]]:
        """Returns the last messages of the JobSet's pods, and notes how far the run got by them."""
        messages = []
        for end in self._pod_ends():
            with contextlib.suppress(ValueError):  # of a container that did not start: Kubernetes'
                messages.append(json.loads(end.get("message", "")))
        self._step = max([self._step, *(message["step"] for message in messages)])
        return messages

    def _items(self, kind: str, selector: str) -> list[dict[str, Any]]:
        """Returns the objects that a selector chooses; asks until the cluster answers, or until
        somebody stops the launch: then []."""
        while True:
            done = self._kubectl("get", kind, "-l", selector, "-o", "json")
            if done.returncode == 0:
                return json.loads(done.stdout)["items"]
            print(done.stderr, end="", flush=True)
            if self.is_stopped:
                return []
            time.sleep(_PERIOD)

    def _ask(self, *words: str) -> str:
        """Returns what kubectl prints; a ConfigError if it fails."""
        done = self._kubectl(*words)
        if done.returncode:
            raise ConfigError(f"kubectl {' '.join(words)}: {' '.join(done.stderr.split())}")
        return done.stdout

    def _kubectl(self, *words: str, text: str = "") -> subprocess.CompletedProcess:
        """Runs kubectl, in a session of its own: Ctrl-C stops the launch, and not what it asks."""
        command = ["kubectl", "-n", self._keys.gke_namespace, *words]
        options = {"capture_output": True, "text": True, "start_new_session": True}
        return subprocess.run(command, input=text, check=False, **options)


def _is(manifest: dict[str, Any], *conditions: str) -> bool:
    states = manifest.get("status", {}).get("conditions", ())
    return any(state["type"] in conditions and state["status"] == "True" for state in states)


class PodCluster:
    """Starts this pod's process of jobs on the nodes of its JobSet."""

    def __init__(self, run: Run, nodes: int):
        self._run, self._nodes = run, nodes
        self._process: subprocess.Popen | None = None
        self.is_stopped = False
        self.end = JobEnd(0, 0)  # of the last job; `next_nodes` are those for another JobSet

    def available(self) -> int:
        return self._nodes

    def start(self, nodes: int, failures: int) -> bool:
        has_nodes = nodes == self._nodes
        self.end = dataclasses.replace(self.end, next_nodes=0 if has_nodes else nodes)
        if self.is_stopped or not has_nodes:
            return False
        self._process = subprocess.Popen(self._run.command("python"))
        if self.is_stopped:  # asked while it started
            self._process.terminate()
        return True

    def wait(self) -> JobEnd:
        code = self._process.wait()
        self.end = JobEnd.read(self._run.folder, 128 - code if code < 0 else code)
        return self.end

    def stop(self) -> None:
        self.is_stopped = True
        if self._process:
            self._process.terminate()


def follow(run: Run, nodes: int, message: Place) -> int:
    """Runs the jobs of a run that take `nodes`, and writes the pod's last `message`; returns the
    exit status of the pod. Called in the main thread; raises as `supervise`."""
    cluster = PodCluster(run, nodes)
    stop_on_signals(cluster)
    status = supervise(run, cluster, nodes)
    message.write_text(json.dumps({"step": cluster.end.step, "nodes": cluster.end.next_nodes}))
    if cluster.end.next_nodes or status in (0, EXIT_CONFIG):
        return 0 if cluster.end.next_nodes else status
    # Whatever its trainer ended with: Kubernetes takes the pod away, or the supervisor gave up.
    return EXIT_PREEMPTED if cluster.is_stopped else EXIT_FAILED


@command
def main(arguments: list[str]) -> int:
    nodes, message, *config = arguments
    run = Run.from_config(load(config, "launch"), config)
    return follow(run, int(nodes), pathlib.Path(message))


if __name__ == "__main__":
    sys.exit(main())
