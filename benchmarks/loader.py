"""How fast the loader reads, against what training eats, and what a stage change costs in it.

Writes some text in every format that this environment can write, then reads batches of it.

python benchmarks/loader.py [--json FILE] [--seconds 2] [--megabytes 24]
"""

import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from figures import ROOT, parser, save
from jax.sharding import NamedSharding

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data.batch import abstract_batch
from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.relay import Expansion
from maxramp.keys.base import CONFIGS
from maxramp.model.size import training_flops_per_token
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import initial_state
from maxramp.training.step import make_train_step

BATCH = 64
WARM_UP = 8
SETTINGS = {
    "1 thread": (),
    "4 threads": ("grain_num_threads=4",),
    "2 processes": ("grain_worker_count=2",),
}
GPUS, PEAK, MFU = 8, 989e12, 0.5  # H200, bfloat16


def resolved(*arguments: str):
    base = [str(CONFIGS / "base.yml"), "eval_interval=-1", "eval_fraction=0"]
    return resolve(load([*base, *arguments]), 1, 1, 1)


def write_texts(folder: pathlib.Path, megabytes: int) -> dict[str, tuple[str, ...]]:
    """Documents of some 2,000 bytes in several formats; source -> keys."""
    random = np.random.default_rng(0)
    words = np.array(["".join(w) for w in itertools.product("abcdefgh", repeat=4)])
    sizes = random.lognormal(5.5, 1, megabytes * 1_000_000 // 2000).astype(int) + 1
    texts = [" ".join(words[random.integers(0, len(words), n)]) for n in sizes]
    sources = {"synthetic": ("dataset_type=synthetic",)}

    def add(name: str, path: pathlib.Path, *more: str) -> None:
        sources[name] = ("dataset_type=grain", f"grain_train_files={path}", *more)

    jsonl = folder / "text.jsonl"
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, "-m", "maxramp.prepare", jsonl, "--output", folder / "prepared"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    add("prepared", folder / "prepared")
    add("Megatron", next(iter(sorted((folder / "prepared").glob("*.idx")))))
    add("JSONL, split", jsonl)
    add("JSONL, best fit", jsonl, "grain_packing_type=best_fit")
    add("JSONL, one a row", jsonl, "packing=False")
    try:
        from array_record.python.array_record_module import ArrayRecordWriter
    except ImportError:
        print("no ArrayRecord: array_record is not installed")
    else:
        writer = ArrayRecordWriter(str(folder / "text.arrayrecord"), "group_size:1")
        for text in texts:
            writer.write(text.encode())
        writer.close()
        add("ArrayRecord, split", folder / "text.arrayrecord")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        print("no Parquet: pyarrow is not installed")
    else:
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, folder / "text.parquet", row_group_size=200)
        add("Parquet, split", folder / "text.parquet")
    return sources


def make_loader(config) -> tuple[Loader, RampupBatchManager]:
    mesh = mesh_lib.make_mesh(config.mesh)
    expansion = Expansion(mesh, 1)
    ramp = RampupBatchManager(config.batch, 1)
    corpus = open_rows(config.data, True)
    return Loader(config.data, config.reading, corpus, ramp, expansion, first_step=0), ramp


def rows_per_second(keys: tuple[str, ...], length: int, seconds: float) -> float:
    """Counts the rows a second that the loop gets as arrays on the device."""
    config = resolved(
        *keys,
        f"max_target_length={length}",
        f"per_device_batch_size={BATCH}",
        "enable_rampup_batch_size=False",
        "num_epoch=100000",
        "steps=1000000",
    )
    loader, _ = make_loader(config)
    for step in range(WARM_UP):  # until every worker has started and nothing is read ahead
        loader.batch(step)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        step += 1
        loader.batch(step)
    rate = BATCH * (step + 1 - WARM_UP) / (time.perf_counter() - start)
    loader.close()
    return rate


def stage_changes(keys: tuple[str, ...], stages: int = 12, steps: int = 12) -> dict[str, float]:
    """Measures waits for the first batch of a stage and for the others, at 30 ms a step."""
    sizes = [16 * (stage + 1) for stage in range(stages)]
    firsts = itertools.accumulate([steps * size for size in sizes[:-1]], initial=0)
    schedule = " ".join(f"{first}:{size}" for first, size in zip(firsts, sizes, strict=True))
    config = resolved(
        *keys,
        "max_target_length=2048",
        f"step_batch_size_schedule={schedule}",
        "step_batch_size_unit=samples",
        f"per_device_batch_size={sizes[-1]}",
        "num_epoch=100000",
        f"steps={stages * steps}",
    )
    loader, ramp = make_loader(config)
    first, other = [], []
    for step in range(stages * steps):
        _, waited = loader.batch(step)
        time.sleep(0.03)
        if step > 0:
            (first if ramp.stage_at_step(step).first_step == step else other).append(waited)
    loader.close()
    return {"first_seconds": statistics.median(first), "other_seconds": statistics.median(other)}


def memory(keys: tuple[str, ...], gib: float) -> dict[str, float]:
    """Measures how far this process grows while it reads ahead of a loop that takes no rows."""
    config = resolved(
        *keys,
        "max_target_length=2048",
        "per_device_batch_size=1024",
        "num_epoch=100000",
        "enable_rampup_batch_size=False",
        "steps=100000",
        "grain_prefetch_buffer_size=10000",
        f"grain_prefetch_buffer_gib={gib}",
    )
    before = resident()
    loader, _ = make_loader(config)
    grown, deadline = 0.0, time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(1)
        now = resident() - before
        if now - grown < 0.001:
            break
        grown = now
    loader.close()
    return {"bound_gib": gib, "grown_gib": grown}


def resident() -> float:
    """Returns the memory of this process in GiB."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**30


def step_eats() -> float:
    """Measures tokens per second of the default model's step, at its largest batch."""
    config = resolved()
    with jax.set_mesh(mesh_lib.make_mesh(config.mesh)):
        ramp = RampupBatchManager(config.batch, 1)
        rate = LearningRate.from_keys(config.learning_rate, ramp)
        state = initial_state(config.recipe)
        spec = ramp.stages[-1].spec
        sharding = NamedSharding(jax.sharding.get_mesh(), BATCH_ABT)
        abstract = abstract_batch(spec.fields, (1, spec.samples), sharding)
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)
        step = make_train_step(config.recipe, rate)
        compiled = jax.jit(step).lower(state, batch).compile()
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(compiled(state, batch))
            seconds.append(time.perf_counter() - start)
    return spec.samples * spec.tokens / statistics.median(seconds)


def main() -> None:
    options = parser("loader", __doc__)
    options.add_argument("--seconds", type=float, default=2, help="to read for each figure")
    options.add_argument("--megabytes", type=int, default=24, help="of text")
    arguments = options.parse_args()
    default = step_eats()
    eaten = {}
    for length in (2048, 8192):
        large = resolved("model_name=llama3-8b", f"max_target_length={length}")
        flops = training_flops_per_token(large, large.max_target_length)
        eaten[length] = {
            "default model, here": default / length,
            "8B, 8 H200 at 50% MFU": GPUS * PEAK * MFU / flops / length,
        }
        for name, rate in eaten[length].items():
            print(f"eaten at {length} tokens a row: {rate:8.1f} rows/s by {name}")
    figures: dict = {"eaten": eaten, "read": []}
    with tempfile.TemporaryDirectory() as name:
        sources = write_texts(pathlib.Path(name), arguments.megabytes)
        titles = " ".join(f"{setting:>12s}" for setting in SETTINGS)
        print(f"\n{'rows/s':20s} {'tokens':>6s} {titles}   best / what the 8B eats")
        for (source, keys), length in itertools.product(sources.items(), eaten):
            rates = {
                setting: rows_per_second((*keys, *more), length, arguments.seconds)
                for setting, more in SETTINGS.items()
            }
            times = max(rates.values()) / eaten[length]["8B, 8 H200 at 50% MFU"]
            figures["read"].append({"source": source, "tokens": length, **rates, "times": times})
            shown = " ".join(f"{rate:12,.0f}" for rate in rates.values())
            print(f"{source:20s} {length:6d} {shown}   {times:8.0f} x", flush=True)
        figures["stage change"] = {
            s: stage_changes(sources[s]) for s in ("prepared", "JSONL, split")
        }
        for source, waited in figures["stage change"].items():
            print(
                f"stage change, {source}: waited {waited['first_seconds'] * 1e3:.2f} ms for the "
                f"first batch of a stage, {waited['other_seconds'] * 1e3:.2f} ms for the others"
            )
        figures["memory"] = memory(sources["prepared"], 0.25)
        print(
            "memory: bound {bound_gib} GiB, grown by {grown_gib:.3f} GiB".format(
                **figures["memory"]
            )
        )
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
