"""Optimizers of optax in a step, beside optax on its own over gradients of the same loss."""

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.checkpoints.arrays import items_of, load, save
from maxramp.errors import ConfigError
from maxramp.keys.yamlfile import parse
from maxramp.model.parts.weights import map_weights
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.training.state import abstract_state, init_state
from maxramp.training.step import make_train_step

ROWS, STEPS = 16, 4
TOKENS = np.random.default_rng(0).integers(0, 264, (STEPS, ROWS, 17), dtype=np.int32)
MESH = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")


def rate_at(samples):
    return 0.01 / (1 + jnp.float32(samples) / ROWS)


def new_state(config):
    with jax.set_mesh(make_mesh(config)):
        return jax.jit(functools.partial(init_state, config.recipe))()


def stepped(*keys, accumulation=1, devices=8):
    """The weights after some steps of ours, clipped at norm 1."""
    config = make_config("enable_rampup_batch_size=False", *keys, devices=devices)
    mesh, state = make_mesh(config), new_state(config)
    step = jax.jit(make_train_step(config.recipe, lambda samples, rows: rate_at(samples)))
    with jax.set_mesh(mesh):
        for rows in TOKENS.reshape(STEPS, accumulation, -1, 17):
            state, _ = step(state, jax.device_put(batch_of(rows), NamedSharding(mesh, BATCH_ABT)))
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

    def take(model, rows):
        with jax.set_mesh(mesh):
            return jax.device_get(gradient(model, batch_of(rows)))

    return jax.device_get(new_state(config).model), take


def on_its_own(make, **arguments):
    """The weights before and after the same steps by optax, whose schedule counts steps."""
    weights, gradient = gradient_of_loss()
    optimizer = make(lambda count: rate_at(count * ROWS), **arguments)
    optimizer = optax.chain(optax.clip_by_global_norm(1), optimizer)
    update, state = jax.jit(optimizer.update), optimizer.init(weights)
    found = [weights]
    for rows in TOKENS:
        updates, state = update(gradient(found[-1], rows), state, found[-1])
        found.append(jax.device_get(optax.apply_updates(found[-1], updates)))
    return [list(map(np.asarray, jax.tree.leaves(tree))) for tree in (found[0], found[-1])]


def decays(tree):
    return map_weights(lambda weight: weight.role == "matrix", tree)


def assert_same(ours, before, expected):
    """But for rounding: the sign of a gradient near zero, which it may turn, moves a weight as far
    as that of any other."""
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


@pytest.mark.slow
def test_what_optax_keeps_is_read_on_another_mesh(tmp_path):
    """Factored moments, which have fewer axes than their weights."""
    keys = ("opt_type=optax.adafactor", "opt_arguments={min_dim_size_to_factor: 8}")
    state = new_state(make_config(*keys, *MESH))
    save(tmp_path / "saved", state)()
    mesh = make_mesh(config := make_config(*keys, "ici_tensor_parallelism=2", devices=4))
    abstract = items_of(abstract_state(config.recipe, mesh))
    with jax.set_mesh(mesh):
        read = load(tmp_path / "saved", abstract)
    for x, wanted, first in zip(
        *map(jax.tree.leaves, (read, abstract, items_of(state))), strict=True
    ):
        assert x.sharding == wanted.sharding
        np.testing.assert_array_equal(x, first)
    parts = read["optimizer"]["opt_state"].inner_states["optax"].inner_state
    rows_LD = parts[0].v_row.layers["dense"].mlp.up_DF[...]
    assert rows_LD.shape == (2, 32) and not rows_LD.sharding.is_fully_replicated


@pytest.mark.parametrize(
    "keys, said",
    [
        ("opt_type=optax.loin", "opt_type=optax.loin is not an optimizer of .* mean optax.lion"),
        ("opt_type=optax.adopt", "did you mean optax.contrib.adopt"),
        ("opt_type=optax.contrib.muon", "as layers are stacked; use opt_type=muon"),
        ("opt_type=optax.polyak_sgd", "that takes a learning rate"),
        ("opt_type=optax.contrib.momo", "argument: 'value'; a step gives gradients, weights and"),
        (
            "opt_type=optax.lion opt_arguments={weigth_decay: 1}",
            "=1 is not .* mean weight_decay. it takes",
        ),
        ("opt_type=optax.lion opt_arguments={learning_rate: 1}", "give the key learning_rate"),
        ("opt_type=optax.lion opt_arguments={mask: [scales]}", "must be a list of some of matrix"),
        (
            "opt_type=optax.lion opt_arguments={b1: high}",
            "opt_arguments={'b1': 'high'}: unsupported",
        ),
        ("opt_type=optax.lion half_lives_in_samples=[adam_b2]", "optax counts steps: leave it out"),
        ("opt_type=optax.lion adam_b2=0.9", "is read only with opt_type=adamw or muon, and"),
        ("opt_type=muon opt_arguments={b1: 0.9}", "is read only with opt_type=optax[.][*], and"),
        ("opt_type=lion", "is not one of adamw, sgd, muon, or .* such as optax.lion"),
    ],
)
def test_what_optax_does_not_take_is_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        make_config(*re.split(" (?=[a-z_0-9]+=)", keys))
