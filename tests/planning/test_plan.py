"""`maxramp.plan`, the growing node count, and a ramp that is changed on the way."""

import functools
import json
import pathlib

import pytest
from conftest import BASE, ROOT, TINY, complete, make_config, run, steps_of
from matplotlib.figure import Figure
from one_step import programs_of

from maxramp.checkpoints.folder import Checkpoint
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.errors import EXIT_STAGE_END
from maxramp.model.size import training_flops_per_token
from maxramp.plan import main, print_plan
from maxramp.planning.plan import estimate, make_plan
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.job_schedule import JobSchedule, ramp_change
from maxramp.run.metrics import read_records
from maxramp.run.picture import draw_run
from maxramp.training.device_memory import compiled_bytes

NEMO_8B = [
    *("model_name=llama3-8b", "max_target_length=4096", "num_nodes=16", "devices_per_node=8"),
    *("rampup_batch_size=[256,256,10000000]", "global_batch_size=2048", "micro_batch_size=4"),
    *("total_tokens=300e9", "dataset_type=synthetic", "remat_policy=full"),
    *("ici_fsdp_parallelism=8", "ici_data_parallelism=-1", "node_schedule=nemo"),
]


def test_the_plan_of_an_8b_model_on_16_nodes(tmp_path, capsys, monkeypatch):
    """With NeMo's node table, every stage's memory and the totals, as JSON, table and picture."""
    monkeypatch.delenv("COLUMNS", raising=False)  # which a test's runner may set
    line = [BASE, *NEMO_8B, "planned_tflops_per_device=400"]
    assert main([*line, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    stages = plan["stages"]
    assert [s["nodes"] for s in stages] == [8, 8, 8, 8, 10, 12, 14, 16]
    assert [s["devices"] for s in stages] == [64, 64, 64, 64, 80, 96, 112, 128]
    for s in stages:
        rows = s["per_device_batch_size"] * s["devices"] * s["gradient_accumulation_steps"]
        assert rows == s["global_batch_size"] and s["per_device_batch_size"] == 4
        # 8.03 billion weights of 4 bytes in 8 shards, and twice that for Adam's moments.
        assert s["memory_gib"]["weights"] == pytest.approx(8.03e9 * 4 / 8 / 2**30, rel=0.01)
        assert s["memory_gib"]["optimizer"] == pytest.approx(2 * s["memory_gib"]["weights"])
    assert sum(s["run_samples"] for s in stages) == plan["total_samples"]
    assert 0 <= plan["total_samples"] - 300e9 / 4096 < 2048
    assert stages[-1]["steps"] is None and stages[-1]["samples"] is None
    assert sum(s["share_of_node_time"] for s in stages) == pytest.approx(1)
    # Micro batches are full in every stage, so node-time is what the operations take.
    flops = plan["totals"]["node_hours"] * 3600 * 8 * 400e12
    assert flops == pytest.approx(plan["total_tokens"] * 6 * 8.03e9, rel=0.2)

    assert main([*line, "--plot", str(tmp_path / "plan.png")]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    table = [row for row in rows if row and row[0].isdigit()]
    assert [row[0] for row in table] == [str(i) for i in range(8)]
    assert [row[5] for row in table][:4] == ["256", "512", "768", "1,024"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_fits_the_terminal(width, capsys, monkeypatch):
    """Columns that do not fit are left out and named; what stays is whole."""
    plan = make_plan(load([BASE, *NEMO_8B]))
    monkeypatch.delenv("COLUMNS", raising=False)  # which a test's runner may set
    print_plan(plan)
    whole = capsys.readouterr().out.splitlines()
    monkeypatch.setenv("COLUMNS", str(width))
    print_plan(plan)
    printed = capsys.readouterr().out.splitlines()
    rule = next(i for i, line in enumerate(printed) if "───" in line)
    table = printed[: rule + 9]
    assert max(map(len, table)) <= width < max(map(len, printed[rule + 9 :]))
    full = [line.split() for line in whole[rule + 1 : rule + 9]]
    for line, row in zip(table[rule + 1 :], full, strict=True):
        assert set(line.split()) <= set(row) and line.split()[0] == row[0]
        assert row[5] in line.split(), "the global batch"
    assert any(line.startswith("columns ") for line in printed) == (width < 116)


def test_a_plan_names_nodes_that_no_stage_uses(capsys):
    """64 rows do not divide over more than 8 nodes of 8."""
    keys = [BASE, "global_batch_size=64", "micro_batch_size=1", "devices_per_node=8"]
    for nodes, expected in ((16, ["nodes     8 of 16 at most"]), (8, [])):
        print_plan(make_plan(load([*keys, f"num_nodes={nodes}"])))
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(":")[0] for line in lines if line.startswith("nodes ")] == expected


def test_a_plan_names_files_that_are_missing_here_and_asks_no_storage(tmp_path, capsys):
    files = f"grain_train_files={tmp_path}/a*,1;{tmp_path},1;gs://nobody/c,1"
    keys = ["dataset_type=grain", files, "base_output_directory=gs://nobody/runs", "num_nodes=1"]
    assert main([BASE, *keys, "devices_per_node=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    missing = f"grain_train_files={tmp_path}/a*"
    assert [line.split()[-1] for line in lines if line.startswith("data ")] == [missing]


def test_one_device_has_no_columns_of_nodes(capsys):
    print_plan(make_plan(load([BASE, "num_nodes=1", "devices_per_node=1"])))
    printed = capsys.readouterr().out
    heads = " ".join(printed.partition("──")[0].split())
    expected = "first global share of GiB per stage step steps samples tokens batch time device"
    assert heads == expected
    assert "node-time" not in printed


def test_the_legend_covers_no_curve(tmp_path, monkeypatch):
    kept = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: kept.append(self) or save(self, *a, **k)
    )
    for losses in ([6.0] * 5, [6.0, 5.0, 4.0, 3.0, 2.0]):
        records = [
            {"step": k, "loss": x, "consumed_samples": 8 * k + 8, "global_batch_size": 8}
            for k, x in enumerate(losses)
        ]
        records.append({"step": 4, "eval_loss": losses[-1], "consumed_samples": 40})
        draw_run(records, tmp_path, "a run: batch size and loss")
    assert (tmp_path / "ramp.png").stat().st_size > 10_000
    for figure in kept:
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1)
        assert figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1)
        title = figure.axes[0].title
        others = [axes.bbox for axes in figure.axes]
        others.append(figure.axes[0]._left_title.get_window_extent())
        assert not any(box.overlaps(other) for other in others), title


def test_totals_against_constant_batches():
    """By hand: 150 + 75 + 50 + 45 steps for 5040 samples; 630 of 8, 158 of 32."""
    plan = make_plan(load([BASE, "devices_per_node=1", "num_nodes=1"]))
    assert [s["run_steps"] for s in plan["stages"]] == [150, 75, 50, 45]
    assert plan["totals"]["constant_first_batch"]["steps"] == 630
    assert plan["totals"]["constant_final_batch"]["steps"] == 158
    cost = [150 * 8.25, 75 * 16.25, 50 * 24.25, 45 * 32.25]  # a quarter row's worth per pass
    assert plan["totals"]["node_time"] == pytest.approx(sum(cost) / 32.25)


def test_a_ramp_that_decides_while_it_runs(capsys):
    """As early and as late as it may be, and between them the stages of the table."""
    keys = ["rampup_policy=noise", "rampup_ladder=[8,16,32]", "total_samples=20000"]
    keys += ["devices_per_node=1", "rampup_latest=[9000,15000]"]
    plan = make_plan(load([BASE, *keys]))
    bounds = plan["adaptive"]
    assert bounds["earliest"]["steps"] < plan["total_steps"] < bounds["latest"]["steps"]
    assert bounds["expected"]["steps"] == plan["total_steps"]
    for name in ("earliest", "expected", "latest"):
        assert [size for _, size in bounds[name]["batches"]] == [8, 16, 32]
    places = [[n for n, _ in bounds[name]["batches"][1:]] for name in ("earliest", "latest")]
    assert places[0][0] >= 1000 and places[1][0] >= 9000  # after the warm-up of 5%
    print_plan(plan)
    printed = capsys.readouterr().out
    assert "every rung as early as it may be" in printed and "as late as it may be" in printed


_EXPERTS = ("decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2")


def test_the_plan_of_experts(capsys):
    """All weights, and those of a token, whose FLOPs count; the mesh in Megatron's words."""
    model = ("base_emb_dim=64", "base_mlp_dim=256", "vocab_size=512", "max_target_length=64")
    mesh = ("num_nodes=1", "devices_per_node=8", "ici_expert_parallelism=4")
    config = load([BASE, *_EXPERTS, *model, *mesh])
    plan = make_plan(config)
    D, F, V, T, heads = 64, 256, 512, 64, (4 * 2 + 2 * 2) * 32  # of queries, outputs; keys, values
    attention, norms, expert, router = D * heads, 2 * D, 3 * D * F, 8 * D
    outside = 2 * V * D + D + 4 * (attention + norms + router)
    weights, active = (outside + 4 * n * expert for n in (8, 2))
    assert plan["model"] == {"name": "default", "weights": weights, "active": active}
    products = plan["model"]["active"] - V * D - D - 4 * norms
    scores = 4 * 4 * 32 * T  # layers, heads, width, tokens: half of them lie behind
    assert training_flops_per_token(config.model, T) == 6 * (products + scores)
    print_plan(plan)
    printed = capsys.readouterr().out
    assert f"{plan['model']['active']:,} of them for a token" in printed
    words = "in Megatron's words: expert-model-parallel-size 4, "
    assert f"fsdp 2 x expert 4; {words}" in printed and "over 8 ranks" in printed


@pytest.mark.parametrize(
    ("policy", "keys"),
    [
        *((policy, ()) for policy in ("none", "minimal", "full")),
        *(pytest.param(x, _EXPERTS, marks=pytest.mark.slow) for x in ("none", "minimal", "full")),
        ("minimal", (*_EXPERTS, "ici_fsdp_parallelism=1", "ici_expert_parallelism=2")),
    ],
)
def test_the_memory_estimate_is_of_the_right_size(policy, keys):
    """Weights and optimizer exactly, the whole within a factor of 2 of the compiler's account."""
    config = make_config(
        *("base_emb_dim=256", "base_mlp_dim=1024", "base_num_decoder_layers=6", "head_dim=32"),
        *("max_target_length=256", f"remat_policy={policy}", "vocab_size=4096"),
        *("ici_fsdp_parallelism=2", "per_device_batch_size=8", "enable_rampup_batch_size=False"),
        *keys,
        devices=2,
    )
    with programs_of(config, print) as (programs, _, (stage,)):
        compiled, _ = programs.train_step(stage)
    memory = estimate(config.recipe, stage.spec)
    sizes = {name: gib * 2**30 for name, gib in memory.items()}
    clock, bad_steps, batch = 8, 4, 8 * (2 * 256 * 4 + 2 * 4)
    held = compiled.memory_analysis().argument_size_in_bytes - clock - bad_steps - batch
    assert sizes["weights"] + sizes["optimizer"] == held
    assert sizes["optimizer"] == 2 * sizes["weights"] + 8  # Adam's moments, what zeros left in them
    assert 0.5 < sizes["total"] / compiled_bytes(compiled) < 2


@pytest.mark.parametrize("rows, compiled", [(2, 6.42), (4, 11.36)])
def test_the_memory_of_experts_is_what_the_tpu_compiler_counts(rows, compiled):
    """GiB of 2 layers of Qwen3 30B-A3B on 16 v5p chips, by maxramp.compile: within a tenth."""
    size = ("base_num_decoder_layers=2", "vocab_size=8192", "max_target_length=4096")
    mesh = ("ici_expert_parallelism=4", f"per_device_batch_size={rows}")
    line = [BASE, "model_name=qwen3-30b-a3b", *size, "remat_policy=full", *mesh]
    config = resolve(load(line), 16)
    (stage,) = RampupBatchManager(config.batch).stages
    assert estimate(config.recipe, stage.spec)["total"] == pytest.approx(compiled, rel=0.1)


def test_the_memory_of_a_hybrid_is_what_the_tpu_compiler_counts():
    """GiB of 4 layers of Qwen3.5 9B on 4 v5p chips, by maxramp.compile: within 3%. On GPUs, without
    a kernel, squares of chunks remain."""
    size = ("base_num_decoder_layers=4", "vocab_size=8192", "max_target_length=8192")
    model = ("model_name=qwen3.5-9b", "override_model_config=true", *size, "remat_policy=full")
    line = [BASE, *model, "per_device_batch_size=1", "enable_rampup_batch_size=False"]
    memory = {}
    for machine in ("v5p:2x2x1", "h200:1x4"):
        plan = make_plan(load([*line, f"compile_topology={machine}"]))
        memory[machine] = plan["stages"][-1]["memory_gib"]["total"]
    assert memory["v5p:2x2x1"] == pytest.approx(6.96, rel=0.03)
    assert memory["h200:1x4"] > memory["v5p:2x2x1"] * 1.05


GROWING = [*TINY, "rampup_batch_size=[8,8,240]", "global_batch_size=24", "micro_batch_size=4"]
GROWING += ["steps=26", "eval_interval=-1"]


@pytest.mark.slow
def test_other_stages_at_every_stop(tmp_path, cache_dir):
    """Pipelines and evaluations of every kind are one run without; a start ends with its stage."""
    line = [BASE, *GROWING, "base_num_decoder_layers=4", "eval_interval=10", "eval_samples=16"]
    line += [f"base_output_directory={tmp_path}", f"jax_cache_dir={cache_dir}"]
    complete(*line, "run_name=whole", "eval_per_device_batch_size=8")
    two = "ici_pipeline_parallelism=2"
    starts = (  # and the stage, rows and consumed samples of what follows
        (2, f"{two} num_pipeline_microbatches=4", (1, 16, 120)),
        (4, f"{two} ici_tensor_parallelism=2 num_pipeline_repeats=2", (2, 24, 248)),
        (8, "ici_pipeline_parallelism=4 remat_policy=full", None),
    )
    for devices, keys, following in starts:
        keys = (*keys.split(), f"eval_per_device_batch_size={8 // devices}")
        done = run(*line, "run_name=staged", "stop_at_stage_end=True", *keys, devices=devices)
        expected = EXIT_STAGE_END if following else 0
        assert (done.returncode, done.stderr) == (expected, ""), done.stderr
        path = tmp_path / "staged" / "next_stage.json"
        assert path.exists() == bool(following)
        if following:
            next_stage = json.loads(path.read_text())
            keys = ("stage", "global_batch_size", "consumed_samples")
            assert tuple(next_stage[key] for key in keys) == following
    a, b = (read_records(tmp_path / name / "metrics.jsonl") for name in ("staged", "whole"))
    assert [r["step"] for r in a] == [r["step"] for r in b]
    for x, y in zip(a, b, strict=True):
        for name in ("stage", "global_batch_size", "batch_fingerprint", "consumed_samples"):
            assert x.get(name) == y.get(name)
        for name in {"loss", "eval_loss"} & y.keys():
            assert x[name] == pytest.approx(y[name], rel=2e-4)


def test_a_plan_finds_micro_batches_that_make_the_bubble_small():
    """8 micro batches idle 3 turns of 11, 28 make it 3 of 31: 7 rows divide some passes alone."""
    pipeline = ("ici_pipeline_parallelism=4", "num_pipeline_microbatches=8", "devices_per_node=8")
    pipeline += ("base_num_decoder_layers=4", "node_schedule=fixed", "num_nodes=1", "steps=1000")

    def plan(schedule, rows):
        keys = (*pipeline, f"micro_batch_size={rows}", f"step_batch_size_schedule={schedule}")
        return make_plan(load([BASE, *TINY, *keys, "step_batch_size_unit=samples"]))

    idle = plan("0:112 1120:128", 16)
    assert [s["pipeline_bubble"] for s in idle["stages"]] == pytest.approx([3 / 11] * 2)
    names = ("num_pipeline_microbatches", "rows_multiple", "not_in_stages")
    assert idle["smaller_bubble"] == dict(zip(names, (28, 7, [1]), strict=True))
    # 8 rows of a pass divide into 8 parts: 32 micro batches.
    whole = plan("0:64 640:128", 8)
    assert whole["smaller_bubble"] == dict(zip(names, (32, 8, []), strict=True))


@pytest.mark.slow
def test_a_ramp_is_changed_on_the_way(tmp_path, cache_dir):
    """From the checkpoint on the new sizes hold; no row is lost or repeated; one line says so."""
    line = [BASE, *TINY, f"base_output_directory={tmp_path}", f"jax_cache_dir={cache_dir}"]
    line += ["run_name=changed", "eval_interval=-1", "checkpoint_period=7", "micro_batch_size=8"]
    complete(*line, "step_batch_size_schedule=0:4 50:8", "step_batch_size_unit=samples", "steps=14")
    new = ("step_batch_size_schedule=0:4 50:8 100:16 130:2", "step_batch_size_unit=samples")
    second = complete(*line, *new, "steps=18")
    # 13 steps of 4 reach 52, the 14th takes 8: 60 samples.
    change = [text for text in second.stdout.splitlines() if text.startswith("change ")]
    assert change == [
        "change   from sample 60 on (step 14) the batch sizes are 8, 16 from 100, 2 from 132; "
        "before this start they were to be 8"
    ]
    # 5 steps of 8 from 60 reach 100, 2 of 16 reach 132.
    third = run(*line, *new, "steps=30")
    assert third.returncode == 0 and "change " not in third.stdout
    records = steps_of(tmp_path / "changed")
    assert [r["step"] for r in records] == list(range(30))
    sizes = [4] * 13 + [8] * 6 + [16] * 2 + [2] * 9
    assert [r["global_batch_size"] for r in records] == sizes
    # The stage of 8 continues as stage 1, whatever number today's keys alone would give it.
    assert [r["stage"] for r in records] == [0] * 13 + [1] * 6 + [2] * 2 + [3] * 9
    stages = [line.split(":")[0] for line in third.stdout.splitlines() if line[:6] == "stage "]
    assert stages == [f"stage {i} (of 0 to 3)" for i in (1, 2, 3)]
    plan = json.loads((tmp_path / "changed" / "plan.json").read_text())
    assert [s["index"] for s in plan["stages"]] == [0, 1, 2, 3]  # as trained, and as planned
    assert records[-1]["consumed_samples"] == sum(sizes)


def by_schedule(schedule: str, *more: str, devices: int = 1) -> Config:
    keys = f"step_batch_size_schedule={schedule}", "step_batch_size_unit=samples", "steps=50"
    return make_config(*keys, *more, devices=devices)


def stand(step: int, job: JobSchedule, config: Config) -> Checkpoint:
    """A checkpoint of a job after some steps."""
    consumed, stages = job.ramp.samples_before(step), job.ramp.to_json()["stages"]
    return Checkpoint(pathlib.Path(), step, consumed, stages, "", dict(config.values), {})


def plan_schedule(schedule: str, position: Checkpoint | None = None) -> JobSchedule:
    config = by_schedule(schedule)
    return JobSchedule(config.batch, config.checkpoints, 1, config.batch.mesh_at, 0.0, position)


def change(job: JobSchedule) -> str:
    return ramp_change(job.ramp.keys, job.ramp, job.position)


def test_stages_are_numbered_on_after_a_change():
    """The stage that the last step was in goes on under its number; another batch is the next."""
    trained = "0:4 24:8 64:16"  # 6 steps of 4, 5 of 8
    old, first = plan_schedule(trained), by_schedule(trained)
    for schedule, step, indices in (
        (trained, 8, [1, 2]),  # nothing changed
        ("0:8 80:32", 8, [1, 2]),  # in stage 1, with its batch
        ("0:12 80:32", 8, [2, 3]),  # in stage 1, with another
        ("0:8 80:32", 6, [1, 2]),  # at the end of stage 0
        ("0:4 80:32", 6, [0, 1]),  # there, which now goes on
        ("0:8 80:32", 0, [0, 1]),  # before the first step
    ):
        new = plan_schedule(schedule, stand(step, old, first))
        for ramp in (new.ramp, new.planned):
            assert [s.index for s in ramp.stages] == indices, schedule
            assert ramp.stages_between(step, 10**6)[-1].index == indices[-1]
        later = stand(step + 2, new, by_schedule(schedule))  # and once more, a few steps later
        again = plan_schedule(schedule, later)
        assert again.ramp.to_json() == new.ramp.to_json() and not change(again)
        third = plan_schedule("0:24 100:48", later).ramp.stages
        assert [s.index for s in third] == [indices[0] + 1, indices[0] + 2]


def test_a_job_that_is_smaller_than_planned_leaves_the_stage_to_a_larger_one(tmp_path):
    """As the job that follows a crash at the very end of a stage, which has the nodes of before."""
    line = ["step_batch_size_schedule=0:2 40:4", "step_batch_size_unit=samples", "steps=50"]
    line += ["stop_at_node_change=True", "num_nodes=2", "devices_per_node=1"]
    config = make_config(*line, "per_device_batch_size=2", devices=1)
    job = functools.partial(JobSchedule, config.batch, config.checkpoints)
    whole = job(1, lambda devices, sample: True, 0.0)
    for devices, step, end in ((1, 10, 20), (1, 20, 20), (1, 22, 22), (2, 22, 50), (2, 10, 20)):
        position = stand(step, whole, config)
        assert job(devices, lambda devices, sample: True, 0.0, position).last_step == end

    small = ["steps=2", "step_batch_size_schedule=0:4", "per_device_batch_size=2"]
    small += ["dataset_type=synthetic", "eval_interval=-1", "run_name=x", "jax_cache_dir="]
    done = run(BASE, *TINY, *line[1:2], *line[3:], *small, f"base_output_directory={tmp_path}")
    assert done.returncode == 75, done.stderr
    following = json.loads((tmp_path / "x" / "next_stage.json").read_text())
    assert (following["nodes"], following["consumed_samples"]) == (2, 0)
    assert not (tmp_path / "x" / "metrics.jsonl").exists()


def test_a_plan_names_what_it_takes_from_the_demo(capsys):
    """Where a larger model takes base.yml's learning rate, and where its passes do not fit."""
    keys = ["model_name=llama2-7b", "compile_topology=h100:1x8", "max_target_length=4096"]
    assert main([BASE, *keys, "ici_data_parallelism=2", "per_device_batch_size=8"]) == 0
    lines = {line[:10].strip(): line[10:] for line in capsys.readouterr().out.splitlines()}
    others = "opt_type=adamw, remat_policy=none, weight_dtype=float32, steps=320 (configs/base.yml)"
    assert f"learning_rate=0.003, {others}; dtype=bfloat16 (configs/models" in lines["defaults"]
    words = "in Megatron's words: weights, gradients and the optimizer's state over 4 ranks"
    assert words in lines["mesh"]
    assert "GiB (remat_policy=none), of 59.3 GiB (compile_topology=h100:1x8)" in lines["memory"]
    plan = make_plan(load([BASE, *keys, "per_device_batch_size=8"]), {"learning_rate": ""})
    assert [line.partition(" is ")[0] for line in plan["warnings"]] == ["stage 0"]
    plan = make_plan(load([BASE, *keys]), {"base_emb_dim": "configs/models/llama2-7b.yml"})
    assert any("learning_rate=0.003 is that of base.yml's model" in x for x in plan["warnings"])
    assert main([BASE, "hardware=cpu", "devices_per_node=2"]) == 0
    printed = capsys.readouterr().out
    assert "GiB together, as 2 devices share" in printed and "\nwarning" not in printed


def test_the_plan_in_the_docs_is_the_plan(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "130")
    assert main([str(ROOT / "configs" / "schedules" / "nemo-gpt3-5b.yml")]) == 0
    shown = [line.rstrip() for line in (ROOT / "docs" / "running.md").read_text().splitlines()]
    for line in capsys.readouterr().out.splitlines():
        assert line.rstrip() in shown
