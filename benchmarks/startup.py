"""From the start of the process to the end of step 0 of the default job, and where the time goes.

Cold (an empty compilation cache) and warm, interleaved.

python benchmarks/startup.py [--json FILE] [--rounds N] [key=value ...]
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time

from figures import ROOT, parser, save

# Marks the clock where the run passes; the parts that overlap with the compiler's thread are those
# of the main thread.
PROGRAM = """
import json, os, sys, time
marks = {"python": time.time()}
import maxramp.train as train
from maxramp.processes import backend
from maxramp.run import metrics, writers
from maxramp.training import background_compiler
marks["imports"] = time.time()

def marked(owner, name, mark):
    function = getattr(owner, name)
    def call(*arguments, **keys):
        result = function(*arguments, **keys)
        marks.setdefault(mark, time.time())
        return result
    setattr(owner, name, call)

marked(backend, "start", "backend")
marked(train, "open_rows", "data")
marked(background_compiler.BackgroundCompiler, "lower", "lowering of stage 0")
marked(metrics.MetricsLog, "__init__", "first weights")
marked(writers.JsonlWriter, "__call__", "step 0")
try:
    train.main(sys.argv[1:])
finally:
    print("MARKS", json.dumps(marks))
    sys.stdout.flush()
    os._exit(0)
"""


def run(folder: str, name: str, keys: list[str]) -> dict[str, float]:
    """Seconds of each part, in order."""
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(ROOT / "configs" / "base.yml"),
        f"base_output_directory={folder}",
        f"run_name={name}",
        f"jax_cache_dir={folder}/cache",
        "steps=3",
        "enable_checkpointing=False",
        *keys,
    ]
    start = time.time()
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    line = next(line for line in printed.splitlines() if line.startswith("MARKS"))
    parts, last = {}, start
    for mark, when in json.loads(line.removeprefix("MARKS ")).items():
        parts[mark] = when - last
        last = when
    return {**parts, "total": last - start}


def main() -> None:
    options = parser("startup", __doc__)
    options.add_argument("--rounds", type=int, default=5, help="pairs of starts; medians are shown")
    options.add_argument("keys", nargs="*", help="key=value of the run")
    arguments = options.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append({name: run(folder, name, arguments.keys) for name in ("cold", "warm")})
    figures = {
        name: {
            part: statistics.median(each[name][part] for each in rounds) for part in rounds[0][name]
        }
        for name in ("cold", "warm")
    }
    print(f"{'seconds':22s} {'cold':>7s} {'warm':>7s}   medians of {arguments.rounds}")
    for part in figures["cold"]:
        print(f"{part:22s} {figures['cold'][part]:7.2f} {figures['warm'][part]:7.2f}")
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
