"""Our train step against a bare hand-written one, interleaved in one run.

Both in a process that is set up as the trainer's is: on one CPU device it keeps a step's memory.

python benchmarks/step.py [--json FILE]
"""

import functools
import statistics
import time

import bare
import jax
import numpy as np
from figures import parser, save

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data.batch import Batch
from maxramp.keys.base import CONFIGS
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.processes import backend, heap
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import initial_state
from maxramp.training.step import make_train_step

# name: (D, layers, heads, kv heads, MLP, vocabulary, tokens, rows, accumulation)
SIZES = {
    "default, batch 8": (128, 4, 4, 2, 384, 320, 128, 8, 1),
    "default, batch 32": (128, 4, 4, 2, 384, 320, 128, 32, 1),
    "default, batch 8 x 4": (128, 4, 4, 2, 384, 320, 128, 8, 4),
    "wide": (512, 2, 8, 4, 1536, 4096, 128, 8, 1),
    "deep": (128, 16, 4, 4, 384, 320, 64, 8, 2),
}
ROUNDS = 15


def ours(size, batch, *keys):
    D, L, H, K, F, V, T, B, A = size
    config = load(
        [
            str(CONFIGS / "base.yml"),
            f"base_emb_dim={D}",
            f"base_num_decoder_layers={L}",
            f"base_num_query_heads={H}",
            f"base_num_kv_heads={K}",
            f"base_mlp_dim={F}",
            f"vocab_size={V}",
            "head_dim=32",
            f"max_target_length={T}",
            f"per_device_batch_size={B}",
            "jax_cache_dir=",
            f"gradient_accumulation_steps={A}",
            "enable_rampup_batch_size=False",
            *keys,
        ]
    )
    config = resolve(config, 1, 1, 1)
    jax.set_mesh(mesh_lib.make_mesh(config.mesh))
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch))
    state = initial_state(config.recipe)
    step = make_train_step(config.recipe, rate)
    tokens, targets = (jax.device_put(x, BATCH_ABT) for x in (batch[..., :-1], batch[..., 1:]))
    hashes = jax.device_put(np.zeros((A, B, 2), np.uint32), BATCH_ABT)
    batch = Batch(tokens, targets, hashes=hashes)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()

    def run():
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    return run


def hand_written(size, batch):
    D, L, H, K, F, V, _, _, _ = size
    make = functools.partial(bare.init, D=D, H=H, K=K, h=32, F=F, V=V, L=L)
    params = jax.jit(make)(jax.random.key(0))
    zeros = jax.jit(functools.partial(jax.tree.map, jax.numpy.zeros_like))
    state = [params, zeros(params), zeros(params), jax.numpy.float32(0)]
    step = functools.partial(bare.step, dtype=jax.numpy.float32, rate=1e-3)
    batch = jax.numpy.asarray(batch)
    compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*state, batch).compile()

    def run():
        *state[:], metrics = compiled(*state, batch)
        return metrics

    return run


def seconds(run) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def main() -> None:
    arguments = parser("step", __doc__).parse_args()
    base = str(CONFIGS / "base.yml")
    backend.start(load([base, "jax_cache_dir="]).backend)
    heap.keep(0)
    figures = {}
    print(f"{'size':22s} {'ours':>9s} {'bare':>9s} {'ours / bare':>12s}   median of {ROUNDS} pairs")
    for name, size in SIZES.items():
        *_, V, T, B, A = size
        batch = np.random.default_rng(0).integers(0, V, (A, B, T + 1), dtype=np.int32)
        with jax.set_mesh(jax.make_mesh((1,), ("none",))):
            second = hand_written(size, batch)
        first = ours(size, batch)
        seconds(first), seconds(second)
        pairs = [(seconds(first), seconds(second)) for _ in range(ROUNDS)]
        a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(x / y for x, y in pairs)
        figures[name] = {"ours_seconds": a, "bare_seconds": b, "ratio": ratio}
        print(f"{name:22s} {a * 1e3:6.1f} ms {b * 1e3:6.1f} ms {ratio:12.3f}", flush=True)
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
