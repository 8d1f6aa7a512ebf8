"""What layers make beside their output reaches the loss, the metrics and the buffers.

Shapes: A accumulation steps, B rows, S tokens of a row and the one after it, L layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from counting import ROPE, stand_in, sums_of
from jax.sharding import NamedSharding

from maxramp.checkpoints import arrays
from maxramp.model.block import Block
from maxramp.model.parts import rotary
from maxramp.model.parts.embedding import look_up
from maxramp.model.parts.positions import Pass, Positions
from maxramp.model.pattern import Mixing
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.training.state import abstract_state, init_state
from maxramp.training.step import make_train_step

LAYERS, STEPS, ROWS = 4, 2, 32
PIPELINE = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=4")
MESH = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2")
CASES = {
    "data, fsdp": (4, 1, MESH),
    "data, fsdp, accumulation": (4, 4, (*MESH, "remat_policy=full")),
    "pipeline": (4, 1, PIPELINE),
    "circular pipeline, accumulation": (4, 4, (*PIPELINE, "num_pipeline_repeats=2")),
}


def config_of(*keys, devices=1):
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS / devices}")
    constant += ("opt_type=sgd", "gradient_clipping_threshold=0")
    constant += (f"base_num_decoder_layers={LAYERS}",)
    return make_config(*constant, *keys, devices=devices)


def rows_of(step):
    return np.random.default_rng(step).integers(0, 264, (ROWS, 17), dtype=np.int32)


def by_name(model):
    leaves = jax.tree.leaves_with_path(order_by_layer(model))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def first_state(config):
    return jax.jit(functools.partial(init_state, config.recipe))()


@functools.cache
def plain():
    """Layer after layer on one device: the weights after every step, its metrics and counts."""
    config = config_of()

    def minimized(model, rows_BS):
        x_BTD, sums = look_up(model.embedding_VD[...], rows_BS[:, :-1]), []
        for block in model.one_by_one().layers:
            angles = {ROPE: rotary.angles(ROPE, jnp.arange(16), config.model.head_dim)}
            shared = Pass(config.model, Positions(), angles)
            x_BTD, _ = Block.__call__(block, x_BTD, Mixing(ROPE), shared)
            sums.append(jax.tree.map(lambda x_B: x_B.sum(0), sums_of(x_BTD)))
        log_p_BTV = jax.nn.log_softmax(model.logits(model.norm(x_BTD)))
        is_next_BTV = rows_BS[:, 1:, None] == jnp.arange(log_p_BTV.shape[-1])
        loss = -jnp.where(is_next_BTV, log_p_BTV, 0).sum(-1).mean()
        tokens = rows_BS[:, 1:].size
        square = sum(aux.minimized["square"] for aux in sums) / tokens
        size = sum(aux.shown["size"] for aux in sums) / tokens
        counts_L2 = jnp.stack([aux.counts["signs"] for aux in sums])
        return loss + square, ({"loss": loss, "square": square, "size": size}, counts_L2)

    with jax.set_mesh(make_mesh(config)):
        model, steps, counted = first_state(config).model, [], np.zeros((LAYERS, 2))
        for step in range(STEPS):
            gradient, (shown, counts_L2) = jax.jit(jax.grad(minimized, has_aux=True))(
                model, rows_of(step)
            )
            model = jax.tree.map(lambda w, g: w - 0.1 * g, model, gradient)
            counted = counts_L2
            steps.append((by_name(model), jax.device_get(shown), np.asarray(counted)))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [x if "accum" in x else pytest.param(x, marks=pytest.mark.long) for x in CASES]
)
def test_sums_of_layers_are_those_of_a_plain_computation(monkeypatch, tmp_path, name):
    """The loss's gradient, the metrics and the buffers are the same, also after a restart on other
    devices, where layers are in another order."""
    devices, accumulation, keys = CASES[name]
    stand_in(monkeypatch, LAYERS)
    config = config_of(*keys, devices=devices)
    mesh = make_mesh(config)
    step = make_train_step(config.recipe, lambda samples, rows: jnp.float32(0.1))
    with jax.set_mesh(mesh):
        state, step = first_state(config), jax.jit(step)
        for index, (weights, shown, counted) in enumerate(plain()):
            rows_ABS = rows_of(index).reshape(accumulation, -1, 17)
            batch = jax.device_put(batch_of(rows_ABS), NamedSharding(mesh, BATCH_ABT))
            state, metrics = step(state, batch)
            for key, value in shown.items():
                assert metrics[key] == pytest.approx(value, rel=1e-5), key
            for key, weight in by_name(state.model).items():
                np.testing.assert_allclose(weight, weights[key], atol=2e-6, err_msg=key)
            np.testing.assert_array_equal(state.buffers["signs"], counted)
            assert counted.sum() == LAYERS * ROWS * 16
            assert state.buffers["signs"].dtype == jnp.uint32
        arrays.save(tmp_path / "1", state)()
    one = config_of()
    with jax.set_mesh(make_mesh(one)):
        abstract = abstract_state(one.recipe, make_mesh(one))
        loaded = arrays.load(tmp_path / "1", arrays.items_of(abstract))["optimizer"]["buffers"]
    np.testing.assert_array_equal(loaded["signs"], counted)
    assert loaded["signs"].sharding == abstract.buffers["signs"].sharding
