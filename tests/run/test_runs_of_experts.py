"""Runs of mixtures of experts, as a user starts them."""

import signal

import pytest
from conftest import BASE, TINY, complete, steps_of
from jobs import run_signalled

from maxramp.errors import EXIT_PREEMPTED
from maxramp.run.metrics import read_records

MIXTURE = (
    *("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16"),
    *("load_balance_loss_weight=0.1", "router_z_loss_weight=0.01", "learning_rate=3e-3"),
)
RAMP = (
    *("step_batch_size_schedule=0:8 64:16 192:32", "step_batch_size_unit=samples", "steps=22"),
    *("enable_rampup_batch_size=False", "eval_interval=-1", "checkpoint_period=1000"),
)


@pytest.fixture
def arguments(tmp_path, cache_dir):
    def line(name, *more):
        keys = [*TINY, *MIXTURE, *RAMP, f"jax_cache_dir={cache_dir}", f"run_name={name}"]
        keys += [f"base_output_directory={tmp_path}", *more]
        return [BASE, *keys]

    return line


def assert_same_run(folder, expected):
    """The same rows, and all that is computed of them but for rounding."""
    actual, wanted = (steps_of(path) for path in (folder, expected))
    for one, other in zip(actual, wanted, strict=True):
        for name in ("step", "batch_fingerprint", "consumed_samples", "target_tokens"):
            assert one[name] == other[name]
        names = ("loss", "load_balance_loss", "router_z_loss", "expert_load_max")
        for name in (*names, "expert_load_entropy", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), (name, one["step"])


# The axes on 8 devices, and later on 2.
MESHES = {
    "data": (("ici_data_parallelism=8", "micro_batch_size=1"), ("ici_data_parallelism=2",)),
    "fsdp, tensor": (
        ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "micro_batch_size=2"),
        ("ici_tensor_parallelism=2",),
    ),
    "expert, fsdp": (
        ("ici_expert_parallelism=4", "ici_fsdp_parallelism=2", "micro_batch_size=1"),
        ("ici_expert_parallelism=2",),
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param(x, marks=[pytest.mark.long] * (x == "fsdp, tensor")) for x in MESHES]
)
def test_a_ramp_with_a_restart_is_one_run_on_any_mesh(arguments, tmp_path, shared, mesh):
    """Batch and passes grow fourfold; in the middle of a stage 2 devices take over from 8."""
    if not (shared / "plain").exists():
        where = f"base_output_directory={shared}"
        complete(*arguments("plain", "micro_batch_size=8", where))
    first, later = MESHES[mesh]
    stopped = run_signalled(11, signal.SIGTERM, *arguments("run", *first), devices=8)
    assert stopped.returncode == EXIT_PREEMPTED, stopped.stderr
    complete(*arguments("run", "micro_batch_size=4", *later), devices=2)
    assert_same_run(tmp_path / "run", shared / "plain")


EXPERTS = [
    *TINY,
    *("decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=32"),
    *("load_balance_loss_weight=0.01", "load_balance_loss_scope=step", "dataset_type=synthetic"),
    *("enable_rampup_batch_size=False", "per_device_batch_size=2", "steps=9", "log_period=3"),
    *("eval_interval=-1", "phases_unit=samples", "ici_data_parallelism=1"),
]


@pytest.mark.slow
def test_experts_that_move_in_a_phase_learn_as_those_that_stay(tmp_path, cache_dir):
    """The balance loss, too; the loads of every third step are written and drawn."""
    common = [BASE, *EXPERTS, f"base_output_directory={tmp_path}", f"jax_cache_dir={cache_dir}"]
    phases = "phases={48: {ici_expert_parallelism: 4}, 96: {ici_expert_parallelism: 1}}"
    loads = {}
    for name, keys in {"stays": [], "moves": ["ici_expert_parallelism=2", phases]}.items():
        done = complete(*common, *keys, f"run_name={name}", devices=8)
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
