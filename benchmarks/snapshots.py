"""What snapshots in memory cost the loop: seconds of a copy, and their share of the time.

A run of two nodes, each with a folder of its own in /dev/shm, trains a model of about 8 M weights
(100 MB of state) three times: without snapshots, with one every other step, and at the period that
the log recommends after the first ones. The stall is `snapshot_seconds`. The writing shares the
processor with the steps here, as it does not where devices compute: so does `others`, the median
step of the run with snapshots over that of the run without.

python benchmarks/snapshots.py [--json FILE] [--steps N]
"""

import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile

from figures import ROOT, parser, save

sys.path[:0] = [str(ROOT)]

from maxramp.files.place import place
from maxramp.run.metrics import read_records

MODEL = (
    "base_emb_dim=256",
    "base_mlp_dim=1024",
    "base_num_decoder_layers=8",
    "vocab_size=4096",
    "enable_rampup_batch_size=False",
    "per_device_batch_size=4",
    "eval_interval=-1",
    "checkpoint_period=-1",
    "log_period=1000",
)
NODES = 2
_ADVICE = re.compile(r"snapshot ([\d.,]+) MB .* copied in (\S+) s: .* 1% at \S+=(\d+)")


def train(folder: str, name: str, *keys: str) -> tuple[str, list[dict]]:
    """Trains; returns what process 0 prints, and the records of steps after the first five."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "maxramp.train", str(ROOT / "configs" / "base.yml"), *MODEL]
    command += [f"base_output_directory={folder}", f"run_name={name}", *keys]
    command += [f"jax_cache_dir={folder}/cache"]
    job = []
    for node in range(NODES):
        variables = {
            "MAXRAMP_COORDINATOR": f"127.0.0.1:{port}",
            "MAXRAMP_NUM_PROCESSES": str(NODES),
            "MAXRAMP_PROCESS_ID": str(node),
        }
        stdout = subprocess.PIPE if node == 0 else subprocess.DEVNULL
        kept = os.environ | {"PYTHONPATH": str(ROOT)} | variables
        job.append(subprocess.Popen(command, stdout=stdout, text=True, env=kept))
    printed = job[0].communicate()[0]
    if any(process.wait() for process in job):
        raise SystemExit(printed)
    records = read_records(place(folder) / name / "metrics.jsonl")
    return printed, [r for r in records if "loss" in r and r["step"] >= 5]


def main() -> None:
    options = parser("snapshots", __doc__)
    options.add_argument("--steps", type=int, default=60)
    arguments = options.parse_args()
    steps = f"steps={arguments.steps}"
    memory = tempfile.mkdtemp(dir="/dev/shm")
    snapshots = (
        "enable_emergency_checkpoint=True",
        f"local_checkpoint_directory={memory}/$MAXRAMP_PROCESS_ID",
    )
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        _, plain = train(folder, "plain", steps)
        step = statistics.median(r["step_seconds"] for r in plain)
        printed, _ = train(folder, "often", *snapshots, steps, "local_checkpoint_period=2")
        size, _, period = _ADVICE.search(printed).groups()
        figures |= {"megabytes": float(size.replace(",", "")), "step": step, "period": int(period)}
        for name, every in (("often", 2), ("recommended", int(period))):
            if name == "recommended":
                more = (*snapshots, f"local_checkpoint_period={every}", f"steps={4 * every + 5}")
                train(folder, name, *more)
            records = read_records(place(folder) / name / "metrics.jsonl")
            records = [r for r in records if "loss" in r and r["step"] >= 5]
            copies = [r["snapshot_seconds"] for r in records if "snapshot_seconds" in r]
            total = sum(r["step_seconds"] for r in records)
            figures[name] = {
                "copy": statistics.median(copies),
                "stall": sum(copies) / total,
                "others": statistics.median(r["step_seconds"] for r in records) / step,
            }
            print(
                "{0}: every {1} steps, a copy {copy:.4f} s, {stall:.2%} of the time; a step "
                "{others:.2f} times that without".format(name, every, **figures[name])
            )
    shutil.rmtree(memory)
    print("{megabytes:.0f} MB a process, a step {step:.3f} s, period {period}".format(**figures))
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
