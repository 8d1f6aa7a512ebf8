"""A run of a mixture of experts: another expert axis in a phase, and what it writes."""

import pytest
from conftest import BASE, TINY, run

from maxramp.run.metrics import read_records

EXPERTS = [
    *TINY,
    *("decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=32"),
    *("load_balance_loss_weight=0.01", "load_balance_loss_scope=step", "dataset_type=synthetic"),
    *("enable_rampup_batch_size=False", "per_device_batch_size=2", "steps=9", "log_period=3"),
    *("eval_interval=-1", "phases_unit=samples", "ici_data_parallelism=1"),
]


@pytest.mark.slow
def test_another_expert_axis_in_a_phase(tmp_path, cache_dir):
    """Experts that move to other devices learn as those that stay: the balance loss, which knows
    the loads of the step before, too. The loads of every third step are written, and drawn."""
    common = [BASE, *EXPERTS, f"base_output_directory={tmp_path}", f"jax_cache_dir={cache_dir}"]
    phases = "phases={48: {ici_expert_parallelism: 4}, 96: {ici_expert_parallelism: 1}}"
    loads = {}
    for name, keys in {"stays": [], "moves": ["ici_expert_parallelism=2", phases]}.items():
        done = run(*common, *keys, f"run_name={name}", devices=8)
        assert done.returncode == 0, done.stderr
        assert f"see      {tmp_path}/{name}/ramp.png, experts.png, metrics.jsonl" in done.stdout
        loads[name] = read_records(tmp_path / name / "metrics.jsonl")
    assert "83,104 weights, 46,240 of them for a token" in done.stdout
    for stays, moves in zip(loads["stays"], loads["moves"], strict=True):
        for name in ("loss", "load_balance_loss", "expert_load_max", "expert_load_entropy"):
            assert moves[name] == pytest.approx(stays[name], rel=1e-5), (stays["step"], name)
        assert moves["batch_fingerprint"] == stays["batch_fingerprint"]
        assert ("expert_load" in moves) == (moves["step"] % 3 == 0)
        for layer in moves.get("expert_load", []):
            assert len(layer) == 8 and sum(layer) == pytest.approx(1, abs=1e-3)
