"""Runs of mixtures of experts, as a user starts them."""

import signal

import pytest
from conftest import BASE, TINY, run
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
        merged = dict(argument.split("=", 1) for argument in keys)
        return [BASE, *(f"{key}={value}" for key, value in merged.items())]

    return line


def assert_same_run(folder, expected):
    """The same rows, and all that is computed of them but for rounding."""
    actual, wanted = (
        [r for r in read_records(path / "metrics.jsonl") if "loss" in r]
        for path in (folder, expected)
    )
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
@pytest.mark.parametrize("mesh", MESHES)
def test_a_ramp_with_a_restart_is_one_run_on_any_mesh(arguments, tmp_path, shared, mesh):
    """Batch and passes grow fourfold; in the middle of a stage 2 devices take over from 8."""
    if not (shared / "plain").exists():
        where = f"base_output_directory={shared}"
        done = run(*arguments("plain", "micro_batch_size=8", where))
        assert done.returncode == 0, done.stderr
    first, later = MESHES[mesh]
    stopped = run_signalled(11, signal.SIGTERM, *arguments("run", *first), devices=8)
    assert stopped.returncode == EXIT_PREEMPTED, stopped.stderr
    done = run(*arguments("run", "micro_batch_size=4", *later), devices=2)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", shared / "plain")
