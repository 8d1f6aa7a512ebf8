"""`maxramp.suggest`: a ramp from measurements, none where they say so, and what they do not say."""

import json
import shlex

import pytest
from conftest import BASE
from noise_records import write_noise

from maxramp import suggest
from maxramp.config.load import load
from maxramp.config.resolve import meshes_of
from maxramp.keys.yamlfile import parse
from maxramp.measuring.suggestion import Measurement, branch_measurements, fit_ramp
from maxramp.planning.stages import PlannedRun, with_nodes
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate


def result(first_sample, largest, surely, sizes=(8, 16, 32, 64), noise=None, run="x"):
    return {
        **{"run": run, "step": first_sample // 8, "first_sample": first_sample, "samples": 1000},
        **{"row_tokens": 128, "target_tokens": 128_000, "tolerance": 0.01},
        **{"sizes": [{"rows": n} for n in sizes], "largest": largest, "surely": surely},
        "possibly": largest,
        "noise": {"norms_noise_scale": {"noise_scale": noise}} if noise else {},
    }


def test_a_size_is_taken_where_it_is_allowed_and_kept():
    numbers = [(0, 10, 90), (10, 20, 230), (20, 30, 120), (30, 40, 900)]
    measured = [Measurement(*three) for three in numbers]
    assert fit_ramp(measured, [50, 100, 200, 400]) == [(0, 50), (10, 200), (30, 400)]
    assert fit_ramp([Measurement(0, 10, 450)], [50, 100, 200, 400]) == [(0, 400)]
    assert fit_ramp([Measurement(5, 10, 10)], [50, 100]) == [(0, 50)]


@pytest.mark.parametrize(
    "results, expected",
    [
        # Without an interval the size itself counts.
        ([result(4000, 32, 16), result(1000, 16, None)], [(1000, 4000, 16), (4000, 5000, 16)]),
        # Of several windows from one step the smallest size counts.
        (
            [result(1000, 32, 32), result(1000, 16, 16) | {"samples": 2000}, result(0, 8, 8)],
            [(0, 1000, 8), (1000, 3000, 16)],
        ),
        # What costs something later is not allowed before.
        (
            [result(0, 64, 64), result(1000, 8, 8), result(2000, 32, 32)],
            [(0, 1000, 8), (1000, 2000, 8), (2000, 3000, 32)],
        ),
    ],
)
def test_branches_hold_up_to_the_next(results, expected):
    for order in (results, results[::-1]):
        measured = branch_measurements(order)
        assert [tuple(number / 128 for number in one) for one in measured] == expected


def test_limits_that_branches_set(tmp_path, capsys):
    """A ramp that grows with what was measured has none but the largest size that was tried."""
    (tmp_path / "config.yml").write_text("packing: false\ndataset_type: grain\n")  # padded rows
    for name, largest, expected in (
        ("grows", (8, 64), "no batch above 8.19k tokens was tried"),
        ("falls", (64, 8), "cost nothing early in the run, but more than 1.02k cost something"),
        ("stays", (16, 16), ""),
    ):
        at = zip((1000, 6000), largest, strict=True)
        results = [result(n, size, size, run=str(tmp_path)) for n, size in at]
        run = write_branches(tmp_path / name, *results)
        limits = " ".join(suggested(capsys, "--branch", run)[0]["limits"])
        assert expected in limits
        assert ("no batch above" in limits) == (name == "grows")
        assert ("never shrinks again" in limits) == (name == "falls")


# Configs of 20,000 samples, each with its ways to give a batch.
PHASES = "phases={4000: {global_batch_size: 32, row_length: 64}, 8000: {global_batch_size: 64}}"
CONFIGS = {
    "constant": ["global_batch_size=8"],
    "tokens": ["global_batch_tokens=1024", "total_samples=-1", "total_tokens=2560000"],
    "passes": ["per_device_batch_size=4", "gradient_accumulation_steps=2"],
    "micro": ["global_batch_size=16", "micro_batch_size=4"],
    "MaxText": ["per_device_batch_size=16", "per_device_batch_size_start=4"]
    + ["per_device_batch_size_increment=4", "global_rampup_samples=5000"],
    "NeMo": ["rampup_batch_size=[8,8,5000]", "global_batch_size=32"],
    "Megatron": ["step_batch_size_schedule=0:8 1M:16"],
    "Seesaw": ["rampup_policy=seesaw", "rampup_ladder=[8,16,32]"],
    "noise": ["rampup_policy=noise", "rampup_ladder=[8,16]", "rampup_latest=[9000]"],
    "phases": ["global_batch_size=8", "phases_unit=samples", PHASES],
    "phases of passes": ["per_device_batch_size=8", "gradient_accumulation_steps=2"]
    + ["phases={1M: {gradient_accumulation_steps: 4, remat_policy: full}}"],
}


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("sizes", [(16, 32), (16, 16)], ids=["a ramp", "no ramp"])
def test_the_line_makes_the_run_that_is_shown(tmp_path, capsys, keys, sizes):
    """Behind its command line, and in a file based on its config; other changes of phases stay."""
    run = write_branches(tmp_path, result(0, sizes[0], 8), result(6000, sizes[1], sizes[1]))
    line = [BASE, "total_samples=20000", "devices_per_node=1", "learning_rate=1e-3", *keys]
    assert suggest.main([*line, "--json", "--branch", run]) == 0
    suggestion = json.loads(capsys.readouterr().out)
    suggest.print_suggestion(suggestion)
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    values = dict(key.split("=", 1) for key in line[1:])
    (tmp_path / "before.yml").write_text(json.dumps({k: parse(v) for k, v in values.items()}))
    after = {"base_config": str(tmp_path / "before.yml"), **suggestion["keys"]}
    (tmp_path / "after.yml").write_text(json.dumps(after))
    before = load(line)
    (shown,) = (row for row in suggestion["rows"] if row["name"] == "suggested")
    for suggested in ([*line, *printed], [str(tmp_path / "after.yml")]):
        config = load(suggested, "train")
        plan = PlannedRun.from_config(with_nodes(config), meshes_of(config))
        pairs = [[stage.first_sample, stage.global_batch_size] for stage in plan.stages]
        assert (pairs, plan.ramp.total_steps) == (shown["pairs"], shown["steps"])
        assert plan.ramp.total_samples - suggestion["keys"]["total_samples"] in range(32)
        for sample in range(0, 20_000, 1000):
            for name in ("row_length", "remat_policy"):
                values = {getattr(c.batch.keys_at(sample), name) for c in (before, config)}
                assert len(values) == 1


def test_a_config_is_not_compared_with_itself(capsys):
    line = [BASE, "total_samples=20000", "devices_per_node=1", *CONFIGS["Seesaw"], "--json"]
    assert suggest.main(line) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["as configured"]


@pytest.mark.parametrize("sizes", [(16, 32), (16, 16)], ids=["a ramp", "no ramp"])
def test_rates_follow_the_batches(tmp_path, capsys, sizes):
    """By the square-root rule, also in phases that give a rate of their own."""
    run = write_branches(tmp_path, result(0, sizes[0], 8), result(6000, sizes[1], sizes[1]))
    phases = "phases={4000: {global_batch_size: 32}, 12000: {learning_rate: 2e-3}}"
    line = [BASE, "total_samples=20000", "devices_per_node=1", "learning_rate=1e-3", phases]
    line += ["phases_unit=samples", "global_batch_size=8", "lr_schedule_type=wsd"]
    assert suggest.main([*line, "--branch", run]) == 0
    printed = capsys.readouterr().out
    assert "limit     phases.12000.learning_rate=" in printed
    configs = [load(keys) for keys in (line, [*line, *shlex.split(printed.splitlines()[-1])])]
    plans = [PlannedRun.from_config(with_nodes(c), meshes_of(c)) for c in configs]
    ramps = [plan.ramp for plan in plans]
    curves = [LearningRate.from_keys(plan.config.learning_rate, plan.ramp) for plan in plans]
    for sample, batch in ((3000, 8), (14_000, 32)):
        new_batch = ramps[1].stage_at_sample(sample).global_batch_size
        expected = float(curves[0](sample, batch)) * (new_batch / batch) ** 0.5
        assert float(curves[1](sample, new_batch)) == pytest.approx(expected, rel=0.01)


def write_branches(folder, *results):
    for r in results:
        path = folder / "branches" / f"{r['step']}-1000"
        path.mkdir(parents=True)
        (path / "branch.json").write_text(json.dumps(r | {"run": str(folder)}))
    (folder / "config.yml").write_text("base_emb_dim: 64\nbase_num_kv_heads: 1\n")
    return str(folder)


def suggested(capsys, *arguments):
    line = [BASE, "global_batch_size=8", "total_samples=20000", "devices_per_node=1", *arguments]
    assert suggest.main([*line, "--json"]) == 0
    suggestion = json.loads(capsys.readouterr().out)
    assert suggest.main(line) == 0
    return suggestion, capsys.readouterr().out


def test_the_printed_line_makes_the_ramp_that_is_shown(tmp_path, capsys):
    run = write_branches(tmp_path, result(1000, 16, 8), result(6000, 32, 32))
    suggestion, printed = suggested(capsys, "--branch", run)
    assert suggestion["batches"] == [[0, 8], [6000, 32]]
    keys = {k: v for k, v in suggestion["keys"].items() if not k.startswith("batch_size_lr")}
    ramp = RampupBatchManager(keys | {"max_target_length": 128}, 1)
    configured, ours, constant, _ = suggestion["rows"]
    assert ramp.total_steps == ours["steps"] == 750 + 438
    assert "'step_batch_size_schedule=0:8 6000:32'" in printed
    limits = " ".join(suggestion["limits"])
    assert "nothing was measured before 128k tokens" in limits
    assert "nothing was measured beyond 896k of this run's 2.56M tokens" in limits
    assert "base_emb_dim=64 (here 128), base_num_kv_heads=1 (here 2)" in limits
    names = [row["name"] for row in suggestion["rows"]]
    assert names == ["as configured", "suggested", "constant 32", "Seesaw"]
    assert all(row["steps"] for row in suggestion["rows"])
    assert configured["steps"] == 2500 and configured["node_time"] > ours["node_time"]
    # 32 rows were measured from sample 6,000 on alone.
    assert [row["within"] for row in suggestion["rows"][:3]] == [True, True, False]
    assert constant["steps"] == 625
    assert "52% fewer steps than your config (1,188, not 2,500)" in printed


def test_a_config_whose_batch_costs_something(tmp_path, capsys):
    run = write_branches(tmp_path, result(0, 16, 16), result(6000, 16, 16))
    more = ("--branch", run, "global_batch_size=64", "learning_rate_schedule_steps=200")
    suggestion, printed = suggested(capsys, *more)
    assert "learning_rate_schedule_steps=200 counts steps" in printed
    assert [row["within"] for row in suggestion["rows"][:2]] == [False, True]
    assert "steps than your config, whose batch is above what was measured to cost no" in printed


def test_a_ramp_that_saves_little_is_a_constant_batch(tmp_path, capsys):
    run = write_branches(tmp_path, result(0, 16, 16), result(6000, 16, 16))
    suggestion, printed = suggested(capsys, "--branch", run)
    rate = pytest.approx(3e-3 * (16 / 8) ** 0.5, rel=1e-2)  # of a first batch of 8 in the config
    keys = {"global_batch_size": 16, "total_samples": 20000, "learning_rate": rate}
    assert suggestion["keys"] == keys
    assert "no ramp: a constant batch of 16 does as well" in printed
    run = write_branches(tmp_path / "late", result(0, 8, 8), result(19_500, 16, 16))
    suggestion, printed = suggested(capsys, "--branch", run)
    assert suggestion["batches"] == [[0, 8]] and "less than 5%" in printed


# The noise scale of steps of 8 rows, over 20,000 samples.
RISING = [4.0] * 1250 + [8.0] * 1250


def test_the_noise_scale_gives_the_shape_and_branches_the_height(tmp_path, capsys):
    """A noise scale that grows from 4 to 8 rows; the batch may be four times that."""
    write_noise(tmp_path, RISING, 8, 128)
    run = write_branches(tmp_path, result(0, 32, 16, noise=3.99))
    suggestion, _ = suggested(capsys, "--noise", run, "--branch", run)
    (first, low), (place, high) = suggestion["batches"]
    assert (first, low, high) == (0, 16, 32) and 10_000 <= place < 12_000
    assert not any("beyond" in line for line in suggestion["limits"])
    suggestion, printed = suggested(capsys, "--noise", run)
    assert "kept at the noise scale's lower end" in printed
    assert max(size for _, size in suggestion["batches"]) < 8


def test_devices_divide_what_is_suggested(tmp_path, capsys):
    """8 devices hold 4 ranks: the noise scale's lower end would allow 1, 2 and 3 rows."""
    write_noise(tmp_path, RISING, 8, 128)
    mesh = ["devices_per_node=8", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"]
    suggestion, printed = suggested(capsys, "--noise", str(tmp_path), *mesh)
    assert suggestion["batches"] == [[0, 4]] and suggestion["rows"][1]["steps"] == 5000
    assert "the smallest batch that this run may take has 512" in printed


def test_without_measurements_nothing_is_suggested(tmp_path, capsys):
    suggestion, printed = suggested(capsys)
    assert suggestion["batches"] is None
    assert "suggested nothing: no measurement is given" in printed
    write_noise(tmp_path, [3, 0, -2] * 7, 8, 128)  # a variance that cannot be told from 0
    suggestion, printed = suggested(capsys, "--noise", str(tmp_path))
    assert suggestion["batches"] is None and "nothing: what was measured does not tell" in printed
    assert "21 steps are too few to tell the noise scale" in printed
    write_noise(tmp_path, [3] * 12, 8, 128)  # one block, though its interval is above 0
    suggestion, printed = suggested(capsys, "--noise", str(tmp_path))
    assert suggestion["batches"] is None and "fewer than 3 blocks of 8" in printed
    for text in ("", "[]", "5", "{}", '{"step": 5, "samples": 3}'):
        (tmp_path / "branch.json").write_text(text)
        assert suggest.main([BASE, "--branch", str(tmp_path)]) == 2
        assert "not what maxramp.branch wrote" in capsys.readouterr().err
    for flag, message in (("--branch", "holds no branches"), ("--noise", "holds no metrics.jsonl")):
        assert suggest.main([BASE, flag, "/nowhere"]) == 2
        assert message in capsys.readouterr().err
