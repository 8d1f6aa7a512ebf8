"""A step of training on the mesh of a config, what an evaluation finds before it, and weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import make_mesh
from jax.sharding import NamedSharding

from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import init_state
from maxramp.training.step import eval_step, make_train_step


def take_step(config, batch):
    """The models before and after a step at rate 1, layers in their order, its metrics, and the
    held-out sums of its rows."""
    mesh = make_mesh(config)
    step = make_train_step(config.recipe, lambda samples, rows: jnp.float32(1))
    objective = next_token_prediction(config.recipe.loss, config.model)

    def evaluate(model, batch):
        return eval_step(model, (jnp.float32(0),) * 2, batch, loss=objective)

    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(init_state, config.recipe))()
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH_ABT))
        # One program after the other: in one, collectives of both would wait for each other.
        sums = jax.device_get(jax.jit(evaluate)(state.model, batch))
        after, metrics = jax.jit(step)(state, batch)
        models = (order_by_layer(x.model) for x in (state, after))
        return *map(jax.device_get, (*models, metrics)), sums


def by_name(tree):
    """Arrays as numpy, by their path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(tree)
    }
