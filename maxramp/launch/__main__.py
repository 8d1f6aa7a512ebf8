"""Trains as a chain of jobs, here or on a cluster, and restarts them until the run is done.

python -m maxramp.launch CONFIG.yml --cluster local|slurm|gke [key=value ...] [--dry-run]

num_nodes and devices_per_node say what nodes you have; each job takes as many as the plan gives its
stage, and runs the program that the config is for (docs/pods.md).
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.outlive_readers()

import subprocess
import sys

from maxramp.commandline import command, config_parser
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.keys.section import is_object_storage, refuse
from maxramp.launch import gke, local, slurm
from maxramp.launch.jobs import Run
from maxramp.planning.stages import with_hosts

_CLUSTERS = {"local": local.launch, "slurm": slurm.launch, "gke": gke.launch}


@command
def main(arguments: list[str]) -> int:
    parser = config_parser(__doc__)
    parser.add_argument("--cluster", required=True, choices=_CLUSTERS, help="where jobs run")
    text = "print everything that would be started"
    parser.add_argument("--dry-run", action="store_true", help=text)
    options = parser.parse_intermixed_args(arguments)
    config, cluster = load(options.arguments, "launch"), options.cluster
    if cluster != "local":
        config = with_hosts(config)
    if cluster == "gke":
        gke.check(config)
    devices, output = config.batch.devices_per_node, config.run.base_output_directory
    refuse(
        [
            (
                devices == -1 and cluster != "local",
                f"devices_per_node=-1: --cluster {cluster} needs to know the devices of a "
                "node; give devices_per_node, or compile_topology",
            ),
            (
                cluster == "slurm" and is_object_storage(output),
                f"base_output_directory={output}: the script of --cluster slurm reads the "
                "run's folder through the file system; give a path that all nodes share, or "
                "mount the storage (GCS FUSE, Mountpoint for S3) and give that path",
            ),
        ]
    )
    if devices == -1:
        devices = _count_local_devices(config)
    config = config.replace(devices_per_node=devices, num_nodes=config.batch.nodes)
    run = Run.from_config(config, options.arguments, options.dry_run)
    return _CLUSTERS[cluster](run, options.dry_run)


def _count_local_devices(config: Config) -> int:
    """Counts the devices of this machine in another process: counting takes hold of them. A
    ConfigError if JAX finds none."""
    if config.backend.hardware == "cpu":
        return 1
    program = "import jax; print(jax.local_device_count())"
    counted = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    if counted.returncode:
        raise ConfigError("devices_per_node=-1: JAX finds no devices here; give devices_per_node")
    return int(counted.stdout)


if __name__ == "__main__":
    sys.exit(main())
