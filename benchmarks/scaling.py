"""How lowering, compiling and the program's size grow with layers, stages and the mesh.

Layers and stages on this machine's CPU; meshes as abstract TPU pods, where libtpu is installed.

python benchmarks/scaling.py [--json FILE]
"""

import contextlib
import importlib.util
import os
import time

import jax
from figures import ROOT, parser, save
from jax.experimental import topologies

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.parallel.compiler import compiler_options
from maxramp.parallel.mesh import make_mesh
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import lower_step

SMALL = [
    "base_emb_dim=64",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "head_dim=32",
    "base_mlp_dim=128",
    "max_target_length=128",
    "enable_rampup_batch_size=False",
    "per_device_batch_size=8",
    "jax_cache_dir=",
]
POD = [
    "model_name=llama3.2-1b",
    "dtype=bfloat16",
    "max_target_length=2048",
    "remat_policy=full",
    "per_device_batch_size=2",
    "enable_rampup_batch_size=False",
    "dataset_type=synthetic",
]
TOPOLOGIES = ("v5p:2x2x1", "v5p:2x2x4", "v5p:4x4x4", "v5p:8x8x8")


def resolved(devices: int, *keys: str):
    """Resolves a config for `devices` devices."""
    loaded = load([str(ROOT / "configs" / "base.yml"), *keys])
    return resolve(loaded, devices, 1, 1)


def measure(config, devices, stage_index: int = -1) -> dict[str, float]:
    """Seconds to lower and to compile the step of a stage, and the lines of its program."""
    ramp = RampupBatchManager(config.batch, len(devices))
    rate, spec = LearningRate.from_keys(config.learning_rate, ramp), ramp.stages[stage_index].spec
    start = time.perf_counter()
    lowered = lower_step(config.recipe, rate, spec, make_mesh(config.mesh, devices))
    middle = time.perf_counter()
    compiled = lowered.compile(compiler_options(devices[0].platform) or None)
    end = time.perf_counter()
    return {
        "lower_seconds": middle - start,
        "compile_seconds": end - middle,
        "lowered_lines": len(lowered.as_text().splitlines()),
        "compiled_lines": len(compiled.as_text().splitlines()),
    }


def on_cpu(*keys: str, stage_index: int = -1) -> dict[str, float]:
    return measure(resolved(1, *SMALL, *keys), jax.devices()[:1], stage_index)


def on_pod(topology: str) -> dict[str, float]:
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    return measure(resolved(len(devices), *POD), devices)


def show(name: str, numbers: dict[str, float]) -> dict[str, float]:
    print(
        f"{name:34s} lowered in {numbers['lower_seconds']:5.2f} s ({numbers['lowered_lines']:6.0f} "
        f"lines), compiled in {numbers['compile_seconds']:6.2f} s "
        f"({numbers['compiled_lines']:6.0f})",
        flush=True,
    )
    return numbers


def main() -> None:
    arguments = parser("scaling", __doc__).parse_args()
    figures: dict[str, dict] = {"layers": {}, "layers, unrolled": {}, "stages": {}, "pods": {}}
    on_cpu("base_num_decoder_layers=1")  # the first compile of a process takes longer
    for layers in (2, 8, 32):
        figures["layers"][layers] = show(
            f"{layers} layers", on_cpu(f"base_num_decoder_layers={layers}")
        )
    for layers in (2, 8):
        figures["layers, unrolled"][layers] = show(
            f"{layers} layers, scan_layers=False",
            on_cpu(f"base_num_decoder_layers={layers}", "scan_layers=False"),
        )
    for index, size in enumerate((8, 16, 32, 64)):
        ramp = ("step_batch_size_schedule=0:8 800:16 2400:32 5600:64", "steps=400")
        numbers = on_cpu(*ramp, "step_batch_size_unit=samples", stage_index=index)
        figures["stages"][size] = show(f"stage {index}, batch {size}", numbers)
    if importlib.util.find_spec("libtpu"):
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost"
        )
        for topology in TOPOLOGIES:
            with contextlib.suppress(KeyboardInterrupt):
                figures["pods"][topology] = show(f"Llama 3.2 1B on {topology}", on_pod(topology))
    else:
        print("no libtpu here (python -m pip install libtpu): no pods")
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
