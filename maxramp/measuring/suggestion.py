"""A ramp for a run that is planned, or none, from what was measured on others.

The largest batch that costs nothing, over a run, is in tokens of the run that is planned, as a run
with rows of another length may have been measured. Nothing is assumed where nothing was measured:
before that the batch is the smallest, after it the batch stays. The run is shown beside the same
run with other batches.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from maxramp.commandline import short
from maxramp.config.keys import Config
from maxramp.config.resolve import meshes_of
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys.yamlfile import read_yaml
from maxramp.measuring.batch_check import Batches, Rebatching, check_batches, ramp_keys
from maxramp.measuring.noise import KINDS, Block, noise_blocks, run_records
from maxramp.model.keys import SHAPE_KEYS
from maxramp.planning.stages import PlannedRun, with_nodes

_LEAST_SAVING = 0.05  # of a constant batch's steps: a ramp that saves less is not worth its trouble
_BLOCKS = 12, 3, 1  # shares of a run in which its noise scale is read: fewer where it is short
_FEWEST_BLOCKS = 3  # one or two show no course
# Where these keys differ, a measurement is of another run than the one that is planned.
_SAME = (
    *SHAPE_KEYS,
    *("max_target_length", "packing", "dataset_type", "text_files", "grain_train_files"),
    *("learning_rate", "opt_type"),
)


class Measurement(NamedTuple):
    """The largest batch that surely costs nothing over some tokens of a run."""

    first: float  # tokens consumed before
    last: float  # and after
    batch: float  # in tokens


def branch_measurements(results: Sequence[dict[str, Any]]) -> list[Measurement]:
    """Returns what `maxramp.branch` measured: each measurement holds up to the next, the last to
    the end of its window.

    The lower end of an interval counts, and the smallest of several windows from one step. A batch
    never shrinks again, so no measurement allows more than those after it.
    """
    measured: list[Measurement] = []  # the last one first
    order = sorted(results, key=lambda r: (r["first_sample"] * r["row_tokens"], r["samples"]))
    for r in reversed(order):
        first = r["first_sample"] * r["row_tokens"]
        last = first + r["samples"] * r["row_tokens"]
        batch = (r["surely"] or r["largest"]) * r["row_tokens"]
        if measured:
            batch = min(batch, measured[-1].batch)
            last = measured.pop().last if measured[-1].first == first else measured[-1].first
        measured.append(Measurement(first, last, batch))
    return measured[::-1]


def _noise_measurements(curve: Sequence[Block], factor: float, row: float) -> list[Measurement]:
    """Returns what blocks of a noise scale allow: `factor` times the lower end of the interval.

    One block in twenty is too high, so a block allows no more than the next one; the last no more
    than the one before. A row has `row` tokens.
    """
    lows = [block.low / block.row_target_tokens for block in curve]
    others = [*lows[1:], *lows[-2:-1]] or lows
    return [
        Measurement(row * block.first_sample, row * block.last_sample, row * factor * min(pair))
        for block, *pair in zip(curve, lows, others, strict=True)
    ]


def fit_ramp(measured: Sequence[Measurement], sizes: Sequence[int]) -> list[tuple[float, int]]:
    """Fits a ramp, (tokens from which on, batch in tokens), to measurements in order.

    The batch is the largest of the rising sizes (at least one) that a measurement allows, and never
    shrinks.
    """
    batches: list[tuple[float, int]] = [(0, sizes[0])]
    for one in measured:
        allowed = max((size for size in sizes if size <= one.batch), default=0)
        if allowed > batches[-1][1]:
            batches = [before for before in batches if before[0] < one.first]
            batches.append((one.first, allowed))
    return batches


class Evidence:
    """What the noise scale of a run and the branches of one say about the batch."""

    def __init__(self, config: Config, noise: str | None, branch: str | None):
        """Reads what `suggest` gets for the same names; raises as `_read_noise` and
        `_read_branches`."""
        self._keys = config.values
        self.lines: list[str] = []  # what was measured
        self.limits: list[str] = []  # what the measurements leave open
        results = self._read_branches(branch) if branch else []
        # Batches of the branches, in tokens.
        self.tried = [size["rows"] * r["row_tokens"] for r in results for size in r["sizes"]]
        by_noise = self._read_noise(place(noise), results) if noise else []
        self.by_noise, self.measured = bool(by_noise), by_noise or branch_measurements(results)
        if results:
            self.limits += self._branch_limits(results)

    def _read_branches(self, branch: str) -> list[dict[str, Any]]:
        """Reads all results below a folder, or the one in a file, with `row_tokens` in tokens of
        the planned run; describes them in `lines`. Raises a ConfigError without any, and for
        another program's."""
        path = place(branch)
        files = [*path.glob("branches/*/branch.json"), *path.glob("branch.json")]
        try:
            texts = [file.read_bytes() for file in ([path] if path.is_file() else files)]
            results = sorted(map(json.loads, texts), key=lambda r: (r["step"], r["samples"]))
            self.lines += map(_result_line, results)
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"--branch {branch}: not what maxramp.branch wrote") from None
        if not results:
            raise ConfigError(
                f"--branch {branch}: holds no branches; measure them: python -m maxramp.branch "
                f"{branch} --at STEP --sizes 8,16,32"
            )
        run = place(results[0]["run"])
        for result in results:
            targets = result["target_tokens"] / result["samples"]
            result["row_tokens"] = self._row_tokens(run, result["row_tokens"], targets)
        return results

    def _read_noise(self, run: Place, results: Sequence[dict[str, Any]]) -> list[Measurement]:
        """Returns measurements by the norms' noise scale, which has no gaps, times a factor: how
        far above it the branches' batches surely cost nothing, the smallest of all branches. []
        if too few steps tell, a ConfigError without a noise scale; adds lines and limits.
        """
        records = run_records(run)
        curve = max((noise_blocks(records, "norms_", n) for n in _BLOCKS), key=len)
        if not curve:
            raise ConfigError(
                f"--noise {run}: holds no noise scale of 8 steps or more; train with "
                "log_gradient_noise_scale=true"
            )
        first, last = (
            f"{low:.3g} rows or more" if high is None else f"{low:.3g} to {high:.3g} rows"
            for _, low, high in (block.rows for block in (curve[0], curve[-1]))
        )
        self.lines.append(
            f"noise scale of {run} ({KINDS['norms_']}): {first} at the start, "
            f"{last} after {short(curve[-1].last_sample)} samples"
        )
        is_short = len(curve) < _FEWEST_BLOCKS
        if is_short or not any(block.low for block in curve):
            blocks = f"fewer than {_FEWEST_BLOCKS} blocks of 8" if is_short else "intervals from 0"
            self.limits.append(
                f"{sum(block.steps for block in curve)} steps are too few to tell the noise scale "
                f"of {run}: {blocks}; train longer, or measure which batches cost "
                f"nothing: python -m maxramp.branch {run} --at STEP --sizes 8,16,32"
            )
            return []
        factors = [
            (result["surely"] or result["largest"]) / measured["noise_scale"]
            for result in results
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
        return _noise_measurements(curve, min(factors, default=1.0), row_tokens)

    def _row_tokens(self, run: Place, row_tokens: int, targets: float) -> float:
        """Returns the length of a measured run's rows, in tokens of the planned run; the limits get
        what differs between the two runs.

        A row counts as a row where both runs put one document into each. `row_tokens` includes
        padding, `targets` are those of a row on average.
        """
        planned, measured, limit = self._keys, {}, ""
        try:
            measured = read_yaml(run / "config.yml")
        except (ConfigError, OSError):
            limit = f"{run} holds no config.yml: whether it was a run like this is not known"
        differing = [n for n in _SAME if n in measured and measured[n] != planned[n]]
        if differing:
            pairs = ", ".join(
                f"{name}={json.dumps(measured[name])} (here {json.dumps(planned[name])})"
                for name in differing
            )
            limit = f"measured on another run: {pairs}"
        if limit and limit not in self.limits:
            self.limits.append(limit)
        if not _is_padded(measured):
            return row_tokens
        return planned["max_target_length"] if _is_padded(planned) else targets

    def _branch_limits(self, results: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Yields lines on what the branches (`_read_branches`), at least one, leave open."""
        order = sorted(results, key=lambda r: -r["largest"])  # the smallest of a checkpoint counts
        largest = {r["first_sample"]: r["largest"] * r["row_tokens"] for r in order}
        last, most = largest[max(largest)], max(largest.values())
        if (least := min(self.tried)) in largest.values():
            yield (
                f"every batch above {short(least)} tokens, the smallest that was tried, cost "
                "something: try smaller ones (maxramp.branch --sizes)"
            )
        if last == max(self.tried):
            yield (
                f"no batch above {short(last)} tokens was tried, and the largest cost nothing: "
                "larger ones may do as well"
            )
        elif last < most and not self.by_noise:
            yield (
                f"a batch of {short(most)} tokens cost nothing early in the run, but more than "
                f"{short(last)} cost something later; as a batch never shrinks again, it stays at "
                "what the later branches allow"
            )


def _is_padded(keys: dict[str, Any]) -> bool:
    """Returns whether a row of the run is one document and padding."""
    return keys.get("packing") is False and keys.get("dataset_type") in ("grain", "hf")


def _result_line(result: dict[str, Any]) -> str:
    ends = f"{result['surely']} to {result['possibly']}" if result["surely"] else "no interval"
    sizes = ", ".join(str(size["rows"]) for size in result["sizes"])
    return (
        f"branches at {short(result['first_sample'] * result['row_tokens'])} tokens: batch "
        f"{result['largest']} of {sizes} is the largest within {result['tolerance']:g} nats "
        f"({ends}; rows of {result['row_tokens']} tokens)"
    )


class _Planned(Rebatching):
    """The run that is planned, with other batches on as many samples."""

    def __init__(self, config: Config):
        config = with_nodes(config)
        self.meshes = meshes_of(config)
        self.configured = PlannedRun.from_config(config, self.meshes)
        super().__init__(config, self.configured.config, self.configured.ramp)
        self.first_batch = self.configured.stages[0].global_batch_size

    def plan(self, own: dict[str, Any]) -> PlannedRun:
        """Plans the run with the batches of `own` keys; a ConfigError if it cannot run so."""
        return PlannedRun.from_config(self.config.replace(**self.keys(own)), self.meshes)

    def divides(self, size: int) -> bool:
        with contextlib.suppress(ConfigError):
            return bool(self.plan({"global_batch_size": size}))
        return False

    def rows(self, batches: Batches | None) -> list[dict[str, Any]]:
        """Compares the run as configured, as suggested (unless `batches` is None), at its largest
        batch throughout, and under Seesaw unless it is configured so. Where keys are refused,
        `steps` is None and `why` the error. The suggested `batches` must divide over the
        devices."""
        rows = [_row("as configured", self.configured)]
        if batches:
            rows.append(_row("suggested", self.plan(ramp_keys(batches))))
        sizes = [size for _, size in rows[-1]["pairs"]]
        least, most, others = min(sizes), max(sizes), {}
        if batches and least < most:
            others[f"constant {most}"] = {"global_batch_size": most}
        if least == most:
            most = 4 * least
        ladder = [least << n for n in range((most // least).bit_length())]
        seesaw = {"rampup_policy": "seesaw", "rampup_ladder": ladder}
        if not seesaw.items() <= self.config.values.items():
            others["Seesaw"] = seesaw
        for name, own in others.items():
            try:
                rows.append(_row(name, self.plan(own)))
            except ConfigError as error:
                rows.append({"name": name, "steps": None, "pairs": [], "why": str(error)})
        return rows


def _row(name: str, run: PlannedRun) -> dict[str, Any]:
    pairs = [(stage.first_sample, stage.global_batch_size) for stage in run.stages]
    figures = {"name": name, "steps": run.ramp.total_steps, "node_time": run.node_time}
    return figures | {"batches": _batches_text(pairs), "pairs": pairs}


def _batches_text(batches: Batches) -> str:
    parts = [f"{short(sample)}:{size}" for sample, size in batches]
    return " ".join(parts if len(parts) <= 6 else [*parts[:3], "...", parts[-1]])


def _batch_at(batches: Batches, sample: int) -> float:
    """Returns the batch that holds at a sample, whatever the order of `batches`; 0 before the
    first."""
    return max((pair for pair in batches if pair[0] <= sample), default=(0, 0.0))[1]


def _largest_batches(fitted: Batches, measured: Sequence[Measurement], row: int) -> Batches:
    """Returns the largest batches that cost nothing, or are suggested, from their samples on, in no
    order; 0 behind the last measurement. There is at least one."""
    bounds = [(int(one.first // row), one.batch / row) for one in measured]
    bounds.append((int(measured[-1].last // row), 0.0))
    samples = {sample for sample, _ in (*fitted, *bounds)}
    return [(n, max(_batch_at(fitted, n), _batch_at(bounds, n))) for n in samples]


def _saving(configured: dict[str, Any], suggested: dict[str, Any]) -> str:
    steps, before = suggested["steps"], configured["steps"]
    change = 1 - steps / before
    if abs(change) < 0.005:
        text = "as many steps as your config"
    else:
        text = f"{abs(change):.0%} {'fewer' if change > 0 else 'more'} steps than your config"
    if not configured["within"]:
        text += ", whose batch is above what was measured to cost nothing"
    time = suggested["node_time"] / configured["node_time"]
    return f"{text} ({steps:,}, not {before:,}), and {time:.2f}x its node-time"


def _possible_sizes(evidence: Evidence, planned: _Planned, row: int) -> list[int]:
    """Returns the batches that the ramp may have, the smallest first.

    These are the run's own, halved and doubled, and those that were tried, in rows of `row` tokens;
    only those that the devices divide among them. Raises a ConfigError if none is left.
    """
    halvings = (Fraction(planned.first_batch) * Fraction(2) ** n for n in range(-31, 31))
    sizes = {int(size) for size in halvings if size.denominator == 1}
    if tried := evidence.tried:
        # Only a noise scale tells of a smaller batch than those that were tried, and nothing of a
        # larger one.
        least = 0 if evidence.by_noise else min(tried)
        sizes = {size for size in sizes if least <= size * row <= max(tried)}
        sizes |= {int(tokens // row) for tokens in tried if tokens % row == 0}
    most = max(one.batch for one in evidence.measured)
    dividing = filter(planned.divides, sorted(sizes))
    possible = [*itertools.islice(dividing, 1)]  # the smallest, whatever it may cost
    possible += itertools.takewhile(lambda size: size * row <= most, dividing)
    if not possible:
        raise ConfigError(
            f"max_target_length={row}: no batch of such rows that the devices divide among them is "
            "as large as those that were tried; measure branches of a run with rows of this length"
        )
    return possible


def _fit(evidence: Evidence, planned: _Planned, row: int) -> Batches:
    """Fits a ramp to what was measured, at least once; the evidence gets what limits it. A
    ConfigError as `_possible_sizes`."""
    measured, limits = evidence.measured, evidence.limits
    sizes = [size * row for size in _possible_sizes(evidence, planned, row)]
    lowest, start = measured[0].batch, measured[0].first
    end, run_tokens = max(one.last for one in measured), planned.total_samples * row
    if lowest < sizes[0]:
        surely = f"no batch above {short(lowest)} tokens" if lowest else "no batch"
        limits.append(
            f"at the start {surely} surely costs nothing, and the smallest batch that this run may "
            f"take has {short(sizes[0])} tokens"
        )
    if end < 0.999 * run_tokens:
        limits.append(
            f"nothing was measured beyond {short(end)} of this run's {short(run_tokens)} tokens: "
            "the batch stays as it is there"
        )
    if start > 0.02 * run_tokens:
        limits.append(
            f"nothing was measured before {short(start)} tokens: the batch begins at the smallest"
        )
    in_rows = [(round(tokens) // row, size // row) for tokens, size in fit_ramp(measured, sizes)]
    by_sample = dict(in_rows)  # shorter rows that were measured may fall into one: the last counts
    return [(sample, size) for sample, size in by_sample.items() if sample < planned.total_samples]


def suggest(config: Config, noise: str | None, branch: str | None) -> dict[str, Any]:
    """Suggests a ramp or none, and compares it with the config as it is.

    Args:
      config: of the run that is planned, loaded and not resolved.
      noise: the folder of a run with a noise scale, or None.
      branch: the folder of a run with branches, or of one of their results, or None.

    Returns:
      `batches`, [sample, batch] of the suggested ramp, of one entry where no ramp is suggested and
      None where nothing was measured; `keys`, which give it beside those of the config; `saves`, a
      sentence; `evidence` and `limits`, lines; `rows`, what is compared, the config as it is first:
      `name`, `steps`, `node_time`, `batches` and `pairs` of each, and whether it is `within` what
      was measured; where it cannot run, `steps` is None and `why` says why.
    """
    planned, evidence = _Planned(config), Evidence(config, noise, branch)
    limits, measured, row = evidence.limits, evidence.measured, config.batch.max_target_length
    run = place(noise) if noise else config.run.folder
    limits += check_batches(planned.configured.config, planned.meshes, run)
    if not measured:
        nothing = {"batches": None, "keys": {}, "saves": "", "rows": planned.rows(None)}
        return nothing | {"evidence": evidence.lines, "limits": limits}
    batches = fitted = _fit(evidence, planned, row)
    (_, first), rate = batches[0], config.learning_rate.learning_rate
    keys = planned.rated_keys(batches)
    if "learning_rate" in keys:
        limits.append(
            f"learning_rate={rate:g} is that of a first batch of {planned.first_batch}; for "
            f"{first} use {keys['learning_rate']:g}, or tune it"
        )
    for name, phase_rate in planned.phase_rates(first).items() if rate else ():
        limits.append(f"phases.{name}.learning_rate={phase_rate:g} is for a batch of {first}, too")
    if (steps := config.learning_rate.learning_rate_schedule_steps) != -1:
        limits.append(
            f"learning_rate_schedule_steps={steps} counts steps, which have other batches now; "
            "use -1 for all, or count anew"
        )
    if len(batches) > 1:
        steps = planned.plan(ramp_keys(batches)).ramp.total_steps
        saved = 1 - steps / -(-planned.total_samples // first)
        if saved < _LEAST_SAVING:
            limits.append(
                f"the ramp {_batches_text(batches)} would save {saved:.1%} of the steps of a "
                f"constant batch of {first}, less than {_LEAST_SAVING:.0%}"
            )
            batches = batches[:1]
    rows, allowed = planned.rows(batches), _largest_batches(fitted, measured, row)
    for one in rows:
        samples = [sample for sample, _ in (*one["pairs"], *allowed)]
        one["within"] = all(_batch_at(one["pairs"], n) <= _batch_at(allowed, n) for n in samples)
    return {
        "batches": batches,
        "keys": planned.rated_keys(batches),
        "saves": _saving(*rows[:2]),
        "evidence": evidence.lines,
        "limits": limits,
        "rows": rows,
    }
