"""What a pod's compiler says of a train step, on a machine that has no pod."""

import functools
import re
import time
from typing import Any

import jax
from jax.sharding import Mesh

from maxramp.parallel.topology import Chip
from maxramp.planning import hlo
from maxramp.rampup.schedule import Stage
from maxramp.training.device_memory import GIB, compiled_bytes
from maxramp.training.keys import Recipe
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import compiler_options, lower_step


class Pod:
    """A pod's compiler."""

    def __init__(
        self,
        recipe: Recipe,
        learning_rate: LearningRate,
        mesh: Mesh,
        chip: Chip,
        device_memory_gib: float,
        model_parallel_size: int,
    ):
        """
        Args:
          recipe, learning_rate: what the step is made from.
          mesh: over the pod's chips.
          chip: what one of them does.
          device_memory_gib: of a chip; -1 = what it is published to have.
          model_parallel_size: chips that together hold one row.
        """
        self._mesh, self._chip = mesh, chip
        self._limit = chip.memory_gib if device_memory_gib == -1 else device_memory_gib
        self._parallel = model_parallel_size
        # Setting a mesh of devices that are not there fails as soon as anything runs.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            self._lower = lower_step(recipe, mesh, learning_rate)

    @functools.cache  # noqa: B019
    def step(self, accumulation: int, rows: int) -> dict[str, Any]:
        """What the compiler says of the step of a batch shape."""
        start = time.perf_counter()
        limit = {"peak_tflops_per_device": self._chip.peak_tflops}
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            lowered = self._lower(accumulation, rows)
            try:
                compiled = lowered.compile(compiler_options("tpu") or None)
            except jax.errors.JaxRuntimeError as error:
                if not (sizes := _too_big(str(error))):
                    raise
                memory = {"arguments": None, "temporaries": None, "peak": sizes[0]}
                return limit | {
                    "memory_gib": memory | {"limit": min(sizes[1], self._limit)},
                    "fits": False,
                    "compile_seconds": time.perf_counter() - start,
                }
        seconds = time.perf_counter() - start
        analysis, peak = compiled.memory_analysis(), compiled_bytes(compiled) / GIB
        work = hlo.count(compiled.as_text())
        attention = work.kernel_flops / (self._chip.peak_tflops * 1e12)
        compute = work.cycles / (self._chip.clock_ghz * 1e9) + attention
        waited = work.waited_bytes / (self._chip.interconnect_gbytes * 1e9)
        network = sum(work.network_bytes.values()) / (self._chip.network_gbytes * 1e9)
        return limit | {
            "memory_gib": {
                "arguments": analysis.argument_size_in_bytes / GIB,
                "temporaries": analysis.temp_size_in_bytes / GIB,
                "peak": peak,
                "limit": self._limit,
            },
            "fits": peak <= self._limit,
            "flops_per_device": work.flops,
            "compute_seconds": compute,
            "attention_seconds": attention,
            "collective_seconds": waited,
            "network_seconds": network,
            "step_seconds": compute + waited + network,
            "collective_gib": _gib(work.collective_bytes),
            "network_gib": _gib(work.network_bytes),
            "compile_seconds": seconds,
        }

    def nearest_fit(self, stage: Stage) -> dict[str, Any] | None:
        """The same global batch in the largest micro batches that fit; None if one row does not."""
        ranks = stage.devices // self._parallel
        rows = stage.global_batch_size // ranks
        now = stage.micro_batch_size // ranks
        sizes = [size for size in range(1, now) if rows % size == 0]
        fits, low = None, 0
        while low < len(sizes):  # bisects from above: sizes[:low] fit, what is cut off does not
            middle = (low + len(sizes)) // 2
            found = self.step(rows // sizes[middle], sizes[middle] * ranks)
            if found["fits"]:
                fits, low = (sizes[middle], found), middle + 1
            else:
                sizes = sizes[:middle]
        if fits is None:
            return None
        return {
            "per_device_batch_size": fits[0] / self._parallel,
            "gradient_accumulation_steps": rows // fits[0],
            "peak_gib": fits[1]["memory_gib"]["peak"],
        }


def _gib(moved: dict[str, float]) -> dict[str, float]:
    return {kind: size / GIB for kind, size in sorted(moved.items())}


def _too_big(error: str) -> tuple[float, float] | None:
    """GiB that a refused program needs at least, and those there are; None if nothing is said."""
    used = re.search(r"Used ([0-9.]+[KMGT]) of ([0-9.]+[KMGT]) hbm", error)
    used = used or re.search(
        r"temporaries \(([0-9.]+[KMGT])\) exceeds available HBM \(([0-9.]+[KMGT])\)", error
    )
    if not used:
        return None
    return tuple(float(n[:-1]) * 1024.0 ** ("KMGT".index(n[-1]) - 2) for n in used.groups())
