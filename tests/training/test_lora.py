"""Adapters: one update on every mesh; the base stays as it is and is not kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding
from one_step import by_name

from maxramp.model.adapters import is_adapter, stored_part
from maxramp.model.families.table import FAMILIES
from maxramp.model.keys import LORA_MODULES
from maxramp.model.parts.weights import map_weights, weights_of
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.training.state import abstract_state, init_state
from maxramp.training.step import make_train_step

LORA = ("lora_rank=4", "lora_alpha=6", "gradient_clipping_threshold=0", "opt_type=sgd")
DROPS, TENSOR = "lora_dropout=0.25", "ici_tensor_parallelism=2"
RATE = 0.5


def stepped(passes, *keys, consumed=0, devices=8):
    """Weights by name before and after a step from adapters that are not zero, and its loss."""
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={16 / devices}")
    config = make_config(*constant, *LORA, *keys, devices=devices)
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
        states = [by_name(order_by_layer(s.model)) for s in (state, after)]
    return *states, float(metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "keys"),
    [
        (2, (DROPS, TENSOR, "ici_data_parallelism=2", "ici_fsdp_parallelism=2")),
        (1, ("ici_pipeline_parallelism=2", "ici_data_parallelism=2", "ici_fsdp_parallelism=2")),
        (2, (DROPS, TENSOR, "ici_fsdp_parallelism=4", "remat_policy=minimal")),
    ],
)
def test_an_update_is_that_of_one_device_on_every_mesh(passes, keys):
    """In any number of passes, with all that is dropped; the base does not change a bit."""
    first, last, loss = stepped(passes, *keys)
    _, expected, expected_loss = stepped(1, *{DROPS}.intersection(keys), devices=1)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, weight in last.items():
        is_trained = name.endswith(("down", "up"))
        assert (weight != first[name]).any() == is_trained, name
        np.testing.assert_allclose(weight, expected[name], atol=1e-6 * is_trained, err_msg=name)


@pytest.mark.slow
def test_other_rows_of_the_run_drop_others():
    *_, loss = stepped(1, DROPS)
    *_, other = stepped(1, DROPS, consumed=16)
    *_, none = stepped(1)
    assert len({loss, other, none}) == 3
    assert other == pytest.approx(none, rel=1e-2)


def test_only_adapters_have_a_state_of_the_optimizer():
    config = make_config("lora_rank=2", "lora_targets=[q_proj,down_proj]", "weight_dtype=bfloat16")
    state = abstract_state(config.recipe, make_mesh(config))
    stored = stored_part(state.model)
    paths = jax.tree.leaves_with_path(stored, is_leaf=lambda x: hasattr(x, "role"))
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
