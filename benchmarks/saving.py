"""What a checkpoint of about 100 MB costs the loop, and a restart in the middle of a ramp.

The loop stands still for the time of `save`; then it shares the machine with the writing. A start
and a restart after 1,000 steps of a ramp are timed to the end of their first step in turn, with
a warm compilation cache.

With --storage, the same checkpoint is saved to the disk and to an object storage on this machine.

python benchmarks/saving.py [--json FILE] [--rounds N] [--storage gs|s3]
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from figures import ROOT, parser, save

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import object_stores

from maxramp.files.place import place, sizes

PROGRAM = """
import json, os, sys, time
import maxramp.train as train
from maxramp.checkpoints import store
from maxramp.run import writers
blocked, ends = [], []
keep, write = store.Checkpoints.save, writers.JsonlWriter.__call__
def timed(self, record, *arguments, **more):
    start = time.perf_counter()
    keep(self, record, *arguments, **more)
    blocked.append((record.step, time.perf_counter() - start))
def noted(self, record):
    write(self, record)
    ends.append((record["step"], record["step_seconds"], time.time()))
store.Checkpoints.save, writers.JsonlWriter.__call__ = timed, noted
status = train.main(sys.argv[1:])
print("FIGURES", json.dumps({"blocked": blocked, "ends": ends}))
sys.stdout.flush()
os._exit(status)
"""
LARGE_PERIOD = 25
LARGE = (
    "base_emb_dim=256",
    "base_mlp_dim=1024",
    "base_num_decoder_layers=8",
    "vocab_size=4096",
    "enable_rampup_batch_size=False",
    "per_device_batch_size=4",
    "steps=200",
    f"checkpoint_period={LARGE_PERIOD}",
)
SMALL = (
    "base_emb_dim=32",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    "max_target_length=32",
    "step_batch_size_schedule=0:4, 2000:8, 6000:16",
    "step_batch_size_unit=samples",
    "per_device_batch_size=16",
    "checkpoint_period=1000",
)


def run(folder: str, name: str, *keys: str, storage=None) -> dict:
    """Runs a run; returns what it measured, and when it began. Its folder may be in a storage."""
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(ROOT / "configs" / "base.yml"),
        "eval_interval=-1",
        f"base_output_directory={storage.address if storage else folder}",
        f"run_name={name}",
        f"jax_cache_dir={folder}/cache",
        *keys,
    ]
    began = time.time()
    kept = os.environ | (storage.environment if storage else {})
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env=kept
    ).stdout
    line = next(line for line in printed.splitlines() if line.startswith("FIGURES"))
    return json.loads(line.removeprefix("FIGURES ")) | {"began": began}


def large(folder: str, storage=None) -> dict[str, float]:
    """Measures blocking times of saves, and the steps after one against the others."""
    report = run(folder, "large", *LARGE, storage=storage)
    saves = [step for step, _ in report["blocked"][:-1]]  # the last is waited for
    seconds = {step: duration for step, duration, _ in report["ends"]}
    after = [seconds[step + i] for step in saves for i in range(8) if step + i in seconds]
    others = [seconds[step + i] for step in saves for i in range(8, 24) if step + i in seconds]
    last = saves[-1] + LARGE_PERIOD  # the last is whole: it was waited for
    size = sum(
        sizes(place(f"{storage.address if storage else folder}/large/checkpoints/{last}")).values()
    )
    blocked = [duration for _, duration in report["blocked"][:-1]]
    return {
        "megabytes": size / 1e6,
        "blocked_median": statistics.median(blocked),
        "blocked_most": max(blocked),
        "step_median": statistics.median(seconds.values()),
        "steps_after_over_others": statistics.median(after) / statistics.median(others),
    }


def restart(folder: str, rounds: int) -> dict[str, float]:
    """Seconds to the end of the first step: of a start, and of a restart at step 1,000."""
    run(folder, "small", *SMALL, "steps=1010")
    checkpoints = f"{folder}/small/checkpoints"
    shutil.rmtree(f"{checkpoints}/1010")
    starts, restarts = [], []
    for i in range(rounds):
        for times, name in ((starts, f"start {i}"), (restarts, f"restart {i}")):
            if times is restarts:
                shutil.copytree(f"{folder}/small", f"{folder}/{name}")
            more = "steps=3" if times is starts else "steps=1010"
            report = run(folder, name, *SMALL, more)
            times.append(report["ends"][0][2] - report["began"])
            assert report["ends"][0][0] == (0 if times is starts else 1000)
    return {"start": statistics.median(starts), "restart": statistics.median(restarts)}


TEXT = (
    "a checkpoint of {megabytes:.0f} MB: the loop stood for {blocked_median:.3f} s (most "
    "{blocked_most:.3f}); steps after it / others {steps_after_over_others:.3f}, a step "
    "{step_median:.4f} s"
)


def main() -> None:
    options = parser("saving", __doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--storage", choices=("gs", "s3"))
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = large(folder)
        print(TEXT.format(**figures))
        if arguments.storage:
            with object_stores.running(arguments.storage) as storage:
                os.environ |= storage.environment
                print(f"{arguments.storage}: {TEXT.format(**large(folder, storage))}")
            return
        figures |= restart(folder, arguments.rounds)
    print("start {start:.2f} s, restart at step 1,000 {restart:.2f} s".format(**figures))
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
