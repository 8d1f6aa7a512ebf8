"""A run on Kubernetes: a JobSet for every number of nodes, applied one after another.

`gke/NAME/` in the folder of the launch holds the YAML. NAME ends in a hash of what the objects are
made from, so a changed configuration gets its own: it neither changes those of a job that runs nor
finds them completed. The label `maxramp/run` joins all objects of a run, which a launch does not
start beside a job of the same run.

What the exit statuses of a pod's supervisor become: 0 completes the JobSet; 76, and pods that
Kubernetes takes away, are replaced without being counted; where a pod is killed (137), all are
replaced, up to `max_restarts` times; anything else fails the JobSet at once.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
from typing import Any

import yaml

import maxramp
from maxramp.commandline import count
from maxramp.config.load import dump_config
from maxramp.errors import EXIT_PREEMPTED, ConfigError
from maxramp.keys.section import is_object_storage, refuse
from maxramp.launch.gke_cluster import GkeCluster
from maxramp.launch.jobs import TRAINER_KEYS, Run, write_private
from maxramp.launch.supervisor import stop_on_signals, supervise
from maxramp.planning import topology
from maxramp.processes.nodes import VARIABLE

_PORT = 8476
TPUS = {
    **{"tpu-v4-podslice": "v4", "tpu-v5-lite-podslice": "v5e", "tpu-v5p-slice": "v5p"},
    "tpu-v6e-slice": "v6e",
}

_KILLED = 137


def launch(run: Run, dry_run: bool) -> int:
    run = check(run)
    labels, files = manifests(run)
    if dry_run:
        for name, text in files.items():
            print(f"### {name}\n{text}")
        return 0
    if not shutil.which("kubectl"):
        raise ConfigError(
            "--cluster gke: no kubectl on the path; install it and get the cluster's "
            "credentials, or use --dry-run to see the YAML"
        )
    folder = pathlib.Path("gke") / labels["maxramp/launch"]  # here: the run's own is the cluster's
    write_private(folder, files)
    selector = ",".join(f"{key}={value}" for key, value in _selector(run).items())
    cluster = GkeCluster(run, folder, labels, selector)
    stop_on_signals(cluster)
    return supervise(run, cluster, cluster.nodes_of_jobset() or run.next_nodes)


def manifests(run: Run) -> tuple[dict[str, str], dict[str, str]]:
    """The labels of a launch, and its files: config.yaml, and a JobSet for each number of nodes."""
    keys, name, counts = run.config.launch, run.config.run.run_name, sorted(run.all_node_counts())
    # As the jobs read it: what the command line would have changed is in it.
    config = dump_config(run.config.replace(**TRAINER_KEYS))
    content = [maxramp.__version__, config, counts, list(keys.setup_lines)]
    launch = _hash_name(name, json.dumps(content))  # another configuration has another name
    # A run is a folder of a storage, whatever volume the data may be on.
    far = is_object_storage(str(run.folder))
    storage = ["", ""] if far else [keys.gke_bucket, keys.gke_volume_claim]
    joined = _hash_name(name, json.dumps([keys.gke_namespace, *storage, str(run.folder)]))
    labels = {"maxramp/run": joined, "maxramp/launch": launch}
    metadata = {"namespace": keys.gke_namespace, "name": launch, "labels": labels}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    objects = {"config": config_map | {"data": {"config.yml": config}}}
    for nodes in counts:
        of_nodes = f"{launch}-{nodes}"
        objects[of_nodes] = _jobset(run, metadata | {"name": of_nodes}, nodes)
    return labels, {
        f"{name}.yaml": yaml.dump(one, Dumper=_Manifest, sort_keys=False, width=100)
        for name, one in objects.items()
    }


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


def _jobset(run: Run, metadata: dict[str, Any], nodes: int) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) of one pod a node; of a TPU one Job a slice."""
    keys, slices = run.config.launch, _slices(run, nodes)
    gave_up = {"operator": "NotIn", "values": [EXIT_PREEMPTED, _KILLED]}
    stopped = {"operator": "In", "values": [EXIT_PREEMPTED]}
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
                {"action": "Ignore", "onPodConditions": [disruption]},
                {"action": "FailJob", "onExitCodes": {"containerName": "train"} | gave_up},
                {"action": "Ignore", "onExitCodes": {"containerName": "train"} | stopped},
            ]
        },
        "template": {
            "metadata": {"annotations": {"gke-gcsfuse/volumes": "true"} if keys.gke_bucket else {}},
            "spec": _pod(run, metadata, nodes),
        },
    }
    gave_up = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
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
                "rules": [{"name": "gave-up"} | gave_up],
            },
            "replicatedJobs": [{"name": "nodes", "replicas": slices, "template": {"spec": job}}],
        },
    }


def _pod(run: Run, metadata: dict[str, Any], nodes: int) -> dict[str, Any]:
    """The pod of a node: where it runs, what it mounts, how it finds the others, its supervisor."""
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
    if keys.elastic:
        counted = {"configMap": {"name": f"{metadata['labels']['maxramp/launch']}-nodes"}}
        volumes["nodes"] = "/etc/maxramp-nodes", counted
        environment[VARIABLE] = f"/etc/maxramp-nodes/{VARIABLE}"
    program = ["python", "-m", "maxramp.launch.gke_pod", str(nodes), "/dev/termination-log"]
    container = {
        "name": "train",
        "image": keys.container_image,
        "command": ["/bin/sh", "-c", "\n".join([*keys.setup_lines, 'exec "$@"']), "maxramp"],
        "args": [*program, "/etc/maxramp/config.yml"],
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


def check(run: Run) -> Run:
    """Refuses what cannot run on Kubernetes; returns the run with nodes that on TPUs come and go
    with their slice.
    """
    _check(run)
    tpu = run.config.launch.gke_accelerator in TPUS
    unit = max(1, _chips(run) // run.config.batch.devices_per_node) if tpu else 1
    return dataclasses.replace(run, unit=unit)


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
