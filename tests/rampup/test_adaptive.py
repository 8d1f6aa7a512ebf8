"""The ramp that decides while it runs: its bound, its rule, and the fixed ramp that it equals."""

import random

import numpy as np
import pytest

from maxramp.errors import ConfigError
from maxramp.rampup import adaptive, ladder
from maxramp.rampup.schedule import RampupBatchManager, Start

KEYS = {
    "rampup_policy": "noise",
    "rampup_ladder": [8, 16, 32],
    "total_samples": 6000,
    "warmup_steps_fraction": 0.0,
    "devices_per_node": 1,
}


def ramp_of(**changes):
    return RampupBatchManager(KEYS | changes)


def records_of(rng, steps, scale, spread, rows=8):
    """Steps whose noise scale is `scale` rows of 16 tokens."""
    noisy = 1 + spread * rng.standard_normal((steps, 2))
    return [
        {
            "norms_noise_signal": float(x),
            "norms_noise_variance": float(16 * scale * y),
            "global_batch_size": rows,
            "consumed_samples": (k + 1) * rows,
            "target_tokens": rows * 16,
        }
        for k, (x, y) in enumerate(noisy)
    ]


def test_the_bound_is_below_the_truth_in_19_of_20_cases():
    rng = np.random.default_rng(0)
    below = sum(
        adaptive.lower_bound(records_of(rng, 60, 20.0, 0.8), 1.0) <= 20 for _ in range(1000)
    )
    assert 930 < below < 985
    assert adaptive.lower_bound(records_of(rng, 200, 20.0, 1e-4), 3.0) == pytest.approx(60, 1e-3)


def test_what_says_nothing_allows_nothing():
    rng = np.random.default_rng(0)
    assert adaptive.lower_bound(records_of(rng, 7, 20.0, 0.1), 1.0) == 0
    records = records_of(rng, 20, 20.0, 0.1)
    for record, wrong in zip(records, (None, float("nan"), float("inf")), strict=False):
        record["norms_noise_signal"] = wrong
    assert adaptive.lower_bound(records, 1.0) == pytest.approx(20, 0.2)
    records[4] |= {"norms_noise_signal": 700.0, "bad_steps": 1}  # skipped
    assert adaptive.lower_bound(records, 1.0) == pytest.approx(20, 0.2)
    for record in records:
        record["norms_noise_signal"] = -1.0
    assert adaptive.lower_bound(records, 1.0) == 0


def decisions_of(lower, **changes):
    """Every step asked, as the loop does."""
    ramp = ramp_of(**changes)
    policy, found = adaptive.Policy(ramp.keys), []
    step = 0
    while step < ramp.total_steps:
        if decision := policy.decide(ramp, step, lower):
            ramp.grow(decision.first_step)
            found.append(decision)
        step += 1
    return ramp, found


@pytest.mark.parametrize("seed", range(3))
def test_a_rung_needs_two_periods_in_a_row(seed):
    """One rung at a time, never down; and the ramp is the one whose thresholds were known."""
    rng = random.Random(seed)
    bounds = [rng.choice((0.0, 10.0, 20.0, 40.0)) for _ in range(100)]
    length = 160
    ramp, found = decisions_of(bounds.__getitem__, rampup_decision_samples=length)
    sizes = [8, *(d.global_batch_size for d in found)]
    assert sizes == [8, 16, 32][: len(sizes)]
    for decision in found:
        before = decision.global_batch_size // 2
        period = (decision.first_sample - ladder.DELAY * before) // length - 1
        assert min(bounds[period], bounds[period - 1]) >= decision.global_batch_size
        assert decision.lower == min(bounds[period], bounds[period - 1])
        assert decision.first_step == decision.after_step + ladder.DELAY
    pairs = [(d.first_sample, d.global_batch_size) for d in found]
    again = RampupBatchManager(KEYS, start=Start(decided=pairs))
    fixed = {"step_batch_size_unit": "samples", "total_samples": 6000, "devices_per_node": 1}
    text = " ".join(f"{n}:{size}" for n, size in [(0, 8), *pairs])
    plain = RampupBatchManager(fixed | {"step_batch_size_schedule": text})
    assert ramp.stages == again.stages == plain.stages
    assert [r.global_batch_size for r in again.rungs] == [8, 16, 32][len(sizes) :]


def test_earliest_and_latest():
    never, always = (lambda period: 0.0), (lambda period: 1e9)
    _, found = decisions_of(never)
    assert found == []
    _, found = decisions_of(never, rampup_latest=[1000, 3000])
    assert [d.reason for d in found] == ["latest"] * 2
    # The first period of 128 samples that ends past them, and eight steps.
    assert [d.first_sample for d in found] == [1024 + 64, 3072 + 128]
    _, found = decisions_of(always, rampup_earliest=[1000, 3000])
    assert [d.first_sample for d in found] == [1024 + 64, 3072 + 128]
    _, found = decisions_of(always, warmup_steps_fraction=0.5)
    assert found[0].first_sample == 3072 + 64
    _, found = decisions_of(never, rampup_latest=[5990, 5990])
    assert found == []  # it would begin after the end


def test_simulated_as_decided():
    for noise, changes in ((1e9, {}), (20.0, {"rampup_latest": [3000, 4000]}), (0.0, {})):
        _, found = decisions_of(lambda period, noise=noise: noise, **changes)
        pairs = [(d.first_sample, d.global_batch_size) for d in found]
        assert adaptive.simulate(ramp_of(**changes).keys, noise) == pairs


def test_a_plan_expects_what_may_happen():
    """Each rung between its earliest and its latest sample, and where these are one, there.

    But for a period: where steps end in it depends on when the rung before was taken.
    """
    draw = random.Random(0)
    for _ in range(300):
        sizes = sorted(draw.sample(range(2, 40), draw.choice([2, 3, 4])))
        above, total = len(sizes) - 1, draw.randrange(2000, 20_000)
        earliest, latest = (sorted(draw.randrange(total) for _ in sizes[1:]) for _ in range(2))
        latest = [max(pair) for pair in zip(earliest, latest, strict=True)]
        for changes in (
            {},
            {"rampup_latest": latest, "rampup_earliest": earliest},
            {"rampup_latest": latest, "rampup_earliest": latest},
        ):
            changes = {"rampup_ladder": sizes, "total_samples": total, **changes}
            try:
                keys = ramp_of(**changes).keys
            except ConfigError:  # a rung that the run is too short for
                continue
            early, found, late = (
                ([min(first, total) for first, _ in pairs] + [total] * above)[:above]
                for pairs in (
                    adaptive.simulate(keys, 1e9),
                    ladder.plan_rungs(keys),
                    adaptive.simulate(keys, 0.0),
                )
            )
            spare = ladder.period(keys) + sizes[-1]
            for a, b, c in zip(early, found, late, strict=True):
                assert a - spare <= b <= c + spare, changes
            if changes.get("rampup_earliest") == latest:
                assert early == found == late


def test_nodes_do_not_depend_on_decisions():
    keys = KEYS | {"num_nodes": 4, "per_device_batch_size": 8}
    nodes = {}
    for decided in ([], [(800, 16)], [(800, 16), (4000, 32)], ladder.plan_rungs(ramp_of().keys)):
        ramp = RampupBatchManager(keys, start=Start(decided=decided))
        for stage in ramp.stages + ramp.rungs:
            assert nodes.setdefault(stage.global_batch_size, stage.nodes) == stage.nodes
    assert sorted(nodes) == [8, 16, 32] and nodes[32] > nodes[8]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"rampup_ladder": [8]}, "rampup_ladder=.*such as .*rampup_policy=noise"),
        ({"rampup_earliest": [5]}, r"rampup_earliest=\[5\] must be 2 numbers of samples"),
        ({"rampup_latest": [9, 5]}, r"rampup_latest=\[9, 5\] must not decrease"),
        ({"rampup_earliest": [9, 9], "rampup_latest": [8, 9]}, "8 comes before the rung's"),
        (
            {"warmup_steps_fraction": 0.1, "rampup_latest": [500, 900]},
            "rampup_latest=.*500 comes before the rung's earliest sample, 600 .*raise it",
        ),
        ({"rampup_ladder": [1, 2]}, "a batch of 1 row has no noise scale.*begin with 2 rows"),
        ({"total_samples": 250}, "two of 128 samples are more than the run's 250; take smaller"),
        ({"rampup_decision_samples": 4000}, "two of 4000 samples are.*6000; use 128 to 3000"),
        ({"rampup_decision_samples": 100}, "fewer than 8 steps of 16 rows.*use 128 or more"),
        ({"rampup_noise_factor": 0.0}, "rampup_noise_factor=0.0 must be above 0"),
        ({"total_samples": -1, "steps": 9}, "steps=9 with rampup_policy=noise"),
        (
            {"rampup_policy": "seesaw", "rampup_latest": [1, 2]},
            "is read only with rampup_policy=noise",
        ),
    ],
)
def test_refused(change, expected):
    with pytest.raises(ConfigError, match=expected):
        ramp_of(**change)


def test_another_ladder_than_the_one_decided_on():
    keys = ramp_of().keys
    assert adaptive.check_decisions(keys, [(80, 16)]) == [(80, 16)]
    with pytest.raises(ConfigError, match=r"has taken the batches \[8, 24\]"):
        adaptive.check_decisions(keys, [(80, 24)])
