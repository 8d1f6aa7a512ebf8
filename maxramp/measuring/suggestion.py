"""A ramp for a run that is planned, or none, from what was measured on others."""

from collections.abc import Iterator
from typing import Any

from maxramp.commandline import short
from maxramp.config import alternatives
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.measuring.comparison import Comparison, schedule_keys, shown
from maxramp.measuring.evidence import Evidence
from maxramp.measuring.ramp import ramp_of
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
    limits = evidence.limits
    batches = _fitted(evidence, planned) if evidence.measured else None
    rows, keys = planned.rows(batches), {}
    if batches:
        if (rate := config.learning_rate.learning_rate) and batches[0][1] != planned.first_batch:
            first, configured = batches[0][1], planned.first_batch
            limits.append(
                f"learning_rate={rate:g} is that of a first batch of {configured}; for {first} use "
                f"{rate * (first / configured) ** 0.5:.3g}, or tune it"
            )
        if len(batches) > 1 and (saved := _saved(rows)) < _LEAST_SAVING:
            limits.append(
                f"the ramp {shown(batches)} would save {saved:.1%} of the steps of a constant "
                f"batch of {batches[0][1]}, less than {_LEAST_SAVING:.0%}"
            )
            batches = batches[:1]
            rows = planned.rows(batches)
        keys = schedule_keys(batches) | {"total_samples": planned.total_samples}
        if len(batches) > 1:
            keys |= {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
        # So that they can follow what this command line gives in another notation.
        defaults = alternatives.of_one_notation().items()
        keys = {k: v for k, v in defaults if config.values[k] != v} | keys
    return {
        "batches": batches,
        "keys": keys,
        "evidence": evidence.lines,
        "limits": limits,
        "rows": rows,
    }


def _saved(rows: list[dict[str, Any]]) -> float:
    """The share of a constant batch's steps that a ramp saves."""
    return 1 - rows[0]["steps"] / rows[1]["steps"]


def _fitted(evidence: Evidence, planned: Comparison) -> list[tuple[int, int]]:
    """(sample from which on, batch) by what was measured; the evidence gets what limits it."""
    measured, row, total = evidence.measured, planned.row_tokens, planned.total_samples
    sizes, limits = [size * row for size in _sizes(evidence, planned)], evidence.limits
    if evidence.results:
        limits += _limits_of_branches(evidence)
    if (lowest := measured[0].batch) < sizes[0]:
        limits.append(
            f"at the start {short(lowest)} tokens surely cost nothing, and the smallest batch "
            f"that this run may take has {short(sizes[0])}"
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
    ramp = ramp_of(measured, sizes)
    return [(round(t) // row, batch // row) for t, batch in ramp if round(t) // row < total]


def _sizes(evidence: Evidence, planned: Comparison) -> list[int]:
    """The batches that the run may take, in rows, the smallest first.

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
    return sorted(sizes)


def _tried(evidence: Evidence) -> list[int]:
    """The batches of all branches, in tokens."""
    return [s["rows"] * r["row_tokens"] for r in evidence.results for s in r["sizes"]]


def _limits_of_branches(evidence: Evidence) -> Iterator[str]:
    """What branches leave open above the largest batch that they allow at the last place."""
    order = sorted(evidence.results, key=lambda r: -r["largest"])  # of one place the least counts
    tops = {r["first_sample"]: r["largest"] * r["row_tokens"] for r in order}
    last, most, largest = tops[max(tops)], max(tops.values()), max(_tried(evidence))
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
