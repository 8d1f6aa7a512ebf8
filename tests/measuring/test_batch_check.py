"""The check of a run's batches: silent for runs that went well, one line with a ramp for others."""

import shlex
import subprocess

import pytest
from conftest import BASE, ROOT, TINY, command, environment
from noise_records import write_noise

from maxramp import plan, suggest
from maxramp.config.load import load
from maxramp.config.resolve import meshes_of, resolve
from maxramp.files.place import place
from maxramp.measuring import batch_check as laws
from maxramp.measuring.batch_check import check_batches
from maxramp.planning.stages import PlannedRun, with_nodes

SHIPPED = [
    path.relative_to(ROOT)
    for folder in ("schedules", "pods", "pre_train")
    for path in sorted((ROOT / "configs" / folder).glob("*.yml"))
]
# 10B tokens in rows of 2,048 on 8 devices; the laws' largest batch there is 4.0M tokens.
LONG = [BASE, "max_target_length=2048", "total_tokens=10000000000", "dataset_type=synthetic"]
LONG += ["num_nodes=1", "devices_per_node=8", "learning_rate=1e-3"]


def lines(arguments, run="/nowhere", consumed=0, **keys):
    config = with_nodes(load([str(one) for one in arguments], "plan", note=lambda line: None))
    resolved = resolve(config, config.batch.num_devices).replace(**keys)
    return check_batches(resolved, meshes_of(config), place(str(run)), consumed)


def test_the_laws_give_their_papers_numbers():
    """Those of other places than the constants come from."""
    assert laws.BEST.batch(3e9) / 2048 == pytest.approx(130.45, rel=1e-3)
    # 4.37 times the batch for 8.3 times the tokens, of which 1.07 come from the larger model.
    assert laws.SCION.batch(10.8e9) / laws.SCION.batch(1.3e9) == pytest.approx(
        4.37 / 1.07, rel=0.01
    )
    # A nanochat of 26 layers took 8.25 / 7.25 times the tokens with 2^20 of them a batch, not 2^19.
    tokens = 12_700 * 2**19
    twice, once = (1 + n / laws.CRITICAL.batch(tokens) for n in (2**20, 2**19))
    assert twice / once == pytest.approx(8.25 / 7.25, rel=0.01)
    for batch in (1e5, 1e7, 1e9):
        assert laws.largest_batch(laws.tokens_of_largest(batch)) == pytest.approx(batch)


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_published_ramps_get_no_line(path):
    assert lines([ROOT / path]) == []


@pytest.mark.parametrize(
    "keys",
    [
        ["global_batch_size=32768", "total_tokens=15500000000000"],  # Kimi K2
        ["global_batch_size=2048", "total_tokens=6000000000000"],  # OLMo 3 7B
        ["global_batch_size=4096", "total_tokens=6000000000000"],  # OLMo 3 32B
        ["global_batch_size=12288", "total_tokens=25000000000000"],  # Nemotron 3 Super
        ["global_batch_size=1152", "total_tokens=11200000000000"],  # SmolLM3
        ["global_batch_size=1024", "total_tokens=50000000000"],  # nanochat, 34 layers
        ["global_batch_size=65536", "total_tokens=900000000"],  # too short for the laws
    ],
)
def test_constant_batches_of_real_runs_get_no_line(keys):
    assert lines([*LONG, *keys]) == []


LOUD = {
    "constant": ["global_batch_size=16384"],
    "tokens": ["global_batch_tokens=33554432"],
    "passes": ["per_device_batch_size=16", "gradient_accumulation_steps=128"],
    "NeMo": ["rampup_batch_size=[4096,4096,1000000]", "global_batch_size=16384"],
    "Megatron": ["step_batch_size_schedule=0:256 500M:16384"],
    "phases": ["global_batch_size=64", "phases={1B: {global_batch_size: 24576, row_length: 1024}}"],
    "few multiples": ["global_batch_size=12000"],
    "few halvings": ["global_batch_size=30000"],
    "few halvings of ranks": ["global_batch_size=30000", "ici_context_parallelism=2"],
    "Muon of 67B": ["global_batch_size=32768", "total_tokens=100000000000", "opt_type=muon"],
}


@pytest.mark.parametrize("keys", LOUD.values(), ids=LOUD)
def test_the_ramp_in_the_line_loads_and_is_silent(keys):
    """With the tokens of the run, never a larger batch than before, and the square-root rule."""
    (line,) = lines([*LONG, *keys])
    before, _, pasted = line.partition("as many tokens in smaller batches: ")
    assert "docs/noise.md" in before and "\n" not in line
    arguments = [*LONG, *keys, *shlex.split(pasted)]
    assert lines(arguments) == []
    ramps = []
    for line in ([*LONG, *keys], arguments):
        config = with_nodes(load(line, "train", note=lambda line: None))
        ramps.append(PlannedRun.from_config(config, meshes_of(config)).ramp)
    old, new = ramps
    assert 0 <= new.total_samples - old.total_samples <= new.stages[-1].global_batch_size
    for stage in [*old.stages, *new.stages]:
        sizes = [r.stage_at_sample(stage.first_sample).global_batch_size for r in (new, old)]
        assert sizes[0] <= sizes[1]
    rate = config.learning_rate.learning_rate
    first = [ramp.stages[0].global_batch_size for ramp in (new, old)]
    assert rate == pytest.approx(1e-3 * (first[0] / first[1]) ** 0.5, rel=5e-3)


def test_without_a_smaller_batch_that_divides_there_is_no_ramp():
    mesh = ["ici_data_parallelism=-1", "ici_fsdp_parallelism=1", "devices_per_node=12289"]
    (line,) = lines([*LONG, *mesh, "global_batch_size=12289"])
    assert line.endswith("use fewer, or train longer") and "step_batch_size" not in line


TUNING = {"load_parameters_path": "there", "load_full_state_path": "there", "use_sft": True}
TUNING |= {"use_dpo": True, "lora_rank": 8, "program": "grpo"}


@pytest.mark.parametrize("key", TUNING)
def test_tuning_and_an_adaptive_ramp_get_no_line(key):
    assert lines([*LONG, "global_batch_size=16384"], **{key: TUNING[key]}) == []
    assert lines([*LONG, "rampup_policy=noise", "rampup_ladder=[4096,16384]"]) == []


def test_the_noise_scale_halves_what_is_far_above(tmp_path):
    """2.9 times the laws' largest is far above if a measured noise scale is surely below 1/10."""
    run = [*LONG, "global_batch_size=5760"]
    assert lines(run) == []
    (line,) = lines(run, write_noise(tmp_path / "small", [300] * 100, 1000, 2048, 0.3))
    assert "of 11.8M tokens (noise scale at most " in line and "as many tokens in smaller" in line
    assert lines(run, write_noise(tmp_path / "large", [2000] * 100, 1000, 2048, 0.3)) == []
    assert lines(run, write_noise(tmp_path / "unsure", [300] * 100, 1000, 2048, 30.0)) == []
    later = [*LONG, "step_batch_size_schedule=0:256 1B:5760"]
    assert lines(later, write_noise(tmp_path / "before", [300] * 100, 1000, 2048, 0.3)) == []


def test_steps_that_are_done_are_not_judged():
    run = [*LONG, "step_batch_size_schedule=0:4096 500M:256"]
    assert lines(run) and not lines(run, consumed=400_000)


def test_plan_and_suggest_print_the_line(capsys):
    loud = [*LONG, "global_batch_size=16384"]
    for main, label in ((plan.main, "warning   "), (suggest.main, "limit     ")):
        assert main(loud) == 0
        shown = capsys.readouterr().out.splitlines()
        assert sum(line.startswith(f"{label}stage 0 has batches of 33.6M") for line in shown) == 1
        assert main([*LONG, "global_batch_size=256"]) == 0
        assert "wasteful" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_start_of_a_run_prints_the_line(tmp_path):
    keys = ["dataset_type=synthetic", "max_target_length=4096", "total_tokens=1000000000"]
    keys += ["per_device_batch_size=1", "gradient_accumulation_steps=2048", "eval_interval=-1"]
    keys += [f"base_output_directory={tmp_path}", "run_name=large"]
    line = command(BASE, *TINY, *keys)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        shown = next(line for line in process.stdout if line.startswith(("batch ", "step ")))
        process.kill()
    assert shown.startswith("batch    stage 0 has batches of 8.39M tokens up to 1.01B tokens")
