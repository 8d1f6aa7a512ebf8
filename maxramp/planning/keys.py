"""The section of plans: what a device does and holds, and the pod to compile for."""

import dataclasses

from maxramp.keys.section import Keys, above_zero_or_open, minimum, share


@dataclasses.dataclass(frozen=True)
class PlanKeys(Keys):
    """What a plan assumes of the devices."""

    planned_tflops_per_device: float = above_zero_or_open()
    price_per_device_hour: float = above_zero_or_open()
    planned_pass_overhead: float = minimum(0)
    restart_minutes: float = minimum(0)
    device_memory_gib: float = above_zero_or_open()
    planned_flops_share: float = share()
    planned_memory_share: float = share()
    planned_link_share: float = share()
    compile_topology: str
    compile_topology_num_slices: int = minimum(1)
