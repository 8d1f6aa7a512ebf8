"""The ladder of a `rampup_policy`: its batch sizes, and when a run may climb to each. Imports no
JAX.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from maxramp.keys.numbers import show
from maxramp.keys.section import Relations
from maxramp.rampup.keys import BatchKeys, CurveKeys

FEWEST_STEPS = 8  # of a period: fewer say too little about their own spread


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve that rises from 0 to the peak, stays there, and falls to `final` of it at the end.

    Lengths are all in samples, or all in steps: whole multiples of `quantum`, the length of one
    batch. A rise or fall over n samples reaches its last value after n - quantum of them, as a
    batch has one learning rate, that of its first sample.
    """

    total: float  # length of the curve; lengths are floats, as samples exceed JAX's int32
    quantum: int  # length of one batch
    warmup: float  # length of the rise
    decay: float  # length of the fall
    style: str  # cosine or linear, the shape of the fall
    final: float  # the end of the fall, as a fraction of the peak

    @classmethod
    def from_keys(cls, keys: CurveKeys, total: int, quantum: int) -> Self:
        """Makes the curve of a run over `total` samples or steps; `quantum` is one batch, in the
        same unit."""
        curve = cls(float(total), quantum, 0.0, 0.0, "cosine", keys.learning_rate_final_fraction)
        warmup = curve.part(keys.warmup_steps_fraction)
        decay, style = curve.total - warmup, curve.style
        if keys.lr_schedule_type == "wsd":
            decay, style = curve.part(keys.wsd_decay_steps_fraction), keys.wsd_decay_style
        return dataclasses.replace(curve, warmup=warmup, decay=decay, style=style)

    def part(self, fraction: float) -> float:
        """Returns a fraction of the total, rounded down to whole batches."""
        return float(math.floor(self.total / self.quantum * fraction) * self.quantum)

    def falls_to(self, height: float) -> float:
        """Returns where the fall reaches a fraction of the peak, above `final` and at most 1; not
        a whole sample."""
        left = (height - self.final) / (1 - self.final)
        done = math.acos(2 * left - 1) / math.pi if self.style == "cosine" else 1 - left
        return self.total - self.decay + done * max(0.0, self.decay - self.quantum)


@dataclasses.dataclass(frozen=True)
class Rung:
    """A size above the first under rampup_policy=noise, and from how many samples it may begin."""

    global_batch_size: int
    earliest: int  # it does not begin before
    expected: int  # it begins here in a plan, which knows no measurements
    latest: float  # it begins here whatever was measured; infinity = never


def rungs(keys: BatchKeys, above: int = 0) -> list[Rung]:
    """Returns the rungs of rampup_policy=noise that are larger than the batch `above`, without the
    ladder's first size. The run's length is given, as samples or tokens."""
    warm = int(_curve_of_first(keys).warmup)
    ladder = []
    for i, size in enumerate(keys.rampup_ladder[1:]):
        earliest = max(warm, keys.rampup_earliest[i] if keys.rampup_earliest else 0)
        # Half way between the two; without a latest sample, the rungs share the rest of the run.
        expected = earliest + (keys.samples_of_run - earliest) * (i + 1) // len(keys.rampup_ladder)
        latest = math.inf
        if keys.rampup_latest:
            latest = keys.rampup_latest[i]
            expected = (earliest + latest) // 2
        ladder.append(Rung(size, earliest, expected, latest))
    return [rung for rung in ladder if rung.global_batch_size > above]


def simulate(
    keys: BatchKeys, noisy_from: Callable[[Rung], float], sample: int = 0, rows: int = 0
) -> list[tuple[int, int]]:
    """Returns (first sample, global batch size) of the rungs to come for a run that stands at
    `sample` with a batch of `rows` (0: the ladder's first), where the noise allows each rung from
    the sample `noisy_from(rung)` on. Only for rampup_policy=noise.
    """
    pairs, rows, length = [], rows or keys.rampup_ladder[0], period(keys)
    for rung in rungs(keys, rows):
        # A decision needs two periods, and the second one ends with steps of the rung below.
        ends = max(2, sample // length + 1) * length
        begins = max(noisy_from(rung), rung.earliest, ends + rows)
        begins = min(begins, rung.latest)
        if begins == math.inf:
            break
        sample += max(1, -(-(int(begins) - sample) // rows)) * rows
        rows = rung.global_batch_size
        pairs.append((sample, rows))
    return pairs


def expected_rungs(
    keys: BatchKeys, sample: int = 0, climbed: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """Returns (first sample, global batch size) of the rungs that were `climbed`, and of those that
    a plan expects after `sample`, maybe beyond the run's end; [] unless rampup_policy=noise.
    """
    if keys.rampup_policy != "noise":
        return []
    rows = climbed[-1][1] if climbed else 0
    return [*climbed, *simulate(keys, operator.attrgetter("expected"), sample, rows)]


def fixed_ramp(keys: BatchKeys, stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns keys of a ramp that repeats the batches of the `stages` (as in plan.json) of a run
    with rampup_policy=noise; {} for another run, or if a restart changed the batches, which no
    single ramp repeats."""
    sizes = [stage["global_batch_size"] for stage in stages]
    if keys.rampup_policy != "noise" or sizes != list(keys.rampup_ladder[: len(sizes)]):
        return {}
    pairs = (f"{stage['first_sample']}:{stage['global_batch_size']}" for stage in stages)
    return {"step_batch_size_schedule": " ".join(pairs), "step_batch_size_unit": "samples"}


def period(keys: BatchKeys) -> int:
    """Returns the samples between two decisions of rampup_policy=noise: by default, a 64th of the
    run.
    """
    if keys.rampup_decision_samples != -1:
        return keys.rampup_decision_samples
    return max(keys.samples_of_run // 64, FEWEST_STEPS * keys.rampup_ladder[-2])


def _check_policy(keys: BatchKeys) -> Relations:
    """Checks what every policy needs, once each key is known to be in its range."""
    ladder, rule = list(keys.rampup_ladder), f"rampup_policy={keys.rampup_policy}"
    shown = f"rampup_ladder={ladder}"
    yield (
        len(ladder) < 2 or any(type(rung) is not int for rung in ladder) or ladder[0] < 1,
        f"{shown} must be a list of global batch sizes, from the first to the largest, such as "
        f"[256, 512, 1024] ({rule})",
    )
    for below, rung in itertools.pairwise(ladder):
        yield rung <= below, f"{shown}: {rung} is not above {below}; sizes must increase"
    yield (
        keys.samples_of_run == -1,
        f"steps={keys.steps} with {rule}: how many steps the samples take is for the ramp to "
        "decide; give total_samples or total_tokens",
    )
    yield (
        keys.learning_rate_by != "samples" or keys.learning_rate_schedule_steps != -1,
        f"learning_rate_by={keys.learning_rate_by} and learning_rate_schedule_steps="
        f"{keys.learning_rate_schedule_steps} with {rule}: the batch goes with the learning rate "
        "over all samples of the run; use samples and -1",
    )


def check_noise(keys: BatchKeys) -> Relations:
    """Checks the keys of rampup_policy=noise."""
    yield from _check_policy(keys)
    yield (
        keys.rampup_ladder[0] == 1,
        f"rampup_ladder={list(keys.rampup_ladder)} with rampup_policy=noise: a batch of 1 row has "
        "no noise scale, so nothing would ever be decided; begin with 2 rows or more",
    )
    above = len(keys.rampup_ladder) - 1
    for name in ("rampup_earliest", "rampup_latest"):
        bounds = list(getattr(keys, name))
        whole = all(type(n) is int and n >= 0 for n in bounds)
        yield (
            bounds and not (whole and len(bounds) == above),
            f"{name}={bounds} must be {above} numbers of samples, one for every rung above the "
            "first, or []",
        )
        text = f"{name}={bounds} must not decrease: rungs are taken in their order"
        yield bounds != sorted(bounds), text
    for rung in rungs(keys):
        yield (
            rung.latest < rung.earliest,
            f"rampup_latest={list(keys.rampup_latest)}: {rung.latest} comes before the rung's "
            f"earliest sample, {rung.earliest} (the later of rampup_earliest and the warm-up's "
            "end); raise it",
        )
    least, samples = FEWEST_STEPS * keys.rampup_ladder[-2], keys.rampup_decision_samples
    yield (
        -1 != samples < least,
        f"rampup_decision_samples={samples} holds fewer than {FEWEST_STEPS} steps of "
        f"{keys.rampup_ladder[-2]} rows, which cannot tell their own spread; use {least} or more, "
        "or -1",
    )
    length, most = period(keys), keys.samples_of_run // 2
    fits = f"use {least} to {most}, or" if least <= most else "take"
    yield (
        length > most,
        f"rampup_decision_samples={samples}: a decision rests on two periods, and two of {length} "
        f"samples are more than the run's {keys.samples_of_run}; {fits} smaller rungs or a longer "
        "run",
    )


# A threshold that is a whole number stays it, whatever a cosine's last bits are.
_ROUNDING = 1e-3


def seesaw_sizes(keys: BatchKeys) -> list[tuple[int, int]]:
    """Returns (first sample, global batch size) of every stage under rampup_policy=seesaw, for keys
    that `check_seesaw` lets pass.

    Seesaw lets the batch grow where the learning rate would fall (Meterez et al., arXiv
    2510.14717): where the base curve cuts the rate by a factor a, it cuts it by sqrt(a) and
    multiplies the batch by a. That keeps rate / sqrt(batch), and with it the loss over samples of
    normalized SGD (a model of Adam) as long as noise dominates the gradient, in fewer steps. With x
    the height of the base curve (1 at its peak) and B the first batch, the batch is B / x and the
    rate peak * sqrt(x).

    The batch takes only the sizes of `rampup_ladder`. Of two rungs m < n, `nearest` takes n from
    their geometric mean on, x = B / sqrt(m * n), and `below` from x = B / n on, so that the batch
    is never above B / x. The base curve is that of a run of constant batch B over the same samples,
    so all thresholds are known before the run begins.
    """
    first, curve = keys.rampup_ladder[0], _curve_of_first(keys)
    return [(0, first)] + [
        (math.ceil(curve.falls_to(first / size) - _ROUNDING), rung)
        for rung, size in _rungs_above_first(keys)
    ]


def check_seesaw(keys: BatchKeys) -> Relations:
    """Checks the keys of rampup_policy=seesaw."""
    yield from _check_policy(keys)
    sizes, lowest = list(keys.rampup_ladder), keys.learning_rate_final_fraction
    for rung, size in _rungs_above_first(keys):
        ends = f"({sizes[0]} / {show(lowest)} = {sizes[0] / lowest:g} rows)" if lowest else ""
        yield (
            sizes[0] / size <= lowest,
            f"rampup_ladder={sizes}: the batch never grows to {rung}, as the learning rate falls "
            f"to learning_rate_final_fraction={show(lowest)} of its peak and no further {ends}; "
            f"leave {rung} out, or lower learning_rate_final_fraction",
        )


def _curve_of_first(keys: BatchKeys) -> Curve:
    """Returns the learning rate's curve of a run whose batches all have the ladder's first size."""
    first = keys.rampup_ladder[0]
    return Curve.from_keys(keys, keys.samples_in_batches_of(first), first)


def _rungs_above_first(keys: BatchKeys) -> list[tuple[int, float]]:
    """Returns (rung, value of B / x at which the rung begins) of every rung but the first."""
    nearest = keys.rampup_rounding == "nearest"
    return [
        (rung, math.sqrt(below * rung) if nearest else rung)
        for below, rung in itertools.pairwise(keys.rampup_ladder)
    ]
