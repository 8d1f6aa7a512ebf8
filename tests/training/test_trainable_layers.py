"""Layers that are chosen to train move as by a plain step; all else keeps its bits."""

import jax
import numpy as np
import pytest
from conftest import batch_of, make_mesh
from one_step import by_name
from test_step import make_config, train

from maxramp.model.parts.weights import weights_of
from maxramp.model.pipeline import order_by_layer
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import init_state, num_trained

RATE = 0.5
CHOSEN = [1, 2]
FOUR = ("base_num_decoder_layers=4", "per_device_batch_size=2")
ROWS = np.random.default_rng(0).integers(0, 264, (1, 16, 17), dtype=np.int32)


def stepped(*keys, steps=1, devices=8):
    """The configuration, and on the host in layer order the weights before and after some steps on
    the same rows at a rate of RATE, the moments after them, and the last norm of gradients."""
    rate = (f"learning_rate={RATE}", "learning_rate_final_fraction=1")
    config = make_config(*FOUR, *rate, *keys, devices=devices)
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
    _, before, after, _, grad_norm = stepped(*keys, "ici_fsdp_parallelism=2", devices=2)
    assert_others_stay(before, after)

    config = make_config(*FOUR, devices=1)
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
            moved, RATE * 0.01 / norm * g, atol=1e-3 * np.abs(moved).max() + 1e-7, err_msg=name
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
    *_, whole, _, _ = stepped(*keys, *roles)
    chosen = f"trainable_layers={CHOSEN}"
    _, before, after, _, _ = stepped(*keys, chosen)
    for name, weight in by_name(after).items():
        if "layers" in name:
            wanted = by_name(whole)[name][CHOSEN]
            np.testing.assert_allclose(weight[CHOSEN], wanted, atol=1e-5, err_msg=name)
    config, before, after, moments, _ = stepped(*keys, chosen, steps=2)
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
    _, before, after, *_ = stepped(*experts, *keys, f"trainable_layers={CHOSEN}", devices=1)
    name = next(name for name in by_name(before) if "bias_E" in name)
    moved = (by_name(after)[name] != by_name(before)[name]).any(1)
    first = 1 if keys else 0
    assert np.flatnonzero(moved).tolist() == [number - first for number in CHOSEN]


def init_shapes(config):
    with jax.sharding.use_abstract_mesh(make_mesh(config).abstract_mesh):
        return jax.eval_shape(lambda: init_state(config.recipe))
