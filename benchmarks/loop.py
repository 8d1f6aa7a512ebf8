"""What the loop's own thread works for a step: rows, dispatch, metrics, checkpoints' clock.

Processor time of the main thread, waiting excluded, over the steps of a real run from the 21st on,
the programs dispatched to other threads as to an accelerator: the default job, and one with the
tree of an 8B model (its sizes made small, its layers kept).

python benchmarks/loop.py [--json FILE]
"""

import subprocess
import sys
import tempfile

from figures import ROOT, parser, save

PROGRAM = """
import sys, time, statistics
import jax
from maxramp.processes import backend
from maxramp.processes.ending import end_process
from maxramp.run import metrics
from maxramp.train import main
join = backend.join
def join_and_dispatch(timeout):  # to threads of XLA's, as to an accelerator
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    join(timeout)
backend.join = join_and_dispatch
times, log_step = [], metrics.MetricsLog.log_step
def marked(self, *arguments):
    log_step(self, *arguments)
    times.append(time.thread_time())
metrics.MetricsLog.log_step = marked
status = main(sys.argv[1:])
steps = [b - a for a, b in zip(times[20:], times[21:])]
print("MILLISECONDS", 1e3 * statistics.median(steps))
end_process(status)
"""
RUNS = {
    "default": ("steps=60", "enable_rampup_batch_size=False", "per_device_batch_size=8"),
    "tree of llama3-8b": (
        "steps=200",
        "model_name=llama3-8b",
        "base_emb_dim=64",
        "base_mlp_dim=64",
        "head_dim=8",
        "vocab_size=320",
        "max_target_length=16",
        "enable_rampup_batch_size=False",
        "per_device_batch_size=8",
    ),
}


def main() -> None:
    arguments = parser("loop", __doc__).parse_args()
    figures = {}
    for name, keys in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-c",
                PROGRAM,
                str(ROOT / "configs" / "base.yml"),
                *keys,
                f"base_output_directory={folder}",
                "eval_interval=-1",
                "log_period=1000",
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        line = next(li for li in done.stdout.splitlines() if li.startswith("MILLISECONDS"))
        figures[name] = float(line.split()[1])
        print(f"{name:20s} {figures[name]:6.2f} ms a step")
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
