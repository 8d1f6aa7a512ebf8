"""What a stage change costs: the first step of each stage against the median of its stage.

Runs the default job in new processes, interleaved: compiling ahead and, for comparison, when a
stage is reached; each with an empty compilation cache and with the one that the run before filled.

python benchmarks/stage_switch.py [--json FILE] [--rounds N] [key=value ...]
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from figures import ROOT, parser, save

PROGRAM = """
import sys
from maxramp.processes.ending import end_process
from maxramp.train import main
from maxramp.training import background_compiler
{patch}
end_process(main(sys.argv[1:]))
"""
WAYS = {
    "ahead": "",
    "when reached": "background_compiler.BackgroundCompiler.lower = lambda self: None",
}


def run(folder: str, way: str, name: str, keys: list[str]) -> list[dict]:
    """Trains, and returns the records of steps."""
    command = [
        sys.executable,
        "-c",
        PROGRAM.format(patch=WAYS[way]),
        str(ROOT / "configs" / "base.yml"),
        f"base_output_directory={folder}",
        f"run_name={name}",
        f"jax_cache_dir={folder}/cache {way}",
        "eval_interval=-1",
        "enable_checkpointing=False",
        *keys,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = pathlib.Path(folder, name, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def stage_figures(records: list[dict]) -> list[dict]:
    """Measures first step and median of every stage, and the time that the first lost."""
    stages = []
    for index in sorted({record["stage"] for record in records}):
        steps = [record for record in records if record["stage"] == index]
        median = statistics.median(record["step_seconds"] for record in steps[1:])
        first = steps[0]
        stages.append(
            {
                "stage": index,
                "global_batch_size": first["global_batch_size"],
                "first_over_median": first["step_seconds"] / median,
                "compile_seconds": first["compile_seconds"],
                "lost_seconds": first["step_seconds"] - median,
                "seconds": sum(record["step_seconds"] for record in steps),
            }
        )
    return stages


def middle(runs: list[list[dict]]) -> list[dict]:
    """Returns the median of every figure over the rounds."""
    return [
        {name: statistics.median(stage[name] for stage in same) for name in same[0]}
        for same in zip(*runs, strict=True)
    ]


def main() -> None:
    options = parser("stage_switch", __doc__)
    options.add_argument(
        "--rounds", type=int, default=1, help="runs of each kind; medians are shown"
    )
    options.add_argument("keys", nargs="*", help="key=value of the run")
    arguments = options.parse_args()
    runs: dict[tuple[str, str], list[list[dict]]] = {}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                for way in WAYS:
                    records = run(folder, way, f"{cache} {way}", arguments.keys)
                    runs.setdefault((way, cache), []).append(stage_figures(records))
    figures = {}
    for (way, cache), rounds in runs.items():
        stages = middle(rounds)
        lost = sum(s["lost_seconds"] for s in stages[1:])
        total = sum(s["seconds"] for s in stages)
        figures[f"{way}, {cache} cache"] = {"stages": stages, "lost": lost, "total": total}
        print(f"compiled {way}, {cache} cache")
        for s in stages:
            print(
                f"  stage {s['stage']:.0f}  batch {s['global_batch_size']:>4.0f}  first step "
                f"{s['first_over_median']:6.2f} x the median, waited {s['compile_seconds']:.2f} s "
                "for its program"
            )
        print(f"  lost to stage changes: {lost:.2f} s of {total:.1f} s", flush=True)
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
