"""Generation: tokens per second, and what a step of it costs beside its matrix products.

python benchmarks/generate.py [--json FILE]

Rounds of what is compared are interleaved, and medians are reported. `forward` runs the jitted
forward pass over the whole rows for every token, as generation without a cache does. `products` are
the matrix products of a step with the same weights, alone, in a loop of their own.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import statistics
import time

import figures
import jax
import jax.numpy as jnp
import numpy as np

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.generation.generator import GenerationConfig, Generator
from maxramp.generation.sampling import Sampling
from maxramp.model.decoder import Decoder, num_parameters
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.sharding import REPLICATED

BASE = str(figures.ROOT / "configs" / "base.yml")
MODELS = {
    "base.yml": (),
    "width 512": (
        *("base_emb_dim=512", "base_num_query_heads=8", "base_num_kv_heads=4", "head_dim=64"),
        *("base_mlp_dim=1536", "base_num_decoder_layers=8", "vocab_size=8192"),
    ),
}
BATCH, PROMPT, NEW, ROUNDS = 8, 32, 96, 7
SHOWN = 4  # of the new tokens, by the whole prefix: each takes as long as the others


def products(model, x_BD, steps):
    """Computes a step's products `steps` times, each from the result of the one before."""

    einsum = functools.partial(jnp.einsum, out_sharding=REPLICATED)

    def step(_, x):
        for block in model.layers:
            a, m = block.mixer, block.mlp
            q = einsum("BD,DHh->BHh", x, a.query_DHh[...])
            k = einsum("BD,DKh->BKh", x, a.key_DKh[...])
            v = einsum("BD,DKh->BKh", x, a.value_DKh[...])
            q = q + (k + v).mean()
            x = einsum("BHh,HhD->BD", q, a.out_HhD[...])
            up = einsum("BD,DF->BF", x, m.gate_DF[...]) + einsum("BD,DF->BF", x, m.up_DF[...])
            x = einsum("BF,FD->BD", up, m.out_FD[...])
        logits = einsum("BD,DV->BV", x, model.head(x_BD.dtype))
        return (x + logits.mean()) * 1e-3

    return jax.lax.fori_loop(0, steps, step, x_BD)


def measure(keys):
    """Seconds of each way, by round, and the model's size."""
    length = PROMPT + NEW
    constant = ("enable_rampup_batch_size=False", "per_device_batch_size=8")
    config = resolve(load([BASE, *constant, f"max_target_length={length}", *keys]), 1, 1, 1)
    jax.set_mesh(mesh_lib.make_mesh(config.mesh))
    model = jax.jit(lambda: Decoder(config.model, jax.random.key(0)))()
    generator = Generator(config.model, model, GenerationConfig(NEW, Sampling(temperature=0)))
    weights = generator.prepare(model)
    layers = generator._structure.unflatten(weights)
    random = np.random.default_rng(0)
    prompts = list(random.integers(0, 250, (BATCH, PROMPT), dtype=np.int32))
    execution = config.model
    forward = jax.jit(functools.partial(Decoder.__call__, execution=execution))
    bare = jax.jit(products)

    def cached():
        generator.answer(weights, prompts)

    def first():
        next(generator.stream(weights, prompts))

    def whole_prefix():
        tokens = np.zeros((BATCH, length), np.int32)
        tokens[:, :PROMPT] = prompts
        for at in range(PROMPT, PROMPT + SHOWN):
            tokens[:, at] = np.asarray(forward(model, tokens)[:, at - 1].argmax(-1))

    def bare_products():
        x = jnp.ones((BATCH, config.model.base_emb_dim), config.model.dtype)
        bare(layers, x, NEW).block_until_ready()

    ways = {"cached": cached, "first": first, "forward": whole_prefix, "products": bare_products}
    seconds = {name: [] for name in ways}
    for round in range(ROUNDS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if round:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    return seconds, num_parameters(model)


def main():
    options = figures.parser("generate", __doc__).parse_args()
    report = {}
    for name, keys in MODELS.items():
        seconds, weights = measure(keys)
        median = {way: statistics.median(values) for way, values in seconds.items()}
        # Of a round: all tokens less the prompt and the first of them.
        step = statistics.median(
            (all_ - one) / (NEW - 1)
            for all_, one in zip(seconds["cached"], seconds["first"], strict=True)
        )
        ratio = statistics.median(
            (all_ - one) / (NEW - 1) / (bare / NEW)
            for all_, one, bare in zip(
                seconds["cached"], seconds["first"], seconds["products"], strict=True
            )
        )
        report[name] = {
            "weights": weights,
            "tokens_per_second": BATCH * NEW / median["cached"],
            "times_as_fast_as_the_whole_prefix": median["forward"]
            / SHOWN
            / (median["cached"] / NEW),
            "step_ms": 1e3 * step,
            "step_over_its_products": ratio,
        }
        print(
            f"{name}: {weights / 1e6:.2f}M weights, batch {BATCH}, {PROMPT} + {NEW} tokens: "
            f"{report[name]['tokens_per_second']:,.0f} tokens/s, "
            f"{report[name]['times_as_fast_as_the_whole_prefix']:.1f} times the speed of the whole "
            f"prefix; a step {1e3 * step:.3f} ms, {ratio:.2f} times its products"
        )
    figures.save(options.json, report)


if __name__ == "__main__":
    main()
