"""Attention by our kernel for GPUs beside cuDNN's, and the memory of each kernel's programs.

With a GPU: milliseconds of the forward pass, and of it and the backward pass, in under a minute.
With --preflight: temporaries of both passes at 8,192 and 32,768 tokens, by the compiler of a GPU or
a TPU that need not be there.

python benchmarks/attention.py [--json FILE] [--preflight h200:1x1 or v5p-8]
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from figures import ROOT, parser, save
from jax.sharding import AxisType, NamedSharding

sys.path.insert(0, str(ROOT))

from maxramp.model.parts.attention import AttentionMask, attend
from maxramp.model.parts.positions import Positions
from maxramp.parallel.axes import AXES
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.sharding import ROWS_BT, X_BTHh
from maxramp.planning import gpu, machine, topology

# Heads and their width; the rule; tokens of a document (0: no packing, so cuDNN without a cap).
NARROW, WIDE = (32, 8, 128), (16, 8, 256)
GEMMA = {"cap": 50.0, "scale": 256**-0.5}
CASES = {
    "causal, cuDNN": (NARROW, {}, 0),
    "causal, ours": (NARROW, {}, 10**9),
    "window of 1,024, cuDNN": (NARROW, {"window": 1024}, 0),
    "window of 1,024, ours": (NARROW, {"window": 1024}, 10**9),
    "documents of 512, ours": (NARROW, {}, 512),
    "heads of 256, cuDNN": (WIDE, {}, 0),
    "heads of 256, ours": (WIDE, {}, 10**9),
    "heads of 256, cap, ours": (WIDE, GEMMA, 0),
}


def shapes(case: str, tokens: int, rows: int) -> list[tuple[tuple[int, ...], type]]:
    (H, K, h), _, _ = CASES[case]
    return [*(((rows, tokens, n, h), jnp.bfloat16) for n in (H, K, K)), ((rows, tokens), jnp.int32)]


def functions(case: str, kernel: str) -> dict:
    """Returns the forward and the training function of a kernel, of q, k, v and segments."""
    _, rule, document = CASES[case]

    def cudnn(q, k, v):
        window = {"local_window_size": (rule["window"] - 1, 0)} if rule else {}
        options = {"is_causal": True, "implementation": "cudnn", **window}
        return jax.nn.dot_product_attention(q, k, v, **options)

    def forward(q, k, v, segments):
        if case.endswith("cuDNN") and kernel == "cudnn_flash":  # `attend` chooses itself
            return map_shards(cudnn, (X_BTHh,) * 3, X_BTHh)(q, k, v)
        return attend(
            q, k, v, AttentionMask(Positions(segments if document else None), **rule), kernel
        )

    def forward_and_backward(q, k, v, segments):
        out, pull = jax.vjp(lambda *qkv: forward(*qkv, segments), q, k, v)
        return pull(out)

    return {"forward": forward, "both": forward_and_backward}


def milliseconds(function, arrays) -> float:
    function = jax.jit(function)
    jax.block_until_ready(function(*arrays))
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([function(*arrays) for _ in range(5)])
        rounds.append((time.perf_counter() - began) * 200)
    return statistics.median(rounds)


@functools.cache
def numbers(heads: int, tokens: int, rows: int, h: int) -> jax.Array:
    random = np.random.default_rng(heads)
    x = random.standard_normal((rows, tokens, heads, h), np.float32)
    return jax.device_put(x.astype(jnp.bfloat16), X_BTHh)


def measure(case: str) -> dict[str, float]:
    tokens, rows, ((H, K, h), _, document) = 8192, 2, CASES[case]
    ends = np.random.default_rng(0).random((rows, tokens)) < 1 / max(document, 1)
    segments = jax.device_put(np.cumsum(ends, axis=1, dtype=np.int32), ROWS_BT)
    q, k = numbers(H, tokens, rows, h), numbers(K, tokens, rows, h)
    ways = functions(case, "cudnn_flash").items()
    return {name: milliseconds(function, (q, k, k, segments)) for name, function in ways}


def preflight(case: str, platform: str, mesh: jax.sharding.Mesh) -> dict[str, float]:
    function = functions(case, "cudnn_flash" if platform == "cuda" else "splash")["both"]
    figures, specs = {}, (*(X_BTHh,) * 3, ROWS_BT)
    for tokens in (8192, 32768):
        arrays = [
            jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, spec))
            for (s, d), spec in zip(shapes(case, tokens, 1), specs, strict=True)
        ]
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,))
        options = {"xla_gpu_autotune_level": 0} if platform == "cuda" else {}
        memory = lowered.compile(options).memory_analysis()
        figures[f"{tokens} tokens, MiB"] = memory.temp_size_in_bytes / 2**20
    return figures


def main() -> None:
    options = parser("attention", __doc__)
    options.add_argument("--preflight", metavar="NAME", help="as in compile_topology")
    arguments = options.parse_args()
    name = arguments.preflight
    devices = jax.devices()
    if name:
        parse = gpu.parse if name.partition(":")[0] in gpu.GPUS else topology.parse
        devices = machine.describe_devices(parse(name))
    platform = "cuda" if devices[0].platform in ("gpu", "cuda") else devices[0].platform
    if platform == "cpu":
        sys.exit("error: this benchmark needs an NVIDIA GPU, or --preflight")
    grid = np.asarray(devices[:1]).reshape((1,) * len(AXES))
    mesh = jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    figures = {}
    with jax.set_mesh(mesh):
        for case in CASES:
            if name and "256, cuDNN" in case:  # jax asks the GPU that is here
                continue
            figures[case] = preflight(case, platform, mesh) if name else measure(case)
            print(f"{case:25}", {k: round(v, 3) for k, v in figures[case].items()}, flush=True)
    save(arguments.json, figures, [name or devices[0].device_kind])


if __name__ == "__main__":
    main()
