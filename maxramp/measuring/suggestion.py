"""A ramp for a run that is planned, or none, from what was measured on others."""

from collections.abc import Sequence
from typing import Any

from maxramp.commandline import short
from maxramp.config import alternatives
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.measuring.comparison import Comparison, schedule_keys, shown
from maxramp.measuring.evidence import Evidence
from maxramp.measuring.ramp import Measurement, ramp_of
from maxramp.planning.stages import with_nodes

_LEAST_SAVING = 0.05  # of a constant batch's steps: a ramp that saves less is not worth its trouble


def suggest(config: Config, noise: str | None, branch: str | None) -> dict[str, Any]:
    """What speaks for which ramp.

    Args:
      config: loaded; of the run that is planned.
      noise: the folder of a run with a noise scale.
      branch: the folder of a run with branches, or of one of their results.

    Returns:
      `batches`, [sample, batch] of the suggested ramp, of one entry where no ramp is suggested and
      None where nothing was measured; `keys`, as key=value; `evidence` and `limits`, lines; `rows`,
      what is compared.

    Raises:
      ConfigError: the config makes no run, or what is named holds no measurement.
    """
    config = with_nodes(config)
    planned = Comparison(config)
    evidence = Evidence(config, noise, branch)
    batches, keys, limits = None, {}, list(evidence.limits)
    if evidence.measured:
        batches, more = _fitted(evidence, planned, config.learning_rate.learning_rate)
        limits += more
        keys = _keys(batches, planned.total_samples)
    rows = planned.rows(batches)
    if batches and len(batches) > 1:
        saved = 1 - rows[0]["steps"] / rows[1]["steps"]
        if saved < _LEAST_SAVING:
            limits.append(
                f"the ramp {shown(batches)} would save {saved:.1%} of the steps of a constant "
                f"batch of {batches[0][1]}, less than {_LEAST_SAVING:.0%}"
            )
            batches = batches[:1]
            keys, rows = _keys(batches, planned.total_samples), planned.rows(batches)
    if keys:  # so that they can follow what this command line gives in another notation
        defaults = alternatives.of_one_notation().items()
        keys = {k: v for k, v in defaults if config.values[k] != v} | keys
    return {
        "batches": batches,
        "keys": keys,
        "evidence": evidence.lines,
        "limits": limits,
        "rows": rows,
    }


def _keys(batches: Sequence[tuple[int, int]], total_samples: int) -> dict[str, Any]:
    """A suggestion as keys."""
    keys = schedule_keys(batches) | {"total_samples": total_samples}
    if len(batches) > 1:
        keys |= {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
    return keys


def _fitted(
    evidence: Evidence, planned: Comparison, learning_rate: float | None
) -> tuple[list[tuple[int, int]], list[str]]:
    """(sample from which on, batch) by what was measured, and what limits it, in lines."""
    measured, row, total = evidence.measured, planned.row_tokens, planned.total_samples
    sizes = _sizes(evidence, planned)
    limits = _limits_of_branches(evidence)
    if (lowest := measured[0].batch) < min(sizes) * row:
        limits.append(
            f"at the start {short(lowest)} tokens surely cost nothing, and the smallest batch "
            f"that this run may take has {short(min(sizes) * row)}"
        )
    limits += _not_measured(measured, total * row)
    found = ramp_of(measured, sorted(size * row for size in sizes))
    batches = [(round(tokens) // row, batch // row) for tokens, batch in found]
    configured, first = planned.first_batch, batches[0][1]
    if learning_rate and first != configured:
        limits.append(
            f"learning_rate={learning_rate:g} is that of a first batch of {configured}; for "
            f"{first} use {learning_rate * (first / configured) ** 0.5:.3g}, or tune it"
        )
    return [pair for pair in batches if pair[0] < total], limits


def _sizes(evidence: Evidence, planned: Comparison) -> set[int]:
    """The batches that the run may take, in rows.

    Raises:
      ConfigError: its rows have another length than those of all batches that were tried.
    """
    first, row = planned.first_batch, planned.row_tokens
    sizes = {first * 2**n for n in range(31)}
    sizes |= {first // 2**n for n in range(31) if first % 2**n == 0}
    if tried := _tried(evidence):
        # Without a noise scale nothing speaks for a smaller batch than the smallest that was
        # tried, and never does anything for one above the largest.
        least = 0 if evidence.by_noise else min(tried)
        sizes = {size for size in sizes if least <= size * row <= max(tried)}
        sizes |= {tokens // row for tokens in tried if tokens % row == 0}
        if not sizes:
            raise ConfigError(
                f"max_target_length={row}: no batch of such rows is as large as those "
                "that were tried; measure branches of a run with rows of this length"
            )
    return sizes


def _tried(evidence: Evidence) -> list[int]:
    """The batches of all branches, in tokens."""
    return [s["rows"] * r["row_tokens"] for r in evidence.results for s in r["sizes"]]


def _limits_of_branches(evidence: Evidence) -> list[str]:
    """What branches leave open above the largest batch that they allow at the last place."""
    tops: dict[int, int] = {}  # by place, the least of several windows there
    for r in evidence.results:
        start, top = r["first_sample"], r["largest"] * r["row_tokens"]
        tops[start] = min(top, tops.get(start, top))
    if not tops:
        return []
    last, most, largest = tops[max(tops)], max(tops.values()), max(_tried(evidence))
    if last == largest:
        return [
            f"no batch above {short(largest)} tokens was tried, and the largest cost "
            "nothing: larger ones may do as well"
        ]
    if last < most and not evidence.by_noise:
        return [
            f"a batch of {short(most)} tokens cost nothing at an early "
            f"place, but more than {short(last)} cost something at the last; as a batch is "
            "never given back, it stays at what later places allow"
        ]
    return []


def _not_measured(measured: Sequence[Measurement], total: int) -> list[str]:
    """Which of a run's tokens lie behind or before everything that was measured."""
    limits = []
    if (end := max(one.last for one in measured)) < 0.999 * total:
        limits.append(
            f"nothing was measured beyond {short(end)} of this run's {short(total)} tokens: "
            "the batch stays as it is there"
        )
    if (start := measured[0].first) > 0.02 * total:
        limits.append(
            f"nothing was measured before {short(start)} tokens: the batch begins at the smallest"
        )
    return limits
