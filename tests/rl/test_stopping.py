"""A signal in the middle of a long step of `maxramp.grpo`."""

import shutil
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
# Of a start, and what its clock measured.
OWN = ("restarted", "time", "goodput")
PART = 2.0  # seconds that the rewards of a part take: a step has four
SLOW = f"""
import time

def length(prompts, answers, truths):
    time.sleep({PART})
    return [len(answer) for answer in answers]
"""


@pytest.mark.long
def test_a_long_step_is_given_up_and_repeated(tmp_path, cache_dir):
    """What was done before it is saved, and the restart is the same run."""
    (tmp_path / "slow.py").write_text(SLOW)
    keys = (f"base_output_directory={tmp_path}", f"jax_cache_dir={cache_dir}")
    weights = run(BASE, *TINY, "base_num_decoder_layers=1", "steps=1", "run_name=weights", *keys)
    assert weights.returncode == 0, weights.stderr
    keys += (f"load_parameters_path={tmp_path / 'weights'}",)

    def start(name, *more):
        line = dict(key.split("=", 1) for key in (*JOB[1:], *keys, f"run_name={name}", *more))
        merged = (f"{name}={value}" for name, value in line.items())
        arguments = command(JOB[0], *merged, module="grpo")
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
    shutil.copytree(tmp_path / "stopped", tmp_path / "more")
    assert start("stopped").wait(300) == 0
    # The step that was given up is taken with more answers to the same prompts.
    process = start("more", "num_generations=8")
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "num_generations=4 (now 8)" in printed
    assert [r["step"] for r in read_records(tmp_path / "more" / "metrics.jsonl")] == [0, 1]
    whole, stopped = (
        [
            {k: v for k, v in record.items() if "second" not in k and k not in OWN}
            for record in read_records(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "stopped")
    )
    assert len(whole) == 2 and whole == stopped
