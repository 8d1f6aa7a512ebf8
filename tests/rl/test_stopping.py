"""A signal in the middle of a long step of `maxramp.grpo`."""

import signal
import subprocess
import time

import pytest
from conftest import BASE, ROOT, TINY, command, environment, run

from maxramp.checkpoints.folder import steps_in
from maxramp.errors import EXIT_PREEMPTED
from maxramp.run.metrics import read_records

JOB = (
    str(ROOT / "configs" / "post_train" / "rl.yml"),
    *(*TINY, "base_num_decoder_layers=1", "rewards=[slow:length]", "rampup_batch_size=none"),
    *("global_batch_size=4", "micro_batch_size=1", "steps=2", "checkpoint_period=100"),
    *("num_generations=4", "max_completion_length=6"),
)
PART = 2.0  # seconds that the rewards of a part take: a step has four
SLOW = f"""
import time

def length(prompts, answers, truths):
    time.sleep({PART})
    return [len(answer) for answer in answers]
"""


@pytest.mark.long
def test_it_is_given_up_and_repeated(tmp_path, cache_dir):
    """What was done before it is saved, and the restart is the same run."""
    (tmp_path / "slow.py").write_text(SLOW)
    keys = (f"base_output_directory={tmp_path}", f"jax_cache_dir={cache_dir}")
    weights = run(BASE, *TINY, "base_num_decoder_layers=1", "steps=1", "run_name=weights", *keys)
    assert weights.returncode == 0, weights.stderr
    keys += (f"load_parameters_path={tmp_path / 'weights'}",)

    def start(name):
        arguments = command(*JOB, *keys, f"run_name={name}", module="grpo")
        return subprocess.Popen(
            arguments, env=environment(), stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )

    assert start("whole").wait(300) == 0
    records = tmp_path / "stopped" / "metrics.jsonl"
    process = start("stopped")
    while process.poll() is None and not read_records(records):
        time.sleep(0.05)
    time.sleep(PART)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_PREEMPTED
    assert "stopped by a signal after step 0, saved" in printed
    assert [*steps_in(tmp_path / "stopped" / "checkpoints")] == [1]
    assert start("stopped").wait(300) == 0
    whole, stopped = (
        [
            {k: v for k, v in record.items() if "second" not in k}
            for record in read_records(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "stopped")
    )
    assert len(whole) == 2 and whole == stopped
