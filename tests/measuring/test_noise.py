"""`maxramp.noise`: intervals of quotients, the curve of a run's records, and padded rows."""

import json
import random
import re

import numpy as np
import pytest
from conftest import BASE, TINY, complete, steps_of
from noise_records import write_noise
from test_suggest import result

from maxramp import noise, suggest
from maxramp.measuring.noise import noise_blocks, ratio_of_means


def records_of(rng, steps, signal, variance, spread, prefix=""):
    """Records of steps of 8 and then 16 rows of 128 tokens, with estimates around the truth."""
    consumed, records = 0, []
    for step in range(steps):
        rows = 8 if step < steps // 2 else 16
        consumed += rows
        noisy = 1 + spread * rng.standard_normal(2) / np.sqrt(rows)
        records.append(
            {"step": step, "loss": 1.0, "global_batch_size": rows, "consumed_samples": consumed}
            | {"target_tokens": 128 * rows}
            | {f"{prefix}noise_signal": signal * noisy[0]}
            | {f"{prefix}noise_variance": variance * noisy[1]}
        )
    return records


@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_the_interval_holds_the_truth_in_nine_of_ten_cases(spread):
    """Whether or not the signal can be told from zero."""
    rng, truth, held = np.random.default_rng(0), 5.0, 0
    for _ in range(1000):
        y = truth + 0.5 * spread * rng.standard_normal(60)
        x = 1 + spread * rng.standard_normal(60)
        ratio, low, high = ratio_of_means(y, x, np.ones(60))
        held += low <= truth and (high is None or truth <= high)
        assert ratio is None or low <= ratio and (high is None or ratio <= high)
    assert 860 < held < 940  # 900 +- 4 standard deviations


def test_blocks_are_equal_shares_of_the_samples():
    records = records_of(np.random.default_rng(0), 300, 2e-3, 4.0, 0.5)
    records[0]["noise_signal"] = None
    blocks = noise_blocks(records, "", 3)
    assert [round(b.batch_rows) for b in blocks] == [8, 16, 16]
    assert sum(b.steps for b in blocks) == 299
    assert [b.first_sample for b in blocks] == [8, *(b.last_sample for b in blocks[:-1])]
    for block in blocks:
        assert block.low / 1.05 < 2000 < block.high * 1.05
        assert block.batch_target_tokens == 128 * block.batch_rows
    assert noise_blocks(records, "adam_", 3) == []
    assert noise_blocks(records[:6], "", 1) == []  # too few to tell their spread


def test_no_block_mixes_lengths_of_rows():
    records = records_of(np.random.default_rng(0), 300, 2e-3, 4.0, 0.5)
    for record in records:
        record["row_length"] = 32 if record["step"] < 120 else 128
    blocks = noise_blocks(records, "", 2)
    assert [b.steps for b in blocks] == [120, 67, 113]
    assert blocks[0].last_sample == blocks[1].first_sample == 8 * 120


def test_blocks_of_a_run_that_began_later():
    """Its own samples are cut, and records that are none of a step's are left out."""
    records = records_of(np.random.default_rng(0), 300, 2e-3, 4.0, 0.5)
    early = noise_blocks(records, "", 3)
    for record in records:
        record["consumed_samples"] += 10**6
    steps = [block.steps for block in noise_blocks(records, "", 3)]
    assert steps == [block.steps for block in early]
    estimates = {"noise_signal": 1.0, "noise_variance": 1.0}
    odd = [estimates, estimates | {"consumed_samples": 0, "global_batch_size": 0}]
    odd.append(records[0] | {"consumed_samples": "8"})
    assert [block.steps for block in noise_blocks([*odd, *records], "", 3)] == steps


def write(folder, records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


def test_the_command_prints_and_draws_the_curves(tmp_path, capsys):
    records = records_of(np.random.default_rng(0), 100, 2e-3, 4.0, 0.5)
    norms = records_of(np.random.default_rng(1), 100, 1e-3, 4.0, 9.0, "norms_")
    both = [a | b for a, b in zip(records, norms, strict=True)]
    run = write(tmp_path, [*both, {"step": 99, "consumed_samples": 1200, "eval_loss": 1.0}])
    assert noise.main([run, "--blocks", "4"]) == 0
    printed = capsys.readouterr().out
    assert "scale, weights" in printed and "norms' scales" in printed and "no end" in printed
    assert (tmp_path / "noise.png").stat().st_size > 10_000
    assert noise.main([run, "--json", "--plot", str(tmp_path / "other.svg")]) == 0
    curves = json.loads(capsys.readouterr().out)
    assert curves.keys() == {"noise_scale", "norms_noise_scale"}
    assert all(b["low"] / 1.1 < 2000 < b["high"] * 1.1 for b in curves["noise_scale"])
    assert (tmp_path / "other.svg").exists()


@pytest.mark.parametrize(
    "arguments, record, expected",
    [
        ((), {"loss": 1.0}, "holds no noise scale; train with log_gradient_noise_scale=true"),
        (("--blocks", "0"), {"loss": 1.0}, "--blocks 0 must be 1 or more"),
        ((), {"norms_noise_signal": None}, "of more than 1 row, as one row has none"),
        ((), None, "holds no metrics.jsonl; give the folder of a run"),
    ],
)
def test_a_run_without_a_noise_scale_is_refused_in_one_line(
    tmp_path, capsys, arguments, record, expected
):
    if record:
        write(tmp_path, [{"step": 0, "consumed_samples": 1} | record])
    assert noise.main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(expected, error)


def test_the_blocks_that_a_short_run_fills_are_named(tmp_path, capsys):
    write_noise(tmp_path, [16] * 20, 8, 128)
    assert noise.main([str(tmp_path)]) == 2
    assert "in one of 12 blocks; use --blocks 2\n" in capsys.readouterr().err
    assert noise.main([str(tmp_path), "--blocks", "2"]) == 0


LENGTHS = 16, 64
LADDER = ["rampup_policy=noise", "rampup_ladder=[8,16]", "warmup_steps_fraction=0"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def padded(tmp_path_factory, cache_dir):
    """The folders of two runs on the same documents, one of which each row holds."""
    folder, rng = tmp_path_factory.mktemp("padded"), random.Random(0)
    texts = ["".join(rng.choices("abcd ", k=rng.randrange(3, 13))) for _ in range(960)]
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    runs = {}
    for length in LENGTHS:
        line = [*TINY, *LADDER, "dataset_type=grain", f"grain_train_files={data}", "packing=False"]
        line += ["eval_interval=-1", "total_samples=960", "num_epoch=2", "eval_fraction=0"]
        line += ["rampup_noise_factor=40", "rampup_decision_samples=156", "tokenizer_type=bytes"]
        line += [f"jax_cache_dir={cache_dir}", f"base_output_directory={folder}"]
        done = complete(BASE, *line, f"run_name={length}", f"max_target_length={length}")
        runs[length] = folder / str(length), done.stdout
    return texts, runs


def test_targets_are_counted_beside_tokens(padded):
    """By the documents' own bytes: all but the first token of each, its end among them."""
    texts, runs = padded
    for length, (folder, printed) in runs.items():
        records = steps_of(folder)
        targets = sum(record["target_tokens"] for record in records)
        assert targets == sum(len(text) for text in texts) + len(texts)
        assert records[-1]["consumed_tokens"] == len(texts) * length
        assert f"{len(texts) * length:,} tokens ({targets:,} targets)" in printed
        for r in records:
            seconds = r["step_seconds"]
            assert r["tokens_per_second"] * seconds == pytest.approx(
                r["global_batch_size"] * length
            )
            assert r["target_tokens_per_second"] * seconds == pytest.approx(r["target_tokens"])


def test_padding_changes_no_noise_scale_and_no_decision(padded):
    short, long = (steps_of(padded[1][length][0]) for length in LENGTHS)
    assert [r["target_tokens"] for r in short] == [r["target_tokens"] for r in long]
    curves = [noise_blocks(records, "norms_", 4) for records in (short, long)]
    for a, b in zip(*curves, strict=True):
        assert a.noise_scale / a.row_target_tokens == pytest.approx(
            b.noise_scale / b.row_target_tokens, rel=1e-3
        )
        assert a.low == pytest.approx(b.low, rel=1e-2)
    (a,), (b,) = ([r for r in x if "noise_lower_bound" in r] for x in (short, long))
    assert a["step"] == b["step"] and a["global_batch_size"] == b["global_batch_size"] == 16
    assert a["noise_lower_bound"] == pytest.approx(b["noise_lower_bound"], rel=1e-3)


def test_padding_changes_no_suggestion(padded, tmp_path, capsys):
    """For a run on such rows, from either run, its noise scale and branches; a row is a row."""
    _, runs = padded
    suggested = []
    for measured in LENGTHS:
        measurement = result(0, 64, 64, noise=16.0, run=str(runs[measured][0]))
        measurement |= {"samples": 240, "row_tokens": measured, "target_tokens": 240 * 9}
        path = tmp_path / f"{measured}" / "branch.json"
        path.parent.mkdir()
        path.write_text(json.dumps(measurement))
        for planned in LENGTHS:
            keys = [BASE, *TINY, "dataset_type=grain", "grain_train_files=x", "packing=False"]
            keys += ["eval_interval=-1", "total_samples=960", "global_batch_size=8", "--json"]
            keys += [f"max_target_length={planned}", "devices_per_node=1"]
            keys += ["--noise", str(runs[measured][0]), "--branch", str(path)]
            assert suggest.main(keys) == 0
            suggested.append(json.loads(capsys.readouterr().out)["batches"])
    assert suggested[0][-1][1] > 8 and suggested == suggested[:1] * len(suggested)
