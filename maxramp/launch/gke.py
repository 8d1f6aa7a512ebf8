"""Jobs on Kubernetes: a JobSet for the stages on the same nodes, applied one after another.

`gke/NAME/` in the folder of the launch holds the YAML and `run.sh`, which applies a JobSet, waits
for its end before the next. It can be ended and started again at any time: what is
completed stays so.

NAME ends in a hash of what the objects are made from, so a changed configuration gets its own: it
neither changes those of a job that runs nor finds them completed. The label `maxramp/run` joins all
objects of a run; run.sh refuses to start beside a job of the same run.

What the exit statuses become: 75 completes the JobSet (it fails the last one, which nothing
follows); 76, and pods that Kubernetes takes away, are replaced without being counted; 2 fails the
JobSet at once; anything else restarts all its pods, up to `max_restarts` times.
"""

import hashlib
import itertools
import json
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

import yaml

import maxramp
from maxramp.commandline import count
from maxramp.config.load import dump_config
from maxramp.errors import EXIT_CONFIG, EXIT_PREEMPTED, EXIT_STAGE_END, ConfigError
from maxramp.keys.section import is_object_storage, refuse
from maxramp.launch import gke_nodes
from maxramp.launch.jobs import TRAINER_KEYS, Run, write_private
from maxramp.planning import topology
from maxramp.processes.nodes import VARIABLE

_PORT = 8476
TPUS = {
    **{"tpu-v4-podslice": "v4", "tpu-v5-lite-podslice": "v5e", "tpu-v5p-slice": "v5p"},
    "tpu-v6e-slice": "v6e",
}

_HEAD = r"""#!/bin/sh
# Runs the JobSets of a run one after another. Written by maxramp.launch; it can be started again.
set -eu
cd "$(dirname "$0")"
is() {
    kubectl -n @NAMESPACE@ wait "--for=condition=$1" "--timeout=$2" "jobset/$name" 2> /dev/null
}
stop_if_failed() {
    is Failed 0s || return 0
    echo "$name failed: kubectl -n @NAMESPACE@ describe jobset $name says why;" \
        "delete it and start again to continue" >&2
    exit 1
}
# JobSets of this run that another configuration started, each with the conditions that are true.
states='{.status.conditions[?(@.status=="True")].type}'
others=$(kubectl -n @NAMESPACE@ get jobset -l 'maxramp/run=@RUN@,maxramp/launch!=@LAUNCH@' \
    -o "jsonpath={range .items[*]}{.metadata.name} $states{\"\n\"}{end}")
active=$(echo "$others" | grep -v -E "^$| (.* )?(Completed|Failed)( |$)" || true)
if [ -n "$active" ]; then
    echo "error:" ${active%% *} "of this run is active with another configuration;" \
        "kubectl -n @NAMESPACE@ delete jobset" ${active%% *} "ends it" >&2
    exit 2
fi
kubectl apply -f config.yaml
"""

_CHAIN = r"""
for name in @NAMES@; do
    if is Completed 0s; then
        echo "$name was completed before; kubectl -n @NAMESPACE@ delete jobset $name forgets it"
        continue
    fi
    kubectl apply -f "$name.yaml"
    until is Completed 60s; do
        stop_if_failed
        sleep 1
    done
done
"""

# Process 1 of a container: Kubernetes sends it the SIGTERM, and has one status for success.
_ENTRY = """"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
wait "$child"; status=$?
while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done
@SAY_NODES@[ "$status" = @SUCCESS@ ] && exit 0
exit "$status"
"""


def apply(run: Run, dry_run: bool) -> int:
    launch, files = manifests(run)
    if dry_run:
        for name, text in files.items():
            print(f"### {name}\n{text}")
        return 0
    if not shutil.which("kubectl"):
        raise ConfigError(
            "--cluster gke: no kubectl on the path; install it and get the cluster's "
            "credentials, or use --dry-run to see the YAML"
        )
    folder = pathlib.Path("gke") / launch  # here: the run's own is the cluster's
    write_private(folder, files)
    return subprocess.run(["sh", str(folder / "run.sh")], check=False).returncode


def manifests(run: Run) -> tuple[str, dict[str, str]]:
    """The name of a launch, and its files by theirs: config.yaml, a JobSet for each job, run.sh."""
    _check(run)
    keys, name = run.config.launch, run.config.run.run_name
    counts = [nodes for nodes, _ in itertools.groupby(stage.nodes for stage in run.stages)]
    of_slice, planned = _slice_nodes(run), run.node_counts()
    if keys.elastic:
        found = sorted(run.all_node_counts())
        counts = [nodes for nodes in found if nodes in planned or nodes % of_slice == 0]
    # As the jobs read it: what the command line would have changed is in it.
    config = dump_config(run.config.replace(**TRAINER_KEYS))
    made_from = [maxramp.__version__, config, counts, list(keys.setup_lines)]
    launch = _hash_name(name, json.dumps(made_from))  # another configuration has another name
    # A run is a folder of a storage, whatever volume the data may be on.
    far = is_object_storage(str(run.folder))
    storage = ["", ""] if far else [keys.gke_bucket, keys.gke_volume_claim]
    joined = _hash_name(name, json.dumps([keys.gke_namespace, *storage, str(run.folder)]))
    labels = {"maxramp/run": joined, "maxramp/launch": launch}
    metadata = {"namespace": keys.gke_namespace, "name": launch, "labels": labels}
    names = [f"{launch}-{of}" for of in (counts if keys.elastic else range(len(counts)))]
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    found = {"config": config_map | {"data": {"config.yml": config}}}
    found |= {
        name: _jobset(
            run, metadata | {"name": name}, nodes, last=name == names[-1] and not keys.elastic
        )
        for name, nodes in zip(names, counts, strict=True)
    }
    files = {
        f"{name}.yaml": yaml.dump(one, Dumper=_Manifest, sort_keys=False, width=100)
        for name, one in found.items()
    }
    values = {"NAMES": " ".join(names), "NAMESPACE": shlex.quote(keys.gke_namespace)}
    values |= {"RUN": joined, "LAUNCH": launch, "FIRST": run.next_nodes}
    values |= {"COUNTS": " ".join(map(str, counts)), "ALL_NODES": run.config.batch.nodes}
    values |= {"OF_SLICE": of_slice, "PATIENCE": keys.grace_seconds + 60}
    values["SELECTOR"] = ",".join(f"{key}={value}" for key, value in _selector(run).items())
    script = _HEAD + (gke_nodes.FOLLOW if keys.elastic else _CHAIN)
    script = re.sub("@([A-Z_]+)@", lambda match: str(values[match[1]]), script)
    return launch, files | {"run.sh": script}


def _hash_name(name: str, content: str) -> str:
    """A name that Kubernetes takes, short because the names of pods begin with it.

    Its last part tells two contents apart where the first is cut or rewritten to the same.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:21].strip("-")
    if not slug[:1].isalpha():
        slug = f"run-{slug}".rstrip("-")
    return f"{slug}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


class _Manifest(yaml.SafeDumper):
    """YAML as Kubernetes reads it, which is 1.1; texts of several lines as blocks, to be read."""


_Manifest.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _check(run: Run) -> None:
    keys, output = run.config.launch, run.config.run.base_output_directory
    mount, path = map(pathlib.PurePosixPath, (keys.gke_mount_path, output))
    far = is_object_storage(output)  # the pods need no volume for the run
    volumes = [name for name in (keys.gke_bucket, keys.gke_volume_claim) if name]
    tpu = keys.gke_accelerator.startswith("tpu")
    refuse(
        [
            *(
                (not getattr(keys, name), f"{name} is not given; --cluster gke needs it")
                for name in ("container_image", "gke_accelerator")
            ),
            (
                keys.processes_per_node != 1,
                f"processes_per_node={keys.processes_per_node}: a pod of --cluster gke is one "
                "process; use 1",
            ),
            (
                len(volumes) > 1 or not (volumes or far),
                f"gke_bucket={keys.gke_bucket} and gke_volume_claim={keys.gke_volume_claim}: "
                "give one of them, the storage that all pods share"
                + ("" if volumes else ", or a base_output_directory such as gs://bucket/folder"),
            ),
            (
                not far and mount not in (path, *path.parents),
                f"base_output_directory={output} does not lie below gke_mount_path="
                f"{keys.gke_mount_path}, where the pods see the storage that they share",
            ),
            (
                tpu and keys.gke_accelerator not in TPUS,
                f"gke_accelerator={keys.gke_accelerator} is not one of {', '.join(TPUS)}",
            ),
            (
                tpu and not keys.gke_topology,
                f"gke_topology is not given; gke_accelerator={keys.gke_accelerator} needs it",
            ),
        ]
    )


def _jobset(run: Run, metadata: dict[str, Any], nodes: int, last: bool) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) of one pod a node; of a TPU one Job a slice.

    `last` says that no job follows.
    """
    keys, slices = run.config.launch, _slices(run, nodes)
    on_exit, ends = {"containerName": "train", "operator": "In"}, [EXIT_CONFIG, EXIT_STAGE_END]
    disruption = {"type": "DisruptionTarget", "status": "True"}
    tpu = keys.gke_accelerator in TPUS
    pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    queue = {"kueue.x-k8s.io/queue-name": keys.gke_queue} if keys.gke_queue else {}
    job = {
        "parallelism": nodes // slices,
        "completions": nodes // slices,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {  # which exit status ends the job, and which is only a pod to replace
            "rules": [
                {"action": "FailJob", "onExitCodes": on_exit | {"values": ends}},
                {"action": "Ignore", "onExitCodes": on_exit | {"values": [EXIT_PREEMPTED]}},
                {"action": "Ignore", "onPodConditions": [disruption]},
            ]
        },
        "template": {
            "metadata": {"annotations": {"gke-gcsfuse/volumes": "true"} if keys.gke_bucket else {}},
            "spec": _pod(run, metadata, nodes, last),
        },
    }
    wrong = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            **metadata,
            "annotations": (pool if tpu else {}) | {"maxramp/run-name": run.config.run.run_name},
            "labels": metadata["labels"] | queue,
        },
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": keys.max_restarts,
                "rules": [{"name": "wrong-configuration"} | wrong],
            },
            "replicatedJobs": [{"name": "nodes", "replicas": slices, "template": {"spec": job}}],
        },
    }


def _pod(run: Run, metadata: dict[str, Any], nodes: int, last: bool) -> dict[str, Any]:
    """The pod of a node: where it runs, what it mounts, how it finds the others, and its trainer.

    The end of a stage is the trainer's success where a job follows.
    """
    keys, name = run.config.launch, metadata["name"]
    environment = {"PYTHONUNBUFFERED": "1"}
    if keys.gke_accelerator in TPUS:  # GKE tells a slice's pods of each other, and JAX reads it
        device = "google.com/tpu"
    else:  # the place of a process is its pod's JOB_COMPLETION_INDEX
        device = "nvidia.com/gpu"
        environment["MAXRAMP_COORDINATOR"] = f"{name}-nodes-0-0.{name}:{_PORT}"
        environment["MAXRAMP_NUM_PROCESSES"] = str(nodes)
    volumes = {
        "config": ("/etc/maxramp", {"configMap": {"name": metadata["labels"]["maxramp/launch"]}})
    }
    if keys.gke_bucket:
        bucket = {"volumeAttributes": {"bucketName": keys.gke_bucket}}
        shared = {"csi": {"driver": "gcsfuse.csi.storage.gke.io"} | bucket}
    else:
        shared = {"persistentVolumeClaim": {"claimName": keys.gke_volume_claim}}
    if keys.gke_bucket or keys.gke_volume_claim:
        volumes["shared"] = keys.gke_mount_path, shared
    volumes["memory"] = "/dev/shm", {"emptyDir": {"medium": "Memory"}}
    words = {"SAY_NODES": "", "SUCCESS": 0 if last else EXIT_STAGE_END}
    if keys.elastic:
        found = {"configMap": {"name": f"{metadata['labels']['maxramp/launch']}-nodes"}}
        volumes["nodes"] = "/etc/maxramp-nodes", found
        environment[VARIABLE] = "/etc/maxramp-nodes/nodes"
        words["SAY_NODES"] = gke_nodes.say_nodes(run.folder)
    entry = re.sub("@([A-Z_]+)@", lambda match: str(words[match[1]]), _ENTRY)
    container = {
        "name": "train",
        "image": keys.container_image,
        "command": ["/bin/sh", "-c", "\n".join([*keys.setup_lines, entry]), "maxramp"],
        "args": ["python", "-m", run.module, "/etc/maxramp/config.yml"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {device: run.config.batch.devices_per_node}},
        "volumeMounts": [{"name": name, "mountPath": at} for name, (at, _) in volumes.items()],
    }
    account = keys.gke_service_account
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": keys.grace_seconds,
        "nodeSelector": _selector(run),
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        **({"serviceAccountName": account} if account else {}),
    }


def _selector(run: Run) -> dict[str, str]:
    """Labels of the nodes that pods take."""
    keys = run.config.launch
    if keys.gke_accelerator not in TPUS:
        return {"cloud.google.com/gke-accelerator": keys.gke_accelerator}
    return {
        "cloud.google.com/gke-tpu-accelerator": keys.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": keys.gke_topology,
    }


def _chips(run: Run) -> int:
    """Of a TPU slice."""
    keys = run.config.launch
    return topology.parse(f"{TPUS[keys.gke_accelerator]}:{keys.gke_topology}").chips


def _slice_nodes(run: Run) -> int:
    """Nodes that come and go together: those of a TPU slice; 1 on GPUs."""
    tpu = run.config.launch.gke_accelerator in TPUS
    return max(1, _chips(run) // run.config.batch.devices_per_node) if tpu else 1


def _slices(run: Run, nodes: int) -> int:
    """Slices of a job on TPUs, which grow by whole ones; 1 on GPUs."""
    keys, of_node = run.config.launch, run.config.batch.devices_per_node
    if keys.gke_accelerator not in TPUS:
        return 1
    chips = _chips(run)
    slices, rest = divmod(nodes * of_node, chips)
    if rest or chips % of_node:
        raise ConfigError(
            f"stage {run.stages_on(nodes)} takes {count(nodes, 'node')} of "
            f"{count(of_node, 'chip')} = {nodes * of_node}, no whole slices of gke_topology="
            f"{keys.gke_topology} ({count(chips, 'chip')}); use a smaller topology, or min_nodes="
            f"{chips // of_node}"
        )
    return slices
