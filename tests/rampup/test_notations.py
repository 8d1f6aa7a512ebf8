"""NeMo's and Megatron's notations, the split over devices and the node schedules."""

import functools
import itertools
import math
import random
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import pytest
from conftest import ROOT

from maxramp.config.load import load
from maxramp.config.resolve import meshes_of
from maxramp.errors import ConfigError
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager


def keys(**values):
    return SimpleNamespace(**({"num_nodes": 1, "devices_per_node": 1} | values))


def batches_of(ramp, steps):
    """(consumed before, batch) of every step, from the closed form."""
    return [(ramp.samples_before(k), ramp.stage_at_step(k).global_batch_size) for k in range(steps)]


def simulate_nemo(start, increment, final, samples, steps):
    """The rule as it is written, one step after the other."""
    share = Fraction(samples * increment, final - start)
    consumed, batches = 0, []
    for _ in range(steps):
        batch = final if consumed >= samples else start + consumed // share * increment
        batches.append((consumed, batch))
        consumed += batch
    return batches


def test_thousand_random_nemo_ramps():
    rng = random.Random(0)
    for _ in range(1000):
        start, increment = rng.randint(1, 40), rng.randint(1, 30)
        final = start + increment * rng.randint(1, 12)
        samples = rng.choice([rng.randint(1, 200), rng.randint(1, 5000)])
        ramp = RampupBatchManager(
            keys(rampup_batch_size=[start, increment, samples], global_batch_size=final)
        )
        steps = ramp.stages[-1].first_step + 3
        assert batches_of(ramp, steps) == simulate_nemo(start, increment, final, samples, steps)


def written(rng, value):
    """A number as a person might write it; exactly `value`."""
    for suffix, size in rng.sample([("K", 10**3), ("M", 10**6), ("B", 10**9), ("T", 10**12)], 4):
        digits = Decimal(value) / size
        if rng.random() < 0.5 and digits == digits.quantize(Decimal("0.001")):
            return f"{digits.normalize():f}{rng.choice([suffix, suffix.lower()])}"
    return str(value)


def test_thousand_random_schedules():
    rng = random.Random(1)
    for _ in range(1000):
        length, by_tokens = rng.choice([1, 7, 128, 2048]), rng.random() < 0.5
        unit = length if by_tokens else 1
        points = [0]
        for _ in range(rng.randint(0, 5)):
            points.append(points[-1] + rng.choice([1, 50, 500]) * rng.randint(1, 9) * unit)
        sizes = [rng.randint(1, 60) for _ in points]
        separator = rng.choice([" ", ",", ", ", "  "])
        text = separator.join(
            f"{written(rng, point)}:{size}" for point, size in zip(points, sizes, strict=True)
        )
        unit_name = {"step_batch_size_unit": "tokens" if by_tokens else "samples"}
        schedule = keys(step_batch_size_schedule=text, max_target_length=length, **unit_name)
        ramp = RampupBatchManager(schedule)
        consumed = 0
        for step in range(ramp.stages[-1].first_step + 3):
            batch = [b for p, b in zip(points, sizes, strict=True) if p // unit <= consumed][-1]
            assert ramp.samples_before(step) == consumed
            assert ramp.stage_at_step(step).global_batch_size == batch, (text, step)
            consumed += batch


def test_a_threshold_within_a_step_gives_no_stage():
    ramp = RampupBatchManager(
        keys(step_batch_size_schedule="0:100 10:200 20:300", step_batch_size_unit="samples")
    )
    assert [(s.global_batch_size, s.steps) for s in ramp.stages] == [(100, 1), (300, None)]


def test_the_split_is_the_largest_that_divides():
    rng = random.Random(2)
    for _ in range(500):
        devices, parallel = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 2, 4])
        parallel = min(parallel, devices)
        ranks, micro = devices // parallel, rng.randint(1, 9)
        batch = ranks * rng.randint(1, 60)
        batches = {"global_batch_size": batch, "micro_batch_size": micro}
        split = keys(**batches, devices_per_node=devices, ici_tensor_parallelism=parallel)
        ramp = RampupBatchManager(split)
        ramp.check(ramp.stages)
        (stage,) = ramp.stages
        rows = stage.per_device_batch_size * parallel  # per rank and pass
        assert rows * ranks * stage.gradient_accumulation_steps == batch
        per_rank = batch // ranks
        assert rows == max(r for r in range(1, micro + 1) if per_rank % r == 0)


def test_a_stage_that_cannot_be_split_names_its_neighbours():
    ramp = RampupBatchManager(keys(rampup_batch_size=[8, 4, 100], global_batch_size=16), 8)
    ramp.check(ramp.stages[:1])
    with pytest.raises(ConfigError, match=r"stage 1 with a global batch of 12 .* use 8 or 16"):
        ramp.check(ramp.stages)


def documented(**changes):
    return keys(
        **{
            **{"rampup_batch_size": [256, 256, 10_000_000], "global_batch_size": 2048},
            **{"micro_batch_size": 4, "num_nodes": 16, "devices_per_node": 8},
            "node_schedule": "nemo",
        }
        | changes
    )


def mesh_unless(config, bad_nodes, devices, sample):
    """The mesh of so many devices, but for those of some numbers of nodes."""
    bad = devices // config.devices_per_node in bad_nodes
    return None if bad else BatchKeys.read(config).mesh_at(devices, 0)


def weighted_node_time(config, batch, nodes, steps):
    """Of a stage, in micro batches, by trying every split; None where no split does."""
    rows, rest = divmod(batch, nodes * config.devices_per_node // config.ici_tensor_parallelism)
    if rest or not rows:
        return None
    micro = max(r for r in range(1, config.micro_batch_size + 1) if rows % r == 0)
    parallel, overhead = config.ici_tensor_parallelism, config.planned_pass_overhead
    full = config.micro_batch_size / parallel + overhead
    passes = steps * rows // micro * (micro / parallel + overhead) / full
    return passes * nodes * (1 + config.node_time_tolerance) ** -math.log2(nodes)


def test_best_nodes_against_trying_all():
    """The cheapest of all choices of nodes, by hand; nodes shrink only where every choice does."""
    rng = random.Random(3)
    growing = shrinking = 0
    for _ in range(200):
        bad = rng.sample(range(1, 9), rng.randint(0, 5))  # of which the mesh cannot be made
        start = rng.choice([8, 16, 24, 40])
        increment = rng.choice([8, 24, 16])
        config = documented(
            rampup_batch_size=[start, increment, rng.choice([200, 2_000])],
            global_batch_size=start + increment * rng.randint(1, 4),
            node_schedule="best",
            num_nodes=rng.choice([4, 8]),
            devices_per_node=rng.choice([2, 4]),
            micro_batch_size=rng.randint(1, 5),
            ici_tensor_parallelism=rng.choice([1, 2]),
            min_nodes=rng.randint(1, 3),
            planned_pass_overhead=0.25,
            node_time_tolerance=rng.choice([0, 0.05]),
            total_samples=rng.choice([1_500, 10_000]),
        )
        restart = rng.choice([0, 10, 100])
        ramp = RampupBatchManager(
            config, meshes=functools.partial(mesh_unless, config, bad), restart_passes=restart
        )
        reached = ramp.stages_between(0, ramp.total_steps)
        ends = [*(s.first_step for s in reached[1:]), ramp.total_steps]
        steps = [end - s.first_step for s, end in zip(reached, ends, strict=True)]
        options = []
        for stage, count in zip(reached, steps, strict=True):
            priced = {
                nodes: weighted_node_time(config, stage.global_batch_size, nodes, count)
                for nodes in range(config.min_nodes, config.num_nodes + 1)
                if nodes not in bad
            }
            options.append({nodes: price for nodes, price in priced.items() if price is not None})
        if not all(options):
            continue

        def cost(choice):
            pairs = list(itertools.pairwise(choice))
            change = restart * config.num_nodes  # noqa: B023
            change *= (1 + config.node_time_tolerance) ** -math.log2(config.num_nodes)  # noqa: B023
            prices = [option[nodes] for option, nodes in zip(options, choice, strict=True)]  # noqa: B023
            shrinks = sum(b < a for a, b in pairs)
            return shrinks, sum(prices) + change * sum(a != b for a, b in pairs)

        least = min(map(cost, itertools.product(*options)))
        chosen = [stage.nodes for stage in reached]
        assert cost(chosen) == (least[0], pytest.approx(least[1])), (config, chosen)
        growing += chosen[0] < chosen[-1]
        shrinking += least[0] > 0
    assert growing > 10 and shrinking > 0


def test_stages_of_a_few_steps_get_no_job_of_their_own():
    """45 stages, 44 of 1 to 47 steps, are one job where a restart takes minutes. 1440 rows divide
    over 32 ranks at most; micro batches of 3 take 2% more node-time than those of 4."""
    ramp = {"rampup_batch_size": [32, 32, 65536], "global_batch_size": 1440}
    costs = {"planned_pass_overhead": 0.25, "node_time_tolerance": 0.05, "total_samples": 300_000}
    config = documented(**ramp, **costs, node_schedule="best")
    odd = [nodes for nodes in range(1, 17) if 128 % (8 * nodes)]
    mesh = {"meshes": functools.partial(mesh_unless, config, odd)}
    nodes = [s.nodes for s in RampupBatchManager(config, restart_passes=600, **mesh).stages]
    assert nodes == [4] * 45
    free = [s.nodes for s in RampupBatchManager(config, **mesh).stages]
    assert free == sorted(free) and free[0] == 1 and free[-1] == 4


def test_stages_after_the_end_of_the_run_decide_no_nodes():
    """A last stage that holds on one node alone does not keep the stages before it there."""
    batches = {"step_batch_size_schedule": "0:64 6400:128 12800:129", "max_target_length": 1}
    config = keys(
        **batches, micro_batch_size=4, num_nodes=16, node_schedule="best", total_samples=12_000
    )
    assert [s.nodes for s in RampupBatchManager(config).stages][:2] == [16, 16]
    config.total_samples = 20_000
    assert max(s.nodes for s in RampupBatchManager(config).stages) == 3


def test_nemos_rule_skips_nodes_without_a_mesh():
    changes = {"rampup_batch_size": [32, 32, 10_000], "global_batch_size": 128}
    config = documented(micro_batch_size=4, num_nodes=4, **changes)
    assert [s.nodes for s in RampupBatchManager(config).stages] == [1, 2, 3, 4]
    config = loaded(
        *("rampup_batch_size=[32,32,10000]", "global_batch_size=128", "micro_batch_size=4"),
        *("num_nodes=4", "devices_per_node=8", "node_schedule=nemo"),
    )
    ramp = RampupBatchManager(config.batch, meshes=meshes_of(config))
    # 128 columns do not divide over the 24 devices of 3 nodes, and 96 rows fill none of 2 nodes.
    assert [s.nodes for s in ramp.stages] == [1, 1, 1, 4]


def test_best_does_not_starve_where_nemos_rule_does():
    """From 32 to 2048 by 32, NeMo's cap leaves one node until 1952."""
    changes = {"rampup_batch_size": [32, 32, 10_000_000]}
    nemo = RampupBatchManager(documented(**changes)).stages
    assert [s.nodes for s in nemo if s.global_batch_size <= 1952] == [1] * 61
    assert [s.nodes for s in nemo][61:] == [2, 9, 16]
    best = RampupBatchManager(documented(node_schedule="best", **changes)).stages
    assert all(b.nodes >= n.nodes for b, n in zip(best, nemo, strict=True))
    assert sum(b.nodes for b in best) > 3 * sum(n.nodes for n in nemo)


def loaded(*arguments):
    return load([str(ROOT / "configs" / "base.yml"), *arguments])


def sizes(config, devices=8):
    ramp = RampupBatchManager(config.batch, devices)
    return [(s.global_batch_size, s.gradient_accumulation_steps) for s in ramp.stages]


def test_nemos_keys_without_a_ramp_are_a_constant_batch():
    """Its batching page: micro batch 4, global batch 16, accumulation 1 on four ranks."""
    config = loaded("global_batch_size=16", "micro_batch_size=4")
    assert sizes(config, 4) == [(16, 1)]
    assert sizes(config, 2) == [(16, 2)]
    assert sizes(loaded("global_batch_size=1024", "micro_batch_size=4")) == [(1024, 32)]


def test_a_notation_replaces_those_of_lower_layers(tmp_path):
    """base.yml < file < command line; what only the old notation used is forgotten with it."""
    file = tmp_path / "nemo.yml"
    file.write_text("rampup_batch_size: [8, 8, 100]\nglobal_batch_size: 32\nmicro_batch_size: 2\n")

    def over(*arguments):
        return load([str(file), *arguments])

    assert [b for b, _ in sizes(over())] == [8, 16, 24, 32]
    assert [b for b, _ in sizes(over("global_batch_size=16"))] == [8, 16]
    listed = over("step_batch_size_schedule=0:8 1M:64")
    assert [b for b, _ in sizes(listed)] == [8, 64]
    assert listed.batch.global_batch_size == -1 and listed.batch.micro_batch_size == 2
    maxtext = over("enable_rampup_batch_size=True", "per_device_batch_size=32")
    assert [b for b, _ in sizes(maxtext)] == [64, 128, 192, 256]
    assert maxtext.batch.rampup_batch_size is None and maxtext.batch.micro_batch_size == -1
    maxtext_file = tmp_path / "maxtext.yml"
    maxtext_file.write_text("gradient_accumulation_steps: 4\nglobal_rampup_samples: 99\n")
    nemo = load([str(maxtext_file), "global_batch_size=64"])
    assert nemo.batch.gradient_accumulation_steps == 1 and not nemo.batch.enable_rampup_batch_size


def test_steps_samples_and_tokens_give_the_length_of_a_run():
    """5040 samples end with step 320; 5041 need one more, and so do tokens past the last sample."""
    for arguments, steps in (
        *((["steps=77"], 77), (["total_samples=5040"], 320), (["total_samples=5041"], 321)),
        *(([f"total_tokens={5040 * 128}"], 320), ([f"total_tokens={5040 * 128 + 1}"], 321)),
        (["total_samples=1"], 1),
    ):
        ramp = RampupBatchManager(loaded(*arguments).batch, 1)
        assert ramp.total_steps == steps
        assert ramp.total_samples == ramp.samples_before(steps)


def test_the_global_batch_does_not_depend_on_the_job():
    """Planned for 16 devices, MaxText's ramp has the same batches on 1, 2 and 16 of them."""
    config = loaded("num_nodes=2", "devices_per_node=8")
    assert sizes(config, 16) == [(128, 1), (256, 1), (384, 1), (512, 1)]
    for devices in (1, 2, 4, 8):
        split = sizes(config, devices)
        assert [b for b, _ in split] == [128, 256, 384, 512]
        assert [a for _, a in split] == [16 // devices] * 4
