"""Trains as a chain of jobs, here or on a cluster, and restarts them until the run is done.

python -m maxramp.launch CONFIG.yml --cluster local|slurm|gke [key=value ...] [options]

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

_CLUSTERS = {"local": local.launch, "slurm": slurm.submit, "gke": gke.launch}


@command
def main(arguments: list[str]) -> int:
    parser = config_parser(__doc__)
    parser.add_argument("--cluster", required=True, choices=_CLUSTERS, help="where jobs run")
    text = "print everything that would be started"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "show the jobs of a run under slurm"
    parser.add_argument("--status", action="store_true", help=text)
    options = parser.parse_intermixed_args(arguments)
    config, cluster = load(options.arguments, "launch"), options.cluster
    devices, output = config.batch.devices_per_node, config.run.base_output_directory
    refuse(
        [
            (
                devices == -1 and cluster != "local",
                f"devices_per_node=-1: --cluster {cluster} needs to know the devices of a "
                "node; give devices_per_node",
            ),
            (
                options.status and cluster != "slurm",
                f"--status works with --cluster slurm, not {cluster}",
            ),
            (
                cluster == "slurm" and is_object_storage(output),
                f"base_output_directory={output}: the scripts of --cluster slurm read the "
                "run's folder through the file system; give a path that all nodes share, or "
                "mount the storage (GCS FUSE, Mountpoint for S3) and give that path",
            ),
        ]
    )
    devices = _local_devices(config) if devices == -1 else devices
    config = config.replace(devices_per_node=devices, num_nodes=config.batch.nodes)
    run = Run.from_config(config, options.arguments, options.dry_run)
    return slurm.print_status(run) if options.status else _CLUSTERS[cluster](run, options.dry_run)


def _local_devices(config: Config) -> int:
    """Devices of this machine, counted by a process of its own: counting takes hold of them."""
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
