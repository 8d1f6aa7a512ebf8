"""The noise scale in the train step: of a known gradient, and of the model's by definition.

Shapes: N steps, A micro batches, B rows, S tokens of a row and the one after it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OPTIMIZED, batch_of, make_config, make_mesh
from test_step import initial_state, place

from maxramp.data.rows import PADDING
from maxramp.measuring.noise import ratio_of_means
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.weights import weights_of
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.loss import next_token_prediction
from maxramp.training.optimizers.table import adam_state
from maxramp.training.state import abstract_state
from maxramp.training.step import make_train_step, train_step

LENGTH, VOCAB, ROWS = 16, 264, 32
LOG = "log_gradient_noise_scale=True"


def config_of(*arguments, devices=8):
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS / devices}")
    return make_config(*constant, "steps=20", "adam_eps=1e-3", *arguments, devices=devices)


def random_rows(*shape):
    """Rows of which some end early, so that rows and micro batches have unequal tokens."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCAB, (*shape, LENGTH + 1), dtype=np.int32)
    rows[np.arange(LENGTH + 1) >= rng.integers(6, 30, (*shape, 1))] = PADDING
    return rows


@functools.cache
def trained(*arguments, accumulation=4, devices=8, optimized=False):
    """(weights, metrics) after each of three steps."""
    config = config_of(*arguments, devices=devices)
    mesh = make_mesh(config)
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch))
    with jax.set_mesh(mesh):
        state = initial_state(config)
        options = OPTIMIZED if optimized else None
        step = jax.jit(make_train_step(config.recipe, rate), compiler_options=options)
        states, records = [state], []
        for rows in random_rows(3, accumulation, ROWS // accumulation):
            state, metrics = step(state, place(rows, mesh))
            states.append(state)
            records.append(jax.device_get(metrics))
    return states, records


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def matrices(tree):
    """All but the norms' scales."""
    paths = jax.tree.leaves_with_path(tree)
    return [np.asarray(x, np.float64) for path, x in paths if "scale_D" not in str(path)]


def by_definition(squares, tokens, square_of_sum):
    """Signal and variance from the expected squares of two sizes: a group, and all of them."""
    a, n = np.sum(np.square(tokens)), np.sum(tokens)
    # sum E|g_a|^2 = a |G|^2 + n S and E|sum g_a|^2 = n^2 |G|^2 + n S, solved for |G|^2 and S.
    return np.linalg.solve([[a, n], [n**2, n]], [np.sum(squares), square_of_sum])


@functools.cache
def gradients_of_rows(step):
    """Gradients of the rows of a step one by one, [R, weights] by kind, and their tokens [R]."""
    config = config_of(devices=1)
    states, _ = trained(LOG, devices=1)
    model, adam = states[step].model, adam_state(states[step].opt_state)
    rows, v_of = random_rows(3, 4, ROWS // 4)[step].reshape(ROWS, -1), matrices(adam.nu.layers)
    estimates = {"": [], "adam_": [], "norms_": []}
    tokens = []
    with jax.set_mesh(make_mesh(config)):
        objective = next_token_prediction(config.loss, config.model)
        gradient = jax.jit(jax.grad(objective, has_aux=True))
        for row_S in rows:
            g, aux = gradient(model, batch_of(row_S[None]))
            tokens.append(float(aux.shown["tokens"]))
            seen = [
                x / (np.sqrt(v / (1 - 0.95**step)) + 1e-3)
                for x, v in zip(matrices(g.layers), v_of, strict=True)
            ]
            stack = g.layers["dense"]
            norms = leaves([stack.mixer_norm, stack.mlp_norm, g.norm])
            for kind, arrays in zip(estimates, (matrices(g), seen, norms), strict=True):
                estimates[kind].append(np.concatenate([x.ravel() for x in arrays]))
    return {kind: np.array(g) for kind, g in estimates.items()}, np.array(tokens)


MIXED = tuple(f"ici_{axis}_parallelism=2" for axis in ("data", "fsdp", "tensor"))


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
def test_estimates_are_those_of_the_definition(copies):
    """The groups are rows, or micro batches and the copies' parts of them."""
    step = 2  # Adam's v is there
    _, metrics = trained(LOG, *MIXED) if copies > 1 else trained(LOG, devices=1)
    gradients, tokens = gradients_of_rows(step)
    for kind, g in gradients.items():
        groups = ROWS if kind == "norms_" else 4 * copies
        sums = g.reshape(groups, -1, g.shape[-1]).sum(1)
        expected = by_definition(
            np.square(sums).sum(1), tokens.reshape(groups, -1).sum(1), np.square(g.sum(0)).sum()
        )
        logged = [metrics[step][f"{kind}{name}"] for name in ("noise_signal", "noise_variance")]
        np.testing.assert_allclose(logged, expected, rtol=2e-3, err_msg=kind)


@pytest.mark.long
def test_training_keeps_its_bits():
    plain, without = trained(devices=2, optimized=True)
    logged, unlogged = trained(LOG, devices=2, optimized=True)
    jax.tree.map(np.testing.assert_array_equal, logged, plain)
    for a, b in zip(unlogged, without, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])
    kinds, parts = ("", "adam_", "norms_"), ("signal", "variance")
    names = {f"{kind}noise_{part}" for kind in kinds for part in parts}
    assert unlogged[0].keys() - without[0].keys() == names


def test_truth_lies_in_the_interval():
    """Tokens drawn from p, and the gradient of a token a row of the embedding's: |G|^2 = D |p|^2,
    tr(Sigma) = D (1 - |p|^2), through the train step."""
    config = config_of(LOG, "opt_type=sgd", "adam_eps=1e-8", "learning_rate=1e-9")
    mesh, rng = make_mesh(config), np.random.default_rng(1)
    p = rng.dirichlet(np.full(VOCAB, 0.3))
    truth = (1 - np.square(p).sum()) / np.square(p).sum()

    def sums(model, batch):
        counts_V = (batch.targets[..., None] == jnp.arange(VOCAB)).sum((0, 1), dtype=jnp.float32)
        counts_V = jax.reshard(counts_V, jax.sharding.PartitionSpec("tensor"))
        tokens = jnp.float32(batch.targets.size)
        minimized = (model.embedding_VD[...] * counts_V[:, None]).sum()
        return minimized, Aux(shown={"loss": tokens, "tokens": tokens})

    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch))
    step = functools.partial(train_step, recipe=config.recipe, learning_rate=rate, loss=sums)
    pairs = []
    with jax.set_mesh(mesh):
        state = initial_state(config)
        step = jax.jit(step)
        for _ in range(200):
            rows = rng.choice(VOCAB, (4, 8, LENGTH + 1), p=p).astype(np.int32)
            _, metrics = step(state, place(rows, mesh))
            pairs.append([float(metrics["noise_variance"]), float(metrics["noise_signal"])])
    variance, signal = np.array(pairs).T
    ratio, low, high = ratio_of_means(variance, signal, np.ones(200))
    assert low < truth < high
    assert high < 1.2 * low and low < ratio < high
    D = config.model.base_emb_dim
    assert np.mean(variance) == pytest.approx(D * (1 - np.square(p).sum()), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("decoder_block=qwen3", "use_qk_norm=true"),
        ("decoder_block=olmoe", "use_qk_norm=true", "num_experts=4", "num_experts_per_tok=2"),
    ],
    ids=" ".join,
)
def test_norms_of_queries_and_keys(keys):
    """Of each head, or of all heads over tensor: as the rows' own gradients have them."""
    keys = (*keys, "base_num_decoder_layers=2", "base_num_query_heads=4", "base_num_kv_heads=2")
    (before, *_), (after, *_) = trained(LOG, *MIXED, *keys, accumulation=1)
    config = config_of(*keys, devices=1)
    tokens, sums = [], []
    with jax.set_mesh(make_mesh(config)):
        like = abstract_state(config.recipe, make_mesh(config)).model
        model = jax.tree.map(
            lambda x, y: jax.device_put(np.asarray(x), y.sharding), before.model, like
        )
        objective = next_token_prediction(config.loss, config.model)
        gradient = jax.jit(jax.grad(objective, has_aux=True))
        for row_S in random_rows(3, 1, ROWS)[0].reshape(ROWS, -1):
            g, aux = gradient(model, batch_of(row_S[None]))
            scales = [x for x in weights_of(g) if x.role == "scale"]
            sums.append(np.concatenate([np.ravel(x[...]) for x in scales]).astype(np.float64))
            tokens.append(float(aux.shown["tokens"]))
    square = np.square(np.sum(sums, 0)).sum()
    expected = by_definition(np.square(sums), tokens, square)
    actual = [after["norms_noise_signal"], after["norms_noise_variance"]]
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
