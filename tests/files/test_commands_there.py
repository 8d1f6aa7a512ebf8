"""Commands on runs in an object storage: what measures a run, and what starts its jobs."""

import json

import pytest
from conftest import BASE, TINY, complete, run, steps_of

from maxramp.files.place import place

pytestmark = pytest.mark.slow


def ran(*arguments, module):
    done = complete(*map(str, arguments), module=module)
    return done.stdout


def test_measuring(storages, cache_dir, tmp_path):
    """The noise scale, branches and the ramp that follows from them, by the run's address alone."""
    address = place(f"{storages('gs').address}/{tmp_path.name}")
    keys = [*TINY, "steps=40", "checkpoint_period=20", "log_gradient_noise_scale=True"]
    keys += ["global_batch_size=8", "eval_per_device_batch_size=64", "eval_interval=40"]
    ran(
        *(BASE, *keys, f"jax_cache_dir={cache_dir}"),
        *(f"base_output_directory={address}", "run_name=run"),
        module="train",
    )
    folder = address / "run"
    assert f"picture   {folder}/noise.png" in ran(folder, "--blocks", "2", module="noise")
    assert (folder / "noise.png").read_bytes().startswith(b"\x89PNG")
    line = [folder, "--at", "20", "--sizes", "8,16", "--tokens", "1K"]
    assert "largest   batch" in ran(*line, module="branch")
    window = folder / "branches" / "20-64"
    result = json.loads((window / "branch.json").read_bytes())
    assert result["run"] == str(folder) and result["noise"]
    for size in (8, 16):
        steps = steps_of(window / str(size))
        assert [r["step"] for r in steps] == list(range(20, 20 + 64 // size))
    assert json.loads(ran(*line, "--json", module="branch")) == result  # read, not trained again
    suggestion = ran(
        *(BASE, *TINY, "global_batch_size=8", "total_samples=2000", "devices_per_node=1"),
        *("--noise", folder, "--branch", folder, "--json"),
        module="suggest",
    )
    suggestion = json.loads(suggestion)
    assert suggestion["batches"] and any(str(folder) in line for line in suggestion["evidence"])
    assert not any("config.yml" in line for line in suggestion["limits"])
    done = run(str(folder / "nothing"), module="noise")
    assert done.returncode == 2 and "holds no metrics.jsonl" in done.stderr


def test_a_launch(storages, cache_dir, tmp_path):
    """Its jobs grow where the plan says so, and a finished one has nothing to do."""
    address = place(f"{storages('s3').address}/{tmp_path.name}")
    line = [BASE, *TINY, "hardware=cpu", "num_nodes=2", "devices_per_node=1", "run_name=grown"]
    line += ["per_device_batch_size=2", "step_batch_size_schedule=0:2 40:4", "steps=30"]
    line += ["step_batch_size_unit=samples", "checkpoint_period=15", "restart_minutes=0"]
    line += ["dataset_type=synthetic", "eval_interval=-1", f"base_output_directory={address}"]
    line += [f"jax_cache_dir={cache_dir}", "--cluster", "local"]
    printed = ran(*line, module="launch")
    assert [x for x in printed.splitlines() if x.startswith("launch ")] == [
        "launch   1 process for 1 node of 1 device",
        "launch   2 processes for 2 nodes of 1 device",
    ]
    steps = steps_of(address / "grown")
    assert [r["step"] for r in steps] == list(range(30))
    assert "finished" in ran(*line, module="launch")
