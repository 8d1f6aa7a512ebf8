"""A run that is planned beside the same run with other batches: constant, Seesaw's, published."""

import pathlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from maxramp.commandline import short
from maxramp.config import alternatives
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.config.resolve import meshes_of, resolve_planned
from maxramp.errors import ConfigError
from maxramp.keys.base import CONFIGS
from maxramp.planning.stages import PlannedRun
from maxramp.rampup.schedule import RampupBatchManager


class Comparison:
    """The run that is planned, with other batches.

    Attributes:
      total_samples: of each such run.
      first_batch: that the run is configured to begin with.
      row_tokens: of a sample.
    """

    def __init__(self, config: Config):
        """
        Args:
          config: loaded, with its nodes.

        Raises:
          ConfigError: it makes no run.
        """
        self._config, self._meshes = config, meshes_of(config)
        devices = config.batch.num_devices
        ramp = RampupBatchManager(resolve_planned(config, devices).batch, devices)
        self.total_samples = ramp.total_samples
        self.first_batch = ramp.stages[0].global_batch_size
        self.row_tokens = config.batch.max_target_length

    def rows(self, batches: Sequence[tuple[int, int]] | None) -> list[dict[str, Any]]:
        """A suggested ramp, constants, Seesaw and the published ramps on this run's samples.

        Args:
          batches: (sample from which on, batch) of the ramp; without one the run as it is
            configured comes first.

        Returns:
          `name`, `steps`, `node_time` and `batches` of each; where it cannot run, `steps` is None
          and `why` says why.

        Raises:
          ConfigError: the first cannot run.
        """
        total = {"total_samples": self.total_samples}
        if batches:
            ramp = self._with(schedule_keys(batches) | total)
            rows = [self._row("suggested", ramp, shown(batches), must_run=True)]
            sizes = [size for _, size in batches]
        else:
            rows = [self._row("as configured", self._config, must_run=True)]
            sizes = rows[0]["sizes"] or [self.first_batch]
        least = min(sizes)
        most = max(sizes) if max(sizes) > least else 4 * least
        for size in dict.fromkeys((least, most)):
            constant = self._with({"global_batch_size": size} | total)
            rows.append(self._row(f"constant {size}", constant, f"{size}"))
        ladder = [least << n for n in range((most // least).bit_length())]
        seesaw = {"rampup_policy": "seesaw", "rampup_ladder": ladder} | total
        rows.append(self._row("Seesaw", self._with(seesaw)))
        for path in sorted((CONFIGS / "schedules").glob("*.yml")):
            shape = _published(path, least, most, self.total_samples)
            ramp = self._with(schedule_keys(shape) | total)
            rows.append(self._row(f"like {path.stem}", ramp, shown(shape)))
        return rows

    def _with(self, keys: dict[str, Any]) -> Config:
        """The run with other batches and another length."""
        return self._config.replace(**(alternatives.none_chosen() | keys))

    def _row(
        self, name: str, config: Config, batches: str = "", must_run: bool = False
    ) -> dict[str, Any]:
        """Steps and node-time of such a run; neither where it cannot run."""
        try:
            run = PlannedRun.of(config, self._meshes)
        except ConfigError as error:
            if must_run:
                raise
            return {"name": name, "steps": None, "sizes": [], "why": str(error)}
        pairs = [(s.first_sample, s.global_batch_size) for s in run.stages]
        return {
            "name": name,
            "steps": run.ramp.total_steps,
            "node_time": run.node_time,
            "batches": batches or shown(pairs),
            "sizes": [size for _, size in pairs],
        }


def schedule_keys(batches: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """(sample from which on, batch) of a ramp as keys."""
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]}
    text = " ".join(f"{sample}:{size}" for sample, size in batches)
    return {"step_batch_size_schedule": text, "step_batch_size_unit": "samples"}


def shown(batches: Sequence[tuple[int, int]]) -> str:
    """(sample from which on, batch) of a ramp, as a person reads it."""
    parts = [f"{short(sample)}:{size}" for sample, size in batches]
    return " ".join(parts if len(parts) <= 6 else [*parts[:3], "...", parts[-1]])


def _published(path: pathlib.Path, least: int, most: int, total: int) -> list[tuple[int, int]]:
    """A published ramp's shape from `least` to `most` rows over so many samples.

    Its places in the run are kept, and each size's place between the first and the last.
    """
    ramp = RampupBatchManager(load([str(path)]).batch, 1)
    stages = ramp.stages_between(0, ramp.total_steps)
    sizes = [stage.global_batch_size for stage in stages]
    low, high = min(sizes), max(sizes)
    found: list[tuple[int, int]] = []
    for stage in stages:
        place = Fraction(stage.first_sample * total, ramp.total_samples)
        share = Fraction(stage.global_batch_size - low, max(1, high - low))
        size = least * round(1 + share * Fraction(most - least, least))
        if not found or (size > found[-1][1] and int(place) > found[-1][0]):
            found.append((int(place), size))
    return found
