"""bfloat16 arithmetic: gradients that do not depend on how many tokens a pass has.

Shapes: R rows, S tokens of a row and the one after it.
"""

import jax
import numpy as np
import pytest
from conftest import ROOT, batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.parallel.sharding import ROWS_BT
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import abstract_state

ROWS, PASS, LENGTH, VOCAB = 1024, 64, 16, 264

# One model of every shipped family, at a small size.
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yml"))
# Where rounding cannot change which experts a token takes.
DENSE = [n for n in MODELS if "num_experts" not in (ROOT / f"configs/models/{n}.yml").read_text()]
FAMILIES = {name.split("-")[0]: name for name in DENSE}
MORE = ("gemma2", "gemma3", "olmo2", "olmo3", "qwen2.5", "qwen3", "smollm2")
MESHES = {"one device": (1, 1, 1), "a mesh": (2, 2, 2)}


def rows():
    """Text in which, as in any, few tokens are most of it."""
    tokens_RS = np.random.default_rng(0).zipf(1.5, (ROWS, LENGTH + 1)) % VOCAB
    return tokens_RS.astype(np.int32)


def gradients(mesh_sizes, rows_a_pass, *arguments):
    """Sums over all rows, added up in float64 over passes of so many: by name, and the loss."""
    axes = zip(("data", "fsdp", "tensor"), mesh_sizes, strict=True)
    keys = [f"ici_{axis}_parallelism={size}" for axis, size in axes]
    config = make_config(
        "enable_rampup_batch_size=False",
        "per_device_batch_size=1",
        *keys,
        *arguments,
        devices=int(np.prod(mesh_sizes)),
    )
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


def test_all_families_are_here():
    llamas = {"llama2", "llama3", "llama3.1", "llama3.2", "mistral"}
    assert FAMILIES.keys() == {*llamas, *MORE}


LIKE_LLAMA3 = ("llama2", "llama3.1", "mistral", "qwen2.5", "smollm2")


def error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        # Which compute as llama3 does, but for angles, windows and biases.
        *(pytest.param(x, "one device", marks=pytest.mark.long) for x in LIKE_LLAMA3),
        ("llama3", "one device"),
        ("llama3.2", "a mesh"),
        *((family, "one device") for family in MORE if family not in LIKE_LLAMA3),
    ],
)
def test_gradients_of_a_large_pass(family, mesh):
    """One pass over all rows, and 16 that are added up: near float32's, and near each other.

    bfloat16 has 8 bits, so that what is rounded once is within 1/256; a sum in bfloat16 loses all
    that is less than 1/256 of it.
    """
    exact, small, large = (
        gradients(MESHES[mesh], rows_a_pass, f"model_name={FAMILIES[family]}", f"dtype={dtype}")
        for dtype, rows_a_pass in (("float32", PASS), ("bfloat16", PASS), ("bfloat16", ROWS))
    )
    for name in exact:
        assert error(small[name], exact[name]) < 0.02, name
        assert error(large[name], exact[name]) < 0.02, name
        assert error(large[name], small[name]) < 1 / 256, name
    assert error(large["loss"], small["loss"]) < 1e-6
