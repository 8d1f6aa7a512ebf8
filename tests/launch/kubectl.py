"""A Kubernetes cluster on this machine, as far as a launch asks kubectl for it.

Started as kubectl, with the folder CLUSTER as its state. `nodes` holds a line for every node that
is ready: its pool. A JobSet that is applied gets a process of its own, which runs the commands of
its pods on these nodes and follows its failure policies.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

CLUSTER = pathlib.Path(os.environ["CLUSTER"])
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


def is_over() -> bool:
    """Whether the test has ended, and so all that it started must."""
    return not pathlib.Path("/proc", os.environ["TEST_PID"]).exists()


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def nodes() -> list[str]:
    return (CLUSTER / "nodes").read_text().split()


def apply(manifest: dict) -> None:
    name = manifest["metadata"]["name"]
    if manifest["kind"] == "ConfigMap":
        for key, value in manifest["data"].items():
            write(CLUSTER / "maps" / name / key, value)
    elif not (path := CLUSTER / "jobset" / f"{name}.json").exists():
        write(path, json.dumps(manifest | {"status": {}}))
        with (CLUSTER / "log").open("a") as log:
            log.write(f"{name}\n")
        subprocess.Popen(
            [sys.executable, __file__, "run", name],
            start_new_session=True,
            stdout=(CLUSTER / "out").open("a"),
            stderr=subprocess.STDOUT,
        )


def get(kind: str, selector: str) -> None:
    if kind == "nodes":
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        items = [
            {
                "metadata": {"labels": {"cloud.google.com/gke-nodepool": pool.strip("!")}},
                "spec": {"unschedulable": "!" in pool},
                "status": ready,
            }
            for pool in nodes()
        ]
    else:
        every = [json.loads(p.read_text()) for p in sorted((CLUSTER / kind).glob("[!.]*.json"))]
        pair = selector.split("=")
        items = [x for x in every if x["metadata"]["labels"].get(pair[0]) == pair[1]]
    print(json.dumps({"items": items}))


def delete(name: str) -> None:
    path = CLUSTER / "jobset" / f"{name}.json"
    (CLUSTER / f"{name}.delete").touch()
    while path.exists():
        time.sleep(0.02)


class JobSet:
    def __init__(self, name: str):
        self.name, self.path = name, CLUSTER / "jobset" / f"{name}.json"
        self.manifest = json.loads(self.path.read_text())
        job = self.manifest["spec"]["replicatedJobs"][0]
        self.count = job["replicas"] * job["template"]["spec"]["completions"]
        self.rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
        self.pod = job["template"]["spec"]["template"]["spec"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.processes: dict[int, subprocess.Popen] = {}
        self.codes: dict[int, int] = {}
        self.node_of: dict[int, int] = {}

    def words(self, index: int) -> pathlib.Path:
        return CLUSTER / "words" / f"{self.name}-{index}"

    def start(self, index: int) -> None:
        self.words(index).parent.mkdir(exist_ok=True)
        self.words(index).write_text("")
        container, launch = self.pod["containers"][0], self.name.rpartition("-")[0]
        paths = {
            "/etc/maxramp-nodes": str(CLUSTER / "maps" / f"{launch}-nodes"),
            "/etc/maxramp/": str(CLUSTER / "maps" / launch) + "/",
            "/dev/termination-log": str(self.words(index)),
        }

        def replace_paths(text: str) -> str:
            for old, new in paths.items():
                text = text.replace(old, new)
            return text

        (devices,) = container["resources"]["limits"].values()
        path = [CLUSTER / "bin", pathlib.Path(sys.executable).parent, os.environ["PATH"]]
        variables = {e["name"]: replace_paths(e["value"]) for e in container["env"]}
        variables |= {
            "MAXRAMP_COORDINATOR": f"127.0.0.1:{self.port}",
            **{"JOB_COMPLETION_INDEX": str(index), "POD": f"{self.name}-{index}"},
            **{"JAX_NUM_CPU_DEVICES": str(devices), "PATH": ":".join(map(str, path))},
        }
        self.processes[index] = subprocess.Popen(
            [*container["command"], *map(replace_paths, container["args"])],
            env=os.environ | variables,
            start_new_session=True,
        )
        self.tell(index, {"running": {}})

    def tell(self, index: int, state: dict) -> None:
        labels = {JOBSET_LABEL: self.name}
        status = {"containerStatuses": [{"name": "train", "state": state}]}
        pod = {"metadata": {"labels": labels}, "status": status}
        write(CLUSTER / "pods" / f"{self.name}-{index}.json", json.dumps(pod))

    def kill(self, index: int) -> None:
        process = self.processes.pop(index)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self, condition: str) -> None:
        for index in list(self.processes):
            self.kill(index)
        status = {"conditions": [{"type": condition, "status": "True"}]}
        write(self.path, json.dumps(self.manifest | {"status": status}))
        self.wait_for_deletion()

    def action(self, code: int) -> str:
        for rule in self.rules:
            on = rule.get("onExitCodes")
            if on and (code in on["values"]) == (on["operator"] == "In"):
                return rule["action"]
        return "Count"

    def run(self) -> None:
        restarts = 0
        while not (CLUSTER / f"{self.name}.delete").exists() and not is_over():
            ready = len(nodes())
            for index in range(self.count):
                if index >= ready and index in self.processes:
                    self.kill(index)  # its node is gone, and tells nothing
                if index < ready and index not in self.processes and self.codes.get(index) is None:
                    self.start(index)
            for index, process in list(self.processes.items()):
                if process.poll() is None:
                    continue
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                message = self.words(index).read_text()
                self.tell(index, {"terminated": {"exitCode": code, "message": message}})
                self.kill(index)
                if code == 0:
                    self.codes[index] = 0
                elif (action := self.action(code)) != "Ignore":
                    restarts += 1
                    most = self.manifest["spec"]["failurePolicy"]["maxRestarts"]
                    if action == "FailJob" or restarts > most:
                        return self.end("Failed")
                    for other in list(self.processes):
                        self.kill(other)
                    self.codes.clear()
            if len(self.codes) == self.count:
                return self.end("Completed")
            time.sleep(0.05)
        self.wait_for_deletion()

    def wait_for_deletion(self) -> None:
        while not (file := CLUSTER / f"{self.name}.delete").exists() and not is_over():
            time.sleep(0.05)
        for index in list(self.processes):
            self.kill(index)
        for path in CLUSTER.glob(f"pods/{self.name}-*.json"):
            path.unlink()
        file.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "run":
        return JobSet(words[1]).run()
    assert words[0] == "-n" and words[1], words
    words = words[2:]
    if words[0] == "apply":
        if words[2] == "-":
            return apply(json.load(sys.stdin))
        import yaml  # which takes longer than all else

        return apply(yaml.safe_load(pathlib.Path(words[2]).read_text()))
    if words[0] == "get":
        return get(words[1], words[3])
    if words[:2] == ["delete", "jobset"]:
        return delete(words[2])
    raise SystemExit(f"unknown: {words}")


if __name__ == "__main__":
    main()
