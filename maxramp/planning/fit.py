"""The largest per-device batch whose compiled step fits a device, by the compiler's own account."""

import functools
from collections.abc import Callable
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


def edge(needed: Callable[[int], int], limit: int) -> tuple[int, int]:
    """The most rows that fit, and the one more that do not, with few questions.

    A step's memory grows almost evenly with its rows: the line through one row and the last try
    says where the limit is. Where that is wrong, every second try halves what is left.

    Args:
      needed: bytes of a step by its rows, never less for more; one row fits.
      limit: bytes that there are.
    """
    fits, too_much, rows, halve = 1, None, 2, False
    while True:
        fits, too_much = (rows, too_much) if needed(rows) <= limit else (fits, rows)
        if too_much == fits + 1:
            return fits, too_much
        per_row = (needed(rows) - needed(1)) / (rows - 1)
        most = too_much - 1 if too_much else 8 * fits  # a step far too large may not compile
        guess = 1 + int((limit - needed(1)) / per_row) if per_row else most
        rows = (fits + too_much) // 2 if halve else max(fits + 1, min(guess, most))
        halve = bool(too_much) and not halve


def largest_per_device_batch_size(
    recipe: Recipe,
    mesh_keys: MeshKeys,
    batch: BatchKeys,
    schedule: LearningRateKeys,
    device_memory_gib: float,
) -> str:
    """Compiles steps of different sizes on this machine's devices until it has found the edge.

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
    fits, too_much = edge(needed, limit)
    size = plain_number(Fraction(fits, parallel))
    return (
        f"per_device_batch_size: {size}  # {needed(fits) / GIB:.3g} of {limit / GIB:.3g} GiB; "
        f"{plain_number(Fraction(too_much, parallel))} would need {needed(too_much) / GIB:.3g}"
    )
