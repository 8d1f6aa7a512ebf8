"""The section of launches: what a job is started with."""

import dataclasses
from collections.abc import Sequence

from maxramp.keys.section import Keys, at_least, one_of


@dataclasses.dataclass(frozen=True)
class LaunchKeys(Keys):
    """How maxramp.launch starts the jobs of a run."""

    processes_per_node: int = at_least(1)
    grace_seconds: int = at_least(1)
    max_restarts: int = at_least(0)
    setup_lines: Sequence[str]
    container_image: str
    container_runtime: str = one_of("pyxis", "apptainer")
    container_mounts: str
    slurm_account: str
    slurm_partition: str
    slurm_qos: str
    slurm_time: str
    slurm_options: Sequence[str]
    gke_accelerator: str
    gke_topology: str
    gke_namespace: str
    gke_queue: str
    gke_service_account: str
    gke_bucket: str
    gke_volume_claim: str
    gke_mount_path: str
