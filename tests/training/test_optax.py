"""Optimizers of optax in a step, beside optax on its own over gradients of the same loss."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import batch_of, make_config, make_mesh
from test_step import initial_state, place

from maxramp.keys.yamlfile import parse
from maxramp.model.parts.weights import map_weights
from maxramp.training.step import make_train_step

ROWS, STEPS = 16, 4
TOKENS = np.random.default_rng(0).integers(0, 264, (STEPS, ROWS, 17), dtype=np.int32)
MESH = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")


def rate_at(samples):
    return 0.01 / (1 + jnp.float32(samples) / ROWS)


def stepped(*keys, accumulation=1, devices=8):
    """The weights after some steps of ours, clipped at norm 1."""
    config = make_config("enable_rampup_batch_size=False", *keys, devices=devices)
    mesh, state = make_mesh(config), initial_state(config)
    step = jax.jit(make_train_step(config.recipe, lambda samples, rows: rate_at(samples)))
    with jax.set_mesh(mesh):
        for rows in TOKENS.reshape(STEPS, accumulation, -1, 17):
            state, _ = step(state, place(rows, mesh))
    return [np.asarray(x) for x in jax.tree.leaves(state.model)]


@functools.cache
def gradient_of_loss():
    """Weights before the first step, and the gradient of the mean loss over rows, on one device."""
    config = make_config("enable_rampup_batch_size=False", devices=1)

    def loss(model, batch):
        logits_BTV = model(batch.tokens, config.model)
        log_p_BTV = jax.nn.log_softmax(logits_BTV)
        return -(log_p_BTV * jax.nn.one_hot(batch.targets, 264)).sum(-1).mean()

    gradient, mesh = jax.jit(jax.grad(loss)), make_mesh(config)

    def gradient_of_rows(model, rows):
        with jax.set_mesh(mesh):
            return jax.device_get(gradient(model, batch_of(rows)))

    return jax.device_get(initial_state(config).model), gradient_of_rows


def on_its_own(make, **arguments):
    """The weights before and after the same steps by optax, whose schedule counts steps."""
    weights, gradient = gradient_of_loss()
    optimizer = make(lambda count: rate_at(count * ROWS), **arguments)
    optimizer = optax.chain(optax.clip_by_global_norm(1), optimizer)
    update, state = jax.jit(optimizer.update), optimizer.init(weights)
    first = weights
    for rows in TOKENS:
        updates, state = update(gradient(weights, rows), state, weights)
        weights = jax.device_get(optax.apply_updates(weights, updates))
    return [list(map(np.asarray, jax.tree.leaves(tree))) for tree in (first, weights)]


def decays(tree):
    return map_weights(lambda weight: weight.role == "matrix", tree)


def assert_same(ours, before, expected):
    """Except where rounding turns a sign near zero, which moves a weight as far as any other."""
    for x, first, wanted in zip(ours, before, expected, strict=True):
        change = np.abs(wanted - first).max()
        assert change > 0 and (np.abs(x - wanted) > 0.01 * change).mean() < 0.005


@pytest.mark.parametrize(
    "name, text",
    [
        ("lion", "{b1: 0.95, weight_decay: 0.1, mask: [matrix]}"),
        ("adafactor", "{min_dim_size_to_factor: 8, momentum: 0.9}"),
        pytest.param("adamax", "{b2: 0.9}", marks=pytest.mark.slow),
        pytest.param("contrib.adopt", "{}", marks=pytest.mark.slow),
        pytest.param("contrib.schedule_free_adamw", "{weight_decay: 0.1}", marks=pytest.mark.slow),
        # products of all weights with their gradients
        pytest.param("contrib.prodigy", "{estim_lr0: 1.0e-2}", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_optax(name, text):
    """On a mesh, by two passes, at the rate of its samples."""
    make, arguments = operator.attrgetter(name)(optax), parse(text)
    ours = stepped(*MESH, f"opt_type=optax.{name}", f"opt_arguments={text}", accumulation=2)
    masks = {"mask": decays} if "mask" in arguments else {}
    assert_same(ours, *on_its_own(make, **arguments | masks))
