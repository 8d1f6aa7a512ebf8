"""The stage list against hand-computed schedules and a brute-force simulation."""

import math
import random
from fractions import Fraction
from types import SimpleNamespace

import ml_collections
import numpy as np
import pytest
import yaml
from conftest import BASE, make_config, refused

from maxramp.errors import ConfigError
from maxramp.parallel.mesh import make_mesh
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager, ResumePoint
from maxramp.stage import text_fields


def settings(**changes):
    values = {
        **{"enable_rampup_batch_size": True, "per_device_batch_size": 4},
        **{"per_device_batch_size_start": 1, "per_device_batch_size_increment": 1},
        **{"global_rampup_samples": 60, "gradient_accumulation_steps": 1, "num_nodes": 1},
        "devices_per_node": 4,
    }
    return SimpleNamespace(**(values | changes))


def shape(ramp):
    return [(s.steps, s.global_batch_size) for s in ramp.stages]


def test_documented_example():
    """1 -> 4 by 1 per device over 60 samples on 4 devices: 5 steps of 4, 3 of 8, 2 of 12, 16."""
    ramp = RampupBatchManager(settings())
    stages = ramp.stages
    assert shape(ramp) == [(5, 4), (3, 8), (2, 12), (None, 16)]
    assert [s.first_step for s in stages] == [0, 5, 8, 10]
    assert [s.first_sample for s in stages] == [0, 20, 44, 68]
    assert [s.samples for s in stages] == [20, 24, 24, None]


def test_constant_batch_is_one_stage():
    ramp = RampupBatchManager(settings(enable_rampup_batch_size=False, per_device_batch_size=2))
    assert len(ramp.stages) == 1
    assert ramp.samples_before(10**12) == 8 * 10**12
    assert ramp.step_at_sample(8 * 10**12 + 7) == 10**12


def test_without_a_size_of_a_pass_a_batch_is_one():
    keys = {"rampup_batch_size": [16, 16, 800], "global_batch_size": 32}
    keys |= {"per_device_batch_size": -1, "micro_batch_size": -1}
    for devices in (1, 4):
        stages = RampupBatchManager(keys, devices).stages
        assert [s.gradient_accumulation_steps for s in stages] == [1, 1]
        assert [s.spec.rows for s in stages] == [16, 32]


def test_a_mapping_is_as_good_as_an_object():
    nemo = {"rampup_batch_size": (16, 16, 96), "global_batch_size": 48, "learning_rate": 1e-3}
    sizes = [stage.global_batch_size for stage in RampupBatchManager(nemo, 8).stages]
    assert sizes == [16, 32, 48]
    dotted = {"model.rampup_batch_size": [16, 16, 96], "model.global_batch_size": 48}
    assert RampupBatchManager(dotted, 8).stages == RampupBatchManager(nemo, 8).stages
    first = {"per_device_batch_size": 1, "phases": {0: {"global_batch_size": "1K"}}}
    assert RampupBatchManager(first, 8).stages[0].global_batch_size == 1000
    with open(BASE) as file:  # the file of a run, say
        assert len(RampupBatchManager(yaml.safe_load(file), 1).stages) == 4


def test_a_configuration_may_be_of_any_kind():
    """ml_collections', argparse's with what was not given, NumPy's numbers."""
    values, wanted = vars(settings()), RampupBatchManager(settings()).stages
    for config in (
        values,
        ml_collections.ConfigDict(values),
        ml_collections.FrozenConfigDict(values),
        SimpleNamespace(
            **values, global_batch_size=None, micro_batch_size=None, total_samples=None
        ),
        values | {"rampup_batch_size": None, "global_batch_size": None},
        values | {"global_rampup_samples": np.int64(values["global_rampup_samples"])},
    ):
        assert RampupBatchManager(config).stages == wanted


VALUES, NOTHING = vars(settings()), "no batch size is given; give one of per_device_batch_s"


@pytest.mark.parametrize(
    "config, says",
    [
        (VALUES | {"per_device_batch_sise": 8}, "per_device_batch_sise=8 is not a known key; did"),
        (VALUES | {"batch": 8, "ramp": 3}, "batch=8, ramp=3 are not known keys; configs/base.yml"),
        (VALUES | {"rampup_batch_size": 8}, "rampup_batch_size=8 must be a list"),
        *((kind(per_device_batch_size="8"), "per_device_batch_size=8 must be a number, not text")
          for kind in (dict, SimpleNamespace)),
        *((x, NOTHING) for x in ({}, {"steps": 5}, SimpleNamespace(steps=5), object())),
    ],
)  # fmt: skip
def test_a_wrong_configuration_of_any_kind_is_refused(config, says):
    with refused(says):
        RampupBatchManager(config, 8)


class MaxTexts:
    """MaxText's configuration: no key of ours alone, and a ValueError for what it does not have."""

    KEYS = {"per_device_batch_size": 4.0, "ici_tensor_parallelism": 1, "num_experts": 8}
    KEYS |= {"enable_rampup_batch_size": True, "per_device_batch_size_start": 1.0, "steps": 20}
    KEYS |= {"per_device_batch_size_increment": 1.0, "global_rampup_samples": 60}

    def __getattr__(self, name):
        if name not in self.KEYS:
            raise ValueError(f"{name} is not in the config")
        return self.KEYS[name]


def test_a_configuration_of_maxtexts():
    """It does not say how many devices there are."""
    assert RampupBatchManager(MaxTexts(), 4).stages == RampupBatchManager(settings()).stages
    with pytest.raises(ConfigError, match="give devices_per_node, or num_devices to RampupBatchM"):
        RampupBatchManager(MaxTexts())


def test_keys_left_out_have_the_defaults_of_base_yml():
    """But for what shapes the batch and ends the run: there base.yml describes the default job."""
    with open(BASE) as file:
        base = yaml.safe_load(file)
    left_out = BatchKeys.read({"per_device_batch_size": 1})
    differ = {name for name in BatchKeys.names() if getattr(left_out, name) != base[name]}
    assert differ == {
        *("enable_rampup_batch_size", "per_device_batch_size_start"),
        *("per_device_batch_size_increment", "global_rampup_samples", "per_device_batch_size"),
        *("max_target_length", "steps"),
    }


def simulate(start, increment, final, samples, devices, accumulation, steps):
    """MaxText's ramp step by step, with accumulation counted in: the batch size of every step."""
    increments = (final - start) / increment
    share, size, counted, batches = Fraction(samples) / increments, start, 0, []
    for _ in range(steps):
        batch = int(size * devices) * accumulation
        batches.append(batch)
        counted += batch
        if size < final and counted >= share:
            size, counted = size + increment, 0
    return batches


def random_settings(rng):
    devices = rng.choice([1, 2, 3, 4, 6, 8, 10, 12, 16])
    denominator = rng.choice([d for d in (1, 2, 4, 5, 8, 10) if devices % d == 0 or d == 1])
    unit = Fraction(1, denominator)
    start, increment = rng.randint(1, 12) * unit, rng.randint(1, 9) * unit
    final = start + rng.randint(1, 12) * increment
    accumulation = rng.choice([1, 1, 2, 3, 8])
    samples = rng.randint(1, 4000)
    return devices, start, increment, final, accumulation, samples


def test_thousand_random_settings_against_simulation():
    rng = random.Random(0)
    for _ in range(1000):
        devices, start, increment, final, accumulation, samples = random_settings(rng)
        config = settings(
            **{"per_device_batch_size": float(final), "per_device_batch_size_start": float(start)},
            **{"per_device_batch_size_increment": float(increment), "devices_per_node": devices},
            **{"global_rampup_samples": samples, "gradient_accumulation_steps": accumulation},
        )
        ramp = RampupBatchManager(config)
        last = ramp.stages[-1].first_step
        batches = simulate(start, increment, final, samples, devices, accumulation, last + 3)
        consumed = [0]
        for batch in batches:
            consumed.append(consumed[-1] + batch)
        steps = list(range(len(batches)))
        rng.shuffle(steps)  # any step, in any order
        for step in steps[:200]:
            stage = ramp.stage_at_step(step)
            assert stage.global_batch_size == batches[step], (config, step)
            assert ramp.samples_before(step) == consumed[step], (config, step)
            row = rng.randrange(consumed[step], consumed[step + 1])
            assert ramp.stage_at_sample(row) is stage and ramp.step_at_sample(row) == step
        for stage, following in zip(ramp.stages, ramp.stages[1:], strict=False):
            assert following.index == stage.index + 1
            assert following.first_step == stage.first_step + stage.steps
            assert following.first_sample == stage.first_sample + stage.samples
            assert stage.samples == stage.steps * stage.global_batch_size


def test_any_step_costs_the_same():
    """A ramp of 10,000 stages answers for the far future without walking there."""
    ramp = RampupBatchManager(settings(per_device_batch_size=10_001, global_rampup_samples=10**9))
    assert len(ramp.stages) == 10_001
    last = ramp.stages[-1]
    step = last.first_step + 10**15
    assert ramp.samples_before(step) == last.first_sample + 10**15 * 40_004
    assert ramp.stages_between(step, step + 1) == [last]


def test_stages_between():
    ramp = RampupBatchManager(settings())
    for first, last, indices in ((0, 5, [0]), (4, 6, [0, 1]), (9, 99, [2, 3])):
        assert [s.index for s in ramp.stages_between(first, last)] == indices


@pytest.mark.parametrize(
    "length, batch",
    [
        ({"steps": 5}, 4),
        ({"steps": 8}, 8),
        ({"steps": 10}, 12),  # the first step of the final batch would be the eleventh
        ({"total_samples": 44}, 8),
        ({"max_target_length": 10, "total_tokens": 441}, 12),
    ],
)
def test_a_run_that_ends_inside_its_ramp_warns(length, batch):
    (line,) = RampupBatchManager(settings(**length)).warnings
    (name, value) = list(length.items())[-1]
    assert line.startswith(f"{name}={value} ends the run inside the ramp: ")
    assert f"(batch {batch}), and the final stage 3 (batch 16) begins after 10" in line


def test_a_run_that_ends_before_its_last_phase_or_after_its_curve_warns():
    phases = {"phases": {"900": {"row_length": 1}}, "phases_unit": "samples"}
    keys = {"global_batch_size": 8, "steps": 10, "devices_per_node": 1} | phases
    (line,) = RampupBatchManager(keys).warnings
    assert line.endswith("10 steps it is in stage 0, and the final stage 1 begins after 113 steps")
    keys = settings(enable_rampup_batch_size=False, steps=30, learning_rate_schedule_steps=20)
    (line,) = RampupBatchManager(keys).warnings
    assert line.startswith("learning_rate_schedule_steps=20 ends the learning rate's curve before")
    assert line.endswith("30 steps: it is 0 in the last 10")


def test_a_run_that_ends_after_its_ramp_does_not_warn():
    assert not RampupBatchManager(settings(steps=11)).warnings
    assert not RampupBatchManager(settings(total_samples=69)).warnings
    constant = settings(enable_rampup_batch_size=False, steps=1)
    assert not RampupBatchManager(constant).warnings
    # Taken up past its end, there is nothing more to run.
    assert not RampupBatchManager(settings(steps=5), point=ResumePoint(6, 24)).warnings


def test_tokens_of_samples_before_a_change_of_their_length():
    past = {"first_step": 0, "steps": 4, "first_sample": 0, "samples": 16, "global_batch_size": 4}
    config = settings(max_target_length=32, total_samples=32, steps=-1)
    ramp = RampupBatchManager(
        config, point=ResumePoint(4, 16, [past | {"index": 0, "max_target_length": 16}])
    )
    assert ramp.sample_lengths == [16, 32] and ramp.tokens(32) == 16 * 16 + 16 * 32
    assert RampupBatchManager(config).sample_lengths == [32]


def test_negative_positions_are_refused():
    ramp = RampupBatchManager(settings())
    for question in (ramp.stage_at_step, ramp.stage_at_sample, ramp.samples_before):
        with pytest.raises(ValueError, match="before"):
            question(-1)


def ramp_of(*arguments, fields=text_fields):
    keys = ("rampup_batch_size=[8,8,100]", "global_batch_size=32", "micro_batch_size=2")
    config = make_config(*keys, "ici_tensor_parallelism=2", *arguments)
    return RampupBatchManager(config.batch, 8, fields=fields)


def test_a_stage_is_all_of_its_shape():
    for stage in ramp_of("max_target_length=48", "remat_policy=minimal").stages:
        spec = stage.spec
        assert spec.samples == stage.global_batch_size and spec.rows == stage.spec.rows
        assert spec.accumulation == stage.gradient_accumulation_steps
        assert (spec.tokens, spec.remat_policy) == (48, "minimal")
        assert math.prod(spec.mesh.sizes.values()) == stage.devices
        assert spec.mesh.ranks == stage.devices // spec.mesh.model_parallel_size == 4
        assert [field.suffix for field in spec.fields] == [(48,), (48,), (2,)]


def test_equal_stages_share_a_program_and_others_do_not():
    """And by nothing else: what is equal shares its programs."""
    first = ramp_of().stages
    assert [stage.spec for stage in first] == [stage.spec for stage in ramp_of().stages]
    others = [
        ramp_of("max_target_length=32"),
        ramp_of("remat_policy=minimal_with_context"),
        ramp_of("ici_data_parallelism=2"),
        ramp_of(fields=lambda tokens: text_fields(tokens, separate=True)),
    ]
    assert len({ramp.stages[0].spec for ramp in others} | {s.spec for s in first}) == 8


def test_a_mesh_of_equal_sizes_is_the_same():
    first, second = (ramp_of().stages[0].spec.mesh for _ in range(2))
    assert make_mesh(first) is make_mesh(second)
