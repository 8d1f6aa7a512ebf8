"""benchmarks/rival_ramps.py: other trainers' ramps, by hand and by their arithmetic."""

import importlib.util
import math

import pytest
from conftest import ROOT

from maxramp.files.place import place

_spec = importlib.util.spec_from_file_location("rival", ROOT / "benchmarks" / "rival_ramps.py")
rival = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rival)

MAXTEXT = """
base_config: base.yml
enable_rampup_batch_size: true
per_device_batch_size_start: 1
per_device_batch_size_increment: 1
per_device_batch_size: 4
global_rampup_samples: 60
learning_rate: 3.e-5
"""


@pytest.fixture
def compared(tmp_path):
    def run(trainer, text, devices=None):
        (tmp_path / "file").write_text(text)
        comparison = rival.compare(trainer, str(place(tmp_path / "file")), devices)
        return comparison | {"lines": "\n".join(comparison["lines"])}

    return run


def test_a_table_ends_with_the_run_and_says_that_the_ramp_does_not(compared):
    comparison = compared("maxtext", MAXTEXT + "steps: 8\n", 4)
    assert rival.side_by_side(comparison) == [(0, 4, 4), (5, 8, 8)]
    assert "steps=8 end the run inside the ramp, which ends at step 10" in comparison["lines"]


def test_maxtext_forgets_the_accumulation(compared):
    """Of a loaded batch of 32 its ramp takes 16; maxramp's batches are twice as large: 20 samples
    an increment are 3 steps of 8, 2 of 16, 1 of 24."""
    comparison = compared("maxtext", MAXTEXT + "gradient_accumulation_steps: 2\n", 4)
    assert comparison["rival"] == [(0, 4), (5, 8), (8, 12), (10, 32)]
    assert comparison["ours"] == [(0, 8), (3, 16), (5, 24), (6, 32)]
    assert "68 of the 160 rows" in comparison["lines"]
    assert rival.side_by_side(comparison)[:3] == [(0, 4, 8), (3, 4, 16), (5, 8, 24)]


@pytest.mark.parametrize(("devices", "samples"), [(4, 60), (4, 61), (8, 500), (3, 100)])
def test_maxtext_by_its_own_loop(devices, samples, compared):
    """Step by step, as its manager counts: 60 are 68 rows of 5 loaded batches of 16."""
    keys = f"global_rampup_samples: {samples}"
    text = MAXTEXT.replace("global_rampup_samples: 60", keys)
    wanted, batch, count, step = [], devices, 0, 0
    while batch < 4 * devices:
        if not wanted or wanted[-1][1] != batch:
            wanted.append((step, batch))
        count, step = count + batch, step + 1
        if count >= samples / 3:
            batch, count = batch + devices, 0
    comparison = compared("maxtext", text, devices)
    assert comparison["rival"] == comparison["ours"] == [*wanted, (step, 4 * devices)]
    assert ("trains on 68 of the 80 rows that its ramp" in comparison["lines"]) == (samples == 60)


@pytest.mark.parametrize(
    ("changed", "devices", "message"),
    [
        ({"samples: 60": "samples: 0"}, 4, "a constant batch of 16"),
        ({"increment: 1": "increment: 0"}, 4, "stops with a ZeroDivisionError"),
        ({"increment: 1": "increment: 0.125"}, 4, "less than a row on all devices"),
        # 1.1, 1.3, 1.5, 1.7
        ({"start: 1": "start: 1.1", "increment: 1": "increment: 0.2", "size: 4": "size: 1.7"}, 10,
         "stops with a ValueError: 0.59999999999999987 % 0.2"),
    ],
)  # fmt: skip
def test_ramps_that_maxtext_changes_or_refuses(changed, devices, message, compared):
    text = MAXTEXT
    for old, new in changed.items():
        text = text.replace(old, new)
    comparison = compared("maxtext", text, devices)
    assert message in comparison["lines"]
    if devices == 10:
        assert [batch for _, batch in comparison["ours"]] == [11, 13, 15, 17]


MEGATRON = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 \\
    --rampup-batch-size 16 16 96 --global-batch-size 32 \\
    --seq-length=10 --train-samples 1000  # a test
"""


def test_megatron_reads_the_old_flag_no_more(compared):
    """96 samples over one increment: 6 steps of 16."""
    comparison = compared("megatron", MEGATRON)
    assert comparison["rival"] == [(0, 32)] and comparison["ours"] == [(0, 16), (6, 32)]
    assert '--step-batch-size-schedule "0:16 960:32" ramps there' in comparison["lines"]
    ramp = '--step-batch-size-schedule "0:16 960:32"'
    text = MEGATRON.replace("--rampup-batch-size 16 16 96 --global-batch-size 32", ramp)
    assert compared("megatron", text)["rival"] == [(0, 16), (6, 32)]
    text = text.replace(ramp, f"{ramp} --global-batch-size 32")
    assert "stops with a ValueError" in compared("megatron", text)["lines"]


def test_megatrons_thresholds_go_through_floats(compared):
    """8.2M becomes 8199999, a sample less in rows of one token; 8.2M / 3 rounds up to a step."""
    text = '--seq-length 1 --train-iters 9 --step-batch-size-schedule "0:3 8.2M:4"'
    comparison = compared("megatron", text)
    assert comparison["rival"][1][0] == math.ceil(8_199_999 / 3)
    assert comparison["ours"][1][0] == math.ceil(8_200_000 / 3)
    assert "takes 8.2M for 8,199,999" in comparison["lines"]


def test_nemo(compared):
    text = "model:\n  rampup_batch_size: [16, 16, 96]\n  global_batch_size: 32\n  precision: bf16\n"
    comparison = compared("nemo", text)
    assert comparison["rival"] == [(0, 32)] and comparison["ours"] == [(0, 16), (6, 32)]
    assert "warns and ignores rampup_batch_size" in comparison["lines"]
    text = "train:\n  rampup_batch_size: [16, 16, 96]\n  global_batch_size: 32\n"
    comparison = compared("nemo", text + "  train_samples: 1000\n")
    assert comparison["rival"] == [] and "stops with an AssertionError" in comparison["lines"]


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("megatron", "--global-batch-size 32 --micro-batch-size 2 --train-iters 9"),
        ("nemo", "model: {global_batch_size: 32}\n"),
    ],
)
def test_a_constant_batch_is_one_here(trainer, text, compared):
    comparison = compared(trainer, text)
    assert comparison["rival"] == comparison["ours"] == [(0, 32)] and not comparison["refused"]
    assert "trains with a constant batch of 32" in comparison["lines"]
