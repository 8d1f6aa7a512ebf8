"""bfloat16: gradients do not depend on the tokens of a pass. R rows of S = T + 1 tokens."""

import math

import jax
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.parallel.sharding import ROWS_BT
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import abstract_state

ROWS, PASS, LENGTH, VOCAB = 1024, 64, 16, 264

# A model of each family that does not choose experts, which rounding may change. The first compute
# as llama3 does, but for angles, windows and biases.
ALIKE = ("llama2-7b", "llama3.1-8b", "mistral-7b", "qwen2.5-7b", "smollm2-135m", "llama3-8b")
ALIKE += ("olmo2-7b",)  # but for windows as olmo3
OTHERS = ("gemma2-2b", "gemma3-4b", "olmo3-7b", "qwen3-8b")
MESHES = {"one device": (1, 1, 1), "a mesh": (2, 2, 2)}


def rows():
    """Text in which, as in any, few tokens are most of it."""
    tokens_RS = np.random.default_rng(0).zipf(1.5, (ROWS, LENGTH + 1)) % VOCAB
    return tokens_RS.astype(np.int32)


def gradients(mesh_sizes, rows_a_pass, *arguments):
    """Sums over all rows, added up in float64 over passes of so many: by name, and the loss."""
    axes = zip(("data", "fsdp", "tensor"), mesh_sizes, strict=True)
    keys = [f"ici_{axis}_parallelism={size}" for axis, size in axes]
    keys += ["enable_rampup_batch_size=False", "per_device_batch_size=1", *arguments]
    config = make_config(*keys, devices=math.prod(mesh_sizes))
    mesh, random, sums = make_mesh(config), np.random.default_rng(0), {}

    def weight(path, x):
        values = np.ones(x.shape) if "scale_D" in str(path) else random.normal(0, 0.2, x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    @jax.jit
    def gradient(model, batch):
        objective = next_token_prediction(config.loss, config.model)
        return jax.grad(objective, has_aux=True)(model.cast(config.model.dtype), batch)

    with jax.set_mesh(mesh):
        model = jax.tree_util.tree_map_with_path(weight, abstract_state(config.recipe, mesh).model)
        for rows_RS in np.split(rows(), ROWS // rows_a_pass):
            placed = jax.device_put(batch_of(rows_RS), NamedSharding(mesh, ROWS_BT))
            gradients, aux = gradient(model, placed)
            shown = aux.shown
            assert shown["tokens"] == rows_RS[:, 1:].size
            for path, x in [*jax.tree.leaves_with_path(gradients), ("loss", shown["loss"])]:
                name = jax.tree_util.keystr(path) if path != "loss" else path
                sums[name] = sums.get(name, 0) + np.asarray(x, np.float64)
    return sums


def error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, "one device") for name in OTHERS),
        ("llama3.2-1b", "a mesh"),
        *(pytest.param(name, "one device", marks=pytest.mark.long) for name in ALIKE),
    ],
)
def test_gradients_of_a_large_pass(name, mesh):
    """One pass and 16 added up: within 1/256 of float32 as if rounded once, no bfloat16 sum."""
    exact, small, large = (
        gradients(MESHES[mesh], rows_a_pass, f"model_name={name}", f"dtype={dtype}")
        for dtype, rows_a_pass in (("float32", PASS), ("bfloat16", PASS), ("bfloat16", ROWS))
    )
    for weight in exact:
        assert error(small[weight], exact[weight]) < 0.02, weight
        assert error(large[weight], exact[weight]) < 0.02, weight
        assert error(large[weight], small[weight]) < 1 / 256, weight
    assert error(large["loss"], small["loss"]) < 1e-6
