"""`maxramp.branch`: what branches say, and the branches of a real run."""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BASE, TINY, complete, make_config, run, steps_of

from maxramp import branch
from maxramp.checkpoints.folder import Checkpoint, commit
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError
from maxramp.keys.base import base
from maxramp.measuring.branches import (
    DEFAULTED,
    Branch,
    Experiment,
    compare,
    difference,
    parse_sizes,
    window,
)
from maxramp.model.parts.weights import new_weight
from maxramp.rampup import RampupBatchManager
from maxramp.run.metrics import MetricsLog, as_json, evaluation_from_sums, read_records
from maxramp.run.writers import JsonlWriter
from maxramp.training.learning_rate import LearningRate
from maxramp.training.optimizers.half_lives import decay_weights, kept_share


def branches_of(rng, losses, spread, count=40):
    """Branches whose held-out batches scatter alike, and apart from each other by `spread`."""
    tokens = rng.integers(300, 500, count).astype(float)
    common = 2 + 0.5 * rng.standard_normal(count)
    sums = [tokens * (loss + common + spread * rng.standard_normal(count)) for loss in losses]
    return [Branch(8 * 2**k, 10, 0.1, each, tokens) for k, each in enumerate(sums)]


def test_the_interval_of_a_difference_holds_the_truth_in_nine_of_ten_cases():
    """However much the batches differ from each other: they are compared in pairs."""
    rng, held, widths = np.random.default_rng(0), 0, []
    for _ in range(1000):
        one, other = branches_of(rng, [0.0, 0.02], 0.03)
        mean, low, high = difference(other, one)
        held += low <= 0.02 <= high
        widths.append(high - low)
        assert low < mean < high
    assert 860 < held < 940
    assert np.mean(widths) == pytest.approx(2 * 1.685 * 0.03 * np.sqrt(2 / 40), rel=0.05)


def test_the_largest_size_and_its_interval():
    rng = np.random.default_rng(0)
    result = compare(branches_of(rng, [0, 0, 0.005, 0.008, 0.03], 0.01), 0.01)
    assert [s["rows"] for s in result["sizes"]] == [8, 16, 32, 64, 128]
    assert [s["within"] for s in result["sizes"]] == [True] * 4 + [False]
    assert result["largest"] == 64 and result["surely"] <= 64 <= result["possibly"] < 128
    # A size is compared with the best of all smaller ones, and none counts behind one that fails.
    result = compare(branches_of(rng, [0.02, 0, 0.02, 0.001], 1e-4), 0.01)
    assert result["largest"] == result["surely"] == result["possibly"] == 16
    few = compare(branches_of(rng, [0, 0.02], 0.001, count=5), 0.01)
    assert few["largest"] == 8 and few["surely"] is None and few["possibly"] is None


def test_a_loss_that_is_no_number_is_not_within():
    """Of a size, and of a smaller one that it is compared with."""
    rng = np.random.default_rng(0)
    for count in (40, 5):
        branches = branches_of(rng, [0, 0, 0, 0.05], 1e-4, count)
        branches[1].cross_entropy[2] = np.nan
        result = compare(branches, 0.01)
        assert result["largest"] == 8
        assert [s["above"] <= 0.01 for s in result["sizes"]] == [True, False, True, False]
        assert result["surely"] == result["possibly"] == (8 if count == 40 else None)
        json.dumps(as_json(result), allow_nan=False)


def test_an_evaluation_keeps_the_digits_of_each_batch(tmp_path):
    """Each keeps its digits however many come before it; what is no number is null."""
    sums = [(np.float32(1e8), np.float32(4e7)), (np.float32(3.25), np.float32(2))]
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    log = MetricsLog(make_config().run, [writer], print)
    log.log_eval(3, 80, evaluation_from_sums({"": sums}, by_batch=True))
    no_number = (np.float32(np.nan), np.float32(2))
    log.log_eval(4, 80, evaluation_from_sums({"": [*sums, no_number]}, by_batch=True))
    log.log_eval(5, 80, evaluation_from_sums({"": sums[:1]}, by_batch=False))
    log.flush()
    log.close()
    writer.close()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    first, second, third = read_records(tmp_path / "metrics.jsonl")
    assert first["eval_batch_loss"] == [1e8, 3.25]
    assert first["eval_batch_tokens"] == [4e7, 2] and first["eval_tokens"] == 40_000_002
    assert first["eval_loss"] == (1e8 + 3.25) / 40_000_002
    assert second["eval_batch_loss"] == [1e8, 3.25, None]
    assert third["eval_loss"] == 2.5 and "eval_batch_tokens" not in third


def checkpoint_at_20(tmp_path, *keys):
    """A run's folder with a checkpoint after 20 steps, of 40 of rows of 16 tokens on a device."""
    config = make_config("max_target_length=16", "steps=40", *keys, devices=1)
    ramp = RampupBatchManager(config.batch, 1)
    folder = tmp_path / "run" / "checkpoints" / "20"
    folder.mkdir(parents=True)
    stages = ramp.to_json()["stages"]
    commit(Checkpoint(folder, 20, ramp.samples_before(20), stages, "", dict(config.values), {}))
    return tmp_path / "run"


@pytest.fixture
def checkpointed(tmp_path):
    """Of steps of 8 rows."""
    return checkpoint_at_20(tmp_path, "global_batch_size=8")


def experiment_of(run, *keys, sizes="8,16,24"):
    """In a window of 48 rows."""
    return Experiment(str(run), 20, sizes, "768", keys)


def config_of(experiment, size):
    """What a branch is started with."""
    experiment._folder.mkdir(parents=True, exist_ok=True)
    return load(experiment._command_line(size), "train")


def test_a_branch_has_what_its_run_measures_and_hands_over_only_where_it_compares(tmp_path):
    keys = ("export_huggingface=True", "checkpoint_best=lowest eval_loss", "adam_b2=0.9")
    keys += ("wandb_project=p", "log_token_statistics=True", "rope_factor=4", "elastic=True")
    keys += ("learning_rate_by=steps", "learning_rate_final_fraction=0.3", "slurm_account=a")
    keys += ("phases={80: {row_length: 8, rope_max_timescale: 500}, 800: {rope_type: llama3.1}}",)
    experiment = experiment_of(checkpoint_at_20(tmp_path, *keys, "phases_unit=samples"))
    config = config_of(experiment, 16)
    assert (config.optimizer.adam_b2, config.batch.row_length) == (0.9, 8)
    assert all(config.values[name] == base()[name] for name in DEFAULTED)
    assert config.batch.phases == {"80": {"rope_max_timescale": 500.0}}
    assert not config.run.export_huggingface and config.model.rope_factor == 8


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear"])
def test_half_lives_of_a_branch_are_those_of_its_run(tmp_path, scaling):
    """One of the run's size forgets as it does; one of four times the size, four times as much."""
    schedule = "step_batch_size_schedule=0:4 40:8", "step_batch_size_unit=samples"
    lives = "half_lives_in_samples=[adam_b1,adam_b2,adam_weight_decay]"
    keys = (f"batch_size_lr_scaling={scaling}", "batch_size_lr_reference=initial", lives)
    experiment = experiment_of(checkpoint_at_20(tmp_path, *schedule, *keys))
    run = experiment._config

    def kept_and_lost(config, size):
        ramp = RampupBatchManager(config.batch, 1)
        rate = LearningRate.from_keys(config.learning_rate, ramp)
        weight, pace = new_weight(jnp.ones(1), "matrix", "D"), rate.pace(size)
        kept_of = [kept_share(config.optimizer, name, pace) for name in ("adam_b1", "adam_b2")]
        still = jax.tree.map(jnp.zeros_like, weight)
        decays = decay_weights(config.optimizer, "adam_weight_decay", pace)
        decay, _ = decays.update(still, decays.init(weight), weight)
        lost = float(rate(120, size)) * float(jax.tree.leaves(decay)[0][0])
        return [np.log(x) for x in kept_of] + [lost]

    run_keeps = kept_and_lost(run, 8)
    for size in (8, 32):
        branch = resolve(config_of(experiment, size), 1, 1, 1)
        assert kept_and_lost(branch, size) == pytest.approx(
            [number * size / 8 for number in run_keeps], rel=1e-5
        )


def write_branch(run, size, losses, tokens):
    """As a branch that is done leaves it."""
    folder = run / "branches" / "20-48" / str(size)
    (folder / "checkpoints" / "26").mkdir(parents=True)
    batches = {"eval_batch_loss": losses, "eval_batch_tokens": tokens}
    record = {"step": 25, "consumed_samples": 208} | batches
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_branches_of_other_keys_or_batches_are_refused(checkpointed, capsys):
    folders = [write_branch(checkpointed, size, [3.0, 3.0], [2.0, 2.0]) for size in (8, 16, 24)]
    experiment = experiment_of(checkpointed, "hardware=cpu")
    assert experiment.train(sys.stdout) == 0
    assert "window   48 rows" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r'ran with the keys \["hardware=cpu"\], not with \[\]'):
        experiment_of(checkpointed).train(sys.stdout)
    shutil.rmtree(folders[1])
    write_branch(checkpointed, 16, [3.0], [4.0])
    with pytest.raises(ConfigError, match=r"16: evaluated in other batches.*\(1 and 2 of them"):
        experiment.train(sys.stdout)
    shutil.rmtree(folders[0])
    write_branch(checkpointed, 8, [None, 3.0], [2.0, 2.0])
    with pytest.raises(ConfigError, match="not a number, so there is nothing to compare with"):
        experiment.train(sys.stdout)


def test_sizes_that_are_done_count_though_fewer_are_asked_for(checkpointed):
    for size in (8, 16, 24, "8.moved-away"):
        write_branch(checkpointed, size, [3.0, 3.0], [2.0, 2.0])
    (checkpointed / "branches" / "20-48" / "32").mkdir()  # that has not begun
    (checkpointed / "metrics.jsonl").touch()
    again = experiment_of(checkpointed, sizes="8,24")
    assert again.train(sys.stdout) == 0
    assert [size["rows"] for size in again.result(0.01)["sizes"]] == [8, 16, 24]


def test_progress_is_that_of_the_log(checkpointed):
    """Of a step's line; a held-out loss is none."""
    experiment, shown = experiment_of(checkpointed), []
    for line in (
        "step     20/84  stage 0  batch    8  loss 2.3456  grad norm 1.2  1,989 tokens/s  9s left",
        "step     30  eval loss 1.8 on held-out text (2 tokens in 1s)",
        "done     320 steps",
    ):
        experiment._show(shown.append, "64 steps", line)
    assert shown == ["         step 0 of 64 steps, loss 2.3456"]


def test_a_wrong_tolerance_is_refused(tmp_path, capsys):
    for tolerance in ("nan", "inf", "-0.01"):
        line = [str(tmp_path), "--at=5", "--sizes=8,16", f"--tolerance={tolerance}"]
        assert branch.main(line) == 2
        assert capsys.readouterr().err.startswith(f"error: --tolerance {tolerance} must be 0 nats")


def test_wrong_sizes_are_refused():
    for text in ("8", "8,8", "0,8", "8,²", "8,x", ""):
        with pytest.raises(ConfigError, match="must be two or more different global batch sizes"):
            parse_sizes(text)


def test_a_window_far_above_the_tokens_is_refused():
    assert window([8, 16, 32], 1000, 16) == 1024
    assert window([8, 24, 64], 100, 16) == 192
    with pytest.raises(ConfigError, match="16,800 rows.*the 1,000.*each other, or --tokens 268800"):
        window([96, 100, 112, 120], 1000, 16)
    with pytest.raises(ConfigError, match=r"or --tokens 1024$"):
        window([8, 64], 10, 16)


@pytest.mark.slow
def test_branches_train_on_the_rows_of_their_run_at_scaled_rates(tmp_path, cache_dir):
    """At constant rates by the root of the size; the branch of the run's own size is the run."""
    keys = [*TINY, "steps=40", "checkpoint_period=20", "log_gradient_noise_scale=True"]
    keys += ["step_batch_size_schedule=0:4 40:8", "step_batch_size_unit=samples"]
    keys += ["half_lives_in_samples=[adam_b1,adam_b2,adam_weight_decay]"]
    keys += ["batch_size_lr_reference=initial", "lr_schedule_type=wsd", "adam_b2=0.8"]
    keys += ["eval_per_device_batch_size=64", "eval_interval=40", "export_huggingface=True"]
    keys += [f"jax_cache_dir={cache_dir}", f"base_output_directory={tmp_path}", "run_name=run"]
    done = complete(BASE, *keys)
    folder = tmp_path / "run"
    line = [str(folder), "--at", "20", "--sizes", "8,16,32", "--tokens", "1K"]
    done = complete(*line, module="branch")
    assert "largest   batch" in done.stdout and "rows (norms' scales)" in done.stdout
    assert "caution   in a short window" in done.stdout and "tokens/s" not in done.stdout
    assert "tokens/s" in (folder / "branches" / "20-64" / "8.log").read_text()
    assert not list(folder.glob("branches/*/*/exported"))
    result = json.loads((folder / "branches" / "20-64" / "branch.json").read_text())
    run_records = {r["step"]: r for r in steps_of(folder)}
    rate = run_records[20]["learning_rate"]
    for size in result["sizes"]:
        records = read_records(folder / "branches" / "20-64" / str(size["rows"]) / "metrics.jsonl")
        steps = [r for r in records if "loss" in r]
        assert [r["step"] for r in steps] == list(range(20, 20 + 64 // size["rows"]))
        assert steps[-1]["consumed_samples"] == 120 + 64
        if size["rows"] == 8:  # as the run went on: at one rate, with the same memory
            for r in steps:
                own = run_records[r["step"]]
                assert r["batch_fingerprint"] == own["batch_fingerprint"]
                for name in ("loss", "grad_norm", "learning_rate"):
                    assert r[name] == pytest.approx(own[name], rel=1e-4)
        expected = rate * np.sqrt(size["rows"] / 8)
        rates = [r["learning_rate"] for r in steps]
        assert rates == pytest.approx([expected] * len(rates), rel=1e-5)
        evaluation = records[-1]
        assert evaluation["eval_loss"] == pytest.approx(size["loss"], rel=1e-5)
        assert sum(evaluation["eval_batch_tokens"]) == evaluation["eval_tokens"]

    before = {p: p.stat().st_mtime_ns for p in folder.rglob("metrics.jsonl")}
    again = run(*line, "--json", module="branch")
    assert json.loads(again.stdout) == result and again.returncode == 0
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("metrics.jsonl")}

    wrong = run(*line, "learning_rate=1", module="branch")
    assert wrong.returncode == 2 and "a branch has its own learning_rate" in wrong.stderr
    wrong = run(*line[:2], "7", *line[3:], module="branch")
    assert (
        wrong.returncode == 2
        and "is not a checkpoint; of the run's checkpoints 10, 20, 40 give" in wrong.stderr
    )
