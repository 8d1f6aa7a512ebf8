"""The largest per-device batch whose compiled step fits a device, by the compiler's own account."""

import functools
from fractions import Fraction

import jax

from maxramp.commandline import count
from maxramp.errors import ConfigError
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.keys import MeshKeys
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.numbers import plain_number
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.device_memory import GIB, compiled_bytes, device_memory
from maxramp.training.keys import LearningRateKeys, Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import lower_step


def largest_per_device_batch_size(
    recipe: Recipe,
    mesh_keys: MeshKeys,
    batch: BatchKeys,
    schedule: LearningRateKeys,
    device_memory_gib: float,
) -> str:
    """Compiles steps of growing size on this machine's devices and bisects.

    Args:
      recipe, mesh_keys, batch, schedule: sections of a config that is resolved for these devices.
      device_memory_gib: of a device; -1 = what it reports.

    Returns:
      The line to put into a config.

    Raises:
      ConfigError: the device does not say how much memory it has, or one row is too much.
    """
    limit = device_memory(device_memory_gib)
    if not limit:
        raise ConfigError(
            f"device_memory_gib=-1: {jax.devices()[0].device_kind} does not report its memory; "
            "give device_memory_gib"
        )
    mesh = mesh_lib.make_mesh(mesh_keys)
    jax.set_mesh(mesh)
    parallel = batch.model_parallel_size
    ranks = mesh.size // parallel
    rate = LearningRate.of(schedule, RampupBatchManager(batch, mesh.size))
    # With accumulation the sums of the gradients live through the passes: two passes show it.
    passes = 2 if batch.gradient_accumulation_steps > 1 or batch.global_batch_size != -1 else 1
    lower = lower_step(recipe, mesh, rate)

    @functools.cache
    def needed(rows: int) -> int:
        return compiled_bytes(lower(passes, rows * ranks).compile())

    if needed(1) > limit:
        raise ConfigError(
            f"one row per {count(parallel, 'device')} needs {needed(1) / GIB:.3g} "
            f"GiB, but device_memory_gib={limit / GIB:.3g}; use remat_policy=full, a shorter "
            "max_target_length, or more devices"
        )
    fits, too_much = 1, 2
    while needed(too_much) <= limit:
        fits, too_much = too_much, 2 * too_much
    while too_much - fits > 1:
        middle = (fits + too_much) // 2
        fits, too_much = (middle, too_much) if needed(middle) <= limit else (fits, middle)
    size = plain_number(Fraction(fits, parallel))
    return (
        f"per_device_batch_size: {size}  # {needed(fits) / GIB:.3g} of {limit / GIB:.3g} GiB; "
        f"{plain_number(Fraction(too_much, parallel))} would need {needed(too_much) / GIB:.3g}"
    )
