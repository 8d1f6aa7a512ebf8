"""use_dpo in the step and in runs: the same pairs give the same update, however it is computed."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, complete, make_config, make_mesh, run, steps_of
from preference_pairs import keys_of, pairs, write_pairs, write_tokenizer

from maxramp.data.batch import Batch
from maxramp.data.rows import PADDING
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.run.metrics import read_records
from maxramp.training.state import initial_state
from maxramp.training.step import eval_step, loss_of, make_train_step

B, T = 8, 16
KEYS = ("use_dpo=True", "packing=False", "dpo_beta=0.5", "opt_type=sgd", "tokenizer_path=t.json")
KEYS += ("dataset_type=grain", "grain_train_files=f", "tokenizer_type=huggingface")
MESHES = {
    "one device": ((), 1, 1),
    "passes": ((), 1, 4),
    "sharded": (("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"), 4, 2),
    "copies": (("ici_data_parallelism=2", "ici_fsdp_parallelism=1"), 2, 2),
    "pipeline": (("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=1"), 2, 2),
    "remat": (("remat_policy=full", "loss_block_tokens=8"), 1, 1),
}


def batch_of_pairs() -> Batch:
    """Seven pairs of several lengths, and padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (B, T), dtype=np.int32)
    targets, segments = np.full((B, T), PADDING, np.int32), np.zeros((B, T), np.int32)
    for row, (first, second) in enumerate([(5, 12), (9, 16), (4, 8), (7, 15), (8, 16), (3, 9)]):
        segments[row, first:] = 1
        for begin, end in ((1, first - 1), (first + 1, second - 1)):
            targets[row, begin:end] = tokens[row, begin + 1 : end + 1]
    segments[6, 8:] = 1
    targets[6, [3, 12]] = 5
    tokens[7] = PADDING
    known = random.normal(-20, 1, (B, 2)).astype(np.float32)
    hashes = np.ones((B, 2), np.uint32)
    return Batch(tokens, targets, segments, hashes, reference_log_probs=known)


def equal_pairs() -> Batch:
    """Pairs of one answer, of several lengths; one fills its row to the end."""
    batch = batch_of_pairs()
    for row, size in enumerate((2, 3, 4, 5, 6, 7, 8, 8)):
        batch.tokens[row], batch.targets[row] = PADDING, PADDING
        batch.tokens[row, :size] = batch.tokens[row, size : 2 * size] = np.arange(size) + row
        for begin in (0, size):
            batch.targets[row, begin : begin + size - 1] = np.arange(1, size) + row
        batch.segments[row] = np.arange(T) >= size
    batch.reference_log_probs[:] = 0, 40  # by which every first answer has gained
    return batch


def updated(keys, devices, passes):
    """Weights after a step of gradient descent, its metrics, and an evaluation's."""
    config = make_config(*KEYS, *keys, devices=devices)
    step = make_train_step(config.recipe, lambda samples, rows: jnp.float32(0.1))
    objective = loss_of(config.recipe)
    batch = batch_of_pairs()
    batch = jax.tree.map(lambda x: x.reshape(passes, B // passes, *x.shape[1:]), batch)
    with jax.set_mesh(make_mesh(config)):
        batch = jax.device_put(batch, BATCH_ABT)
        state = initial_state(config.recipe)
        zeros = (jnp.float32(0),) * len(config.recipe.sum_names)
        evaluate = jax.jit(lambda m, b: eval_step(m, zeros, b, loss=objective))
        sums = dict(zip(config.recipe.sum_names, evaluate(state.model, batch), strict=True))
        state, metrics = jax.jit(step)(state, batch)
    leaves = [np.asarray(x).reshape(-1) for x in jax.tree.leaves(state.model)]
    return leaves, jax.device_get(metrics), jax.device_get(sums)


@pytest.fixture(scope="module")
def expected():
    return updated(*MESHES["one device"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("sharded", "passes", "pipeline"),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("copies", "remat")),
    ],
)
def test_the_update_does_not_depend_on(name, expected):
    ours = updated(*MESHES[name])
    for own, other in zip(ours[0], expected[0], strict=True):
        np.testing.assert_allclose(np.sort(own), np.sort(other), atol=2e-6)
    for key, value in expected[1].items():
        np.testing.assert_allclose(ours[1][key], value, rtol=2e-5, atol=1e-6, err_msg=key)


def test_shown_numbers_follow_from_log_probabilities(expected):
    """By hand, from the log-probabilities: padding is no pair, and an evaluation says the same."""
    _, metrics, sums = expected
    assert sums["pairs"] == 7 and metrics["target_tokens"] == sums["tokens"] > 40
    for name, value in metrics.items():
        if name in sums:
            np.testing.assert_allclose(value, sums[name] / 7, rtol=1e-5)
    known = batch_of_pairs().reference_log_probs[:7].mean(0)
    for column, name in enumerate(("chosen", "rejected")):
        reward = 0.5 * (metrics[f"logps/{name}"] - known[column])
        np.testing.assert_allclose(metrics[f"rewards/{name}"], reward, rtol=1e-4)
    margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    np.testing.assert_allclose(metrics["rewards/margins"], margin, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tie_is_no_win(dtype):
    config = make_config(*KEYS, f"dtype={dtype}")
    objective, batch = loss_of(config.recipe), equal_pairs()
    zeros = (jnp.float32(0),) * len(config.recipe.sum_names)
    evaluate = jax.jit(lambda m, b: eval_step(m, zeros, b, loss=objective))

    def right_answers():
        with jax.set_mesh(make_mesh(config)):
            one_pass = jax.device_put(jax.tree.map(lambda x: x[None], batch), BATCH_ABT)
            sums = evaluate(initial_state(config.recipe).model, one_pass)
        return dict(zip(config.recipe.sum_names, sums, strict=True))["rewards/accuracies"]

    assert right_answers() == 0
    for array, place in ((batch.targets, 8), (batch.tokens, 0)):
        array[3, place] += 1
        assert right_answers() == 1
        array[3, place] -= 1


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of four steps that begins with a small model: its folder, command line and output."""
    folder = tmp_path_factory.mktemp("dpo")
    write_tokenizer(folder)
    sizes = ["base_emb_dim=16", "base_mlp_dim=32", "base_num_decoder_layers=2", "head_dim=8"]
    sizes += ["base_num_query_heads=2", "base_num_kv_heads=1", "vocab_size=320"]
    sizes += [f"base_output_directory={folder}", "enable_tensorboard=False", "log_period=1"]
    base = str(ROOT / "configs/base.yml")
    complete(
        *(base, *sizes, "run_name=base", "steps=1", "dataset_type=synthetic", "eval_interval=-1"),
        *("enable_rampup_batch_size=False", "max_target_length=16", "learning_rate=0.02"),
    )
    keys = dict(key.split("=", 1) for key in keys_of(folder, folder / "pairs.jsonl"))
    write_pairs(folder / "pairs.jsonl", pairs(24))
    keys |= {"load_parameters_path": str(folder / "base"), "learning_rate": "0.01"}
    keys |= {"opt_type": "optax.adamax"}
    keys.pop("enable_rampup_batch_size")
    keys |= {"step_batch_size_schedule": "0:4 8:8"}
    keys |= {"step_batch_size_unit": "samples", "steps": "4", "checkpoint_period": "1"}
    keys |= {"eval_interval": "2", "eval_fraction": "0.2", "eval_per_device_batch_size": "4"}
    keys |= {"enable_data_shuffling": "True", "num_epoch": "3"}
    arguments = [base, *sizes, *(f"{name}={value}" for name, value in keys.items())]
    done = complete(*arguments, "run_name=whole")
    return folder, arguments, done


def losses(folder):
    names = ("step", "loss", "rewards/margins", "batch_fingerprint", "consumed_samples")
    return [tuple(record[name] for name in names) for record in steps_of(folder)]


@pytest.mark.slow
def test_a_run_begins_at_log_2_and_counts_pairs(first):
    folder, _, done = first
    records = losses(folder / "whole")
    assert [record[-1] for record in records] == [4, 8, 16, 24]
    assert records[0][1] == pytest.approx(np.log(2), rel=1e-6) and records[0][2] == 0
    assert records[3][1] < 0.6
    assert "on held-out pairs" in done.stdout and "log-probabilities of 24 pairs" in done.stdout
    (_, last) = [r for r in read_records(folder / "whole/metrics.jsonl") if "eval_loss" in r]
    assert last["eval_pairs"] == 5 and 0 < last["eval_rewards/accuracies"] <= 1
    lines = (folder / "whole/reference.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines[1:]] == list(range(24))
    saved = json.loads((folder / "whole/checkpoints/4/checkpoint.json").read_text())
    assert saved["evaluations"]["eval_reference"] == json.loads(lines[0])["reference"]


@pytest.mark.slow
def test_a_restart_is_exact(first, tmp_path):
    """After a kill in the pass over the reference, and one between two steps."""
    folder, arguments, _ = first
    lines = (folder / "whole/reference.jsonl").read_bytes().splitlines(keepends=True)
    own = tmp_path / "killed"
    (own / "checkpoints").mkdir(parents=True)
    (own / "reference.jsonl").write_bytes(b"".join(lines[:10]) + lines[10][:9])
    begun = run(
        *arguments, f"base_output_directory={tmp_path}", "run_name=killed", "stop_at_stage_end=True"
    )
    assert begun.returncode == 75, begun.stderr
    assert "log-probabilities of 15 pairs" in begun.stdout
    ended = complete(*arguments, f"base_output_directory={tmp_path}", "run_name=killed")
    assert "log-probabilities" not in ended.stdout
    assert losses(own) == losses(folder / "whole")


@pytest.mark.long
def test_branches_of_adapters(first):
    """They begin with the run's state, and with the weights that it adapts and stays near to."""
    folder, arguments, _ = first
    constant = ["warmup_steps_fraction=0", "lr_schedule_type=wsd", "wsd_decay_steps_fraction=0"]
    complete(*arguments, *constant, "lora_rank=2", "run_name=adapted")
    line = ("--at", "2", "--sizes", "4,8", "--tokens", str(16 * 95))
    complete(str(folder / "adapted"), *line, module="branch")
    branch = folder / "adapted/branches/2-16/8"
    for record, expected in zip(losses(branch), losses(folder / "adapted")[2:], strict=True):
        assert record[-2:] == expected[-2:]
        assert record[:-2] == pytest.approx(expected[:-2], rel=1e-3)


@pytest.mark.slow
def test_another_reference_is_refused(first):
    folder, arguments, _ = first
    shutil.copytree(folder / "whole", folder / "other")
    other = run(*arguments, "run_name=whole", f"load_parameters_path={folder}/other", "steps=5")
    assert other.returncode == 2
    assert "not the weights that the run began with (hash " in other.stderr


@pytest.mark.slow
def test_a_reference_of_another_run_is_made_again(first, tmp_path):
    folder, arguments, _ = first
    head, *lines = (folder / "whole/reference.jsonl").read_bytes().splitlines(keepends=True)
    other = json.dumps(json.loads(head) | {"reference": "of other weights"}).encode() + b"\n"
    own = tmp_path / "own"
    (own / "checkpoints").mkdir(parents=True)
    for keys in (["stop_at_stage_end=True"], []):
        (own / "reference.jsonl").write_bytes(b"".join([other, *lines]))
        done = run(*arguments, f"base_output_directory={tmp_path}", "run_name=own", *keys)
        assert "log-probabilities of 24 pairs" in done.stdout, done.stderr
    assert losses(own) == losses(folder / "whole")
