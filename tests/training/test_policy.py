"""The objective of GRPO: its formula, and one update however the answers are cut and sharded.

Shapes: P prompts, G answers to each, A parts, B rows of a part, S tokens of a row and the next.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding
from test_step import initial_state

from maxramp.data.rows import PADDING
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.weights import new_weight, part_of
from maxramp.objectives.rewards import REWARDS, PolicyKeys
from maxramp.parallel.sharding import BATCH_ABT, ROWS_BT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.log_probs import token_log_probs
from maxramp.training.optimizers.table import make_optimizer
from maxramp.training.policy import advantages, shares
from maxramp.training.state import TrainState
from maxramp.training.step import make_train_step, update

P, G, S, VOCAB = 4, 4, 17, 264
KEYS = PolicyKeys(
    **{"num_generations": G, "grpo_normalize_advantages": True, "grpo_epsilon": 0.2},
    **{"grpo_epsilon_high": 0.28, "grpo_beta": 0.1, "grpo_normalization": "token"},
    **{"num_iterations": 1, "decode_sampling_temperature": 0.8, "loss_block_tokens": 2048},
)


def config_of(*keys, devices=8):
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={P * G / devices}")
    constant += ("base_num_decoder_layers=1", "warmup_steps_fraction=0", "steps=20")
    constant += ("opt_type=sgd", "learning_rate=1")
    return make_config(*constant, *keys, devices=devices)


def random_batch(grpo_normalization="token"):
    """Answers of many lengths, sampled by a policy that is not quite the model's."""
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (P * G, S), dtype=np.int32)
    begin = np.repeat(random.integers(1, 6, P), G)
    end = begin + random.integers(1, S - 5, P * G)
    at = np.arange(S)
    mask = (at >= begin[:, None]) & (at < end[:, None])
    ids[at >= end[:, None]] = -1
    answer_advantages = advantages(random.random((P, G)), True).ravel()
    share = shares(end - begin, grpo_normalization)
    log_probs = random.normal(-5.5, 0.4, (2, P * G, S)).astype(np.float32)
    mask = mask[:, 1:]
    return dataclasses.replace(
        batch_of(ids),
        targets=np.where(mask, ids[:, 1:], PADDING),
        weights=np.where(mask, answer_advantages[:, None], 0).astype(np.float32),
        shares=np.where(mask, share[:, None], 0).astype(np.float32),
        sampled_log_probs=log_probs[0][:, 1:],
        reference_log_probs=log_probs[1][:, 1:],
    )


@functools.cache
def stepped(parts, grpo_normalization="token", *keys, devices=8):
    """The metrics and the weights after a step on the batch in so many parts."""
    config = config_of(*keys, devices=devices)
    mesh = make_mesh(config)
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch, devices))
    policy = dataclasses.replace(KEYS, grpo_normalization=grpo_normalization)
    step = make_train_step(dataclasses.replace(config.recipe, objective=REWARDS, loss=policy), rate)
    with jax.set_mesh(mesh):
        state = initial_state(config)
        batch = random_batch(grpo_normalization)
        batch = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH_ABT))
        after, metrics = jax.jit(step)(state, batch)
        change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.model, state.model)
        return {name: np.asarray(x) for name, x in metrics.items()}, jax.tree.leaves(change)


MESH = ("ici_data_parallelism=2", "ici_tensor_parallelism=2", "loss_block_tokens=10")


@pytest.mark.parametrize(
    "grpo_normalization, parts, keys, devices",
    [
        ("token", 4, (), 1),
        pytest.param("sequence", 2, MESH, 8, marks=pytest.mark.slow),
        pytest.param("sequence", 4, (), 1, marks=pytest.mark.long),
        pytest.param("token", 2, MESH, 8, marks=pytest.mark.long),
    ],
)
def test_the_update_depends_on_no_cutting(grpo_normalization, parts, keys, devices):
    whole, change = stepped(1, grpo_normalization, devices=1)
    cut, other = stepped(parts, grpo_normalization, *keys, devices=devices)
    assert set(whole) == set(cut)
    for name in set(whole) - {"batch_fingerprint"}:
        assert cut[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    for one, two in zip(change, other, strict=True):
        assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max()


def test_what_layers_minimize_is_minimized():
    experts = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
    whole, change = stepped(1, "token", *experts, devices=1)
    balanced, other = stepped(1, "token", *experts, "load_balance_loss_weight=1", devices=1)
    assert balanced["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert {*balanced} > {*whole} and balanced["load_balance_loss"] > 0
    assert max(np.abs(one - two).max() for one, two in zip(change, other, strict=True)) > 1e-3


@pytest.mark.parametrize("grpo_normalization", ["token", "sequence"])
def test_the_loss_is_the_formula(grpo_normalization):
    """In float64, token by token, from the log-probabilities of the whole forward pass."""
    config = config_of(devices=1)
    mesh, batch = make_mesh(config), random_batch(grpo_normalization)
    with jax.set_mesh(mesh):
        model = initial_state(config).model
        placed = jax.device_put(batch, NamedSharding(mesh, ROWS_BT))
        execution = config.model
        forward = jax.jit(functools.partial(type(model).__call__, execution=execution))
        logits = np.asarray(forward(model, placed.tokens), np.float64)
        how = KEYS.loss_block_tokens, KEYS.decode_sampling_temperature
        find = jax.jit(lambda model, batch: token_log_probs(model, execution, batch, *how))
        log_probs, entropy, _ = find(model, placed)
    logits /= KEYS.decode_sampling_temperature
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, np.maximum(batch.targets[..., None], 0), 2)[..., 0]
    np.testing.assert_allclose(log_probs, chosen, atol=2e-5)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), atol=2e-5)
    total = kl_total = clipped = divisor = 0.0
    mask = batch.targets >= 0
    for row, at in zip(*np.nonzero(mask), strict=True):
        share = 1.0 if grpo_normalization == "token" else 1 / mask[row].sum()
        log_ratio = chosen[row, at] - batch.sampled_log_probs[row, at]
        ratio, advantage = np.exp(log_ratio), batch.weights[row, at]
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        d = batch.reference_log_probs[row, at] - chosen[row, at]
        kl = np.exp(d) - d - 1
        total += share * (-surrogate + 0.1 * kl)
        kl_total, divisor = kl_total + share * kl, divisor + share
        clipped += share * (surrogate < ratio * advantage - 1e-12)
    metrics, _ = stepped(1, grpo_normalization, devices=1)
    assert metrics["loss"] == pytest.approx(total / divisor, rel=1e-4)
    assert metrics["kl"] == pytest.approx(kl_total / divisor, rel=1e-4)
    assert metrics["clip_share"] == pytest.approx(clipped / divisor, rel=1e-5)
    assert 0 < metrics["clip_share"] < 1
    assert divisor == pytest.approx(P * G if grpo_normalization == "sequence" else mask.sum())


def test_advantages_are_of_a_group():
    rewards = np.array([[1.0, 0, 0, 1], [0, 0, 0, 0], [5, 5, 5, 9]])
    centred = advantages(rewards, False)
    assert centred.tolist() == [[0.5, -0.5, -0.5, 0.5], [0] * 4, [-1, -1, -1, 3]]
    normal = advantages(rewards, True)
    np.testing.assert_allclose(normal[0], [1, -1, -1, 1], rtol=1e-3)
    np.testing.assert_allclose(normal[2].std(), 1, rtol=1e-3)
    assert not normal[1].any()


def test_updates_on_one_batch_are_one_step():
    """With one learning rate, also where the clock's low word has wrapped, and one bad step."""
    config = config_of("skip_bad_steps=10", devices=1)
    optimizer = config.optimizer
    make_update = functools.partial(
        update, optimizer=optimizer, learning_rate=lambda sample, samples: sample
    )
    compiled = jax.jit(make_update, static_argnames="again")
    with jax.set_mesh(make_mesh(config)):
        model = {"w_D": new_weight(jnp.ones(2), "matrix", "D")}
        state = TrainState(
            jnp.array([2**32 - 512, 0], jnp.uint32),
            model,
            part_of(model, lambda weight: False),
            {"seen": jnp.uint32([7])},
            make_optimizer(optimizer).init(model),
            jnp.uint32(5),
            {},
        )

        def rates_and_bad_steps(*sizes):
            after, shown = state, []
            for again, size in enumerate(sizes):
                gradients = jax.tree.map(lambda w: jnp.full_like(w, size), model)  # noqa: B023
                aux = Aux({}, {"tokens": jnp.float32(2)}, {"seen": jnp.uint32([3])})
                sums = gradients, aux
                after, metrics = compiled(after, sums, np.uint32(1024), again=again > 0)
                assert after.consumed_samples.tolist() == [512, 1]
                shown.append((float(metrics["learning_rate"]), int(metrics["bad_steps"])))
            good = sum(map(np.isfinite, sizes))
            assert after.buffers["seen"].tolist() == [3 if good else 7]
            return shown

        rate, nan = 2.0**32 - 512, np.nan
        assert rates_and_bad_steps(1, 1, nan) == [(rate, n) for n in (0, 0, 1)]
        assert rates_and_bad_steps(nan, nan, 1) == [(rate, n) for n in (6, 6, 0)]
