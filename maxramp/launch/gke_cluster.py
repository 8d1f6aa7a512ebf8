"""A run's JobSets on a Kubernetes cluster, one after another.

The supervisors in the pods (`gke_pod`) restart a job on the same nodes. Here the JobSet for other
nodes follows: after a stage, and where an elastic run loses a node. Such a run takes as many nodes
as its plan gives it, for the cluster to bring, until it loses one; then those that are ready, until
all are back. A launch that was ended continues when it is started again.
"""

import collections
import json
import pathlib
import subprocess
import time
from typing import Any

from maxramp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_PREEMPTED,
    EXIT_STAGE_END,
    ConfigError,
)
from maxramp.launch.jobs import Run
from maxramp.launch.supervisor import JobEnd, say
from maxramp.processes.nodes import VARIABLE

_PERIOD = 3.0  # seconds between two looks at the cluster
_POOL = "cloud.google.com/gke-nodepool"


class GkeCluster:
    """Applies the JobSets of a launch, which are files `{name}-{nodes}.yaml`."""

    def __init__(self, run: Run, folder: pathlib.Path, labels: dict[str, str], selector: str):
        """`labels` are the launch's, and `selector` chooses nodes by theirs."""
        self._run, self._keys, self._folder = run, run.config.launch, folder
        self._name, self._selector = labels["maxramp/launch"], selector
        # Files, as they outlive this program: that the JobSet has had its nodes; how many the one
        # had that lost the first.
        self._whole, self._lost = folder / "whole", folder / "lost"
        self._step, self._has_waited, self.is_stopped = 0, False, False
        every = json.loads(self._ask("get", "jobset", "-l", f"maxramp/run={labels['maxramp/run']}"))
        self._jobset = ""
        for jobset in every["items"]:
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
        """Of the JobSet that an earlier start of this launch has applied; 0 for none."""
        return int(self._jobset.rpartition("-")[2] or 0)

    def stop(self) -> None:
        self.is_stopped = True
        say(f"ends; the JobSet {self._jobset} continues, and the same launch follows it")

    def available(self) -> int:
        """Counts the nodes that are ready, of TPUs in whole slices."""
        pools = collections.Counter()
        for node in self._items("nodes", self._selector):
            if _is(node, "Ready") and not node["spec"].get("unschedulable"):
                pools[node["metadata"]["labels"].get(_POOL)] += 1
        return sum(count - count % self._run.unit for count in pools.values())

    def start(self, nodes: int, failures: int) -> bool:
        name, elastic = f"{self._name}-{nodes}", self._keys.elastic
        file = self._folder / f"{name}.yaml"
        if not file.exists():
            raise ConfigError(f"{file}: the plan had no job on these nodes; launch again")
        if self._jobset and (self._has_waited or self._jobset != name):
            self._delete()
            if self._lost.exists() and nodes >= int(self._lost.read_text()):
                self._lost.rename(self._whole)
        while elastic and self._publish() < nodes and self._lost.exists() and not self.is_stopped:
            time.sleep(_PERIOD)
        if self.is_stopped:
            return False
        self._ask("apply", "-f", str(file))
        say(f"JobSet {name}, stage {self._run.stages_on(nodes)}")
        self._jobset, self._has_waited = name, False
        return True

    def wait(self) -> JobEnd:
        self._has_waited, name = True, self._jobset
        while not self.is_stopped:
            jobsets = self._items("jobset", f"maxramp/launch={self._name}")
            jobset = next((one for one in jobsets if one["metadata"]["name"] == name), {})
            if _is(jobset, "Completed"):
                nodes = max((words["nodes"] for words in self._read_words()), default=0)
                return JobEnd(EXIT_STAGE_END if nodes else 0, self._step, nodes)
            if not jobset or _is(jobset, "Failed"):
                return self._fail("failed" if jobset else "was deleted")
            if self._keys.elastic and self._has_lost_node():
                return JobEnd(EXIT_LOST, self._step, has_lost_nodes=True)
            time.sleep(_PERIOD)
        return JobEnd(EXIT_PREEMPTED, self._step)

    def _fail(self, why: str) -> JobEnd:
        """Ends the launch: the supervisors in the pods gave up, or are gone."""
        self.is_stopped = True
        codes = {end["exitCode"] for pod in self._pods() for end in _ends(pod)}
        codes -= {0, EXIT_PREEMPTED}  # of pods that were replaced, too
        describe = f"kubectl -n {self._keys.gke_namespace} describe jobset {self._jobset}"
        say(f"{self._jobset} {why} ({describe}); launch again to continue")
        failed = EXIT_CONFIG if EXIT_CONFIG in codes else max(codes, default=EXIT_FAILED)
        return JobEnd(failed, self._step)

    def _has_lost_node(self) -> bool:
        nodes, ready = self.nodes_of_jobset(), self._publish()
        if ready >= nodes:
            self._whole.touch()
        is_short = ready < nodes and (self._whole.exists() or self._lost.exists())
        if not is_short and not any(_is(pod, "DisruptionTarget") for pod in self._pods()):
            return False
        say(f"{self._jobset} lost a node; {ready} are ready")
        self._read_words()
        if not self._lost.exists():
            self._lost.write_text(str(nodes))
        return True

    def _publish(self) -> int:
        """Tells the trainer how many nodes it could have; returns how many are ready."""
        ready = self.available()
        count = ready if self._lost.exists() else self._run.config.batch.nodes
        metadata = {"namespace": self._keys.gke_namespace, "name": f"{self._name}-nodes"}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        text = json.dumps(config_map | {"data": {VARIABLE: str(count)}})
        self._kubectl("apply", "-f", "-", text=text)
        return ready

    def _delete(self) -> None:
        options = ("--cascade=foreground", f"--timeout={self._keys.grace_seconds + 60}s")
        if self._kubectl("delete", "jobset", self._jobset, *options).returncode:
            self._kubectl("delete", "pods", "-l", self._selector_of_pods(), "--force")
        self._whole.unlink(missing_ok=True)

    def _selector_of_pods(self) -> str:
        return f"jobset.sigs.k8s.io/jobset-name={self._jobset}"

    def _pods(self) -> list[dict[str, Any]]:
        return self._items("pods", self._selector_of_pods())

    def _read_words(self) -> list[dict[str, int]]:
        """The last words of the JobSet's pods that have ended, and how far the run got by them."""
        ends = [end for pod in self._pods() for end in _ends(pod)]
        words = [json.loads(end["message"]) for end in ends if end.get("message")]
        self._step = max([self._step, *(word["step"] for word in words)])
        return words

    def _items(self, kind: str, selector: str) -> list[dict[str, Any]]:
        """The objects that a selector chooses; asks until the cluster answers."""
        while (done := self._kubectl("get", kind, "-l", selector, "-o", "json")).returncode:
            print(done.stderr, end="", flush=True)
            if self.is_stopped:
                return []
            time.sleep(_PERIOD)
        return json.loads(done.stdout)["items"]

    def _ask(self, *words: str) -> str:
        done = self._kubectl(*words, *(["-o", "json"] if words[0] == "get" else []))
        if done.returncode:
            raise ConfigError(f"kubectl {' '.join(words)}: {' '.join(done.stderr.split())}")
        return done.stdout

    def _kubectl(self, *words: str, text: str = "") -> subprocess.CompletedProcess:
        command = ["kubectl", "-n", self._keys.gke_namespace, *words]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def _is(thing: dict[str, Any], *conditions: str) -> bool:
    states = thing.get("status", {}).get("conditions", ())
    return any(state["type"] in conditions and state["status"] == "True" for state in states)


def _ends(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """How the containers of a pod ended that did."""
    states = (one.get("state", {}) for one in pod.get("status", {}).get("containerStatuses", ()))
    return [state["terminated"] for state in states if "terminated" in state]
