"""What one GPU makes of the trainer, in under ten minutes; needs an NVIDIA GPU.

1. Does the attention kernel compute what plain products do, with documents in a row and without?
   What does it take for packed rows, beside cuDNN with a mask and cuDNN without documents?
2. MFU of each stage of a ramp, for the 1B and 3B Llama shapes, and what a stage's first step costs.
3. The memory of those runs against the preflight's figure for the same GPU.
4. A ramp of 200 steps that is killed and started again: the same rows, and how far the losses are
   from those of a run that was left alone.

Figures are saved after each part, so that a run that is cut short keeps what it has.

python benchmarks/gpu.py [--json FILE] [--preflight KIND] [key=value ...]
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from figures import ROOT, parser, save

sys.path.insert(0, str(ROOT))

from maxramp.planning.gpu import GPUS
from maxramp.run.metrics import read_records

BASE = str(ROOT / "configs" / "base.yml")
MODELS = {"llama3.2-1b": (16, 4), "llama3.2-3b": (8, 2)}  # rows in the last stage and in the first
STEPS = 40
RAMP = [
    f"steps={STEPS}",
    "max_target_length=4096",
    "dtype=bfloat16",
    "dataset_type=synthetic",
    "enable_checkpointing=False",
    "eval_interval=-1",
    "remat_policy=minimal",
    "enable_tensorboard=False",
    "loss_block_tokens=4096",
    "learning_rate=1e-4",
]
KILLED = [
    "base_emb_dim=1024",
    "base_mlp_dim=2816",
    "base_num_decoder_layers=8",
    "head_dim=64",
    "base_num_query_heads=16",
    "base_num_kv_heads=8",
    "vocab_size=32000",
    "dtype=bfloat16",
    "max_target_length=1024",
    "dataset_type=synthetic",
    "learning_rate=3e-4",
    "steps=200",
    "step_batch_size_schedule=0:8 400:16 1200:32",
    "step_batch_size_unit=samples",
    "per_device_batch_size=8",
    "checkpoint_period=40",
    "eval_interval=-1",
    "hardware=gpu",
    "enable_tensorboard=False",
]
EQUALITY = """
import jax, jax.numpy as jnp, json, numpy as np
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.model.parts.attention import AttentionMask, attend
from maxramp.model.parts.positions import Positions
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.sharding import ROWS_BT, X_BTHh
keys = ["dtype=bfloat16", "enable_rampup_batch_size=False", "per_device_batch_size=1"]
config = resolve(load(["configs/base.yml", *keys]), 1, 1, 1)
random = np.random.default_rng(0)
q, k, v = (jnp.asarray(random.normal(size=(2, 1024, n, 64)), jnp.bfloat16) for n in (8, 2, 2))
segments = jnp.asarray(np.cumsum(random.random((2, 1024)) < 0.005, axis=1), jnp.int32)
deviations = {}
with jax.set_mesh(mesh_lib.make_mesh(config.mesh)):
    q, k, v = (jax.device_put(x, X_BTHh) for x in (q, k, v))
    segments = jax.device_put(segments, ROWS_BT)
    for name, s in (("", None), (", documents", segments)):
        def run(which, q=q, k=k, v=v):
            def f(q, k, v):
                out = attend(q, k, v, AttentionMask(Positions(s)), which).astype(jnp.float32)
                return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum(), out
            return jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        pairs = zip(jax.tree.leaves(run("cudnn_flash")), jax.tree.leaves(run("dot_product")))
        deviations["largest deviation over the largest value" + name] = max(
            float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()
                  / jnp.abs(b.astype(jnp.float32)).max()) for a, b in pairs)
print(json.dumps(deviations))
"""
TIMES = """
import jax, jax.numpy as jnp, json, numpy as np, statistics, time
from maxramp.model.parts.packed_attention import packed_attention
random = np.random.default_rng(0)

def milliseconds(f, *arrays):
    f = jax.jit(f)
    jax.block_until_ready(f(*arrays))
    rounds = []
    for _ in range(10):
        began = time.perf_counter()
        jax.block_until_ready([f(*arrays) for _ in range(10)])
        rounds.append((time.perf_counter() - began) * 100)
    return statistics.median(rounds)

lines = []
for tokens, rows, document in ((4096, 4, 512), (8192, 2, 512), (8192, 2, 4096), (32768, 1, 2048)):
    q, k, v = (
        jnp.asarray(random.normal(size=(rows, tokens, heads, 128)), jnp.bfloat16)
        for heads in (32, 8, 8)
    )
    begins = random.random((rows, tokens)) < 1 / document
    begins[:, 0] = True
    start = jnp.asarray(np.maximum.accumulate(np.where(begins, np.arange(tokens), 0), 1), jnp.int32)
    cudnn = lambda q, k, v, mask=None: jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, implementation="cudnn")
    def masked(q, k, v):
        return cudnn(q, k, v, (start[:, :, None] == start[:, None, :])[:, None])
    def packed(q, k, v):
        at = jnp.broadcast_to(jnp.arange(tokens), start.shape)
        return packed_attention(q, k, v, start, at, 128**-0.5)
    ways = {"packed": packed, "masked": masked, "whole": cudnn}
    if tokens > 8192:
        del ways["masked"]
    line = {"tokens": tokens, "rows": rows, "document": document}
    for name, attend in ways.items():
        line[name] = milliseconds(attend, q, k, v)
        gradient = jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))
        line[name + " and gradient"] = milliseconds(gradient, q, k, v)
    lines.append(line)
    print(line, flush=True)
print(json.dumps(lines))
"""
TRAIN = """
import json, sys, jax
from maxramp.train import main
status = main(sys.argv[1:])
stats = jax.local_devices()[0].memory_stats() or {}
print(json.dumps({"status": status, "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30}))
"""


def ramp_keys(model: str, keys: list[str]) -> list[str]:
    """Returns keys of four batch sizes, each for a quarter of the ramp's samples, then the last."""
    last, first = MODELS[model]
    return [
        f"run_name={model}",
        f"model_name={model}",
        *RAMP,
        f"per_device_batch_size={last}",
        f"per_device_batch_size_start={first}",
        f"per_device_batch_size_increment={first}",
        f"global_rampup_samples={STEPS * first}",
        *keys,
    ]


def stages(model: str, keys: list[str], peak: float) -> tuple[list[dict[str, float]], float]:
    """Medians of every stage of a run without its first steps; and the peak of its memory, GiB."""
    with tempfile.TemporaryDirectory() as folder:
        line = [BASE, *ramp_keys(model, keys), "hardware=gpu", f"base_output_directory={folder}"]
        printed = subprocess.check_output([sys.executable, "-c", TRAIN, *line], text=True, cwd=ROOT)
        records = read_records(pathlib.Path(folder, model, "metrics.jsonl"))
    ended = json.loads(printed.splitlines()[-1])
    if ended["status"]:
        sys.exit(f"error: the run of {model} ended with {ended['status']}")
    results = []
    for index in sorted({record["stage"] for record in records}):
        steps = [record for record in records if record["stage"] == index]
        tflops = statistics.median(record["tflops_per_device"] for record in steps[2:])
        seconds = statistics.median(record["step_seconds"] for record in steps[2:])
        results.append(
            {
                "global_batch_size": steps[0]["global_batch_size"],
                "tflops_per_device": tflops,
                "mfu": tflops / peak,
                "step_seconds": seconds,
                "first_over_median": steps[0]["step_seconds"] / seconds,
                "compile_seconds": steps[0]["compile_seconds"],
            }
        )
    return results, ended["peak_gib"]


def preflight(model: str, keys: list[str], kind: str) -> list[dict]:
    """Compiles the same stages for one such GPU, without using it."""
    with tempfile.TemporaryDirectory() as folder:
        line = [BASE, *ramp_keys(model, keys), f"compile_topology={kind}:1x1", "--json"]
        command = [sys.executable, "-m", "maxramp.compile", *line]
        printed = subprocess.check_output(
            [*command, f"base_output_directory={folder}"],
            text=True,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
    return json.loads(printed)["stages"]


def killed_ramp(folder: str, keys: list[str]) -> dict[str, float]:
    """Compares a ramp that is killed halfway and started again with one that is not."""

    def start(name: str) -> tuple[subprocess.Popen, pathlib.Path]:
        line = [BASE, *KILLED, *keys, f"run_name={name}", f"base_output_directory={folder}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "maxramp.train", *line], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        return process, pathlib.Path(folder, name, "metrics.jsonl")

    def steps(path: pathlib.Path) -> list[dict]:
        return [r for r in read_records(path) if "loss" in r] if path.exists() else []

    alone, alone_path = start("alone")
    if alone.wait():
        sys.exit(f"error: the ramp ended with {alone.returncode}")
    killed, path = start("killed")
    while killed.poll() is None and len(steps(path)) < 110:
        time.sleep(0.2)
    killed.kill()
    killed.wait()
    before = len(steps(path))
    again, _ = start("killed")
    if again.wait():
        sys.exit(f"error: the ramp that was started again ended with {again.returncode}")
    expected, records = steps(alone_path), steps(path)
    if [r["step"] for r in records] != [r["step"] for r in expected]:
        sys.exit("error: the steps of the ramp that was started again are not 0, 1, 2, ...")
    return {
        "steps": len(records),
        "killed_after_step": before,
        "steps_on_other_rows": sum(
            a["batch_fingerprint"] != b["batch_fingerprint"]
            for a, b in zip(expected, records, strict=True)
        ),
        "largest_difference_of_losses": max(
            abs(a["loss"] - b["loss"]) for a, b in zip(expected, records, strict=True)
        ),
    }


def main() -> None:
    options = parser("gpu", __doc__)
    options.add_argument(
        "--preflight", metavar="KIND", help="only compile the runs' stages for a GPU, without one"
    )
    options.add_argument("keys", nargs="*", help="key=value of the runs")
    arguments = options.parse_args()
    if arguments.preflight:
        for model in MODELS:
            for s in preflight(model, arguments.keys, arguments.preflight):
                print(
                    f"{model}  batch {s['global_batch_size']:>3}  "
                    f"{s['memory_gib']['peak']:.2f} GiB, fits: {s['fits']}  roofline "
                    f"{s['step_seconds']:.3f} s, MFU {s['mfu'] or 0:.3f}"
                )
        return
    ask = [
        sys.executable,
        "-c",
        "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)",
    ]
    platform, _, device = subprocess.check_output(ask, text=True).strip().partition(" ")
    if platform not in ("gpu", "cuda"):
        sys.exit(f"error: this benchmark needs an NVIDIA GPU; here is {device}")
    kind = next((kind for kind in GPUS if kind.upper() in device), None)
    if kind is None:
        sys.exit(f"error: {device} is not in maxramp.planning.gpu.GPUS ({', '.join(GPUS)}); add it")
    peak = GPUS[kind].peak_tflops
    printed = subprocess.check_output([sys.executable, "-c", EQUALITY], text=True, cwd=ROOT)
    figures: dict = {"attention": json.loads(printed.splitlines()[-1]), "models": {}}
    print("attention: cudnn_flash against dot_product,", figures["attention"], flush=True)
    printed = subprocess.check_output([sys.executable, "-c", TIMES], text=True, cwd=ROOT)
    figures["attention of packed rows, ms"] = json.loads(printed.splitlines()[-1])
    print(printed, flush=True)
    save(arguments.json, figures, [device])
    for model in MODELS:
        stage_figures, used = stages(model, arguments.keys, peak)
        foreseen = max(s["memory_gib"]["peak"] for s in preflight(model, arguments.keys, kind))
        memory = {"peak_gib": used, "preflight_gib": foreseen, "ratio": used / foreseen}
        figures["models"][model] = {"stages": stage_figures, "memory": memory}
        for s in stage_figures:
            print(
                f"{model}  batch {s['global_batch_size']:>3}  {s['tflops_per_device']:6.1f} "
                f"TFLOP/s  MFU {s['mfu']:.3f}  first step {s['first_over_median']:.2f} x"
            )
        print(
            f"{model}  memory {used:.2f} GiB, {used / foreseen:.3f} of the preflight's", flush=True
        )
        save(arguments.json, figures, [device])
    with tempfile.TemporaryDirectory() as folder:
        figures["killed ramp"] = killed_ramp(folder, arguments.keys)
    print("killed ramp:", figures["killed ramp"])
    save(arguments.json, figures, [device])


if __name__ == "__main__":
    main()
