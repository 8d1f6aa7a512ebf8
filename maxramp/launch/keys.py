"""The section of launches: what a job is started with."""

import dataclasses
from collections.abc import Sequence

from maxramp.keys.section import Keys, form, limit, minimum, one_of

# The chip of each TPU by the label that GKE gives its nodes.
TPUS = {
    **{"tpu-v4-podslice": "v4", "tpu-v5-lite-podslice": "v5e", "tpu-v5p-slice": "v5p"},
    "tpu-v6e-slice": "v6e",
}


def _sbatch_text() -> str:
    """Makes the field of an option of sbatch, whose own reading of quotes is not a shell's."""
    return form(r"[A-Za-z0-9._:,@+-]+", "holds characters that SLURM has not; leave them out")


def _kubernetes_name() -> str:
    """Makes the field of a name of an object on Kubernetes."""
    text = "is not a Kubernetes name (lower-case letters, digits, - and .)"
    return form(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", text)


@dataclasses.dataclass(frozen=True)
class LaunchKeys(Keys):
    """How maxramp.launch starts the jobs of a run."""

    processes_per_node: int = minimum(1)
    grace_seconds: int = minimum(1)
    max_restarts: int = minimum(0)
    elastic: bool
    node_rest_seconds: int = minimum(0)
    max_node_failures: int = minimum(1)
    setup_lines: Sequence[str] = form(r"(?s:.*)", "must be lines of shell; quote each")
    container_image: str
    container_runtime: str = one_of("pyxis", "apptainer")
    container_mounts: str
    slurm_account: str = _sbatch_text()
    slurm_partition: str = _sbatch_text()
    slurm_qos: str = _sbatch_text()
    slurm_time: str = _sbatch_text()
    slurm_options: Sequence[str] = form(
        r"--[a-z][A-Za-z0-9._:,@+=/*\[\]()&|%-]*",
        "must be options of sbatch of the form --name=value, without blanks or quotes",
    )
    gke_accelerator: str = limit(
        lambda label: label in TPUS or not label.startswith("tpu"),
        f"is not one of {', '.join(TPUS)}",
    )
    gke_topology: str
    gke_namespace: str = _kubernetes_name()
    gke_queue: str = _kubernetes_name()
    gke_service_account: str = _kubernetes_name()
    gke_bucket: str
    gke_volume_claim: str = _kubernetes_name()
    gke_mount_path: str
