"""A ramp for a run that is planned, or none, from what was measured on others.

The largest batch that costs nothing, over a run, is in tokens of the run that is planned, as a run
with rows of another length may have been measured. Nothing is assumed where nothing was measured:
before that the batch is the smallest, after it the batch stays. The run is shown beside the same
run with other batches.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from maxramp.commandline import short
from maxramp.config.keys import Config
from maxramp.config.load import OF_ONE_NOTATION, no_batch
from maxramp.config.resolve import meshes_of, resolve_planned
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys.base import base
from maxramp.keys.yamlfile import read_yaml
from maxramp.measuring.noise import KINDS, Block, blocks_of, records_of
from maxramp.model.keys import SHAPE_KEYS
from maxramp.planning.stages import PlannedRun, with_nodes
from maxramp.rampup.schedule import RampupBatchManager

_LEAST_SAVING = 0.05  # of a constant batch's steps: a ramp that saves less is not worth its trouble
_Batches = Sequence[tuple[int, int]]  # (sample from which on, batch) of a ramp
_BLOCKS = 12, 3, 1  # shares of a run in which its noise scale is read: fewer where it is short
# What makes a run that was measured another one than the run that is planned.
_SAME = (
    *SHAPE_KEYS,
    *("max_target_length", "packing", "dataset_type", "text_files", "grain_train_files"),
    *("learning_rate", "opt_type"),
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured over some tokens of a run."""

    first: float  # tokens consumed before
    last: float  # and after
    batch: float  # in tokens, that surely costs nothing there


def from_branches(results: Sequence[dict[str, Any]]) -> list[Measurement]:
    """What `maxramp.branch` measured: each holds up to the next, the last to its window's end.

    Of an interval its lower end counts, and of several windows from one step on the least. A batch
    is never given back, so at each place the least of those from there on counts.
    """
    found: list[Measurement] = []  # the last one first
    order = sorted(results, key=lambda r: (r["first_sample"] * r["row_tokens"], r["samples"]))
    for r in reversed(order):
        places = r["first_sample"], r["first_sample"] + r["samples"], r["surely"] or r["largest"]
        first, last, batch = (place * r["row_tokens"] for place in places)
        if found:
            batch = min(batch, found[-1].batch)
            last = found.pop().last if found[-1].first == first else found[-1].first
        found.append(Measurement(first, last, batch))
    return found[::-1]


def _from_noise(curve: Sequence[Block], factor: float, row_tokens: float) -> list[Measurement]:
    """What blocks of a noise scale allow: `factor` times the lower end of the interval.

    One block in twenty is too high, so a block counts for what the next one, too, allows; the last
    for what the one before does.
    """
    lows = [block.low / block.row_target_tokens for block in curve]
    others = [*lows[1:], *lows[-2:-1]] or lows
    places = [
        (block.first_sample, block.last_sample, factor * min(low, other))
        for block, low, other in zip(curve, lows, others, strict=True)
    ]
    return [Measurement(*(number * row_tokens for number in place)) for place in places]


def ramp_of(measured: Sequence[Measurement], sizes: Sequence[int]) -> list[tuple[float, int]]:
    """The ramp that follows the measurements: (tokens from which on, batch in tokens).

    A size is taken where a measurement allows it, and never given back.

    Args:
      measured: in order.
      sizes: that the batch may take, in tokens, the smallest first.
    """
    found: list[tuple[float, int]] = [(0, sizes[0])]
    for one in measured:
        allowed = max((size for size in sizes if size <= one.batch), default=0)
        if allowed > found[-1][1]:
            found = [before for before in found if before[0] < one.first]
            found.append((one.first, allowed))
    return found


class Evidence:
    """What a run's noise scale and its branches say of the batch."""

    def __init__(self, config: Config, noise: str | None, branch: str | None):
        """Takes what `suggest` takes.

        Raises:
          ConfigError: what is named holds no measurement.
        """
        # For a person, what was measured, and what that leaves open.
        self._config, self.by_noise, self.lines, self.limits = config, bool(noise), [], []
        # What maxramp.branch found, one of each step and window; and the batches that surely cost
        # nothing, in order.
        self.results = self._read_branches(branch) if branch else []
        self.measured = self._read_noise(place(noise)) if noise else from_branches(self.results)

    def _read_branches(self, given: str) -> list[dict[str, Any]]:
        path = place(given)
        files = [*path.glob("branches/*/branch.json"), *path.glob("branch.json")]
        try:
            texts = [file.read_bytes() for file in ([path] if path.is_file() else files)]
            results = sorted(map(json.loads, texts), key=lambda r: (r["step"], r["samples"]))
            self.lines += map(_line_of, results)
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"--branch {given}: not what maxramp.branch wrote") from None
        if not results:
            raise ConfigError(
                f"--branch {given}: holds no branches; measure them: python -m maxramp.branch "
                f"{given} --at STEP --sizes 8,16,32"
            )
        run = place(results[0]["run"])
        for result in results:
            targets = Fraction(result["target_tokens"], result["samples"])
            result["row_tokens"] = self._row_tokens(run, result["row_tokens"], targets)
        return results

    def _read_noise(self, run: Place) -> list[Measurement]:
        """What the norms' noise scale of a run, which has no gaps, allows at the branches' height.

        The factor is what surely costs nothing over the noise scale, the least of all branches.
        """
        records = records_of(run)
        curve = next(filter(None, (blocks_of(records, "norms_", n) for n in _BLOCKS)), None)
        if not curve:
            raise ConfigError(
                f"--noise {run}: holds no noise scale of 8 steps or more; train with "
                "log_gradient_noise_scale=true"
            )
        first, last = (
            f"{low:.3g} to {'no end' if high is None else f'{high:.3g}'} rows"
            for _, low, high in (block.in_rows for block in (curve[0], curve[-1]))
        )
        self.lines.append(
            f"noise scale of {run} ({KINDS['norms_']}): {first} at the start, "
            f"{last} after {short(curve[-1].last_sample)} samples"
        )
        factors = [
            (result["surely"] or result["largest"]) / measured["noise_scale"]
            for result in self.results
            if (measured := result["noise"].get("norms_noise_scale"))
        ]
        if factors:
            self.lines.append(
                f"the batch may be {min(factors):.3g} times the noise scale, by the branches"
            )
        else:
            self.limits.append(
                "no branch says how far above the noise scale the batch may go; it is kept at the "
                "noise scale's lower end, which is usually too careful"
            )
        end = next(r for r in reversed(records) if "consumed_tokens" in r)
        row_tokens = end["consumed_tokens"] // end["consumed_samples"]
        row_tokens = self._row_tokens(run, row_tokens, curve[-1].row_target_tokens)
        return _from_noise(curve, min(factors, default=1.0), row_tokens)

    def _row_tokens(self, run: Place, row_tokens: int, targets: float) -> float:
        """What a row that was measured counts for, in tokens of the run that is planned.

        Where both runs have a document in a row, whatever the rest of it, a row counts for a row.
        Where the run that was measured is another one, the limits say so.

        Args:
          run: that was measured.
          row_tokens: of its rows, padding included.
          targets: of its rows, on average.
        """
        here, there, line = self._config.values, {}, ""
        try:
            there = read_yaml(run / "config.yml")
        except (ConfigError, OSError):
            line = f"{run} holds no config.yml: whether it was a run like this is not known"
        differ = [
            f"{name}={there[name]} (here {here[name]})"
            for name in _SAME
            if name in there and there[name] != here[name]
        ]
        if differ:
            line = f"measured on another run: {', '.join(differ)}"
        self.limits += [line] * (line != "" and line not in self.limits)
        if not _padded(there):
            return row_tokens
        return here["max_target_length"] if _padded(here) else targets


def _padded(keys: dict[str, Any]) -> bool:
    """Whether each row of a run is one document, and the rest padding."""
    return keys.get("packing") is False and keys.get("dataset_type") in ("grain", "hf")


def _line_of(result: dict[str, Any]) -> str:
    """A result of maxramp.branch in one line."""
    ends = f"{result['surely']} to {result['possibly']}" if result["surely"] else "no interval"
    sizes = ", ".join(str(size["rows"]) for size in result["sizes"])
    return (
        f"branches at {short(result['first_sample'] * result['row_tokens'])} tokens: batch "
        f"{result['largest']} of {sizes} is the largest within {result['tolerance']:g} nats "
        f"({ends}; rows of {result['row_tokens']} tokens)"
    )


class _Planned:
    """The run that is planned, with other batches."""

    def __init__(self, config: Config):
        """Raises ConfigError where the config, which has its nodes, makes no run."""
        self._config, self._meshes = config, meshes_of(config)
        devices = config.batch.num_devices
        ramp = RampupBatchManager(resolve_planned(config, devices).batch, devices)
        self.total_samples = ramp.total_samples
        self.first_batch = ramp.stages[0].global_batch_size
        self.row_tokens = config.batch.max_target_length

    def rows(self, batches: _Batches | None) -> list[dict[str, Any]]:
        """The run as it is, as suggested, with the suggestion's largest batch throughout, Seesaw's.

        Raises:
          ConfigError: one of the first two cannot run.
        """
        found = [self._row("as configured", {})]
        found += [self._ramp("suggested", batches)] if batches else []
        for row in found:
            if "why" in row:
                raise ConfigError(row["why"])
        sizes = [size for _, size in found[-1]["pairs"]]
        least, most = min(sizes), max(sizes)
        if batches and least < most:
            found.append(self._row(f"constant {most}", {"global_batch_size": most}, f"{most}"))
        most = most if most > least else 4 * least
        ladder = [least << n for n in range((most // least).bit_length())]
        return [*found, self._row("Seesaw", {"rampup_policy": "seesaw", "rampup_ladder": ladder})]

    def _ramp(self, name: str, batches: _Batches) -> dict[str, Any]:
        return self._row(name, _keys_of(batches), _shown(batches))

    def _row(self, name: str, keys: dict[str, Any], batches: str = "") -> dict[str, Any]:
        """Steps and node-time of the run with these batches on as many samples."""
        if keys:
            keys = no_batch() | keys | {"total_samples": self.total_samples}
        try:
            run = PlannedRun.of(self._config.replace(**keys), self._meshes)
        except ConfigError as error:
            return {"name": name, "steps": None, "pairs": [], "why": str(error)}
        pairs = [(s.first_sample, s.global_batch_size) for s in run.stages]
        return {
            "name": name,
            "steps": run.ramp.total_steps,
            "node_time": run.node_time,
            "batches": batches or _shown(pairs),
            "pairs": pairs,
        }


def _keys_of(batches: _Batches) -> dict[str, Any]:
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]}
    return {
        "step_batch_size_schedule": " ".join(f"{sample}:{size}" for sample, size in batches),
        "step_batch_size_unit": "samples",
    }


def _shown(batches: _Batches) -> str:
    parts = [f"{short(sample)}:{size}" for sample, size in batches]
    return " ".join(parts if len(parts) <= 6 else [*parts[:3], "...", parts[-1]])


def _within(pairs: _Batches, fitted: _Batches, measured: Sequence[Measurement], row: int) -> bool:
    """Whether no batch is larger than what was measured to cost nothing there, or is suggested.

    Args:
      pairs: (sample from which on, batch) of a run.
      fitted: the same of the ramp that the measurements make.
      measured: in order.
      row: tokens of one.
    """
    bounds = [(int(m.first // row), m.batch / row) for m in measured]
    bounds += [(int(m.last // row), 0.0) for m in measured[-1:]]

    def at(steps: Sequence[tuple[int, float]], place: int) -> float:
        return max((one for one in steps if one[0] <= place), default=(0, 0.0))[1]

    places = sorted({place for steps in (pairs, fitted, bounds) for place, _ in steps})
    return all(at(pairs, n) <= max(at(fitted, n), at(bounds, n)) for n in places)


def _saving(configured: dict[str, Any], suggested: dict[str, Any]) -> str:
    """What the suggestion saves against the user's config, in a sentence."""
    steps, theirs = suggested["steps"], configured["steps"]
    time = suggested["node_time"] / configured["node_time"]
    change = 1 - steps / theirs
    said = f"{abs(change):.0%} {'fewer' if change > 0 else 'more'} steps than your config"
    if abs(change) < 0.005:
        said = "as many steps as your config"
    why = "" if configured["within"] else ", whose batch is above what was measured to cost nothing"
    return f"it takes {said}{why} ({steps:,}, not {theirs:,}), and {time:.2f}x its node-time"


def _fitted(evidence: Evidence, planned: _Planned) -> _Batches:
    """The ramp by what was measured; the evidence gets what limits it.

    Raises:
      ConfigError: its rows have another length than those of all batches that were tried.
    """
    measured, row, total = evidence.measured, planned.row_tokens, planned.total_samples
    tried = [s["rows"] * r["row_tokens"] for r in evidence.results for s in r["sizes"]]
    first, limits = Fraction(planned.first_batch), evidence.limits
    sizes = {
        int(size) for n in range(-31, 31) if (size := first * Fraction(2) ** n).denominator == 1
    }
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


def suggest(config: Config, noise: str | None, branch: str | None) -> dict[str, Any]:
    """What speaks for which ramp.

    Args:
      config: loaded; of the run that is planned.
      noise: the folder of a run with a noise scale.
      branch: the folder of a run with branches, or of one of their results.

    Returns:
      `batches`, [sample, batch] of the suggested ramp, of one entry where no ramp is suggested and
      None where nothing was measured; `keys`, as key=value; `saves`, a sentence; `evidence` and
      `limits`, lines; `rows`, what is compared, the config as it is first: `name`, `steps`,
      `node_time`, `batches` and `pairs` of each, and whether it is `within` what was measured;
      where it cannot run, `steps` is None and `why` says why.

    Raises:
      ConfigError: the config makes no run, or what is named holds no measurement.
    """
    planned = _Planned(with_nodes(config))
    evidence = Evidence(config, noise, branch)
    limits = evidence.limits
    batches = fitted = _fitted(evidence, planned) if evidence.measured else None
    rows, keys, saves = planned.rows(batches), {}, ""
    if batches:
        (_, first), rate = batches[0], config.learning_rate.learning_rate
        if rate and first != planned.first_batch:
            limits.append(
                f"learning_rate={rate:g} is that of a first batch of {planned.first_batch}; for "
                f"{first} use {rate * (first / planned.first_batch) ** 0.5:.3g}, or tune it"
            )
        constant = -(-planned.total_samples // first)
        saved = 1 - rows[1]["steps"] / constant
        if len(batches) > 1 and saved < _LEAST_SAVING:
            limits.append(
                f"the ramp {_shown(batches)} would save {saved:.1%} of the steps of a constant "
                f"batch of {first}, less than {_LEAST_SAVING:.0%}"
            )
            rows = planned.rows(batches := batches[:1])
        keys = _keys_of(batches) | {"total_samples": planned.total_samples}
        if len(batches) > 1:
            keys |= {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
        # So that they can follow what this command line gives in another notation.
        keys = {k: base()[k] for k in OF_ONE_NOTATION if config.values[k] != base()[k]} | keys
        for row in rows:
            row["within"] = _within(row["pairs"], fitted, evidence.measured, planned.row_tokens)
        saves = _saving(*rows[:2])
    found = {"batches": batches, "keys": keys, "saves": saves, "evidence": evidence.lines}
    return found | {"limits": limits, "rows": rows}
