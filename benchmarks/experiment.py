"""Small runs whose held-out losses are compared: each is kept, and made once."""

import json
import math
import os
import pathlib
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from figures import ROOT

from maxramp.processes.bound import bind
from maxramp.run.metrics import read_records

_MODULE = bind([sys.executable, "-m"])  # ends when this one does: the next start finds no other
ROW = 128
MODEL = {
    "base_emb_dim": 64,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 32,
    "base_mlp_dim": 192,
    "base_num_decoder_layers": 2,
    "max_target_length": ROW,
    "num_epoch": 4,
    "eval_interval": 10**9,  # at the end
    "eval_samples": -1,
    "eval_per_device_batch_size": 32,
    "per_device_batch_size": 64,
    "checkpoint_stage_ends": False,
    "enable_tensorboard": False,
    "log_period": 10**9,
}
_CORES = (
    sorted(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else range(os.cpu_count() or 1)
)
_T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


class Experiment:
    """Runs below a folder, each by the name of its keys; what is there is not run again.

    `run` and `factor` may be called by several threads at once: each waits for a free core.
    """

    def __init__(self, folder: pathlib.Path, samples: int, keys: list[str], expected: int):
        self.folder, self.samples, self._expected = folder, samples, expected
        self._keys = dict(key.split("=", 1) for key in keys)
        self._began, self._ended = time.monotonic(), set()
        self._cores: queue.SimpleQueue[int] = queue.SimpleQueue()
        for core in _CORES:
            self._cores.put(core)
        self._stopped = False
        folder.mkdir(parents=True, exist_ok=True)
        made_with = {"samples": samples, "model": MODEL, "keys": self._keys}
        note = folder / "protocol.json"
        if note.exists() and json.loads(note.read_text()) != json.loads(json.dumps(made_with)):
            sys.exit(f"error: {folder} holds runs of other keys (protocol.json); give --folder")
        note.write_text(json.dumps(made_with))

    def run(self, arm: str, seed: int, rate: float, keys: dict[str, Any]) -> dict[str, Any]:
        """Trains a run to its end if it is not there; returns its loss and its steps.

        Args:
          arm: what it is called.
          seed: of the weights and of the order of rows.
          rate: the learning rate at its peak.
          keys: more keys, or other values; total_samples too.
        """
        folder = self.folder / f"{arm} rate {rate:.3g} seed {seed}"
        keys = {"total_samples": self.samples, **keys}
        result = self._result(folder, keys["total_samples"])
        if result is None:
            run_keys = MODEL | {
                "base_output_directory": self.folder,
                "run_name": folder.name,
                "learning_rate": repr(rate),
                "init_weights_seed": seed,
                "data_shuffle_seed": seed,
                "checkpoint_period_samples": max(1, keys["total_samples"] // 2),
                "checkpoint_period": -1,
            }
            self._train(run_keys | keys | self._keys, folder)
            result = self._result(folder, keys["total_samples"])
            if result is None:
                self._stopped = True
                sys.exit(f"error: {folder} ended without an evaluation")
        self._ended.add(folder)
        minutes = (time.monotonic() - self._began) / 60
        place = f"run {len(self._ended)} of about {self._expected}"
        ended = f"{folder.name}: loss {result['loss']:.4f} in {result['steps']:,} steps"
        print(f"{minutes:5.1f} min  {place}: {ended}", flush=True)
        return result

    def factor(self, a: dict[str, Any], sizes: list[int]) -> float:
        """Divides the largest batch that surely costs nothing by the noise scale, halfway through
        A."""
        folder = self.folder / a["run"]
        step = min(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())
        command = [*_MODULE, "maxramp.branch", str(folder), "--at", str(step)]
        command += ["--sizes", ",".join(map(str, sizes)), "--json"]
        with (self.folder / "branch.json").open("w") as printed:
            status = self._run(
                [*command, "checkpoint_period_samples=-1"], printed, subprocess.DEVNULL
            )
        if status:
            sys.exit(f"error: {' '.join(command)} ended with {status}")
        result = json.loads(pathlib.Path(printed.name).read_text().splitlines()[-1])
        noise = result["noise"].get("norms_noise_scale")
        if noise is None:  # a run of a few steps has no signal
            return 1.0
        return (result["surely"] or result["largest"]) / noise["noise_scale"]

    def _train(self, keys: dict[str, Any], folder: pathlib.Path) -> None:
        command = [*_MODULE, "maxramp.train", str(ROOT / "configs" / "base.yml")]
        command += [f"{name}={value}" for name, value in keys.items()]
        with (self.folder / f"{folder.name}.txt").open("w") as printed:
            status = self._run(command, printed, subprocess.STDOUT)
        if status:
            last = pathlib.Path(printed.name).read_text().strip().splitlines()[-1:]
            sys.exit(f"error: {folder.name}: status {status}: {' '.join(last)}")

    def _run(self, command: list[str], out: Any, err: int) -> int:
        """Runs a command on the next core that is free; returns its status."""
        core = self._cores.get()
        try:
            if self._stopped:  # a run of another thread failed, or the user stopped it
                sys.exit(1)
            _bind(core)  # this thread, and so the process that it starts
            status = subprocess.run(command, stdout=out, stderr=err, env=_environment()).returncode
            self._stopped |= status != 0
            return status
        finally:
            self._cores.put(core)
            _bind(*_CORES)

    def _result(self, folder: pathlib.Path, samples: int) -> dict[str, Any] | None:
        records = read_records(folder / "metrics.jsonl")
        ends = [r for r in records if "eval_loss" in r and r["consumed_samples"] >= samples]
        if not ends:
            return None
        return {
            "loss": ends[-1]["eval_loss"],
            "acceptance": ends[-1].get("eval_mtp_acceptance_rate"),
            "steps": ends[-1]["step"] + 1,
            "run": folder.name,
            "seconds": sum(r.get("step_seconds", 0.0) for r in records),
        }


def at_once(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Returns a function's results, in the values' order; every call has a thread."""
    values = list(values)
    with ThreadPoolExecutor(max(1, len(values))) as threads:
        return list(threads.map(function, values))


def _bind(*cores: int) -> None:
    """Lets this thread run on these cores only, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def tuned(
    experiment: Experiment, rows: int, most: int, arm: str = "pilot", **keys: Any
) -> dict[str, Any]:
    """Finds the best of at most `most` learning rates of a constant batch with seed 0.

    Returns:
      Its rate, rows, loss and steps.
    """
    middle, losses = 3e-3 * math.sqrt(rows / 16), {}
    grid = [-1, 0, 1]

    def constant(power: int) -> dict[str, Any]:
        run_keys = {"global_batch_size": rows, **keys}
        return experiment.run(f"{arm} {rows}", 0, middle * 2.0**power, run_keys)

    while True:
        losses |= dict(zip(grid, at_once(constant, grid), strict=True))
        best = min(losses, key=lambda power: losses[power]["loss"])
        if min(losses) < best < max(losses) or len(losses) >= most:
            return losses[best] | {"rate": middle * 2.0**best, "rows": rows}
        grid = [min(losses) - 1] if best == min(losses) else [max(losses) + 1]


def paired(runs: list[dict], others: list[dict]) -> dict[str, Any]:
    """Returns the mean difference of the losses by seed, and its 90% t-interval."""
    apart = np.array([a["loss"] - b["loss"] for a, b in zip(runs, others, strict=False)])
    mean, n = float(apart.mean()), len(apart)
    if n < 2:
        return {"mean": mean, "low": None, "high": None, "seeds": n}
    half = _T90.get(n - 1, 1.645) * float(apart.std(ddof=1)) / math.sqrt(n)
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": n}


def print_figures(figures: dict[str, Any]) -> None:
    """Prints the losses of arms, how far pairs of them are apart, and which claims hold."""
    for name, runs in figures["arms"].items():
        losses = ", ".join(f"{run['loss']:.4f}" for run in runs)
        print(f"{name:3} {runs[0]['steps']:>6,} steps  {losses}")
    for pair, apart in figures["apart"].items():
        if apart["low"] is not None:
            print(f"{pair}: {apart['mean']:+.4f} ({apart['low']:+.4f} to {apart['high']:+.4f})")
    for claim, holds in figures["claims"].items():
        print(f"{claim}: {holds}")
