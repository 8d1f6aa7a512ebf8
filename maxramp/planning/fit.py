"""What fits a device by the compiler's own account: the largest batch under each remat policy."""

import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from jax.sharding import Mesh

from maxramp.commandline import count
from maxramp.errors import ConfigError
from maxramp.planning.machine import Machine
from maxramp.planning.pod import Pod
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.numbers import plain_number
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.training.keys import LearningRateKeys, Recipe
from maxramp.training.learning_rate import LearningRate

POLICIES = ("none", "minimal", "full")  # remat_policy, from the least work to the least memory


def pods(
    recipe: Recipe,
    learning_rate: LearningRate,
    mesh: Mesh,
    machine: Machine,
    device_memory_gib: float,
    model_parallel_size: int,
) -> Iterator[tuple[str, Pod]]:
    """The compiler of a machine under each remat policy, the cheapest first; arguments as Pod's."""
    for policy in POLICIES:
        model = dataclasses.replace(recipe.model, remat_policy=policy)
        changed = dataclasses.replace(recipe, model=model)
        yield (
            policy,
            Pod(changed, learning_rate, mesh, machine, device_memory_gib, model_parallel_size),
        )


def largest_batch(
    recipe: Recipe,
    batch: BatchKeys,
    schedule: LearningRateKeys,
    mesh: Mesh,
    machine: Machine,
    device_memory_gib: float,
) -> str:
    """Compiles steps of growing size under each remat policy.

    Args:
      recipe, batch, schedule: sections of a config that is resolved for the machine.
      mesh: over its devices.
      machine: to compile for; its devices may be this machine's own.
      device_memory_gib: of a device; -1 = what the machine says.

    Returns:
      The lines to put into a config: the cheapest policy under which anything fits, and the most
      that fits under it.

    Raises:
      ConfigError: the device does not say how much memory it has, or one row is too much.
    """
    limit = machine.memory_gib if device_memory_gib == -1 else device_memory_gib
    if not limit:
        raise ConfigError(
            f"device_memory_gib=-1: {machine.name} does not report its memory; "
            "give device_memory_gib"
        )
    parallel = batch.model_parallel_size
    ranks = mesh.size // parallel
    rate = LearningRate.of(schedule, RampupBatchManager(batch, mesh.size))
    # With accumulation the sums of the gradients live through the passes: two passes show it.
    passes = 2 if batch.gradient_accumulation_steps > 1 or batch.global_batch_size != -1 else 1
    lines: list[str] = []
    others: list[str] = []
    for policy, pod in pods(recipe, rate, mesh, machine, device_memory_gib, parallel):

        def needed(rows: int, pod: Pod = pod) -> float:
            return pod.step(passes, rows * ranks)["memory_gib"]["peak"]

        if not (rows := most(needed, limit)):
            others.append(f"{policy} needs {needed(1):.3g} GiB for one row")
            continue
        size, above = (plain_number(Fraction(n, parallel)) for n in (rows, rows + 1))
        if lines:
            others.append(f"{policy} fits {size}")
            continue
        lines = [
            f"per_device_batch_size: {size}  # {needed(rows):.3g} of {limit:.3g} GiB; "
            f"{above} would need {needed(rows + 1):.3g}",
            f"remat_policy: {policy}  # the cheapest that fits",
        ]
    if not lines:
        raise ConfigError(
            f"one row per {count(parallel, 'device')} needs {needed(1):.3g} "
            f"GiB, but device_memory_gib={limit:.3g}; use remat_policy=full, a shorter "
            "max_target_length, or more devices"
        )
    return "\n".join([lines[0], "; ".join([lines[1], *others])])


def most(needed: Callable[[int], float], limit: float) -> int:
    """The most rows that fit; 0 if one does not.

    Memory grows almost in proportion to the rows, so a line through what is known leads there in a
    few steps, each of which is a compile.
    """
    if needed(1) > limit:
        return 0
    fits, above, guess = 1, None, 2
    while above is None or above - fits > 1:
        if needed(guess) <= limit:
            fits = guess
        else:
            above = guess
        slope = (needed(guess) - needed(1)) / (guess - 1)
        line = 1 + int((limit - needed(1)) / slope) if slope > 0 else 2 * guess
        guess = max(line, fits + 1) if above is None else min(max(line, fits + 1), above - 1)
    return fits


def by_speed(candidates: Iterator[tuple[str, Pod]], stage: Stage) -> list[dict[str, Any]]:
    """What fits of a stage's global batch, the most tokens per second first.

    Under each remat policy, the two largest micro batches: a smaller one is slower but for small
    models, and each costs a compile.
    """
    found = [
        {"remat_policy": policy} | entry
        for policy, pod in candidates
        for entry in pod.largest_fits(stage, 2)
    ]
    return sorted(found, key=lambda entry: entry["step_seconds"])
