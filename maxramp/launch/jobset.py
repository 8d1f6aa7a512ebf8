"""The JobSet of one job on Kubernetes: a pod a node, and what an exit status becomes."""

from typing import Any

from maxramp.commandline import count
from maxramp.errors import EXIT_CONFIG, EXIT_PREEMPTED, EXIT_STAGE_END, ConfigError
from maxramp.launch.jobs import Run
from maxramp.launch.keys import LaunchKeys
from maxramp.planning import topology

_PORT = 8476
TPUS = {
    **{"tpu-v4-podslice": "v4", "tpu-v5-lite-podslice": "v5e", "tpu-v5p-slice": "v5p"},
    "tpu-v6e-slice": "v6e",
}

# Process 1 of a container: Kubernetes sends it the SIGTERM, and has one status for success.
_ENTRY = """"$@" &
child=$!
trap 'kill -TERM "$child"' TERM
wait "$child"; status=$?
while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done
[ "$status" = @SUCCESS@ ] && exit 0
exit "$status"
"""


def jobset(run: Run, name: str, config_map: str, nodes: int, last: bool) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) of one pod a node; of a TPU one Job a slice.

    Args:
      run: that is launched.
      name: of the JobSet.
      config_map: the name of the one with the configuration.
      nodes: of the job.
      last: whether no job follows.

    Raises:
      ConfigError: the nodes are no whole slices of TPUs.
    """
    keys = run.keys
    slices = _slices(run, nodes)
    annotations = {"maxramp/run-name": run.name}
    if keys.gke_accelerator in TPUS:
        pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        annotations = pool | annotations
    metadata = {"name": name, "namespace": keys.gke_namespace, "annotations": annotations}
    if keys.gke_queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": keys.gke_queue}
    job = _job(nodes // slices, keys, _pod(run, name, config_map, nodes, last))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": keys.max_restarts,
                "rules": [
                    {
                        "name": "wrong-configuration",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": "nodes", "replicas": slices, "template": {"spec": job}}],
        },
    }


def _job(pods: int, keys: LaunchKeys, pod: dict[str, Any]) -> dict[str, Any]:
    """A Job of so many pods: which exit status ends it, and which is only a pod to replace."""
    on_exit = {"containerName": "train", "operator": "In"}
    return {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {**on_exit, "values": [EXIT_CONFIG, EXIT_STAGE_END]},
                },
                {"action": "Ignore", "onExitCodes": {**on_exit, "values": [EXIT_PREEMPTED]}},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {
            "metadata": {"annotations": {"gke-gcsfuse/volumes": "true"} if keys.gke_bucket else {}},
            "spec": pod,
        },
    }


def _pod(run: Run, name: str, config_map: str, nodes: int, last: bool) -> dict[str, Any]:
    """The pod of a node: where it runs, what it mounts, and how it finds the others."""
    keys = run.keys
    selector = {"cloud.google.com/gke-accelerator": keys.gke_accelerator}
    environment = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    if keys.gke_accelerator in TPUS:  # GKE tells a slice's pods of each other, and JAX reads it
        selector = {
            "cloud.google.com/gke-tpu-accelerator": keys.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": keys.gke_topology,
        }
    else:  # the place of a process is its pod's JOB_COMPLETION_INDEX
        environment += [
            {"name": "MAXRAMP_COORDINATOR", "value": f"{name}-nodes-0-0.{name}:{_PORT}"},
            {"name": "MAXRAMP_NUM_PROCESSES", "value": str(nodes)},
        ]
    volumes = {"config": ("/etc/maxramp", {"configMap": {"name": config_map}})}
    if storage := _storage(keys):
        volumes["shared"] = keys.gke_mount_path, storage
    volumes["memory"] = "/dev/shm", {"emptyDir": {"medium": "Memory"}}
    mounts = [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": keys.grace_seconds,
        "nodeSelector": selector,
        "containers": [_container(run, environment, mounts, last)],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }
    if keys.gke_service_account:
        pod["serviceAccountName"] = keys.gke_service_account
    return pod


def _container(
    run: Run, environment: list[dict[str, str]], mounts: list[dict[str, str]], last: bool
) -> dict[str, Any]:
    """The trainer's process; the end of a stage is its success where a job follows."""
    keys = run.keys
    entry = _ENTRY.replace("@SUCCESS@", str(0 if last else EXIT_STAGE_END))
    kind = "google.com/tpu" if keys.gke_accelerator in TPUS else "nvidia.com/gpu"
    return {
        "name": "train",
        "image": keys.container_image,
        "command": ["/bin/sh", "-c", "\n".join([*map(str, keys.setup_lines), entry]), "maxramp"],
        "args": ["python", "-m", run.module, "/etc/maxramp/config.yml"],
        "env": environment,
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {kind: run.devices_per_node}},
        "volumeMounts": mounts,
    }


def _storage(keys: LaunchKeys) -> dict[str, Any]:
    """The volume that all pods share; nothing where nothing is given."""
    if keys.gke_bucket:
        bucket = {"bucketName": keys.gke_bucket}
        return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": bucket}}
    if keys.gke_volume_claim:
        return {"persistentVolumeClaim": {"claimName": keys.gke_volume_claim}}
    return {}


def _slices(run: Run, nodes: int) -> int:
    """Slices of a job on TPUs, which grow by whole ones; 1 on GPUs."""
    keys = run.keys
    version = TPUS.get(keys.gke_accelerator)
    if not version:
        return 1
    if not keys.gke_topology:
        raise ConfigError(
            f"gke_topology is not given; gke_accelerator={keys.gke_accelerator} needs it"
        )
    chips = topology.parse(f"{version}:{keys.gke_topology}").chips
    slices, rest = divmod(nodes * run.devices_per_node, chips)
    if rest or chips % run.devices_per_node:
        taken = nodes * run.devices_per_node
        raise ConfigError(
            f"stage {run.stages_on(nodes)} takes {count(nodes, 'node')} of "
            f"{count(run.devices_per_node, 'chip')} = {taken}, no whole slices of gke_topology="
            f"{keys.gke_topology} ({count(chips, 'chip')}); use a smaller topology, or min_nodes="
            f"{chips // run.devices_per_node}"
        )
    return slices
