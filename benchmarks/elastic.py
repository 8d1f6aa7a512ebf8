"""What a lost node costs: seconds from a kill to the next step, steps that are trained again, and
the share of the wall time that counts (steps kept x undisturbed seconds of a step / wall time).

Four processes on this machine are the nodes of a launch. Every --every seconds one is killed, and
comes back --away seconds later: under a launch that restarts whole then, an elastic one, and an
elastic one with snapshots in memory.

python benchmarks/elastic.py [--every 20 60 300] [--away 0 30 120] [--modes ...] [--folder DIR]
                             [--json FILE] [key=value ...]
"""

import argparse
import json
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import elastic_storm
from figures import save

from maxramp.run.metrics import read_records

RUN = [
    "global_batch_size=12",
    "per_device_batch_size=4",
    "micro_batch_size=-1",
    "steps=7000",
    "checkpoint_period=20",
    "max_num_checkpoints_to_keep=3",
    "eval_interval=-1",
    "log_period=1000",
    "enable_tensorboard=False",
    "max_node_failures=6",
    "max_restarts=100",
]
ELASTIC = ("node_rest_seconds", "max_node_failures")  # keys of an elastic launch alone
LENGTH = 180.0  # seconds that a row takes, at least; and at most four kills
SNAPSHOTS = ["enable_emergency_checkpoint=True", "local_checkpoint_period=4"]
MODES = {"whole": ["elastic=False"], "elastic": [], "elastic, snapshots": SNAPSHOTS}
_PARTS = {  # of a restart: what ends each, as the log says it
    "the job ends": r"launch   \d process",
    "imports, meeting, data": r"\[0\] run      ",
}


def start(folder: pathlib.Path, keys: list[str]) -> elastic_storm.Launch:
    merged = dict(key.split("=", 1) for key in [*elastic_storm.KEYS, *RUN, *keys])
    if merged.get("elastic") == "False":
        merged = {k: v for k, v in merged.items() if k not in ELASTIC}
    return elastic_storm.Launch(folder, [f"{k}={v}" for k, v in merged.items()])


def measure(folder: pathlib.Path, mode: str, every: float, away: float, keys: list[str]) -> dict:
    keys = [*MODES[mode], f"node_rest_seconds={away:g}", *keys]
    launch = start(folder, keys)
    launch.wait_for(lambda: launch.step() >= 20, 300)
    kills = max(1, min(4, int(LENGTH / every)))
    random_, began, first = random.Random(7), time.time(), launch.step()
    waits, again, parts = [], 0, {name: [] for name in _PARTS}
    for kill in range(kills):
        launch.wait_for(lambda kill=kill: time.time() >= began + kill * every, 2 * every + 60)
        launch.wait_for(launch.trainers)
        done, shown = launch.step(), len(launch.printed())
        struck = time.time()
        launch.kill(random_.choice(sorted(launch.trainers())))
        if mode == "whole" and away:
            stop(launch)
            time.sleep(struck + away - time.time())
            launch = start(folder, keys)
        for name, pattern in _PARTS.items():
            if launch.wait_for(lambda: re.search(pattern, launch.printed()[shown:]), 60):  # noqa: B023
                parts[name].append(time.time() - struck)
        # A step that was done when the kill came may be written down a moment later.
        launch.wait_for(lambda: launch.step() < done or steps_since(folder, struck), 120)  # noqa: B023
        launch.wait_for(lambda: steps_since(folder, struck), 120)  # noqa: B023
        if records := steps_since(folder, struck):
            waits.append(records[0]["time"] - struck)
            again += done + 1 - records[0]["step"]
    launch.wait_for(lambda: time.time() >= began + kills * every, 2 * every + 60)
    end, last = time.time(), launch.step()
    stop(launch)
    return {
        "mode": mode,
        "every": every,
        "away": away,
        "kills": len(waits),
        "seconds_to_next_step": statistics.median(waits),
        "seconds_until": {name: statistics.median(x) for name, x in parts.items() if x},
        "steps_lost": again / len(waits),
        "steps": last - first,
        "wall_seconds": end - began,
    }


def stop(launch: elastic_storm.Launch) -> None:
    launch.process.kill()
    for place in launch.trainers():
        launch.kill(place)
    launch.process.wait(120)


def steps_since(folder: pathlib.Path, struck: float) -> list[dict]:
    records = read_records(folder / "metrics.jsonl")
    return [record for record in records if record["time"] > struck + 0.5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--every", type=float, nargs="+", default=[20, 60, 300])
    parser.add_argument("--away", type=float, nargs="+", default=[0, 30, 120])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--folder", type=pathlib.Path)
    results = ROOT / "benchmarks" / "results" / "elastic.json"
    parser.add_argument("--json", type=pathlib.Path, default=results)
    parser.add_argument("keys", nargs="*")
    options = parser.parse_args()
    folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="elastic"))
    folder.mkdir(parents=True, exist_ok=True)
    keys = [f"jax_cache_dir={folder / 'cache'}", *options.keys]
    # Undisturbed, on all nodes; and each smaller number once, so that its programs are kept.
    for nodes in (1, 2, 3, 4):
        calm = ["elastic=False", f"num_nodes={nodes}", "steps=60", *keys]
        launch = start(folder / f"calm{nodes}", calm)
        launch.wait_for(lambda: False, 300)
    records = read_records(folder / "calm4" / "metrics.jsonl")
    step = statistics.median(r["step_seconds"] for r in records[10:])
    rows = []
    for every, away in zip(options.every, options.away, strict=True):
        for number, mode in enumerate(options.modes):
            row = measure(folder / f"{every:g}-{number}", mode, every, away, keys)
            row["goodput"] = row["steps"] * step / row["wall_seconds"]
            rows.append(row)
            print(json.dumps(row), flush=True)
    save(options.json, {"step_seconds": step, "rows": rows})


if __name__ == "__main__":
    main()
