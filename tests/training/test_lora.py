"""Adapters: the update of one by hand, on every mesh; the base stays as it is and is not kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.model.adapters import is_adapter, stored_part, without_adapters
from maxramp.model.families.table import FAMILIES
from maxramp.model.keys import LORA_MODULES
from maxramp.model.parts.weights import map_weights, weights_of
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import abstract_state, init_state
from maxramp.training.step import make_train_step

CONSTANT = ("enable_rampup_batch_size=False", "per_device_batch_size=2", "opt_type=sgd")
LORA = ("lora_rank=4", "lora_alpha=6", "gradient_clipping_threshold=0")
RATE = 0.5


def stepped(passes, *keys, consumed=0):
    """The states, on the host in layer order, before and after a step on 16 rows from adapters that
    are not zero."""
    config = make_config(*CONSTANT, *LORA, *keys)
    mesh = make_mesh(config)
    step = make_train_step(config.recipe, lambda samples, rows: jnp.float32(RATE))

    def begin():
        state = init_state(config.recipe)
        number = iter(range(100))

        def turned(weight):
            wave = jnp.sin(jnp.arange(weight.size, dtype=jnp.float32) + next(number))
            spec = jax.typeof(weight[...]).sharding.spec
            return weight.replace(jax.lax.reshape(0.1 * wave, weight.shape, out_sharding=spec))

        clock = jnp.array([consumed, 0], jnp.uint32)
        trained = map_weights(turned, state.trained)
        return dataclasses.replace(state, trained=trained, consumed_samples=clock)

    rows = np.random.default_rng(0).integers(0, 264, (passes, 16 // passes, 17), dtype=np.int32)
    with jax.set_mesh(mesh):
        state = jax.jit(begin)()
        batch = jax.device_put(batch_of(rows), NamedSharding(mesh, BATCH_ABT))
        after, metrics = jax.jit(step)(state, batch)
        states = [jax.device_get(order_by_layer(s.model)) for s in (state, after)]
    return config, *states, batch, float(metrics["loss"])


def by_path(model):
    leaves = jax.tree.leaves_with_path(model, is_leaf=lambda x: hasattr(x, "role"))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(weight[...])
        for path, weight in leaves
    }


def by_hand(before, batch):
    """The adapters after the step, from the plain model of W + scale * down @ up in each place."""
    config = make_config(*CONSTANT, devices=1)
    objective = next_token_prediction(config.recipe.loss, config.model)
    adapters = {k: x for k, x in by_path(before).items() if k.endswith(("down", "up"))}
    names = {name.rpartition(".")[0] for name in adapters}

    def loss(adapters):
        def adapted(path, weight):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if name not in names:
                return weight
            down, up = adapters[f"{name}.down"], adapters[f"{name}.up"]
            layers, rank = len(down), down.shape[-1]
            down, up = down.reshape(layers, -1, rank), up.reshape(layers, rank, -1)
            product = jnp.matmul(down, up, precision="highest")
            return weight.replace(weight[...] + 6 / 4 * product.reshape(weight.shape))

        model = jax.tree_util.tree_map_with_path(
            adapted, without_adapters(before), is_leaf=lambda x: hasattr(x, "role")
        )
        total, aux = objective(model, jax.tree.map(lambda x: x.reshape(16, *x.shape[2:]), batch))
        return total / aux.shown["tokens"]

    with jax.set_mesh(make_mesh(config)):
        batch = jax.device_get(batch)
        value, gradient = jax.jit(jax.value_and_grad(loss))(adapters)
    return float(value), {name: x - RATE * gradient[name] for name, x in adapters.items()}


MESHES = [
    (2, "ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"),
    (1, "ici_data_parallelism=2", "ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2"),
    (2, "ici_tensor_parallelism=4", "ici_fsdp_parallelism=2", "remat_policy=minimal"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "a", "b", "c"), [*MESHES[:2], pytest.param(*MESHES[2], marks=pytest.mark.long)]
)
def test_an_update_is_that_of_one_by_hand(passes, a, b, c):
    """On every mesh, in any number of passes; the base does not change a bit."""
    _, before, after, batch, loss = stepped(passes, a, b, c)
    value, expected = by_hand(before, batch)
    assert loss == pytest.approx(value, rel=1e-5)
    first, last = by_path(before), by_path(after)
    assert {name for name in last if name.endswith(("down", "up"))} == expected.keys()
    for name, weight in last.items():
        if name in expected:
            moved = np.abs(expected[name] - first[name]).max()
            np.testing.assert_allclose(weight, expected[name], atol=1e-3 * moved, rtol=0)
            assert moved > 0
        else:
            np.testing.assert_array_equal(weight, first[name], err_msg=name)


@pytest.mark.slow
def test_dropout_follows_from_the_rows():
    """Any split on any mesh drops the same; other rows of the run drop others."""
    drops = "lora_dropout=0.25"
    *_, one, _, loss = stepped(1, drops, "ici_data_parallelism=8")
    *_, two, _, same = stepped(2, drops, "ici_tensor_parallelism=2", "ici_fsdp_parallelism=4")
    *_, other = stepped(1, drops, "ici_data_parallelism=8", consumed=16)
    *_, none = stepped(1, "ici_data_parallelism=8")
    one, two = by_path(stored_part(one)), by_path(stored_part(two))
    for name, weight in one.items():
        np.testing.assert_allclose(weight, two[name], atol=1e-6, err_msg=name)
    assert same == pytest.approx(loss, rel=1e-6)
    assert len({loss, other, none}) == 3
    assert other == pytest.approx(none, rel=1e-2)


def test_only_adapters_have_a_state_of_the_optimizer():
    config = make_config("lora_rank=2", "lora_targets=[q_proj,down_proj]", "weight_dtype=bfloat16")
    state = abstract_state(config.recipe, make_mesh(config))
    paths = jax.tree.leaves_with_path(
        stored_part(state.model), is_leaf=lambda x: hasattr(x, "role")
    )
    names = {path[-2].name for path, _ in paths}
    assert names == {"query_DHh", "out_FD"}
    moments = weights_of(state.opt_state)
    assert len(moments) == 2 * 2 * 2 and all(map(is_adapter, moments))
    assert {str(weight.dtype) for weight in moments} == {"float32"}
    assert {str(weight.dtype) for weight in weights_of(state.frozen)} == {"bfloat16"}


def test_names_are_those_of_every_family():
    for family in FAMILIES.values():
        named = {name.split(".")[-2] for name in family.tensors.values()}
        assert set(LORA_MODULES) >= {name for name in named if name.endswith("_proj")}
