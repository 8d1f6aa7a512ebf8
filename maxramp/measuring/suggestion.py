"""A ramp for a run that is planned, or none, from what was measured on others.

The run is shown beside the same run with other batches: constant, Seesaw's, published.
"""

import pathlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from maxramp.commandline import short
from maxramp.config.keys import Config
from maxramp.config.load import OF_ONE_NOTATION, load, no_batch
from maxramp.config.resolve import meshes_of, resolve_planned
from maxramp.errors import ConfigError
from maxramp.keys.base import CONFIGS, base
from maxramp.measuring.evidence import Evidence, ramp_of
from maxramp.planning.stages import PlannedRun, with_nodes
from maxramp.rampup.schedule import RampupBatchManager

_LEAST_SAVING = 0.05  # of a constant batch's steps: a ramp that saves less is not worth its trouble
_Batches = Sequence[tuple[int, int]]  # (sample from which on, batch) of a ramp


def suggest(config: Config, noise: str | None, branch: str | None) -> dict[str, Any]:
    """What speaks for which ramp.

    Args:
      config: loaded; of the run that is planned.
      noise: the folder of a run with a noise scale.
      branch: the folder of a run with branches, or of one of their results.

    Returns:
      `batches`, [sample, batch] of the suggested ramp, of one entry where no ramp is suggested and
      None where nothing was measured; `keys`, as key=value; `evidence` and `limits`, lines; `rows`,
      what is compared: `name`, `steps`, `node_time` and `batches` of each; where it cannot run,
      `steps` is None and `why` says why.

    Raises:
      ConfigError: the config makes no run, or what is named holds no measurement.
    """
    planned = _Planned(with_nodes(config))
    evidence = Evidence(config, noise, branch)
    limits = evidence.limits
    batches = _fitted(evidence, planned) if evidence.measured else None
    rows, keys = planned.rows(batches), {}
    if batches:
        (_, first), rate = batches[0], config.learning_rate.learning_rate
        if rate and first != planned.first_batch:
            limits.append(
                f"learning_rate={rate:g} is that of a first batch of {planned.first_batch}; for "
                f"{first} use {rate * (first / planned.first_batch) ** 0.5:.3g}, or tune it"
            )
        saved = 1 - rows[0]["steps"] / rows[1]["steps"]
        if len(batches) > 1 and saved < _LEAST_SAVING:
            limits.append(
                f"the ramp {_shown(batches)} would save {saved:.1%} of the steps of a constant "
                f"batch of {first}, less than {_LEAST_SAVING:.0%}"
            )
            batches = batches[:1]
            rows = planned.rows(batches)
        keys = _keys_of(batches) | {"total_samples": planned.total_samples}
        if len(batches) > 1:
            keys |= {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
        # So that they can follow what this command line gives in another notation.
        keys = {k: base()[k] for k in OF_ONE_NOTATION if config.values[k] != base()[k]} | keys
    found = {"batches": batches, "keys": keys, "evidence": evidence.lines}
    return found | {"limits": limits, "rows": rows}


class _Planned:
    """The run that is planned, with other batches."""

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

    def rows(self, batches: _Batches | None) -> list[dict[str, Any]]:
        """A suggested ramp, or the run as it is, constants, Seesaw's and the published ramps.

        Raises:
          ConfigError: the first cannot run.
        """
        first = self._ramp("suggested", batches) if batches else self._row("as configured", {})
        if "why" in first:
            raise ConfigError(first["why"])
        least, most = min(first["sizes"]), max(first["sizes"])
        most = most if most > least else 4 * least
        ladder = [least << n for n in range((most // least).bit_length())]
        return [
            first,
            *(self._row(f"constant {n}", {"global_batch_size": n}, f"{n}") for n in (least, most)),
            self._row("Seesaw", {"rampup_policy": "seesaw", "rampup_ladder": ladder}),
            *(
                self._ramp(f"like {path.stem}", _published(path, least, most, self.total_samples))
                for path in sorted((CONFIGS / "schedules").glob("*.yml"))
            ),
        ]

    def _ramp(self, name: str, batches: _Batches) -> dict[str, Any]:
        return self._row(name, _keys_of(batches), _shown(batches))

    def _row(self, name: str, keys: dict[str, Any], batches: str = "") -> dict[str, Any]:
        """Steps and node-time of the run with these batches on as many samples."""
        if keys:
            keys = no_batch() | keys | {"total_samples": self.total_samples}
        try:
            run = PlannedRun.of(self._config.replace(**keys), self._meshes)
        except ConfigError as error:
            return {"name": name, "steps": None, "sizes": [], "why": str(error)}
        pairs = [(s.first_sample, s.global_batch_size) for s in run.stages]
        return {
            "name": name,
            "steps": run.ramp.total_steps,
            "node_time": run.node_time,
            "batches": batches or _shown(pairs),
            "sizes": [size for _, size in pairs],
        }


def _keys_of(batches: _Batches) -> dict[str, Any]:
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]}
    text = " ".join(f"{sample}:{size}" for sample, size in batches)
    return {"step_batch_size_schedule": text, "step_batch_size_unit": "samples"}


def _shown(batches: _Batches) -> str:
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


def _fitted(evidence: Evidence, planned: _Planned) -> _Batches:
    """The ramp by what was measured; the evidence gets what limits it.

    Raises:
      ConfigError: its rows have another length than those of all batches that were tried.
    """
    measured, row, total = evidence.measured, planned.row_tokens, planned.total_samples
    tried = [s["rows"] * r["row_tokens"] for r in evidence.results for s in r["sizes"]]
    first, limits = planned.first_batch, evidence.limits
    sizes = {first * 2**n for n in range(31)}
    sizes |= {first // 2**n for n in range(31) if first % 2**n == 0}
    if tried:
        # Without a noise scale nothing speaks for a smaller batch than the smallest that was
        # tried, and never does anything for one above the largest.
        least = 0 if evidence.by_noise else min(tried)
        sizes = {size for size in sizes if least <= size * row <= max(tried)}
        sizes |= {tokens // row for tokens in tried if tokens % row == 0}
        limits += _limits_of_branches(evidence, max(tried))
    if not sizes:
        raise ConfigError(
            f"max_target_length={row}: no batch of such rows is as large as those "
            "that were tried; measure branches of a run with rows of this length"
        )
    smallest = min(sizes) * row
    if (lowest := measured[0].batch) < smallest:
        limits.append(
            f"at the start {short(lowest)} tokens surely cost nothing, and the smallest batch "
            f"that this run may take has {short(smallest)}"
        )
    if (end := max(one.last for one in measured)) < 0.999 * total * row:
        limits.append(
            f"nothing was measured beyond {short(end)} of this run's {short(total * row)} tokens: "
            "the batch stays as it is there"
        )
    if (start := measured[0].first) > 0.02 * total * row:
        limits.append(
            f"nothing was measured before {short(start)} tokens: the batch begins at the smallest"
        )
    ramp = ramp_of(measured, sorted(size * row for size in sizes))
    return [(round(t) // row, batch // row) for t, batch in ramp if round(t) // row < total]


def _limits_of_branches(evidence: Evidence, largest: int) -> Iterator[str]:
    """What branches up to `largest` tokens leave open above what they allow at the last place."""
    order = sorted(evidence.results, key=lambda r: -r["largest"])  # of one place the least counts
    tops = {r["first_sample"]: r["largest"] * r["row_tokens"] for r in order}
    last, most = tops[max(tops)], max(tops.values())
    if last == largest:
        yield (
            f"no batch above {short(largest)} tokens was tried, and the largest cost "
            "nothing: larger ones may do as well"
        )
    elif last < most and not evidence.by_noise:
        yield (
            f"a batch of {short(most)} tokens cost nothing at an early "
            f"place, but more than {short(last)} cost something at the last; as a batch is "
            "never given back, it stays at what later places allow"
        )
