"""Phases: hand-computed schedules, what they go with, and what is refused."""

import shlex

import pytest
from conftest import BASE, refused, table

from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate


def stages(**values):
    return RampupBatchManager({"num_nodes": 1, "devices_per_node": 1} | values).stages


def shapes(**values):
    """(first sample, samples of a step, passes, row length) of every stage."""
    return [
        (s.first_sample, s.global_batch_size, s.gradient_accumulation_steps, s.spec.row_length)
        for s in stages(**values)
    ]


def loaded(*arguments):
    return load([BASE, *arguments])


def test_a_key_holds_until_a_later_phase_gives_it_and_the_batch_may_fall():
    assert shapes(
        global_batch_size=16,
        micro_batch_size=8,
        phases_unit="samples",
        max_target_length=64,
        phases={
            "40": {"global_batch_size": 4},  # reached by 3 steps of 16
            "60": {"row_length": 16},
            "1_000": {"micro_batch_size": 2, "global_batch_tokens": 512},
        },
    ) == [(0, 16, 2, 64), (48, 4, 1, 64), (60, 4, 1, 16), (1000, 8, 4, 16)]


@pytest.mark.parametrize(
    ("ramp", "sizes"),
    [
        (
            {"rampup_batch_size": [16, 16, 96], "global_batch_size": 32},
            [(0, 16), (48, 16), (96, 32), (992, 32)],
        ),
        (
            {"step_batch_size_schedule": "0:8 48:16 200:24", "step_batch_size_unit": "samples"},
            [(0, 8), (40, 8), (48, 16), (208, 24), (976, 24)],
        ),
        (  # MaxText's: 20 samples an increment
            {
                **{"enable_rampup_batch_size": True, "per_device_batch_size": 12},
                **{"per_device_batch_size_start": 4, "per_device_batch_size_increment": 4},
                "global_rampup_samples": 40,
            },
            [(0, 4), (20, 8), (44, 12), (980, 12)],
        ),
    ],
)
def test_a_notation_gives_the_batch_and_phases_the_rest(ramp, sizes):
    """The steps are those of the ramp alone; a phase only cuts a stage in two."""
    phases = {"40": {"row_length": 2}, "970": {"row_length": 4}}
    alone = RampupBatchManager({"num_nodes": 1, "devices_per_node": 1} | ramp)
    phased = stages(**ramp, phases=phases, phases_unit="samples", max_target_length=4)
    assert [(s.first_sample, s.global_batch_size) for s in phased] == sizes
    for stage in phased:
        assert alone.samples_before(stage.first_step) == stage.first_sample
        asked = 2 if 40 <= stage.first_sample < 970 else 4
        assert stage.spec.row_length == asked


def test_a_phase_makes_the_whole_step_anew():
    first, second = stages(
        global_batch_size=8, remat_policy="minimal", phases={"64": {"remat_policy": "full"}}
    )
    assert (first.spec.remat_policy, second.spec.remat_policy) == ("minimal", "full")
    assert first.spec != second.spec


def test_phase_0_is_the_keys_and_the_command_line_changes_one_phase(tmp_path):
    file, above = tmp_path / "a.yml", tmp_path / "b.yml"
    file.write_text(
        f"base_config: {BASE}\nphases:\n  0: {{global_batch_size: 4}}\n"
        "  1.5M: {global_batch_size: 8, row_length: 32}\n"
    )
    above.write_text("base_config: a.yml\nphases: {3M: {learning_rate: 1.0e-4}}\n")
    config = load([str(file), "phases.1500K.row_length=64", "phases.0.row_length=16"])
    assert config.values["phases"] == {"1.5M": {"global_batch_size": 8, "row_length": 64}}
    assert (config.batch.global_batch_size, config.batch.row_length) == (4, 16)
    # A file's mapping replaces its base's, whose phase 0 stands as its keys do.
    config = load([str(above)])
    assert config.values["phases"] == {"3M": {"learning_rate": 1e-4}}
    assert config.batch.global_batch_size == 4
    assert load([str(file), "phases={}"]).values["phases"] == {}


def test_learning_rate_of_a_phase():
    """The curve stays, at another peak; a warm-up anew rises over its part of the run's samples."""
    config = loaded(
        *("global_batch_size=4", "total_samples=1000", "lr_schedule_type=wsd"),
        *("wsd_decay_steps_fraction=0", "warmup_steps_fraction=0", "learning_rate=1e-3"),
        *("phases_unit=samples", "phases.400.learning_rate=5e-4"),
        "phases.600.warmup_steps_fraction=0.02",  # 5 batches: from 0 at the first to 1 at the last
        "phases.800.learning_rate=2e-3",
    )
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch, 1))
    wanted = {0: 1, 396: 1, 400: 0.5, 596: 0.5, 600: 0, 604: 0.125, 612: 0.375, 616: 0.5, 796: 0.5}
    wanted |= {800: 2, 996: 2}
    for sample, value in wanted.items():
        assert float(rate(sample)) == pytest.approx(value * 1e-3, rel=1e-6), sample


def test_a_warm_up_anew_is_no_part_of_the_curve():
    keys = ("lr_schedule_type=wsd", "wsd_decay_steps_fraction=0.8", "warmup_steps_fraction=0.1")
    config = loaded(*BATCH, *keys, "phases_unit=samples", "phases.400.warmup_steps_fraction=0.5")
    assert config.batch.keys_at(400).warmup_steps_fraction == 0.1
    with pytest.raises(ConfigError, match="phases.400: warmup_steps_fraction=1.5 must lie"):
        loaded(*BATCH, "phases_unit=samples", "phases.400.warmup_steps_fraction=1.5")


BATCH = ("global_batch_size=8", "total_samples=4000")
CHATS = "dataset_type=grain grain_train_files=f packing=False tokenizer_path=t.json"

REFUSED = table("""
phases.10K.vocab_size=8 | phases.10K.vocab_size=8: no phase can change it
phases.10K.rope_factor=0.5 | phases.10K: rope_factor=0.5 must be 1 or more
phases.10K.rope_factor=4 | phases.10K: rope_factor=4.0 is read only with rope_type=llama3.1 or \
    yarn or dynamic, and rope_type=default here
phases.10K.rope_type=longrope | phases.10K: rope_type=longrope is not one of default, llama3.1, \
    yarn, dynamic
'phases.10K={rope_type: llama3.1, rope_low_freq_factor: 4}' | phases.10K: \
    rope_high_freq_factor=4.0 must be above rope_low_freq_factor=4.0
'phases.10K={rope_type: dynamic, original_max_position_embeddings: 8}' | phases.10K: \
    rope_type=dynamic with max_target_length=128 above original_max_position_embeddings=8: 
phases.10K.sliding_window_size=64 | phases.10K: sliding_window_size=64 is read only with \
    decoder_block=mistral
program=grpo phases.10K.rope_max_timescale=1e6 | phases.10K.rope_max_timescale: program=grpo takes \
    one for the whole run; leave it out
use_dpo=True phases.10K.rope_max_timescale=1e6 CHATS | phases.10K.rope_max_timescale: use_dpo=True \
    takes one for the whole run; leave it out
phases.10K.max_target_length=256 | give the longest, and row_length to the phases
phases.10K.row_lenght=8 | phases.10K.row_lenght=8: is not a known key
phases.ten.row_length=8 | phases.ten: ten is not a whole number
phases.10K=8 phases.10K.row_length=64 | phases.10K=8 must be a mapping of keys
phases=8 | phases=8 must be a mapping
phases.10K.row_length=16 phases.10001.row_length=32 | phases.10001 begins at 78 samples of 128 \
    tokens, not after phases.10K, which begins at 78; thresholds must increase
phases.100.row_length=16 | phases.100 begins at 0 samples
phases.10K.row_length=48 | phases.10K: row_length=48 does not divide max_target_length=128: a step \
    cuts each sample into rows of equal length; use 32 or 64
phases.10K.row_length=256 | row_length=256 does not divide max_target_length=128
phases.10K.global_batch_size=x | phases.10K.global_batch_size=x must be an integer
phases.10K.global_batch_size=0 | phases.10K: global_batch_size=0 must be 1 or more
max_target_length=0 phases.10K.global_batch_tokens=1024 | max_target_length=0 must be 1 or more
phases.10K.global_batch_tokens=1000 | use 896 or 1024
phases.10K.global_batch_tokens=1024 phases.10K.global_batch_size=8 | say the same thing in two ways
phases.10K.remat_policy=some | phases.10K: remat_policy=some is not one of
phases.10K.learning_rate=-1 | phases.10K: learning_rate=-1.0 must be 0 or more
phases.10K.learning_rate=none | phases.10K.learning_rate=none must be a number
rampup_batch_size=[4,4,800] phases.10K.global_batch_size=4 | phases.10K: global_batch_size=4: \
    rampup_batch_size=[4, 4, 800] gives the batch
phases.10K.gradient_accumulation_steps=2 | phases.10K: gradient_accumulation_steps=2 is not read \
    with global_batch_size=8
learning_rate_by=steps phases.10K.warmup_steps_fraction=0.1 | phases.10K: warmup_steps_fraction=0.1
rampup_policy=noise rampup_ladder=[4,8] phases.10K.row_length=64 | phases.10K: rampup_policy=noise \
    decides its stages
program=grpo row_length=64 | row_length=64 cuts samples into rows, and program=grpo
program=grpo phases.10K.row_length=64 | phases.10K: row_length=64 cuts samples
use_sft=True row_length=64 CHATS | row_length=64 cuts samples into rows, and use_sft=True reads \
    each as a whole
use_dpo=True row_length=64 CHATS | row_length=64 cuts samples into rows, and use_dpo=True reads \
    each as a whole
""")


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_refused_in_one_line(keys, message):
    length = BATCH[1:] if keys.startswith("rampup_policy") else BATCH
    with refused(message):
        loaded(*length, *shlex.split(keys.replace("CHATS", CHATS)))


def test_a_batch_that_does_not_divide_names_its_phase():
    ramp = RampupBatchManager(loaded(*BATCH, "phases.10K.global_batch_size=6").batch, 4)
    ramp.check(ramp.stages[:1])
    with pytest.raises(ConfigError, match=r"stage 1 \(phases.10K\) with a global batch of 6"):
        ramp.check(ramp.stages)
