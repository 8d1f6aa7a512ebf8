"""Figures that a batch rests on are those of the documents, in long rows as in short ones."""

import json
import random

import pytest
from conftest import BASE, TINY, complete, steps_of
from test_suggest import result

from maxramp import suggest
from maxramp.measuring.noise import noise_blocks

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
