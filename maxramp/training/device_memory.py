"""The memory of a device, and how much of it a compiled program needs."""

from typing import Any

import jax

GIB = 2**30


def device_memory(device_memory_gib: float) -> int:
    """Returns the bytes of a device: `device_memory_gib`, or (-1) what it reports; 0 if unknown."""
    if device_memory_gib != -1:
        return int(device_memory_gib * GIB)
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def compiled_bytes(compiled: Any) -> int:
    """Returns the bytes per device that the compiler counts; before jax 0.12 the sum of its
    parts."""
    total = getattr(compiled.memory_analysis(), "total_allocation_bytes", 0)
    return total or bytes_by_parts(compiled)


def bytes_by_parts(compiled: Any) -> int:
    """Adds up the parts of a program's bytes per device. Too much on TPUs: memory that is used
    again after a loop counts again."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
