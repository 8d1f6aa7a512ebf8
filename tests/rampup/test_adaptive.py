"""The ramp that decides while it runs: its bound, its rule, and the fixed ramp that it equals."""

import json
import math
import random

import numpy as np
import pytest

from maxramp.errors import ConfigError
from maxramp.rampup import ladder
from maxramp.rampup.adaptive import NoisePolicy, Period
from maxramp.rampup.schedule import RampupBatchManager, ResumePoint

KEYS = {
    **{"rampup_policy": "noise", "rampup_ladder": [8, 16, 32], "total_samples": 6000},
    **{"warmup_steps_fraction": 0.0, "devices_per_node": 1},
}


def ramp_of(**changes):
    return RampupBatchManager(KEYS | changes)


def record(consumed, rows, signal, variance, **more):
    noise = {"norms_noise_signal": signal, "norms_noise_variance": variance}
    clock = {"consumed_samples": consumed, "global_batch_size": rows, "target_tokens": rows * 16}
    return noise | clock | more


def steps_of(rng, steps, scale, spread, rows=8):
    """(rows, signal, variance) of steps whose noise scale is `scale` rows of 16 tokens."""
    noisy = 1 + spread * rng.standard_normal((steps, 2))
    return [(rows, float(x), float(16 * scale * y)) for x, y in noisy]


def bound_of(steps, factor=1.0):
    period = Period()
    for rows, signal, variance in steps:
        period = period.add(rows, rows * 16, signal, variance)
    return period.lower_bound(factor)


def bound_by_residuals(steps, factor):
    """The delta method as it is in books: each step's share of what the quotient is off by."""
    rows, signal, variance = np.array(steps, np.float64).T
    weights = rows / rows.sum()
    x, y = weights @ signal, weights @ variance
    residuals = weights * (variance / y - signal / x)
    error = math.sqrt(len(rows) / (len(rows) - 1) * (residuals**2).sum())
    return factor * y / x / 16 * math.exp(-1.64 * error)


def test_the_bound_is_below_the_truth_in_19_of_20_cases():
    rng = np.random.default_rng(0)
    below = sum(bound_of(steps_of(rng, 60, 20.0, 0.8)) <= 20 for _ in range(1000))
    assert 930 < below < 985
    assert bound_of(steps_of(rng, 200, 20.0, 1e-4), 3.0) == pytest.approx(60, 1e-3)


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.3])
def test_sums_give_the_bound_of_all_steps(spread):
    rng = np.random.default_rng(1)
    steps = steps_of(rng, 40, 20.0, spread) + steps_of(rng, 30, 22.0, spread, rows=24)
    assert bound_of(steps, 2.0) == pytest.approx(bound_by_residuals(steps, 2.0), rel=1e-7)


def test_too_few_steps_and_skipped_steps_allow_no_rung():
    rng = np.random.default_rng(0)
    assert bound_of(steps_of(rng, 7, 20.0, 0.1)) == 0
    assert bound_of([(8, -1.0, 320.0)] * 20) == 0
    whole, holed = NoisePolicy(ramp_of().keys), NoisePolicy(ramp_of().keys)
    strange = [(None, 1.0), (float("nan"), 1.0), (1.0, float("inf"))]
    for k in range(12):
        step = record(8 * k + 8, 8, 1.0, 320.0 + k)
        whole(step)
        holed(step)
        for pair in strange:
            holed(record(8 * k + 8, 8, *pair))
        holed(record(8 * k + 8, 8, 700.0, 1.0, bad_steps=1))  # skipped
        holed({"step": k, "eval_loss": 1.0})
    assert whole.to_json() == holed.to_json() and whole.to_json()["sums"]["0"].steps == 12


def climb(bound, killed=(), **changes):
    """The ramp of every step of a run and what was decided: `bound` is that of all steps from a
    sample on. At the steps `killed` it starts again with what a checkpoint holds."""
    ramp = ramp_of(**changes)
    policy, ramps, decisions = NoisePolicy(ramp.keys), {}, []
    step, late = 0, None  # numbers come one step late
    while step < ramp.total_steps:
        if step in killed:
            policy(late)
            late, saved = None, json.loads(json.dumps([policy.to_json(), ramp.to_json()["stages"]]))
            policy, rungs = NoisePolicy(ramp.keys, saved[0]), ramp.thresholds[1:]
            rungs = [(one.first_sample, one.global_batch_size) for one in rungs]
            point = ResumePoint(step, ramp.samples_before(step), saved[1], rungs)
            ramp = RampupBatchManager(KEYS | changes, None, point)
        ramps[step] = ramp
        rows, sample = ramp.stage_at_step(step).global_batch_size, ramp.samples_before(step)
        if late:
            policy(late)
        late = record(sample + rows, rows, 1.0, 16 * bound(sample))
        step += 1
        if decision := policy.decide(ramp, step):
            sample = ramp.samples_before(step)
            decisions.append((sample, *decision))
            rungs = [(sample, decision.global_batch_size)]
            point = ResumePoint(step, sample, ramp.to_json()["stages"], rungs)
            ramp = RampupBatchManager(KEYS | changes, None, point)
    return ramps, decisions, ramp


@pytest.mark.parametrize("seed", range(3))
def test_a_rung_needs_two_periods_in_a_row(seed):
    """One rung at a time, never down; and the ramp is the one whose thresholds were known."""
    rng, length = random.Random(seed), 160
    bounds = [rng.choice((0.5, 10.0, 20.0, 40.0)) for _ in range(100)]
    changes = {"rampup_decision_samples": length}
    ramps, decisions, last = climb(lambda sample: bounds[sample // length], **changes)
    pairs = [(0, 8), *((sample, size) for sample, size, _ in decisions)]
    assert [size for _, size in pairs] == [8, 16, 32][: len(pairs)]
    for (begins, rows), (sample, size, lower) in zip(pairs, decisions, strict=False):
        period = (sample - rows) // length - 1  # ended a step before
        assert lower == pytest.approx(min(bounds[period - 1 : period + 1])) and lower >= size
        for other in range(1, period):  # the first that says so, on the rung below
            ended_on_it = (other + 1) * length > begins
            assert min(bounds[other - 1 : other + 1]) < size or not ended_on_it
    fixed = {"step_batch_size_unit": "samples", "total_samples": 6000, "devices_per_node": 1}
    plan = last.to_json()
    again = ladder.fixed_ramp(last.keys, plan["stages"])["step_batch_size_schedule"]
    assert again == " ".join(f"{n}:{size}" for n, size in pairs)
    plain = RampupBatchManager(fixed | {"step_batch_size_schedule": again})
    assert plain.to_json() == plan
    for step, ramp in ramps.items():
        assert ramp.stage_at_step(step).spec == plain.stage_at_step(step).spec
        assert ramp.samples_before(step) == plain.samples_before(step)


def test_a_run_killed_at_any_step_climbs_as_an_uninterrupted_one():
    def bound(sample):
        return 4.0 + 60 * sample / 2400 * (1.0 + 0.2 * math.sin(sample))

    changes = {"total_samples": 2400}
    expected, decisions, last = climb(bound, **changes)
    assert [size for _, size, _ in decisions] == [16, 32]
    steps = len(expected)
    for killed in [[step] for step in range(1, steps)] + [range(1, steps), range(2, steps, 7)]:
        got, again, ramp = climb(bound, killed, **changes)
        assert again == decisions and ramp.to_json() == last.to_json()
        batches = (
            {k: r.stage_at_step(k).global_batch_size for k, r in x.items()} for x in (got, expected)
        )
        assert next(batches) == next(batches)


def decided(noise, **changes):
    return [(sample, size) for sample, size, _ in climb(lambda sample: noise, **changes)[1]]


def test_a_rung_begins_between_its_earliest_and_latest_sample():
    never, always = 0.1, 1e9
    assert decided(never) == []
    assert decided(never, rampup_latest=[1000, 3000]) == [(1000, 16), (3000, 32)]
    assert decided(always, rampup_earliest=[1000, 3000]) == [(1000, 16), (3000, 32)]
    assert decided(always, warmup_steps_fraction=0.5)[0] == (3000, 16)
    # Two periods of 128 samples and a step; then one more that ends on 16 rows, and a step.
    assert decided(always) == [(264, 16), (408, 32)]
    assert decided(never, rampup_latest=[5999, 5999]) == []  # it would begin at the end


@pytest.mark.parametrize("noise", [1e9, 20.0, 0.1])
def test_a_simulated_run_climbs_as_a_real_one(noise):
    draw = random.Random(noise)
    for _ in range(30):
        sizes = sorted(draw.sample(range(2, 40), 3))
        earliest, latest = (sorted(draw.randrange(4000) for _ in sizes[1:]) for _ in range(2))
        latest = [max(pair) for pair in zip(earliest, latest, strict=True)]
        changes = {"rampup_ladder": sizes, "total_samples": 4000, "rampup_earliest": earliest}
        changes |= {"rampup_latest": latest} if draw.randrange(2) else {}
        keys = ramp_of(**changes).keys

        def noisy_from(rung):
            return 0 if noise >= rung.global_batch_size else math.inf

        pairs = ladder.simulate(keys, noisy_from)
        assert decided(noise, **changes) == [pair for pair in pairs if pair[0] < 4000]


def test_a_plan_expects_each_rung_between_its_earliest_and_latest_sample():
    """Each rung between its earliest and its latest sample, and where these are one, there."""
    draw = random.Random(0)
    for _ in range(300):
        sizes = sorted(draw.sample(range(2, 40), draw.choice([2, 3, 4])))
        total = draw.randrange(2000, 20_000)
        earliest, latest = (sorted(draw.randrange(total) for _ in sizes[1:]) for _ in range(2))
        latest = [max(pair) for pair in zip(earliest, latest, strict=True)]
        for bounds in ({}, {"rampup_latest": latest, "rampup_earliest": earliest}):
            try:
                keys = ramp_of(rampup_ladder=sizes, total_samples=total, **bounds).keys
            except ConfigError:  # a rung that the run is too short for
                continue
            expected = ladder.expected_rungs(keys)
            early = ladder.simulate(keys, lambda rung: 0)
            late = ladder.simulate(keys, lambda rung: math.inf)
            assert [size for _, size in expected] == sizes[1:]
            for number, rung in enumerate(ladder.rungs(keys)):
                (first, _), (sample, _) = early[number], expected[number]
                spare = sizes[-1]  # steps of other batches end elsewhere
                assert first - spare <= sample and rung.earliest <= max(sample, rung.latest)
                assert not bounds or sample <= late[number][0] + spare
            # Once a rung is climbed, the others are expected where they were.
            for count in range(1, len(sizes)):
                again = ladder.expected_rungs(keys, expected[count - 1][0], expected[:count])
                assert again == expected


def test_nodes_do_not_depend_on_decisions():
    keys = KEYS | {"num_nodes": 4, "per_device_batch_size": 8}
    nodes = {}
    for climbed in ([], [(800, 16)], [(1600, 16)], [(4000, 32)]):
        for sample in (0, 4000):
            rungs = ladder.expected_rungs(ramp_of().keys, sample, climbed)
            ramp = RampupBatchManager(keys, point=ResumePoint(sample // 8, sample, rungs=rungs))
            for stage in ramp.stages:
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
        ({"rampup_policy": "seesaw", "rampup_latest": [1, 2]}, "only with rampup_policy=noise"),
    ],
)
def test_refused(change, expected):
    with pytest.raises(ConfigError, match=expected):
        ramp_of(**change)


def seesaw_of(ladder, total_samples, **keys):
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


def simulate_seesaw(ladder, total_samples, keys):
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
        ramp = seesaw_of(ladder, samples, **keys)
        steps = range(ramp.total_steps)
        sizes = [(ramp.samples_before(k), ramp.stage_at_step(k).global_batch_size) for k in steps]
        assert sizes == simulate_seesaw(ladder, samples, keys), (ladder, samples, keys)


def test_a_warm_up_anew_is_of_its_phase_alone():
    """The batch follows the run's curve, which is the rate's too."""
    alone, phased = (
        seesaw_of([4, 8, 16], 8000, phases_unit="samples", phases=phases)
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
        ramp = seesaw_of(ladder, first * steps, **keys)
        saved = 1 - ramp.total_steps / steps
        assert 100 * saved == pytest.approx(percent, abs=0.06)
        assert rounding == "nearest" or saved < 0.95 * (1 - final) / 2


def test_a_threshold_on_a_whole_sample():
    """Half the peak is half way down: at 2000 + 8000 / 2 exactly, whatever a cosine rounds to."""
    keys = {"learning_rate_final_fraction": 0.0, "warmup_steps_fraction": 0.2}
    ramp = seesaw_of([1, 2], 10_001, **keys, rampup_rounding="below")
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
def test_seesaw_refused(change, expected):
    with pytest.raises(ConfigError, match=expected):
        seesaw_of(**({"ladder": [8, 16], "total_samples": 9000} | change))
