"""What was measured on runs, read for another one that is planned, and what it does not say.

The largest batch that costs nothing, over a run, is in tokens of the run that is planned, as a run
with rows of another length may have been measured. Nothing is assumed where nothing was measured:
before that the batch is the smallest, after it the batch stays.
"""

import dataclasses
import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from maxramp.commandline import short
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys.yamlfile import read_yaml
from maxramp.measuring.noise import KINDS, Block, blocks_of, records_of
from maxramp.model.keys import SHAPE_KEYS

_BLOCKS = 12, 3, 1  # shares of a run in which its noise scale is read: fewer where it is short
# What makes a run that was measured another one than the run that is planned.
_SAME = (
    *SHAPE_KEYS,
    *("max_target_length", "packing", "dataset_type", "text_files", "grain_train_files"),
    *("learning_rate", "opt_type"),
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured over some tokens of a run.

    Attributes:
      first, last: tokens consumed before and after.
      batch: the batch, in tokens, that surely costs nothing there.
    """

    first: float
    last: float
    batch: float


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
    """What a run's noise scale and its branches say of the batch.

    Attributes:
      measured: the batches that surely cost nothing, in order; empty where nothing was measured.
      results: what maxramp.branch found, one of each step and window.
      by_noise: whether a noise scale gave the places of `measured`.
      lines: what was measured, for a person.
      limits: what that leaves open, for a person.
    """

    def __init__(self, config: Config, noise: str | None, branch: str | None):
        """
        Args:
          config: of the run that is planned.
          noise: the folder of a run with a noise scale.
          branch: the folder of a run with branches, or of one of their results.

        Raises:
          ConfigError: what is named holds no measurement.
        """
        self._config, self.by_noise, self.lines, self.limits = config, bool(noise), [], []
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
