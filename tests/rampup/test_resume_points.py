"""A schedule that is made anew where a run stands has the steps, sizes and samples of the whole."""

import dataclasses
import random

import pytest

from maxramp.rampup.schedule import RampupBatchManager, ResumePoint

NODES = {"num_nodes": 8, "devices_per_node": 4, "min_nodes": 2}
SAMPLES = {"total_samples": 40_000, "max_target_length": 64}
MEGATRON = {"step_batch_size_unit": "samples", **SAMPLES}
SMALL = {"per_device_batch_size": 2.0, **NODES}
PHASES = {
    "700": {"row_length": 16, "grain_train_files": "a:1;b:3", "learning_rate": 1e-3},
    "5_003": {"row_length": 32, "sliding_window_size": 16, "warmup_steps_fraction": 0.1},
    "5_020": {"grain_train_files": "b"},
    "21_000": {"row_length": 64, "ici_tensor_parallelism": 2, "remat_policy": "full"},
}
SIZED = {n: keys | {"global_batch_size": 64 + int(n) % 7 * 64} for n, keys in PHASES.items()}
NOTATIONS = {
    "constant": {"global_batch_size": 96, "steps": 300, **NODES},
    "MaxText": {
        **{"enable_rampup_batch_size": True, "per_device_batch_size_start": 0.5},
        **{"per_device_batch_size_increment": 0.5, "global_rampup_samples": 20_000},
        **{"gradient_accumulation_steps": 2, **SMALL, **SAMPLES},
    },
    "NeMo": {
        **{"rampup_batch_size": [32, 32, 17_003], "global_batch_size": 256},
        **{"micro_batch_size": 2, "node_schedule": "nemo", **NODES, **SAMPLES},
    },
    "Megatron": SMALL
    | {"step_batch_size_schedule": "0:32 3001:64 3070:128 3100:96 9000:256", **MEGATRON},
    "Megatron by tokens": {
        **{"step_batch_size_schedule": "0:32 64000:64 640K:128", "total_tokens": 2_000_001},
        **{"max_target_length": 64, **SMALL},
    },
    "Seesaw": {
        **{"rampup_policy": "seesaw", "rampup_ladder": [32, 48, 64, 96, 128, 256]},
        **{**SMALL, **SAMPLES},
    },
    "phases": {
        **{"global_batch_size": 32, "phases": SIZED, "phases_unit": "samples"},
        **{**SAMPLES, **NODES},
    },
    "phases of a ramp": {
        **{"step_batch_size_schedule": "0:32 5010:64 9000:256", "phases": PHASES},
        **{"phases_unit": "samples", **MEGATRON, **SMALL},
    },
}


def stand(ramp, step):
    return ResumePoint(step, ramp.samples_before(step), ramp.to_json()["stages"])


@pytest.mark.parametrize("starts", [5, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("devices", [None, 32])
@pytest.mark.parametrize("notation", NOTATIONS)
def test_the_rest_of_a_schedule_is_that_of_the_whole(notation, devices, starts):
    """At random steps and from each at another; on nodes as planned, and one job's devices."""
    draw, keys = random.Random(notation), NOTATIONS[notation]
    whole = RampupBatchManager(keys, devices)
    plan = whole.to_json()
    for _ in range(starts):
        step = draw.randrange(whole.total_steps)
        ramp = RampupBatchManager(keys, devices, stand(whole, step))
        again = RampupBatchManager(
            keys, devices, stand(ramp, draw.randrange(step, whole.total_steps))
        )
        for rest in (ramp, again):
            first = rest.stages[0]
            last = whole.stage_at_step(first.first_step)
            assert rest.to_json() == plan
            assert rest.stages[1:] == whole.stages[whole.stages.index(last) + 1 :]
            begins = {name: getattr(last, name) for name in ("first_step", "first_sample")}
            whole_first = dataclasses.replace(
                first, **begins, steps=last.steps, samples=last.samples
            )
            assert whole_first == last
            for k in (0, step, draw.randrange(whole.total_steps + 1)):
                assert rest.samples_before(k) == whole.samples_before(k)
                assert rest.step_at_sample(rest.samples_before(k)) == k


@pytest.mark.parametrize("seed", range(3))
def test_a_ramp_that_changes_at_every_start_keeps_one_clock(seed):
    """What was trained stays; from each start on, a step's size is that of its threshold."""
    draw, stages, step, sample = random.Random(seed), [], 0, 0
    trained = []  # the size of each step, as it was trained
    for _ in range(30):
        begins = sorted(draw.sample(range(1, 4000), 5))
        sizes = [8 * draw.randint(1, 6) for _ in range(6)]
        pairs = list(zip([0, *begins], sizes, strict=True))
        text = " ".join(f"{n}:{size}" for n, size in pairs)
        keys = {"step_batch_size_schedule": text, "steps": 10_000, **NODES}
        keys |= {"step_batch_size_unit": "samples"}
        ramp = RampupBatchManager(keys, 8, ResumePoint(step, sample, stages))
        assert sum(trained) == ramp.samples_before(step) == sample
        for _ in range(draw.randrange(1, 30)):
            trained.append([size for n, size in pairs if n <= sample][-1])
            assert ramp.stage_at_step(step).global_batch_size == trained[-1]
            step, sample = step + 1, sample + trained[-1]
            assert ramp.samples_before(step) == sample
        stages = ramp.to_json()["stages"]
        known = [stage for stage in stages if stage["first_step"] < step]
        assert [stage["index"] for stage in stages] == list(range(len(stages)))
        sizes = [s["global_batch_size"] for s in known for _ in range(s["steps"] or 10**5)]
        assert sizes[:step] == trained
