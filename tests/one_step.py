"""A step of training on the mesh of a config, its program, and weights by their names."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.data.relay import Expansion
from maxramp.model.decoder import Decoder
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.learning_rate import LearningRate
from maxramp.training.loss import next_token_prediction
from maxramp.training.programs import Programs
from maxramp.training.state import abstract_state, init_state
from maxramp.training.step import eval_step, make_train_step


def take_step(config, batch):
    """Models before and after a step at rate 1, layers in order; metrics; rows' held-out sums."""
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


def programs_fail():
    raise AssertionError("a program did not compile")


@contextlib.contextmanager
def programs_of(config, say, on_failure=programs_fail, first_stages=None):
    """The programs of a config's stages without an evaluation, their compiler, and the stages."""
    mesh, ramp = make_mesh(config), RampupBatchManager(config.batch)
    rate = LearningRate.from_keys(config.learning_rate, ramp)
    compiler = BackgroundCompiler(0, say, on_failure)
    with jax.set_mesh(mesh):
        state = abstract_state(config.recipe, mesh)
        programs = Programs(config.recipe, Expansion(mesh, 1), rate, state, compiler)
        for stage in ramp.stages[:first_stages]:
            programs.add(stage)
        compiler.lower()
        yield programs, compiler, ramp.stages
        compiler.close()


def packed_batch(config, rows, accumulation=1, packed=True):
    """Random rows of the model's length, with the documents of packed ones."""
    rng = np.random.default_rng(0)
    rows_RS = rng.integers(0, 264, (rows, config.model.max_target_length + 1), dtype=np.int32)
    arrays = (rows_RS, rng.random(rows_RS.shape) < 0.15)[: 1 + packed]
    return batch_of(*(x.reshape(accumulation, -1, x.shape[-1]) for x in arrays))


def parallel(sizes):
    """The keys of `axis=size axis=size`."""
    return tuple(f"ici_{size.replace('=', '_parallelism=')}" for size in sizes.split())


@functools.cache
def update_of(*keys, devices=8, accumulation=1, rows=16, packed=True):
    """What a step of gradient descent makes."""
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={rows // devices}")
    constant += ("opt_type=sgd", "gradient_clipping_threshold=0")
    config = make_config(*constant, *keys, devices=devices)
    return take_step(config, packed_batch(config, rows, accumulation, packed))


def assert_same_update(actual, expected, tolerance=1e-5):
    """Two results of `take_step` must begin with the same weights, and be near to each other."""
    (*models, metrics, sums), (*models_1, metrics_1, sums_1) = actual, expected
    (first, last), (first_1, last_1) = map(by_name, models), map(by_name, models_1)
    np.testing.assert_equal(first, first_1)
    for name in first:
        change = np.abs(last_1[name] - first_1[name]).max()
        rounding = 2.0**-22 * np.abs(last_1[name]).max()  # of the weight, not of its change
        assert np.abs(last[name] - last_1[name]).max() <= tolerance * change + rounding, name
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], metrics_1[name], rtol=tolerance)
    np.testing.assert_array_equal(metrics["batch_fingerprint"], metrics_1["batch_fingerprint"])
    np.testing.assert_allclose(sums, sums_1, rtol=tolerance)


def by_name(tree):
    """Arrays as numpy, by their path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(tree)
    }


def assert_documents_apart(*keys):
    """Asserts that other tokens before a document change no bit of its logits on parts of rows, and
    that alone it has the same."""
    keys = (*keys, "max_target_length=64", "ici_context_parallelism=4")
    config = make_config(*keys, "per_device_batch_size=0.25", devices=4)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 264, (3, 65), dtype=np.int32)
    tokens[1, 27:] = tokens[0, 27:]  # behind another document
    tokens[2, :38] = tokens[0, 27:]  # alone
    begins = np.zeros(tokens.shape, bool)
    begins[:, 0] = begins[:2, 27] = begins[2, 38] = True
    batch = batch_of(tokens, begins)

    def forward(model):
        return model(batch.tokens, config.model, batch.token_positions)

    with jax.set_mesh(make_mesh(config)):
        model = jax.jit(lambda: Decoder(config.model, jax.random.key(0)))()
        logits = np.asarray(jax.jit(forward)(model))
    np.testing.assert_array_equal(logits[0, 27:], logits[1, 27:])
    assert np.abs(logits[0, :27] - logits[1, :27]).max() > 0.1
    np.testing.assert_allclose(logits[2, :37], logits[0, 27:], atol=1e-5 * np.ptp(logits))
