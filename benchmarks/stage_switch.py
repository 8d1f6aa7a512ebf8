"""What a stage change costs: the first step of each stage against the median of its stage.

Runs the default job twice in new processes, with an empty compilation cache and with the warm one.

python benchmarks/stage_switch.py [--json FILE] [key=value ...]
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(folder: str, name: str, keys: list[str]) -> list[dict]:
    """The step records of one run."""
    command = [
        *(sys.executable, "-m", "maxramp.train", str(ROOT / "configs" / "base.yml")),
        *(f"base_output_directory={folder}", f"run_name={name}", f"jax_cache_dir={folder}/cache"),
        *("eval_interval=-1", "enable_checkpointing=False", *keys),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = pathlib.Path(folder, name, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def stages(records: list[dict]) -> list[dict]:
    """First step and median of every stage, and the time above the median that the first took."""
    found = []
    for index in sorted({record["stage"] for record in records}):
        steps = [record for record in records if record["stage"] == index]
        median = statistics.median(record["step_seconds"] for record in steps[1:])
        first = steps[0]
        found.append(
            {
                "stage": index,
                "global_batch_size": first["global_batch_size"],
                "first_over_median": first["step_seconds"] / median,
                "compile_seconds": first["compile_seconds"],
                "lost_seconds": max(0.0, first["step_seconds"] - median),
                "seconds": sum(record["step_seconds"] for record in steps),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("keys", nargs="*", help="key=value of the run")
    arguments = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            figures[name] = stages(run(folder, name, arguments.keys))
            for s in figures[name]:
                print(
                    f"{name} cache  stage {s['stage']}  batch {s['global_batch_size']:>4}  "
                    f"first step {s['first_over_median']:5.2f} x the median, waited "
                    f"{s['compile_seconds']:.2f} s for its program",
                    flush=True,
                )
            later = sum(s["lost_seconds"] for s in figures[name][1:])
            total = sum(s["seconds"] for s in figures[name])
            print(f"{name} cache  lost to stage changes: {later:.2f} s of {total:.1f} s")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
