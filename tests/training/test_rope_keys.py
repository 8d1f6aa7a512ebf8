"""Phases with positions and windows of their own, beside runs that have them from the start."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import BASE, TINY, complete, make_config, run
from opened import logits

from maxramp import convert
from maxramp.errors import EXIT_STAGE_END
from maxramp.handover.opening import open_model
from maxramp.model.size import training_flops_per_token
from maxramp.planning.plan import make_plan
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import read_records

FAMILY = ("decoder_block=mistral", "max_target_length=32", "sliding_window_size=16")
PHASES = {
    "40": {"rope_max_timescale": 100.0, "sliding_window_size": 4},
    "60": {"rope_type": "llama3.1", "rope_factor": 4.0, "original_max_position_embeddings": 8},
    "80": {"rope_type": "default", "rope_max_timescale": 10000.0, "sliding_window_size": 16},
}
# What holds in each of them, of keys that stand alone.
FLAT = (
    (),
    ("rope_max_timescale=100.0", "sliding_window_size=4"),
    ("rope_max_timescale=100.0", "sliding_window_size=4", "rope_type=llama3.1", "rope_factor=4.0")
    + ("original_max_position_embeddings=8",),
    (),
)
SHORT = ("total_samples=80",)  # the first three
RUN = ("global_batch_size=4", "total_samples=100", "phases_unit=samples")


def phased(phases, *more, devices=8):
    return make_config(*FAMILY, *RUN, f"phases={json.dumps(phases)}", *more, devices=devices)


def test_a_stage_that_returns_to_earlier_keys_shares_its_program():
    config = phased({"40": {"sliding_window_size": 4}, "80": {"sliding_window_size": 16}})
    first, other, second = RampupBatchManager(config.batch, 8).stages
    assert first.spec == second.spec != other.spec


def test_a_plan_counts_the_window_of_each_stage():
    keys = ("max_target_length=4096", "sliding_window_size=0", "planned_tflops_per_device=1")
    config = phased({"40": {"sliding_window_size": 256}}, *keys, "devices_per_node=1", devices=1)
    before, after = make_plan(config)["stages"]
    models = (dataclasses.replace(config.model, sliding_window_size=n) for n in (0, 256))
    flops = [training_flops_per_token(model, 4096) for model in models]
    per_step = [stage["hours"] / stage["run_steps"] for stage in (before, after)]
    assert per_step[1] / per_step[0] == pytest.approx(flops[1] / flops[0]) and flops[1] < flops[0]


def run_keys(folder, cache_dir, phases, *more):
    keys = [*TINY, *FAMILY, *RUN, "eval_interval=5", "eval_samples=16", "checkpoint_period=5"]
    keys += [f"phases={json.dumps(phases)}", f"jax_cache_dir={cache_dir}"]
    keys += [f"base_output_directory={folder}", "run_name=r", "vocab_size=320", *more]
    return [BASE, *keys]


def numbers(folder):
    """Of every step and evaluation what does not depend on time."""
    names = ("step", "loss", "grad_norm", "eval_loss", "batch_fingerprint", "global_batch_size")
    records = read_records(folder / "r" / "metrics.jsonl")
    return [{name: r[name] for name in names if name in r} for r in records]


@pytest.mark.slow
def test_a_run_is_those_of_its_phases_one_after_another(tmp_path, cache_dir):
    """To the last bit, evaluations too; each checkpoint is exported as it was trained."""
    exporting = (*SHORT, "export_huggingface=True")
    done = complete(*run_keys(tmp_path / "one", cache_dir, PHASES, *exporting))
    assert "rope_max_timescale=100.0, sliding_window_size=4\n" in done.stdout
    same = {name: {"learning_rate": 1e-2} for name in PHASES}  # where each of these runs ends
    for keys in FLAT[:3]:
        keys = (*SHORT, *keys, "stop_at_stage_end=True")
        hand = run(*run_keys(tmp_path / "hand", cache_dir, same, *keys))
        assert hand.returncode in (0, EXIT_STAGE_END), hand.stderr
    wanted = numbers(tmp_path / "hand")
    assert numbers(tmp_path / "one") == wanted and len(wanted) == 24
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    tokens = np.arange(32)[None] * 7 % 300
    windows = {"10": 16, "20": 4}  # at a border, and at the end
    for step, window in windows.items():
        folder = tmp_path / "one" / "r" / "exported" / step
        if step != "20":  # what the run itself handed over
            folder = tmp_path / step
            assert convert.main([f"{tmp_path}/one/r/checkpoints/{step}", "--to", str(folder)]) == 0
        config_json = json.loads((folder / "config.json").read_text())
        assert config_json["sliding_window"] == window
        assert config_json["rope_theta"] == (100.0 if window == 4 else 10000.0)
        assert bool(config_json["rope_scaling"]) == (step == "20")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        opened = open_model(f"{tmp_path}/one/r/checkpoints/{step}", ["ici_fsdp_parallelism=8"])
        with torch.no_grad():
            wanted = theirs(torch.tensor(tokens)).logits.numpy()
        rows = np.broadcast_to(tokens, (8, 32)).astype(np.int32)
        actual = logits(opened.load(), opened.config, rows)[:1]
        np.testing.assert_allclose(actual, wanted, atol=2e-5)
