"""What trains alone, adapters or chosen layers: on every mesh all else keeps its bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding
from one_step import by_name
from test_step import make_config as make_constant_config
from test_step import train

from maxramp.model.adapters import is_adapter, stored_part
from maxramp.model.families.table import FAMILIES
from maxramp.model.keys import LORA_MODULES
from maxramp.model.parts.weights import map_weights, weights_of
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import abstract_state, init_state, num_trained
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


FAST = 0.5
CHOSEN = [1, 2]
FOUR = ("base_num_decoder_layers=4", "per_device_batch_size=2")
ROWS = np.random.default_rng(0).integers(0, 264, (1, 16, 17), dtype=np.int32)


def trained(*keys, steps=1, devices=8):
    """The configuration, and on the host in layer order the weights before and after some steps on
    the same rows at a rate of FAST, the moments after them, and the last norm of gradients."""
    rate = (f"learning_rate={FAST}", "learning_rate_final_fraction=1")
    config = make_constant_config(*FOUR, *rate, *keys, devices=devices)
    training = train(config, np.repeat(ROWS, steps, 0))
    before, after = training.states
    trees = before.model, after.model, after.opt_state
    trees = [jax.device_get(order_by_layer(tree)) for tree in trees]
    return config, *trees, float(training.metrics["grad_norm"][-1])


def assert_others_stay(before, after):
    """All but the layers CHOSEN, which move, keep their bits."""
    others = [number for number in range(4) if number not in CHOSEN]
    for name, weight in by_name(after).items():
        first = by_name(before)[name]
        kept = others if "layers" in name else slice(None)
        np.testing.assert_array_equal(weight[kept], first[kept], err_msg=name)


def test_a_step_is_that_of_one_by_hand():
    """On a mesh, clipped by the norm of what trains."""
    keys = ("opt_type=sgd", "gradient_clipping_threshold=0.01", f"trainable_layers={CHOSEN}")
    _, before, after, _, grad_norm = trained(*keys, "ici_fsdp_parallelism=2", devices=2)
    assert_others_stay(before, after)

    config = make_constant_config(*FOUR, devices=1)
    objective = next_token_prediction(config.recipe.loss, config.model)
    rows = batch_of(ROWS[0])
    with jax.set_mesh(make_mesh(config)):
        mean = jax.jit(jax.grad(lambda model: objective(model, rows)[0] / (16 * 16)))
        gradient = by_name(mean(before))
    layer_gradients = {name: g[CHOSEN] for name, g in gradient.items() if "layers" in name}
    norm = np.sqrt(sum(np.square(g).sum() for g in layer_gradients.values()))
    assert grad_norm == pytest.approx(norm, rel=1e-4)
    for name, g in layer_gradients.items():
        moved = by_name(before)[name][CHOSEN] - by_name(after)[name][CHOSEN]
        np.testing.assert_allclose(
            moved, FAST * 0.01 / norm * g, atol=1e-3 * np.abs(moved).max() + 1e-7, err_msg=name
        )


PIPELINE = ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2", "ici_data_parallelism=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("opt_type=muon", *PIPELINE, "num_layers_per_pipeline_stage=1"),  # two repeats
        ("opt_type=adamw", "lora_rank=2", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"),
    ],
)
def test_chosen_layers_move_as_if_all_trained(keys):
    """Weights decay there alone; the others have moments of zeros."""
    keys = (*keys, "gradient_clipping_threshold=0", "adam_weight_decay=0.1", "adam_eps=1e-3")
    roles = () if "lora_rank=2" in keys else ("trainable_parameters_mask=[matrix,scale]",)
    *_, whole, _, _ = trained(*keys, *roles)
    chosen = f"trainable_layers={CHOSEN}"
    _, before, after, _, _ = trained(*keys, chosen)
    for name, weight in by_name(after).items():
        if "layers" in name:
            wanted = by_name(whole)[name][CHOSEN]
            np.testing.assert_allclose(weight[CHOSEN], wanted, atol=1e-5, err_msg=name)
    config, before, after, moments, _ = trained(*keys, chosen, steps=2)
    assert_others_stay(before, after)
    changed = sum((x != by_name(before)[name]).sum() for name, x in by_name(after).items())
    assert changed == pytest.approx(num_trained(init_shapes(config).trained, CHOSEN), rel=0.02)
    for weight in weights_of(moments):
        assert not np.asarray(weight[...])[[0, 3]].any() and np.asarray(weight[...])[CHOSEN].any()


@pytest.mark.parametrize(
    "keys", [(), pytest.param(("first_num_dense_layers=1",), marks=pytest.mark.slow)]
)
def test_biases_of_routers_move_in_chosen_layers_alone(keys):
    """Which the balance of loads moves, not the optimizer."""
    experts = ("decoder_block=dots1", "use_qk_norm=True", "num_experts=4", "base_moe_mlp_dim=16")
    experts += ("routed_score_func=sigmoid", "routed_bias=True", "routed_bias_update_rate=0.01")
    _, before, after, *_ = trained(*experts, *keys, f"trainable_layers={CHOSEN}", devices=1)
    name = next(name for name in by_name(before) if "bias_E" in name)
    moved = (by_name(after)[name] != by_name(before)[name]).any(1)
    first = 1 if keys else 0
    assert np.flatnonzero(moved).tolist() == [number - first for number in CHOSEN]


def init_shapes(config):
    with jax.sharding.use_abstract_mesh(make_mesh(config).abstract_mesh):
        return jax.eval_shape(lambda: init_state(config.recipe))
