"""Seesaw's stages against its rule, taken step by step, and the steps that it saves."""

import math
import random

import pytest

from maxramp.errors import ConfigError
from maxramp.rampup.schedule import RampupBatchManager


def ramp_of(ladder, total_samples, **keys):
    curve = {"learning_rate_final_fraction": 0.1, "warmup_steps_fraction": 0.05}
    policy = {"rampup_policy": "seesaw", "rampup_ladder": ladder, "total_samples": total_samples}
    return RampupBatchManager(curve | policy | keys | {"devices_per_node": 1})


def height(k, steps, keys):
    """The base curve at step k of a constant run of so many steps, its peak at 1: MaxText's."""
    final, warmup = keys["learning_rate_final_fraction"], keys["warmup_steps_fraction"]
    rise = math.floor(steps * warmup)
    fall = steps - rise
    linear = False
    if keys["lr_schedule_type"] == "wsd":
        fall = math.floor(steps * keys["wsd_decay_steps_fraction"])
        linear = keys["wsd_decay_style"] == "linear"
    if k < steps - fall:
        return 1.0  # on the way up the batch does not shrink
    part = min(1, (k - (steps - fall)) / (fall - 1))
    return final + (1 - final) * (1 - part if linear else (1 + math.cos(math.pi * part)) / 2)


def simulate(ladder, total_samples, keys):
    """The rule, one step after the other: (consumed before, batch)."""
    first, consumed, batches = ladder[0], 0, []
    steps = -(-total_samples // first)
    while consumed < total_samples:
        wanted = first / max(1e-9, height(consumed / first, steps, keys))
        if keys["rampup_rounding"] == "nearest":
            # of two that are as near, the larger
            batch = min(ladder, key=lambda rung: (round(abs(math.log(rung / wanted)), 9), -rung))
        else:
            batch = max(rung for rung in ladder if rung <= wanted * (1 + 1e-9))
        batches.append((consumed, batch))
        consumed += batch
    return batches


@pytest.mark.parametrize("seed", range(3))
def test_every_step_takes_the_rung_of_the_base_curve(seed):
    rng = random.Random(seed)
    for _ in range(100):
        first = rng.randint(1, 12)
        keys = {
            "lr_schedule_type": rng.choice(("cosine", "wsd")),
            "learning_rate_final_fraction": rng.choice((0.0, 0.1, rng.random())),
            "warmup_steps_fraction": rng.choice((0.0, 0.05, 0.3)),
            "wsd_decay_steps_fraction": rng.choice((0.1, 0.6)),
            "wsd_decay_style": rng.choice(("linear", "cosine")),
            "rampup_rounding": rng.choice(("nearest", "below")),
        }
        most = first / max(0.02, keys["learning_rate_final_fraction"])
        ladder = [first, *sorted(rng.sample(range(first + 1, 20 * first + 5), 3))]
        ladder = [first] + [rung for rung in ladder[1:] if rung < most]
        samples = rng.randint(30 * first, 400 * first)
        if len(ladder) == 1:
            continue
        ramp = ramp_of(ladder, samples, **keys)
        steps = range(ramp.total_steps)
        sizes = [(ramp.samples_before(k), ramp.stage_at_step(k).global_batch_size) for k in steps]
        assert sizes == simulate(ladder, samples, keys), (ladder, samples, keys)


def test_a_warm_up_anew_is_of_its_phase_alone():
    """The batch follows the run's curve, which is the rate's too."""
    alone, phased = (
        ramp_of([4, 8, 16], 8000, phases_unit="samples", phases=phases)
        for phases in ({}, {"2000": {"warmup_steps_fraction": 0.3}, "3000": {"row_length": 1}})
    )
    sizes = [
        [(t.first_sample, t.global_batch_size) for t in ramp.thresholds] for ramp in (alone, phased)
    ]
    assert [pair for pair in sizes[1] if pair[0] not in (2000, 3000)] == sizes[0]
    assert phased.total_steps == alone.total_steps


@pytest.mark.parametrize(
    "ratio, rungs, final, nearest, below",
    [
        *((2, 3, 0.1, 39.8, 29.7), (2**0.5, 6, 0.1, 41.6, 35.6), (1.1, 23, 0.1, 42.6, 40.6)),
        (2**0.5, 6, 0.0, 44.8, 39.5),
    ],
)
def test_steps_saved(ratio, rungs, final, nearest, below):
    """Up to eight times the batch (nine in steps of 1.1) after 5% warm-up. The limit, of any batch
    at all, is the mean of 1 - x: (1 - final) / 2 of what is not warm-up."""
    first, steps = 10_000, 100_000
    ladder = [round(first * ratio**i) for i in range(rungs + 1)]
    for rounding, percent in (("nearest", nearest), ("below", below)):
        keys = {"learning_rate_final_fraction": final, "rampup_rounding": rounding}
        ramp = ramp_of(ladder, first * steps, **keys)
        saved = 1 - ramp.total_steps / steps
        assert 100 * saved == pytest.approx(percent, abs=0.06)
        assert rounding == "nearest" or saved < 0.95 * (1 - final) / 2


def test_a_threshold_on_a_whole_sample():
    """Half the peak is half way down: at 2000 + 8000 / 2 exactly, whatever a cosine rounds to."""
    keys = {"learning_rate_final_fraction": 0.0, "warmup_steps_fraction": 0.2}
    ramp = ramp_of([1, 2], 10_001, **keys, rampup_rounding="below")
    assert [stage.first_sample for stage in ramp.stages] == [0, 6000]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"rampup_ladder": [8]}, r"rampup_ladder=\[8\] must be a list of global batch sizes"),
        ({"rampup_ladder": [8, 16, 16]}, r"rampup_ladder=.*: 16 is not above 16; .* increase"),
        ({"rampup_ladder": [8, 12.5]}, "rampup_ladder=.*must be a list"),
        ({"rampup_ladder": [8, 16, 512]}, r"never grows to 512.*8 / 0.1 = 80 rows.*leave 512 out"),
        ({"total_samples": -1, "steps": 9}, "steps=9 with rampup_policy=seesaw.*total_samples"),
        ({"learning_rate_by": "steps"}, "learning_rate_by=steps.*use samples and -1"),
        ({"learning_rate_schedule_steps": 9}, "learning_rate_schedule_steps=9.*use samples"),
        ({"global_batch_size": 9}, "global_batch_size=9 and rampup_policy=seesaw.*leave"),
        ({"rampup_policy": ""}, r"rampup_ladder=\[8, 16\] is read only with rampup_policy"),
        ({"rampup_batch_size": [8, 8, 80]}, "rampup_policy=seesaw describe the ramp in two"),
    ],
)
def test_refused(change, expected):
    with pytest.raises(ConfigError, match=expected):
        ramp_of(**({"ladder": [8, 16], "total_samples": 9000} | change))
