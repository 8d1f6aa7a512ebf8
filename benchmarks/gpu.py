"""Model FLOPs utilization of each stage of a ramp on one GPU, for 1B and 3B Llama shapes.

Also whether the attention kernel computes what plain products do. Needs an NVIDIA GPU.

python benchmarks/gpu.py [--json FILE] [key=value ...]
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from figures import ROOT, parser, save

# Dense bfloat16 TFLOP/s by the makers' data sheets.
PEAK = {"H200": 989, "H100": 989, "A100": 312, "B200": 2250, "L4": 121}
MODELS = {
    "llama3.2-1b": ("per_device_batch_size=16", "per_device_batch_size_start=4"),
    "llama3.2-3b": ("per_device_batch_size=8", "per_device_batch_size_start=2"),
}
RAMP = [
    "steps=60",
    "max_target_length=4096",
    "dtype=bfloat16",
    "dataset_type=synthetic",
    "enable_checkpointing=False",
    "eval_interval=-1",
    "remat_policy=minimal",
    "hardware=gpu",
    "enable_tensorboard=False",
    "loss_block_tokens=4096",
]
EQUALITY = """
import jax, jax.numpy as jnp, json, numpy as np
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.model.attention import causal_attention
from maxramp.parallel import mesh as mesh_lib
keys = ["dtype=bfloat16", "enable_rampup_batch_size=False", "per_device_batch_size=1"]
config = resolve(load(["configs/base.yml", *keys]), 1, 1, 1)
random = np.random.default_rng(0)
q, k, v = (jnp.asarray(random.normal(size=(2, 1024, n, 64)), jnp.bfloat16) for n in (8, 2, 2))
segments = jnp.asarray(np.cumsum(random.random((2, 1024)) < 0.005, axis=1), jnp.int32)
found = {}
with jax.set_mesh(mesh_lib.make_mesh(config.mesh)):
    for name, s in (("", None), (", documents", segments)):
        def run(which, q=q, k=k, v=v):
            def f(q, k, v):
                out = causal_attention(q, k, v, which, s).astype(jnp.float32)
                return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum(), out
            return jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        pairs = zip(jax.tree.leaves(run("cudnn_flash")), jax.tree.leaves(run("dot_product")))
        found["largest deviation over the largest value" + name] = max(
            float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()
                  / jnp.abs(b.astype(jnp.float32)).max()) for a, b in pairs)
print(json.dumps(found))
"""


def stages(model: str, keys: list[str], peak: float) -> list[dict[str, float]]:
    """Medians of every stage of a run, without its first steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "maxramp.train",
            str(ROOT / "configs" / "base.yml"),
            f"base_output_directory={folder}",
            f"run_name={model}",
            f"model_name={model}",
            *keys,
        ]
        subprocess.run(command, check=True, cwd=ROOT)
        lines = pathlib.Path(folder, model, "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = []
    for index in sorted({record["stage"] for record in records}):
        steps = [record for record in records if record["stage"] == index]
        tflops = statistics.median(record["tflops_per_device"] for record in steps[2:])
        seconds = statistics.median(record["step_seconds"] for record in steps[2:])
        found.append(
            {
                "global_batch_size": steps[0]["global_batch_size"],
                "tflops_per_device": tflops,
                "mfu": tflops / peak,
                "step_seconds": seconds,
                "first_over_median": steps[0]["step_seconds"] / seconds,
                "compile_seconds": steps[0]["compile_seconds"],
            }
        )
    return found


def main() -> None:
    options = parser("gpu", __doc__)
    options.add_argument("keys", nargs="*", help="key=value of the runs")
    arguments = options.parse_args()
    ask = [
        sys.executable,
        "-c",
        "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)",
    ]
    platform, _, kind = subprocess.check_output(ask, text=True).strip().partition(" ")
    if platform not in ("gpu", "cuda"):
        sys.exit(f"error: this benchmark needs an NVIDIA GPU; here is {kind}")
    peak = next((peak for name, peak in PEAK.items() if name in kind), None)
    if peak is None:
        sys.exit(f"error: the peak of {kind} is not in PEAK ({', '.join(PEAK)}); add it")
    printed = subprocess.check_output([sys.executable, "-c", EQUALITY], text=True, cwd=ROOT)
    figures: dict = {"attention": json.loads(printed.splitlines()[-1]), "models": {}}
    print("attention: cudnn_flash against dot_product,", figures["attention"])
    for model, sizes in MODELS.items():
        start = sizes[1].partition("=")[2]
        ramp = (
            f"per_device_batch_size_increment={start}",
            f"global_rampup_samples={60 * int(start)}",
        )
        figures["models"][model] = stages(model, [*RAMP, *sizes, *ramp, *arguments.keys], peak)
        for s in figures["models"][model]:
            print(
                f"{model}  batch {s['global_batch_size']:>3}  {s['tflops_per_device']:6.1f} "
                f"TFLOP/s  MFU {s['mfu']:.3f}  first step {s['first_over_median']:.2f} x"
            )
    save(arguments.json, figures, [kind])


if __name__ == "__main__":
    main()
