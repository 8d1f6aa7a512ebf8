"""The noise scale in the train step: of a known gradient, and of the model's by definition.

Shapes: N steps, A micro batches, B rows, S tokens of a row and the one after it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.data.marks import PADDING
from maxramp.parallel.sharding import BATCH_ABS
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.noise import ratio_of_means
from maxramp.training.learning_rate import LearningRate
from maxramp.training.objective import next_token_prediction
from maxramp.training.state import init_state
from maxramp.training.step import make_train_step, train_step

LENGTH, VOCAB, ROWS = 16, 264, 32
LOG = "log_gradient_noise_scale=True"
QUICK = {"xla_backend_optimization_level": 0}


def config_of(*arguments, devices=8):
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS / devices}")
    return make_config(*constant, "steps=20", "adam_eps=1e-3", *arguments, devices=devices)


def random_rows(*shape):
    """Rows of which some end early, so that rows and micro batches have unequal tokens."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCAB, (*shape, LENGTH + 1), dtype=np.int32)
    rows[np.arange(LENGTH + 1) >= rng.integers(6, 30, (*shape, 1))] = PADDING
    return rows


def place(batch_ABS, mesh):
    return jax.device_put(batch_ABS, NamedSharding(mesh, BATCH_ABS))


@functools.cache
def trained(*arguments, accumulation=4, devices=8, quick=True):
    """(weights, metrics) after each of three steps."""
    config = config_of(*arguments, devices=devices)
    mesh = make_mesh(config)
    rate = LearningRate.of(config.schedule, RampupBatchManager(config.batch))
    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(init_state, config.recipe), compiler_options=QUICK)()
        step = jax.jit(
            make_train_step(config.recipe, rate), compiler_options=QUICK if quick else None
        )
        states, metrics = [state], []
        for rows in random_rows(3, accumulation, ROWS // accumulation):
            state, found = step(state, place(rows, mesh))
            states.append(state)
            metrics.append(jax.device_get(found))
    return states, metrics


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def by_definition(squares, tokens, square_of_sum):
    """Signal and variance from the expected squares of two sizes: a group, and all of them."""
    a, n = np.sum(np.square(tokens)), np.sum(tokens)
    # sum E|g_a|^2 = a |G|^2 + n S and E|sum g_a|^2 = n^2 |G|^2 + n S, solved for |G|^2 and S.
    return np.linalg.solve([[a, n], [n**2, n]], [np.sum(squares), square_of_sum])


def test_of_the_model_by_definition():
    """Every kind, from gradients of micro batches and of rows that are taken one by one."""
    config = config_of(devices=1)
    objective = next_token_prediction(config.objective)
    states, metrics = trained(LOG, devices=1)
    step = 2  # Adam's v is there
    model, adam = states[step].model, states[step].opt_state[0]
    with jax.set_mesh(make_mesh(config)):
        gradient = jax.jit(jax.grad(objective, has_aux=True), compiler_options=QUICK)

        def taken(rows_BS):
            g, (_, tokens) = gradient(model, jnp.asarray(rows_BS))
            v = leaves(adam.nu.layers)
            seen = [
                x / (np.sqrt(v / (1 - 0.95**step)) + 1e-3)
                for x, v in zip(leaves(g.layers), v, strict=True)
            ]
            norms = leaves([g.layers.attention_norm, g.layers.mlp_norm, g.norm])
            flat = [np.concatenate([x.ravel() for x in xs]) for xs in (leaves(g), seen, norms)]
            return (*flat, float(tokens))

        batch_ABS = random_rows(3, 4, ROWS // 4)[step]
        micro = list(zip(*map(taken, batch_ABS), strict=True))
        rows = list(zip(*(taken(row[None]) for row in batch_ABS.reshape(ROWS, -1)), strict=True))
    for kind, groups, tokens in (
        ("", micro[0], micro[3]),
        ("adam_", micro[1], micro[3]),
        ("norms_", rows[2], rows[3]),
    ):
        squares = [np.square(g).sum() for g in groups]
        expected = by_definition(squares, tokens, np.square(np.sum(groups, 0)).sum())
        found = [metrics[step][f"{kind}{name}"] for name in ("noise_signal", "noise_variance")]
        np.testing.assert_allclose(found, expected, rtol=2e-3)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_training_keeps_its_bits(accumulation):
    """With and without: the same weights, optimizer and losses, to the last bit."""
    plain, without = trained(accumulation=accumulation, quick=False)
    logged, found = trained(LOG, accumulation=accumulation, quick=False)
    jax.tree.map(np.testing.assert_array_equal, logged, plain)
    for a, b in zip(found, without, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])
    kinds = {"norms_"} | ({"", "adam_"} if accumulation > 1 else set())
    names = {f"{kind}noise_{part}" for kind in kinds for part in ("signal", "variance")}
    assert found[0].keys() - without[0].keys() == names


def test_meshes_and_splits():
    """No mesh changes an estimate, and no split that of the norms, of which the rows are the
    groups."""
    _, one = trained(LOG, devices=1)
    _, spread = trained(LOG)
    sizes = [f"ici_{axis}_parallelism=2" for axis in ("data", "fsdp", "tensor")]
    _, mixed = trained(LOG, *sizes)
    _, unsplit = trained(LOG, accumulation=1)
    for name in (name for name in one[1] if "noise_" in name):
        for other in (spread, mixed, unsplit) if "norms_" in name else (spread, mixed):
            for a, b in zip(one[1:], other[1:], strict=True):
                assert a[name] == pytest.approx(b[name], rel=5e-3)


def test_truth_lies_in_the_interval():
    """Tokens drawn from p, and the gradient of a token a row of the embedding's: |G|^2 = D |p|^2,
    tr(Sigma) = D (1 - |p|^2), through the train step."""
    config = config_of(LOG, "opt_type=sgd", "learning_rate=1e-9")
    mesh, rng = make_mesh(config), np.random.default_rng(1)
    p = rng.dirichlet(np.full(VOCAB, 0.3))
    truth = (1 - np.square(p).sum()) / np.square(p).sum()

    def objective(model, rows_BS):
        counts_V = (rows_BS[:, 1:, None] == jnp.arange(VOCAB)).sum((0, 1), dtype=jnp.float32)
        counts_V = jax.reshard(counts_V, jax.sharding.PartitionSpec("tensor"))
        tokens = jnp.float32(rows_BS[:, 1:].size)
        return (model.embedding_VD[...] * counts_V[:, None]).sum(), (tokens, tokens)

    rate = LearningRate.of(config.schedule, RampupBatchManager(config.batch))
    step = functools.partial(
        train_step, objective=objective, optimizer=config.optimizer, learning_rate=rate
    )
    pairs = []
    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(init_state, config.recipe), compiler_options=QUICK)()
        step = jax.jit(step, compiler_options=QUICK)
        for _ in range(200):
            rows = rng.choice(VOCAB, (4, 8, LENGTH + 1), p=p).astype(np.int32)
            _, found = step(state, place(rows, mesh))
            pairs.append([float(found["noise_variance"]), float(found["noise_signal"])])
    variance, signal = np.array(pairs).T
    ratio, low, high = ratio_of_means(variance, signal, np.ones(200))
    assert low < truth < high
    assert high < 1.2 * low and low < ratio < high
    D = config.model.base_emb_dim
    assert np.mean(variance) == pytest.approx(D * (1 - np.square(p).sum()), rel=0.02)
