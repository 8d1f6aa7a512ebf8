"""The learning rate over samples against MaxText's schedule over steps, written with optax."""

import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxramp.rampup.schedule import RampupBatchManager, ResumePoint
from maxramp.training.learning_rate import LearningRate

MOST_STEPS = 128  # one length for all curves: one compilation
# Both sides take a position and a cosine in float32: a few roundings of 2^-24 of the peak.
TOLERANCE = 1e-6


def settings(**changes):
    """The batch and schedule keys of a resolved config."""
    values = {
        **{"learning_rate": 1.0, "learning_rate_by": "samples", "batch_size_lr_scaling": "none"},
        **{"batch_size_lr_reference": "final", "lr_schedule_type": "cosine"},
        **{"learning_rate_final_fraction": 0.1, "warmup_steps_fraction": 0.1},
        **{"wsd_decay_steps_fraction": 0.1, "wsd_decay_style": "linear"},
        **{"learning_rate_schedule_steps": 100, "steps": 100, "enable_rampup_batch_size": False},
        **{"per_device_batch_size": 4, "gradient_accumulation_steps": 1, "num_nodes": 1},
        "devices_per_node": 2,
    }
    return SimpleNamespace(**(values | changes))


def random_schedule(rng):
    """Keys of any schedule: phases of no steps and of one step are as likely as long ones."""
    schedule_steps = rng.choice((rng.randint(1, 6), rng.randint(1, MOST_STEPS)))
    warmup = rng.choice((0.0, 1.0, 1 / schedule_steps, round(rng.random(), 2)))
    return {
        "learning_rate": rng.uniform(1e-5, 1e-1),
        "lr_schedule_type": rng.choice(("cosine", "wsd")),
        "learning_rate_final_fraction": rng.choice((0.0, 0.1, 1.0, rng.random())),
        "warmup_steps_fraction": warmup,
        "wsd_decay_steps_fraction": rng.choice((0.0, 1 - warmup, rng.random() * (1 - warmup))),
        "wsd_decay_style": rng.choice(("linear", "cosine")),
        "learning_rate_schedule_steps": schedule_steps,
        "steps": rng.choice((schedule_steps, MOST_STEPS)),
    }


def rate_and_ramp(config):
    ramp = RampupBatchManager(config)
    return LearningRate.from_keys(config, ramp), ramp


def rates_at_steps(rate, ramp, steps):
    """Learning rates of the first `steps` steps."""
    return np.asarray(rate(np.array([ramp.samples_before(step) for step in range(steps)])))


def maxtext_schedule(config):
    """Learning rate by step."""
    peak = config.learning_rate
    final = peak * config.learning_rate_final_fraction

    def cosine(steps):
        def schedule(step):
            part = step / (steps - 1) if steps > 1 else 1.0
            left = 0.5 * (jnp.cos(jnp.pi * part) + 1)
            return peak * left + final * (1 - left)

        return schedule

    total = config.learning_rate_schedule_steps
    warmup = int(total * config.warmup_steps_fraction)
    phases = [(warmup, optax.linear_schedule(0.0, peak, warmup - 1))]
    if config.lr_schedule_type == "cosine":
        phases += [(total - warmup, cosine(total - warmup))]
    else:
        decay = int(total * config.wsd_decay_steps_fraction)
        linear = config.wsd_decay_style == "linear"
        fall = optax.linear_schedule(peak, final, decay - 1) if linear else cosine(decay)
        phases += [(total - warmup - decay, optax.constant_schedule(peak)), (decay, fall)]
    phases += [(config.steps - total, optax.constant_schedule(0.0))]
    phases = [(steps, schedule) for steps, schedule in phases if steps > 0]
    ends = np.cumsum([steps for steps, _ in phases])
    return optax.join_schedules([schedule for _, schedule in phases], ends[:-1].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_constant_batch_is_maxtext(seed):
    """At every step of a run with one batch size, for any schedule and any batch size."""
    rng = random.Random(seed)
    for _ in range(200):
        batch = {
            "per_device_batch_size": rng.choice((0.5, 1, 3, 7, 60)),
            "gradient_accumulation_steps": rng.choice((1, 3, 32)),
            "devices_per_node": rng.choice((2, 10, 256)),
        }
        config = settings(**random_schedule(rng), **batch)
        rate, ramp = rate_and_ramp(config)
        steps = np.arange(MOST_STEPS)
        expected = np.asarray(maxtext_schedule(config)(steps)) * np.ones(MOST_STEPS)
        actual = rates_at_steps(rate, ramp, MOST_STEPS)
        limits = {"rtol": 0, "atol": TOLERANCE * config.learning_rate, "err_msg": str(config)}
        steps = config.steps
        np.testing.assert_allclose(actual[:steps], expected[:steps], **limits)
        assert not np.any(actual[config.learning_rate_schedule_steps :])


def random_ramp(rng):
    """Keys of any ramp, on one device; increments that divide the batch it ends at, and others."""
    start, increment = rng.randint(1, 6), rng.randint(1, 6)
    return {
        "per_device_batch_size": start + increment * rng.randint(1, 4),
        **{"per_device_batch_size_start": start, "per_device_batch_size_increment": increment},
        "global_rampup_samples": rng.randint(1, 300),
        "gradient_accumulation_steps": rng.choice((1, 2)),
        **{"enable_rampup_batch_size": True, "devices_per_node": 1},
    }


def test_ramp_does_not_bend_the_curve():
    """Runs of equal samples, with a ramp or its final batch, have equal rates at each sample."""
    rng = random.Random(0)
    compared = 0
    while compared < 100:
        schedule = random_schedule(rng)
        config = settings(**schedule, **random_ramp(rng))
        rate, ramp = rate_and_ramp(config)
        batch = ramp.stages[-1].global_batch_size
        samples = ramp.samples_before(config.learning_rate_schedule_steps)
        if samples % batch or samples <= ramp.stages[-1].first_sample:
            continue  # no constant-batch run has this total, or the schedule ends inside the ramp
        total = samples // batch
        constant = {"learning_rate_schedule_steps": total, "steps": total + 1}
        constant = vars(config) | constant | {"enable_rampup_batch_size": False}
        curve, _ = rate_and_ramp(settings(**constant))
        steps = [ramp.samples_before(step) for step in range(MOST_STEPS)]
        elsewhere = rng.choices(range(samples), k=MOST_STEPS)
        both = np.array(steps + elsewhere)
        np.testing.assert_array_equal(rate(both), curve(both), err_msg=str(config))
        compared += 1


def test_ramp_starts_and_ends_as_maxtext():
    """A warmup starts from 0, no rate is above the peak, a decay ends at the final rate, then 0."""
    rng = random.Random(1)
    for _ in range(200):
        config = settings(**random_schedule(rng), **random_ramp(rng))
        rate, ramp = rate_and_ramp(config)
        last = config.learning_rate_schedule_steps - 1
        rates = rates_at_steps(rate, ramp, MOST_STEPS + 1)
        peak = config.learning_rate
        final = peak * config.learning_rate_final_fraction
        assert np.all((rates >= 0) & (rates <= peak * (1 + TOLERANCE))), config
        assert not np.any(rates[last + 1 :]), config
        warmup = int(rate.curve.total // rate.curve.quantum * config.warmup_steps_fraction)
        if warmup:
            assert rates[0] == 0, config
        decays = config.lr_schedule_type == "cosine" or (
            rate.curve.total / rate.curve.quantum * config.wsd_decay_steps_fraction >= 2
        )
        if decays and rate.curve.total - warmup * rate.curve.quantum >= 2 * rate.curve.quantum:
            assert rates[last] == pytest.approx(final, abs=TOLERANCE * peak), config


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_seesaw_keeps_rate_over_root_of_batch(seed):
    """rate / sqrt(batch) is that of the constant first batch, at the same sample, in every step
    (Meterez et al., arXiv 2510.14717: equal cuts of rate * sqrt(batch) keep the loss)."""
    rng = random.Random(seed)
    for _ in range(20):
        first, steps = rng.choice((1, 6)), rng.randint(40, MOST_STEPS)
        config = settings(
            **random_schedule(rng)
            | {"learning_rate_schedule_steps": steps, "learning_rate_final_fraction": 0.1},
            batch_size_lr_scaling="sqrt",
            batch_size_lr_reference="initial",
            devices_per_node=1,
        )
        expected = np.asarray(maxtext_schedule(config)(np.arange(steps))) * np.ones(steps)
        config.learning_rate_schedule_steps = config.steps = -1
        config.total_samples = first * steps - rng.randrange(first)
        config.rampup_policy, config.rampup_ladder = "seesaw", [first * i for i in (1, 2, 3, 5, 8)]
        rate, ramp = rate_and_ramp(config)
        before = [ramp.samples_before(k) for k in range(ramp.total_steps)]
        batches = [ramp.stage_at_step(k).global_batch_size for k in range(ramp.total_steps)]
        actual = [float(rate(s, batch)) for s, batch in zip(before, batches, strict=True)]
        constant = expected[np.array(before) // first]
        limits = {"rtol": 0, "atol": 2 * TOLERANCE * config.learning_rate, "err_msg": str(config)}
        wanted = constant / np.sqrt(first)
        np.testing.assert_allclose(actual / np.sqrt(batches), wanted, **limits)


RAMP = {"step_batch_size_schedule": "0:2 160:4 320:8", "step_batch_size_unit": "samples"}


@pytest.mark.parametrize(
    "reference, batch, rule, power",
    [("initial", 2, "sqrt", 0.5), *(("final", 8, r, p) for r, p in (("sqrt", 0.5), ("linear", 1)))],
)
def test_a_ramp_keeps_the_curve_of_its_reference_batch(reference, batch, rule, power):
    length = {"total_samples": 800, "steps": -1, "learning_rate_schedule_steps": -1}
    scaling = {"batch_size_lr_scaling": rule, "batch_size_lr_reference": reference}
    rate, ramp = rate_and_ramp(settings(**scaling, **RAMP, **length))
    constant, _ = rate_and_ramp(settings(global_batch_size=batch, **length))
    samples = np.arange(0, 800, 8)
    np.testing.assert_array_equal(rate(samples, batch), constant(samples))
    wanted = constant(samples) * (4 / batch) ** power
    np.testing.assert_allclose(rate(samples, 4), wanted, rtol=1e-6)


def test_a_curve_by_steps_is_that_of_a_constant_batch():
    rate, ramp = rate_and_ramp(settings(learning_rate_by="steps", **RAMP))
    constant, _ = rate_and_ramp(settings(global_batch_size=8))
    samples = [ramp.samples_before(step) for step in range(100)]
    np.testing.assert_allclose(rate(np.array(samples)), constant(8 * np.arange(100)), rtol=1e-6)


@pytest.mark.parametrize(
    "steps, total, reference", [(5, 20, 4), (40, 160, 4), (49, 232, 8), (51, 248, 8)]
)
def test_a_schedule_that_ended_before_the_changed_ramp(steps, total, reference):
    """The samples and the batch of a step before today's ramp are those that were trained."""
    config = settings(learning_rate_schedule_steps=steps)
    stages = [(0, 40, 0, 160, 4), (40, 10, 160, 80, 8)]
    names = ("first_step", "steps", "first_sample", "samples", "global_batch_size")
    trained = [
        dict(zip(names, stage, strict=True)) | {"index": index, "max_target_length": 1}
        for index, stage in enumerate(stages)
    ]
    ramp = RampupBatchManager(config, point=ResumePoint(50, 240, trained))
    rate = LearningRate.from_keys(config, ramp)
    assert rate.curve.total == total and rate.reference == reference


def test_rates_hold_beyond_32_bits_of_samples():
    total, rows = 1_000_000, 65_536
    config = settings(
        per_device_batch_size=rows // 2, steps=total, learning_rate_schedule_steps=total
    )
    for style in ("cosine", "wsd"):
        config.lr_schedule_type = style
        rate, _ = rate_and_ramp(config)
        steps = np.append(np.linspace(0, total - 1, 100, dtype=int), total)
        expected = np.append(maxtext_schedule(config)(steps[:-1]), 0)
        np.testing.assert_allclose(rate(steps.astype(float) * rows), expected, atol=TOLERANCE)


def test_a_curve_is_a_schedule_of_optax():
    rate, _ = rate_and_ramp(settings())
    count = jnp.int32(100)
    scale, state = optax.scale_by_schedule(rate), optax.ScaleByScheduleState(count)
    assert jax.jit(scale.update)(1.0, state)[0] == rate(100) > 0
