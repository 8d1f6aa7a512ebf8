"""Phases with meshes of their own: the state moves, and the run is that of one mesh."""

import json
import signal
import sys

import jax
import numpy as np
import pytest
from conftest import BASE, TINY, complete, make_config
from jax.sharding import NamedSharding
from jobs import finish, run_signalled, start

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.errors import EXIT_STAGE_END, ConfigError
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.sharding import EMBEDDING_VD, MLP_IN_DF, REPLICATED, HEADS_IN_DHh
from maxramp.planning.plan import estimate, make_plan
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import read_records
from maxramp.training import moving
from maxramp.training.state import abstract_state

SAMPLES = ("global_batch_size=16", "phases_unit=samples", "total_samples=4000")
OTHER = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


def in_phase(threshold, keys):
    return [f"phases.{threshold}.{name}={value}" for name, value in keys.items()]


def stages_of(config):
    return RampupBatchManager(config.batch, 8).stages


def test_arrays_move_one_after_another():
    first = mesh_lib.make_mesh(make_config().mesh)
    second = mesh_lib.reshape_mesh(first, make_config(*(f"{n}={x}" for n, x in OTHER.items())).mesh)
    kinds = [((64, 32), EMBEDDING_VD), ((32, 8, 4), HEADS_IN_DHh), ((), REPLICATED)]
    kinds += [((64, 32), MLP_IN_DF), kinds[0]]
    random = np.random.default_rng(0)
    wanted = [random.random(shape).astype(np.float32) for shape, _ in kinds]
    shardings = [NamedSharding(first, spec) for _, spec in kinds]
    arrays = [*map(jax.device_put, wanted, shardings)]
    before = [*arrays]
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]
    with jax.set_mesh(second):
        lowered = moving.lower(abstract, second)
    assert len(lowered) == 4  # two arrays are alike
    moving.move(arrays, abstract, jax.tree.map(lambda x: x.compile(), lowered))
    for x, y, (_, spec) in zip(wanted, arrays, kinds, strict=True):
        np.testing.assert_array_equal(x, y)
        assert y.sharding == NamedSharding(second, spec)
    assert all(x.is_deleted() for x in before)
    # A device has an eighth of each and then a quarter. While the last moves, it has a quarter of
    # all, and its eighth of that.
    size = 4 * (3 * 64 * 32 // 4 + 32 * 8 * 4 // 4 + 1)
    assert moving.peak_bytes(before, arrays) == size + 4 * 64 * 32 // 8


@pytest.mark.parametrize("optimizer", ["muon", "optax.adafactor"])
def test_a_state_has_the_same_specs_on_every_mesh(optimizer):
    """So the programs of every stage are lowered for the shapes of the first one's state."""
    config = make_config(*SAMPLES, f"opt_type={optimizer}", "phases.320.ici_tensor_parallelism=2")
    first, second = (mesh_lib.abstract_mesh(s.spec.mesh.sizes) for s in stages_of(config))
    before, after = (abstract_state(config.recipe, mesh) for mesh in (first, second))
    assert jax.tree.leaves(mesh_lib.attach_mesh(before, second)) == jax.tree.leaves(after)
    assert jax.tree.structure(before) == jax.tree.structure(after)


def test_phases_fill_in_their_sizes_and_evaluations_have_rows_for_every_mesh():
    config = make_config(
        *SAMPLES,
        *("per_device_batch_size=0.25", "eval_per_device_batch_size=0", "ici_tensor_parallelism=4"),
        "phases.320={ici_tensor_parallelism: 2, row_length: 8}",
        "phases.640.global_batch_size=32",
        "phases.960={ici_tensor_parallelism: 1, ici_fsdp_parallelism: 8}",
    )
    assert config.values["phases"] == {
        "320": {"ici_tensor_parallelism": 2, "row_length": 8, "ici_fsdp_parallelism": 4},
        "640": {"global_batch_size": 32},
        "960": {"ici_tensor_parallelism": 1, "ici_fsdp_parallelism": 8},
    }
    assert resolve(config, 8, 1, 1).values == config.values
    sizes = [(s.spec.mesh.sizes["fsdp"], s.spec.mesh.sizes["tensor"]) for s in stages_of(config)]
    assert sizes == [(2, 4), (4, 2), (4, 2), (8, 1)]
    assert config.evaluation.eval_per_device_batch_size == 1


def test_a_plan_shows_the_memory_of_a_move():
    config = make_config(*SAMPLES, "devices_per_node=8", *in_phase(320, OTHER))
    first, second = make_plan(config)["stages"]
    assert (first["move_gib"], second["mesh"]["tensor"]) == (None, 2)
    before, after = (
        sum(estimate(config.recipe, stage.spec)[name] for name in ("weights", "optimizer"))
        for stage in stages_of(config)
    )
    assert before < after < second["move_gib"] < before + after


def test_fewer_nodes_must_have_the_mesh_of_every_phase():
    """Even where the first stage alone fits on one node."""
    keys = [BASE, *TINY, *SAMPLES, "global_batch_size=2", "num_nodes=2", "devices_per_node=2"]
    keys += ["phases.320.global_batch_size=4", "phases.320.ici_fsdp_parallelism=1"]
    with pytest.raises(ConfigError, match=r"on 1 node, where every .* phases.320: .* be -1"):
        make_plan(load([*keys, "phases.320.ici_data_parallelism=4"]))
    assert make_plan(load([*keys, "phases.320.ici_data_parallelism=-1"]))["stages"][0]["nodes"] == 1


def test_slices_whose_devices_would_change_their_order_are_refused():
    keys = ("phases.320.ici_tensor_parallelism=2", "dcn_data_parallelism=1")
    loaded = load([BASE, *TINY, *SAMPLES, *keys, "dcn_fsdp_parallelism=2"])
    with pytest.raises(ConfigError, match=r"phases.320: ici_fsdp_parallelism=2 .*dcn_fsdp_par"):
        resolve(loaded, 8, 2, 1)
    loaded = load([BASE, *TINY, *SAMPLES, keys[0], "dcn_data_parallelism=2"])
    assert resolve(loaded, 8, 2, 1).values["phases"]["320"]["ici_fsdp_parallelism"] == 2


SNAPSHOTS = ("enable_emergency_checkpoint=True", "local_checkpoint_period=5")
SNAPSHOTS += ("checkpoint_period=1000", "checkpoint_stage_ends=False")
PHASES = {"64": {"row_length": 16, "ici_tensor_parallelism": 2}}


def run_keys(folder, cache_dir, *more):
    keys = [*TINY, *SAMPLES, "total_samples=128", "eval_interval=4", "eval_samples=16"]
    keys += ["run_name=r", f"base_output_directory={folder}", f"jax_cache_dir={cache_dir}"]
    keys += ["per_device_batch_size=4", "row_length=4", "opt_type=optax.adafactor"]
    keys += ["opt_arguments={min_dim_size_to_factor: 8}"]
    keys += [f"phases={json.dumps(PHASES)}", *more]
    return [BASE, *keys]


def compare(folder, wanted):
    """Every step and evaluation is there once, on the same rows, with the same loss."""
    records = read_records(folder / "r" / "metrics.jsonl")
    for ours, theirs in zip(records, wanted, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("batch_fingerprint") == theirs.get("batch_fingerprint")
        for name in {"loss", "eval_loss", "grad_norm"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_run_over_two_meshes_is_that_of_one(tmp_path, cache_dir):
    """Killed after the change, it continues on half of the devices; or in two processes."""
    complete(*run_keys(tmp_path / "one", cache_dir, "phases={64: {row_length: 16}}"), devices=4)
    wanted = read_records(tmp_path / "one" / "r" / "metrics.jsonl")
    assert len(wanted) == 10

    own = f"local_checkpoint_directory={tmp_path}/memory"
    killed = run_keys(tmp_path / "killed", cache_dir, *SNAPSHOTS, own)
    assert run_signalled(6, signal.SIGKILL, *killed, devices=4).returncode == -signal.SIGKILL
    done = complete(*killed, devices=2)
    assert "from step 5 (snapshot)" in done.stdout, done.stdout
    assert "(mesh tensor 2)" in done.stdout
    compare(tmp_path / "killed", wanted)

    keys = run_keys(tmp_path / "both", cache_dir, "stop_at_stage_end=True")
    for status in (EXIT_STAGE_END, 0):
        job = finish(start([sys.executable, "-m", "maxramp.train", *keys], 2, 2, [tmp_path] * 2))
        assert [code for _, _, code in job] == [status] * 2, job
    compare(tmp_path / "both", wanted)
