"""A train step that estimates the noise scale against one that does not, interleaved in one run.

python benchmarks/noise_scale.py [--rounds 20] [--json FILE]
"""

import statistics

import numpy as np
from figures import parser, save
from step import ours, seconds

from maxramp.config.load import load
from maxramp.keys.base import CONFIGS
from maxramp.processes import backend, heap

# name: (D, layers, heads, kv heads, MLP, vocabulary, tokens, rows, accumulation)
SIZES = {
    "8 x 128 tokens": (128, 4, 4, 2, 384, 320, 128, 8, 1),
    "4 passes of 8 x 128 tokens": (128, 4, 4, 2, 384, 320, 128, 8, 4),
    "4 passes of 8 x 512 tokens": (128, 4, 4, 2, 384, 320, 512, 8, 4),
    "wide, 2 passes of 4 x 512 tokens": (512, 2, 8, 4, 1536, 4096, 512, 4, 2),
}


def main() -> None:
    options = parser("noise_scale", __doc__)
    options.add_argument("--rounds", type=int, default=20, help="pairs of steps (20)")
    arguments = options.parse_args()
    backend.start(load([str(CONFIGS / "base.yml"), "jax_cache_dir="]).backend)
    heap.keep(0)
    figures = {}
    print(f"{'a step of':34s} {'without':>10s} {'with / without':>15s}")
    for name, size in SIZES.items():
        *_, V, T, B, A = size
        batch = np.random.default_rng(0).integers(0, V, (A, B, T + 1), dtype=np.int32)
        without, with_it = (
            ours(size, batch, f"log_gradient_noise_scale={logged}") for logged in (False, True)
        )
        for run in (without, with_it, without, with_it):
            seconds(run)
        pairs = []
        for turn in range(arguments.rounds):  # each is the first of every second pair
            order = (without, with_it) if turn % 2 else (with_it, without)
            times = {run: seconds(run) for run in order}
            pairs.append((times[with_it], times[without]))
        ratio = statistics.median(a / b for a, b in pairs)
        base = statistics.median(b for _, b in pairs)
        figures[name] = {"without_seconds": base, "ratio": ratio}
        print(f"{name:34s} {base * 1e3:7.1f} ms {ratio:15.4f}", flush=True)
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
