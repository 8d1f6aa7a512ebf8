"""What fits a device by the compiler's own account: the largest batch under each remat policy."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError
from maxramp.planning import machine as machines
from maxramp.planning.pod import Pod
from maxramp.processes import backend
from maxramp.processes.backend import take_hardware
from maxramp.rampup.numbers import plain_number
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rampup.spec import StageSpec

# Values of remat_policy, from the least work to the least memory.
POLICIES = ("none", "minimal_with_context", "minimal", "full")


def least_rows(multiple: int) -> str:
    """The fewest rows that a group of devices takes at a time, in words."""
    return "one row" if multiple == 1 else f"{multiple} rows"


def edge(needed: Callable[[int], float], limit: float) -> tuple[int, int]:
    """The most rows that fit, and the one more that do not, with few questions.

    A step's memory grows almost evenly with its rows: the line through one row and the last try
    says where the limit is. Where that is wrong, every second try halves what is left.

    Args:
      needed: memory of a step by its rows, never less for more; one row fits.
      limit: memory that there is, in the same unit.
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


def fit_devices(config: Config, say: Callable[[str], None]) -> str:
    """`largest_batch` of a loaded config, for compile_topology or the devices of this machine.

    Args:
      config: loaded.
      say: takes a line of progress.

    Raises:
      ConfigError: as `largest_batch`; or the machine does not exist, or the mesh does not fill it.
    """
    if config.planning.compile_topology:
        take_hardware("cpu")  # nothing runs; the devices are only described
        machine = machines.find(config.planning)
    else:
        backend.start(config.backend)
        machine = machines.here()
    config = resolve(config, len(machine.devices), machine.slices, 1)
    batch, ramp = config.batch, RampupBatchManager(config.batch, len(machine.devices))
    # With accumulation the sums of the gradients live through the passes: two passes show it.
    passes = 2 if batch.gradient_accumulation_steps > 1 or batch.global_batch_size != -1 else 1
    return largest_batch(Pod.of(config, ramp, machine, say), ramp.stages[-1].spec, passes)


def largest_batch(pod: Pod, spec: StageSpec, passes: int = 1) -> str:
    """Compiles steps of growing size under each remat policy.

    Args:
      pod: the compiler of a machine, which may be this one.
      spec: of a stage, but for its batch.
      passes: of a step.

    Returns:
      The lines to put into a config: the cheapest policy under which anything fits, and the most
      that fits under it.

    Raises:
      ConfigError: the device does not say how much memory it has, or one row is too much.
    """
    limit = pod.limit
    if not limit:
        raise ConfigError(
            f"device_memory_gib=-1: {pod.machine.name} does not report its memory; "
            "give device_memory_gib"
        )
    parallel, multiple = spec.mesh.model_parallel_size, spec.rows_multiple
    least = least_rows(multiple)
    lines: list[str] = []
    others: list[str] = []
    for policy in POLICIES:

        def needed(shares: int, policy: str = policy) -> float:
            of_size = spec.of_size(passes, shares * multiple * spec.ranks)
            found = pod.step(dataclasses.replace(of_size, remat_policy=policy))
            return found["memory_gib"]["peak"]

        if needed(1) > limit:
            others.append(f"{policy} needs {needed(1):.3g} GiB for {least}")
            continue
        shares, too_much = edge(needed, limit)
        size, above = (plain_number(Fraction(n * multiple, parallel)) for n in (shares, too_much))
        if lines:
            others.append(f"{policy} fits {size}")
            continue
        lines = [
            f"per_device_batch_size: {size}  # {needed(shares):.3g} of {limit:.3g} GiB; "
            f"{above} would need {needed(too_much):.3g}",
            f"remat_policy: {policy}  # the cheapest that fits",
        ]
    if not lines:
        raise ConfigError(
            f"{least} per {count(parallel, 'device')} needs {needed(1):.3g} "
            f"GiB, but device_memory_gib={limit:.3g}; use remat_policy=full, a shorter "
            "max_target_length, or more devices"
        )
    return "\n".join([lines[0], "; ".join([lines[1], *others])])


def by_speed(pod: Pod, spec: StageSpec) -> list[dict[str, Any]]:
    """What fits of a stage's global batch, the most tokens per second first.

    Under each remat policy, the two largest micro batches: a smaller one is slower but for small
    models, and each costs a compile.
    """
    found = [
        {"remat_policy": policy} | entry
        for policy in POLICIES
        for entry in pod.largest_fits(dataclasses.replace(spec, remat_policy=policy), 2)
    ]
    return sorted(found, key=lambda entry: entry["step_seconds"])
