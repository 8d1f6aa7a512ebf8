"""A run on Kubernetes: a JobSet for every number of nodes, applied one after another.

`gke/NAME/` in the current folder holds the YAML. NAME ends in a hash of what the objects are made
from, so a changed configuration gets its own: it neither changes those of a job that runs nor finds
them completed. The label `maxramp/run` joins all objects of a run: a launch starts nothing while a
job of another launch of the run is active.

What follows the exit status of a pod's supervisor: 0 completes the JobSet; 76, and pods that
Kubernetes takes away, are replaced without being counted; if a pod is killed (137), all are
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
from maxramp.config.keys import Config
from maxramp.config.load import dump_config
from maxramp.errors import EXIT_PREEMPTED, ConfigError
from maxramp.keys.section import is_object_storage
from maxramp.launch.gke_cluster import GkeCluster
from maxramp.launch.jobs import TRAINER_KEYS, Run, write_private
from maxramp.launch.keys import TPUS
from maxramp.launch.supervisor import stop_on_signals, supervise
from maxramp.planning import topology
from maxramp.processes.agreement import VARIABLE

_PORT = 8476
_KILLED = 137


def launch(run: Run, dry_run: bool) -> int:
    """Trains a run, or prints its files, which it writes to gke/ here; returns the exit status.
    Called in the main thread. A ConfigError without kubectl, or as `fill_slices` and `GkeCluster`.
    """
    run = fill_slices(run)
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
    folder = pathlib.Path("gke") / labels["maxramp/launch"]  # the run's is the cluster's
    write_private(folder, files)
    selector = ",".join(f"{key}={value}" for key, value in _node_selector(run).items())
    cluster = GkeCluster(run, folder, labels, selector)
    stop_on_signals(cluster)
    return supervise(run, cluster, cluster.nodes_of_jobset() or run.next_nodes)


def check(config: Config) -> None:
    """Refuses a loaded config that cannot run on Kubernetes, by all reasons in one ConfigError."""
    keys, output = config.launch, config.run.base_output_directory
    mount, path = map(pathlib.PurePosixPath, (keys.gke_mount_path, output))
    is_in_storage = is_object_storage(output)  # the pods need no volume for the run
    volumes = [name for name in (keys.gke_bucket, keys.gke_volume_claim) if name]
    needed = "container_image", "gke_accelerator", "devices_per_node"
    readers = dict.fromkeys(needed, "--cluster gke")
    if keys.gke_accelerator in TPUS:
        readers["gke_topology"] = f"gke_accelerator={keys.gke_accelerator}"
    missing = [name for name in readers if config.values[name] in ("", -1)]
    errors = [
        text
        for is_broken, text in (
            (
                missing,
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given; "
                f"needed by {' and '.join(dict.fromkeys(readers[name] for name in missing))}",
            ),
            (
                keys.processes_per_node != 1,
                f"processes_per_node={keys.processes_per_node}: a pod of --cluster gke is one "
                "process; use 1",
            ),
            (
                len(volumes) > 1 or not (volumes or is_in_storage),
                f"gke_bucket={keys.gke_bucket} and gke_volume_claim={keys.gke_volume_claim}: "
                "give one of them, the storage that all pods share"
                + ("" if volumes else ", or a base_output_directory such as gs://bucket/folder"),
            ),
            (
                not is_in_storage and mount not in (path, *path.parents),
                f"base_output_directory={output} does not lie below gke_mount_path="
                f"{keys.gke_mount_path}, where the pods see the storage that they share",
            ),
        )
        if is_broken
    ]
    if errors:
        raise ConfigError(". ".join(errors))


def fill_slices(run: Run) -> Run:
    """Returns a run with the nodes of a TPU slice, if it is on TPUs; refuses jobs on parts of
    slices."""
    keys, devices = run.config.launch, run.config.batch.devices_per_node
    if keys.gke_accelerator not in TPUS:
        return run
    chips = topology.parse(f"{TPUS[keys.gke_accelerator]}:{keys.gke_topology}").chips
    run = dataclasses.replace(run, nodes_per_slice=max(1, chips // devices))
    for nodes in run.node_counts():
        if chips % devices or nodes % run.nodes_per_slice:
            raise ConfigError(
                f"{run.stages_on(nodes)}: {count(nodes, 'node')} of "
                f"{count(devices, 'chip')} = {nodes * devices} do not fill slices of gke_topology="
                f"{keys.gke_topology} ({count(chips, 'chip')}); use a smaller topology, or "
                f"min_nodes={run.nodes_per_slice}"
            )
    return run


def manifests(run: Run) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the labels of a launch of a run that `fill_slices` returned, and its files:
    config.yaml, and a JobSet for each number of nodes."""
    keys, name, counts = run.config.launch, run.config.run.run_name, sorted(run.node_counts())
    # As the jobs read it: it has what the command line would have changed.
    config = dump_config(run.config.replace(**TRAINER_KEYS))
    content = [maxramp.__version__, config, counts, list(keys.setup_lines)]
    launch = _hash_name(name, json.dumps(content))
    # A run is a folder of a storage, whatever volume the data may be on.
    storage = [keys.gke_bucket, keys.gke_volume_claim]
    if is_object_storage(str(run.folder)):
        storage = ["", ""]
    run_label = _hash_name(name, json.dumps([keys.gke_namespace, *storage, str(run.folder)]))
    labels = {"maxramp/run": run_label, "maxramp/launch": launch}
    metadata = {"namespace": keys.gke_namespace, "name": launch, "labels": labels}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    objects = {"config": config_map | {"data": {"config.yml": config}}}
    for nodes in counts:
        jobset = f"{launch}-{nodes}"
        objects[jobset] = _jobset(run, metadata | {"name": jobset}, nodes)
    return labels, {
        f"{name}.yaml": yaml.dump(content, Dumper=_Manifest, sort_keys=False, width=100)
        for name, content in objects.items()
    }


def _hash_name(name: str, content: str) -> str:
    """Makes a name for Kubernetes, short because the names of pods begin with it, whose last part
    differs where the content does.
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


def _jobset(run: Run, metadata: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Describes a JobSet (jobset.x-k8s.io/v1alpha2) of one pod a node; on TPUs, which `nodes` fill
    in whole slices, each slice has a Job. `metadata` are the JobSet's."""
    keys, is_tpu = run.config.launch, run.config.launch.gke_accelerator in TPUS
    pods = run.nodes_per_slice if is_tpu else nodes
    gave_up = {"operator": "NotIn", "values": [EXIT_PREEMPTED, _KILLED]}
    stopped = {"operator": "In", "values": [EXIT_PREEMPTED]}
    disruption = {"type": "DisruptionTarget", "status": "True"}
    pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    queue = {"kueue.x-k8s.io/queue-name": keys.gke_queue} if keys.gke_queue else {}
    job = {
        "parallelism": pods,
        "completions": pods,
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
            "annotations": (pool if is_tpu else {}) | {"maxramp/run-name": run.config.run.run_name},
            "labels": metadata["labels"] | queue,
        },
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": keys.max_restarts,
                "rules": [{"name": "gave-up"} | gave_up],
            },
            "replicatedJobs": [
                {"name": "nodes", "replicas": nodes // pods, "template": {"spec": job}}
            ],
        },
    }


def _pod(run: Run, metadata: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Describes the pod of a node: where it runs, what it mounts, how it finds the others, and its
    supervisor.
    """
    keys, name = run.config.launch, metadata["name"]
    environment = {"PYTHONUNBUFFERED": "1"}
    if keys.gke_accelerator in TPUS:  # GKE tells a slice's pods of each other, and JAX reads it
        device = "google.com/tpu"
    else:  # a process has the number of its pod, JOB_COMPLETION_INDEX
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
    program = ["python", "-m", "maxramp.launch.gke_cluster", str(nodes), "/dev/termination-log"]
    container = {
        "name": "train",
        "image": keys.container_image,
        "command": ["/bin/sh", "-c", "\n".join([*keys.setup_lines, 'exec "$@"']), "maxramp"],
        "args": [*program, "/etc/maxramp/config.yml"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {device: run.config.batch.devices_per_node}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    account = keys.gke_service_account
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": keys.grace_seconds,
        "nodeSelector": _node_selector(run),
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        **({"serviceAccountName": account} if account else {}),
    }


def _node_selector(run: Run) -> dict[str, str]:
    """Returns the labels of the nodes that pods take."""
    keys = run.config.launch
    if keys.gke_accelerator not in TPUS:
        return {"cloud.google.com/gke-accelerator": keys.gke_accelerator}
    return {
        "cloud.google.com/gke-tpu-accelerator": keys.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": keys.gke_topology,
    }
