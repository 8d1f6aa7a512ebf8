"""Kills a run again and again, starts it again in other shapes, and proves that nothing was lost.

A run with a ramp is started until it ends. Each start has a random shape (processes, devices, mesh,
rows per pass) and comes to a random end: kill -9, SIGTERM or SIGINT, to all processes or to one of
them, in a step, in a save, in a compile, in the start-up, or while a signal is being obeyed. Then
it is compared with the same run without a disturbance: every step exactly once and in order in
metrics.jsonl and TensorBoard, the same rows (batch_fingerprint), the batch sizes of the plan, the
same loss curve, and where the shape never changed the same bits. With --elastic one launch runs all
the time, and nodes of it are killed: in a step, a save, an evaluation, a compile, and while it
starts again after another loss.

python benchmarks/chaos.py [--kills N] [--seed N] [--same-shape] [--pipelines] [--adaptive] [--grpo]
                           [--elastic] [--storage gs|s3] [--folder DIR] [--json FILE]
                           [key=value ...]
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import elastic_storm
import events
import object_stores

from maxramp.checkpoints import folder as folder_lib
from maxramp.errors import EXIT_LOST, EXIT_PREEMPTED
from maxramp.run.metrics import read_records

# 46,000 weights whose every axis divides over 8 devices.
MODEL = [
    "base_emb_dim=32",
    "base_num_query_heads=8",
    "base_num_kv_heads=8",
    "head_dim=8",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    "vocab_size=264",
    "max_target_length=16",
    "learning_rate=2e-3",
    "checkpoint_period=15",
    "max_num_checkpoints_to_keep=3",
    "eval_interval=40",
    "eval_samples=16",
    "eval_per_device_batch_size=8",
    "log_period=1000",
    "hang_timeout_seconds=60",
]
# With --grpo: prompts in the place of rows.
POLICY = [
    "max_completion_length=6",
    "num_generations=4",
    "rewards=[maxramp.rl.tasks:brevity]",
    "lr_schedule_type=cosine",
    "num_epoch=1",
]
TOLERANCE = 0.05  # nats: between runs whose sums were made in another order


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a start lies on the machine. None of it changes a row, a batch size or the schedule."""

    processes: int = 1
    devices: int = 1  # of each process
    data: int = 1
    tensor: int = 1
    stages: int = 1
    microbatches: int = -1  # of a pipeline
    expansion: float = -1  # only processes / expansion of them read
    micro_batch_size: int = 8  # rows per data-parallel rank in a pass: accumulation follows

    def keys(self) -> list[str]:
        return [
            f"ici_data_parallelism={self.data}",
            f"ici_tensor_parallelism={self.tensor}",
            f"ici_pipeline_parallelism={self.stages}",
            f"num_pipeline_microbatches={self.microbatches}",
            f"micro_batch_size={self.micro_batch_size}",
            f"expansion_factor_real_data={self.expansion}",
        ]


SHAPES = (
    Shape(),
    Shape(micro_batch_size=4),
    Shape(devices=2),
    Shape(devices=2, tensor=2, micro_batch_size=4),
    Shape(devices=4, data=2, micro_batch_size=2),
    Shape(devices=4, tensor=2, micro_batch_size=4),
    Shape(processes=2, micro_batch_size=4),
    Shape(processes=2, devices=2, tensor=2),
    Shape(processes=2, expansion=2, micro_batch_size=4),
    Shape(devices=2, stages=2, micro_batch_size=4),
    Shape(devices=4, stages=2, tensor=2, microbatches=4, micro_batch_size=4),
    Shape(processes=2, devices=2, stages=2, expansion=2, microbatches=4, micro_batch_size=4),
)
# Ends of a start and how often they are drawn.
ENDS = {"kill": 5, "term": 3, "int": 1, "save": 4, "compile": 2, "start": 2, "term, kill": 2}


class Job:
    """One start: its processes, and what they print.

    Attributes:
      program: of maxramp, and the config file that it is given.
    """

    program = "train", "base.yml"

    def __init__(
        self,
        folder: pathlib.Path,
        shape: Shape,
        keys: list[str],
        storage: object_stores.Storage | None = None,
    ):
        """Starts the run in a folder, or of that name in a storage."""
        self.folder, self.storage, self.processes = folder, storage, []
        self._before = last_step(folder)
        self._asked = len(storage.requests) if storage else 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        kept = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        kept |= storage.environment if storage else {}
        count = f"--xla_force_host_platform_device_count={shape.devices}"
        kept["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}"
        module, config = self.program
        command = [sys.executable, "-m", f"maxramp.{module}", str(ROOT / "configs" / config)]
        output = storage.address if storage else folder.parent
        output_keys = [f"base_output_directory={output}", f"run_name={folder.name}"]
        for index in range(shape.processes):
            job = {
                "MAXRAMP_COORDINATOR": f"127.0.0.1:{port}",
                "MAXRAMP_NUM_PROCESSES": str(shape.processes),
                "MAXRAMP_PROCESS_ID": str(index),
            }
            outputs = [
                folder.with_name(f"{folder.name}.{name}.{index}").open("wb")
                for name in ("stdout", "stderr")
            ]
            self.processes.append(
                subprocess.Popen(
                    [*command, *output_keys, *shape.keys(), *keys],
                    env=kept | (job if shape.processes > 1 else {}),
                    stdout=outputs[0],
                    stderr=outputs[1],
                )
            )
            for output in outputs:
                output.close()

    def printed(self, name: str = "stdout", index: int = 0) -> str:
        return self.folder.with_name(f"{self.folder.name}.{name}.{index}").read_text()

    def steps(self) -> int:
        """Counts the steps that this start has printed."""
        if not self.storage:
            return last_step(self.folder) - self._before
        steps = [int(n) for n in re.findall(r"^step +(\d+) ", self.printed(), re.MULTILINE)]
        return steps[-1] - steps[0] + 1 if steps else 0

    def saves(self) -> bool:
        """Returns whether a checkpoint is being written."""
        if self.storage:
            asked = self.storage.requests[self._asked :]
            return any("ocdbt" in r and r[:3] in ("POS", "PUT") for r in asked)
        folder = self.folder / "checkpoints"
        numbers = [path for path in folder.iterdir() if folder_lib.is_step(path.name)]
        return any(not (path / folder_lib.FILE).exists() for path in numbers)

    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait_for(self, condition) -> bool:
        """Waits until a condition holds; False if a process ends before."""
        while self.running():
            if condition():
                return True
            time.sleep(0.003)
        return False

    def end(self, grace: float) -> list[int]:
        """Returns exit statuses. Once a process has ended, the others have `grace` seconds."""
        deadline = None
        while any(process.poll() is None for process in self.processes):
            if deadline is None and not self.running():
                deadline = time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
            time.sleep(0.01)
        return [process.returncode for process in self.processes]


def last_step(folder: pathlib.Path) -> int:
    """Returns the last step in metrics.jsonl, -1 without one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = [line for line in file.read().splitlines() if line.endswith(b"}")]
    return max((json.loads(x)["step"] for x in lines if x.startswith(b'{"step')), default=-1)


def strike(job: Job, end: str, random_: random.Random) -> list[int]:
    """Brings a start to its end; returns the exit statuses."""
    one = [random_.choice(job.processes)] if random_.random() < 0.5 else job.processes
    ahead, pause = random_.randint(1, 40), random_.random()
    if end == "start":
        time.sleep(4 * pause)
    elif end == "compile":
        job.wait_for(lambda: "run      " in job.printed())
        time.sleep(pause)
    else:
        job.wait_for(lambda: "stage " in job.printed() and job.steps() >= ahead)
    if end == "save":
        job.wait_for(job.saves)
    number = {"term": signal.SIGTERM, "term, kill": signal.SIGTERM, "int": signal.SIGINT}.get(end)
    for process in one:
        process.send_signal(number or signal.SIGKILL)
    if end == "term, kill":
        time.sleep(0.3 * pause)
        for process in one:
            process.kill()
    return job.end(grace=60 if end in ("term", "int") else 3)


def storm(
    folder: pathlib.Path,
    kills: int,
    seed: int,
    shapes,
    keys: list[str],
    storage: object_stores.Storage | None,
) -> dict:
    """Starts the run until it ends, with so many kills; returns what was done."""
    random_, done, faults = random.Random(seed), collections.Counter(), []
    starts, began = 0, time.monotonic()
    while sum(done.values()) < kills:
        shape = random_.choice(shapes)
        end = random_.choices(list(ENDS), list(ENDS.values()))[0]
        cache = []
        if end == "compile":  # nothing is there yet
            cache = [f"jax_cache_dir={folder.with_name('cold')}"]
            shutil.rmtree(folder.with_name("cold"), ignore_errors=True)
        keys_here = [k for k in keys if not (cache and k.startswith("jax_cache_dir="))] + cache
        job = Job(folder, shape, keys_here, storage)
        starts += 1
        statuses = strike(job, end, random_)
        if statuses == [0] * shape.processes:
            break
        done[end] += 1
        # What may be left of a job that was struck: our own statuses, the signals that we sent,
        # and the abort of a JAX process that lost its coordinator.
        fine = {0, EXIT_PREEMPTED, EXIT_LOST, -signal.SIGKILL, -signal.SIGABRT}
        fine |= {-signal.SIGTERM, -signal.SIGINT}
        if end in ("term", "int") and (last_step(folder) >= 0 or job.steps()):
            fine -= {-signal.SIGKILL, -signal.SIGABRT, EXIT_LOST}
        stderr = [job.printed("stderr", i) for i in range(shape.processes)]
        wrong = [line for line in stderr if unexpected(line, storage)]
        if not set(statuses) <= fine or (wrong and shape.processes == 1):
            faults.append(f"{end} {shape}: status {statuses}: {' | '.join(stderr)[-1500:]}")
        print(
            f"{sum(done.values()):>4} {end:<10} {shape.processes} x {shape.devices} devices, "
            f"tensor {shape.tensor}, stages {shape.stages}, {shape.micro_batch_size} rows: "
            f"after {job.steps()} steps, exit status {statuses}",
            flush=True,
        )
    statuses = Job(folder, shapes[0], keys, storage).end(grace=60)
    if storage:
        fetch(storage, folder)
    if statuses != [0] * shapes[0].processes:
        faults.append(f"the last start: status {statuses}")
    seconds = time.monotonic() - began
    return {"starts": starts + 1, "ends": dict(done), "seconds": seconds, "faults": faults}


def unexpected(stderr: str, storage: object_stores.Storage | None) -> bool:
    """Returns whether a start complained; saves that are slower than the steps are no fault."""
    lines = stderr.splitlines()
    if storage:  # and its clients say which credentials they do not find
        lines = [s for s in lines if "still being written" not in s and not re.match(r"E\d{4} ", s)]
    return bool(lines)


def fetch(storage: object_stores.Storage, folder: pathlib.Path) -> None:
    """Copies a run to where it would be on the disk."""
    os.environ |= storage.environment
    import fsspec

    client, path = fsspec.core.url_to_fs(f"{storage.address}/{folder.name}")
    client.get(f"{path}/", f"{folder}/", recursive=True)


def compare(stormy: pathlib.Path, calm: pathlib.Path, exact: bool) -> dict:
    """Returns how a disturbed run differs from the calm one."""
    got, wanted = (read_records(f / "metrics.jsonl") for f in (stormy, calm))
    steps = [r["step"] for r in got if "loss" in r]
    places = [(r["step"], "loss" in r) for r in got]
    count = collections.Counter(steps)
    expected = {r["step"]: r for r in wanted if "loss" in r}
    shown = events.shown(stormy / "tensorboard")["learning/loss"]
    differ = collections.Counter()
    drift = 0.0
    for r in got:
        if "loss" in r and r["step"] in expected:
            other = expected[r["step"]]
            for name in ("batch_fingerprint", "global_batch_size", "consumed_samples", "stage"):
                differ[name] += r[name] != other[name]
            drift = max(drift, abs(r["loss"] - other["loss"]))
    rows = [r["global_batch_size"] for r in got if "loss" in r]
    report = {
        "steps": len(steps),
        "rows": sum(rows),
        "missing_steps": len(expected.keys() - count.keys()),
        "repeated_steps": sum(n - 1 for n in count.values()),
        "out_of_order": places != [(r["step"], "loss" in r) for r in wanted],
        "tensorboard_differs": sorted(shown) != sorted(expected),
        "differ": {name: n for name, n in differ.items() if n},
        "largest_loss_difference": drift,
    }
    bad = [name for name in list(report)[2:7] if report[name]]
    if drift > (0 if exact else TOLERANCE):
        bad.append("largest_loss_difference")
    if exact and (unequal := unequal_arrays(stormy, calm)):
        bad.append(f"{unequal} arrays of the last checkpoint differ")
    return report | {"bad": bad}


def unequal_arrays(stormy: pathlib.Path, calm: pathlib.Path) -> int:
    """Arrays of the last checkpoints that do not hold the same bits."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from maxramp.checkpoints.arrays import stored_arrays

    arrays = [list(stored_arrays(folder_lib.find(folder))) for folder in (stormy, calm)]
    pairs = zip(*arrays, strict=True)
    return sum(a.tobytes() != b.tobytes() or a.dtype != b.dtype for a, b in pairs)


def _ramp(steps: int, adaptive: bool, same_shape: bool) -> list[str]:
    """Returns keys of 8, 16 and 24 rows over `steps` steps, known before or decided on the way."""
    if not adaptive:
        schedule = f"step_batch_size_schedule=0:8 {2 * steps}:16 {10 * steps}:24"
        return [schedule, "step_batch_size_unit=samples", f"steps={steps}"]
    keys = ["rampup_policy=noise", "rampup_ladder=[8,16,24]", f"total_samples={16 * steps}"]
    if same_shape:  # any scale that can be told from zero: the numbers alone decide when
        return [*keys, "rampup_noise_factor=1000"]
    return [*keys, "rampup_noise_factor=1e-9", f"rampup_latest=[{2 * steps},{10 * steps}]"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--same-shape", action="store_true", help="every start alike: bit-equal")
    parser.add_argument(
        "--pipelines", action="store_true", help="starts with a pipeline, and one shape without"
    )
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="the ramp is decided while it runs: by its latest samples, or with --same-shape by "
        "what is measured",
    )
    parser.add_argument(
        "--grpo",
        action="store_true",
        help="reinforcement learning, every start alike: other sums would draw other answers",
    )
    parser.add_argument("--elastic", action="store_true", help="an elastic launch that loses nodes")
    parser.add_argument(
        "--storage", choices=("gs", "s3"), help="the run's folder is in an object storage"
    )
    parser.add_argument("--folder", type=pathlib.Path, help="keeps the runs and the compile cache")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    parser.add_argument("keys", nargs="*", help="key=value of the run")
    options = parser.parse_args()
    folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="chaos"))
    folder.mkdir(parents=True, exist_ok=True)
    steps = 200 + 25 * options.kills
    words = random.Random(options.seed)
    text = folder / "text.txt"
    text.write_text(
        " ".join(words.choice(["to", "be", "or", "not", "ramp"]) for _ in range(60_000))
    )
    keys = [
        *MODEL,
        *(["log_period=1"] if options.storage else []),
        f"text_files={text}",
        f"num_epoch={1 + steps * 24 // 10_000}",
        *_ramp(steps, options.adaptive, options.same_shape),
        f"jax_cache_dir={folder / 'cache'}",
        *options.keys,
    ]
    if options.grpo:
        options.same_shape = True
        Job(folder / "first", Shape(), [*keys, "steps=10"]).end(60)
        Job.program = "grpo", "post_train/rl.yml"
        keys += [*POLICY, f"load_parameters_path={folder / 'first'}"]
    keys = [f"{k}={v}" for k, v in dict(key.split("=", 1) for key in keys).items()]
    for name in ("calm", "storm"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if statuses := [s for s in Job(folder / "calm", Shape(), keys).end(60) if s]:
        print(f"the undisturbed run failed: {statuses}", file=sys.stderr)
        return 1
    shapes = SHAPES[:1] if options.same_shape else SHAPES
    if options.pipelines:
        shapes = (SHAPES[0], *(shape for shape in SHAPES if shape.stages > 1))
    if options.adaptive:  # the noise scale is not measured in a pipeline
        shapes = tuple(shape for shape in shapes if shape.stages == 1)
    running = contextlib.nullcontext()
    if options.storage:
        running = object_stores.running(options.storage)
    with running as storage:
        arguments = folder / "storm", options.kills, options.seed
        if options.elastic:
            done = elastic_storm.storm(*arguments, keys)
        else:
            done = storm(*arguments, shapes, keys, storage)
    report = done | compare(folder / "storm", folder / "calm", options.same_shape)
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if not options.folder:
        shutil.rmtree(folder)
    few = sum(done["ends"].values()) < options.kills
    if few:
        print("the run ended before all kills were made: give more steps", file=sys.stderr)
    return 1 if report["bad"] or report["faults"] or few else 0


if __name__ == "__main__":
    sys.exit(main())
