"""The section of the backend: what a process runs on."""

import dataclasses

from maxramp.keys.section import Keys, minimum, one_of, positive_or_open


@dataclasses.dataclass(frozen=True)
class BackendKeys(Keys):
    """What a process runs on, and how it finds the others."""

    hardware: str = one_of("auto", "cpu", "gpu", "tpu")
    jax_cache_dir: str
    join_timeout_seconds: int = minimum(1)
    devices_per_node: int = positive_or_open()
    processes_per_node: int = minimum(1)
