"""A storm over an elastic launch: nodes of this machine are killed again and again."""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
NODES = 4
KEYS = [
    "elastic=True",
    f"num_nodes={NODES}",
    "devices_per_node=1",
    "node_rest_seconds=3",
    "max_node_failures=20",  # a rest is twice as long each time
    "micro_batch_size=8",
    "ici_data_parallelism=-1",
    "ici_fsdp_parallelism=1",
    "node_schedule=fixed",
    "hardware=cpu",
]
# When a node is killed, and how often that is drawn; again: one of those that start again, too.
WHEN = {"step": 5, "save": 3, "evaluation": 2, "start": 2, "again": 4, "compile": 1, "two": 1}


class Launch:
    """An elastic launch of a run in a folder, and its trainers."""

    def __init__(self, folder: pathlib.Path, keys: list[str], program: str = "base.yml"):
        self.folder = folder
        self.log = folder.with_name(f"{folder.name}.log")
        output_keys = [f"base_output_directory={folder.parent}", f"run_name={folder.name}", *keys]
        config = str(ROOT / "configs" / program)
        line = [sys.executable, "-m", "maxramp.launch", config, "--cluster", "local", *output_keys]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(line, env=environment, stdout=log, stderr=log)

    def running(self) -> bool:
        return self.process.poll() is None

    def printed(self) -> str:
        return self.log.read_text()

    def trainers(self) -> dict[int, int]:
        """Process ids by place."""
        nodes = {}
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = f"base_output_directory={self.folder.parent}".encode() in words
            if ours and not any(word.endswith(b"bound.py") for word in words):
                for word in variables:
                    if word.startswith(b"MAXRAMP_PROCESS_ID="):
                        nodes[int(word.partition(b"=")[2])] = int(path.name)
        return nodes

    def records(self) -> list[bytes]:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().splitlines() if path.exists() else []

    def step(self) -> int:
        """Returns the last step that is written down."""
        lines = [line for line in self.records()[-3:] if line.endswith(b"}")]
        return max((json.loads(line)["step"] for line in lines), default=-1)

    def saves(self) -> bool:
        folder = self.folder / "checkpoints"
        paths = folder.iterdir() if folder.is_dir() else ()
        return any(p.name.isdigit() and not (p / "checkpoint.json").exists() for p in paths)

    def wait_for(self, condition, seconds: float = 90) -> bool:
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.005)
        return False

    def kill(self, place: int) -> bool:
        pid = self.trainers().get(place)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None


def storm(folder: pathlib.Path, kills: int, seed: int, keys: list[str]) -> dict:
    """Launches the run, kills that many of its nodes, and waits for its end."""
    random_, done, faults = random.Random(seed), collections.Counter(), []
    folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
    began, launch, again = time.monotonic(), Launch(folder, [*KEYS, *keys]), False
    while launch.running() and sum(done.values()) < kills:
        when = "again" if again else random_.choices(list(WHEN), list(WHEN.values()))[0]
        again, before, jobs = False, launch.step(), launch.printed().count("launch   ")
        if when == "start":
            launch.wait_for(launch.trainers)
            time.sleep(3 * random_.random())
        elif when == "compile":
            text = launch.printed().count("run      ")
            launch.wait_for(lambda text=text: launch.printed().count("run      ") > text, 20)
            time.sleep(random_.random())
        elif when != "again":
            ahead = before + random_.randint(3, 40)
            launch.wait_for(lambda ahead=ahead: launch.step() >= ahead)
        if when == "save":
            launch.wait_for(launch.saves)
        if when == "evaluation":  # every 40 steps
            launch.wait_for(lambda: launch.step() % 40 == 39)
        if when == "again":  # the job after a loss is starting
            launch.wait_for(lambda jobs=jobs: launch.printed().count("launch   ") > jobs, 5)
            launch.wait_for(launch.trainers)
            time.sleep(6 * random_.random())
        trainers = launch.trainers()
        nodes = random_.sample(sorted(trainers), min(len(trainers), 1 + (when == "two")))
        if random_.random() < 0.3 and trainers:
            nodes[0] = 0
        if not [launch.kill(place) for place in nodes] or not nodes:
            continue
        done[when] += 1
        again = random_.random() < 0.25
        print(
            f"{sum(done.values()):>4} {when:<10} of {len(trainers)} nodes "
            f"{', '.join(map(str, nodes))} after step {launch.step()}",
            flush=True,
        )
    launch.wait_for(lambda: False, 600)
    if launch.running():
        launch.process.terminate()
    if status := launch.process.wait():
        faults.append(f"status {status}: {launch.printed()[-1500:]}")
    lost = launch.printed().count("launch   lost node ")
    nodes = collections.Counter(
        record["devices"] for record in map(json.loads, launch.records()) if "loss" in record
    )
    seconds = time.monotonic() - began
    return {
        "ends": dict(done),
        "nodes_lost": lost,
        "steps_by_nodes": dict(sorted(nodes.items())),
        "seconds": seconds,
        "faults": faults,
    }
