"""Spikes: which steps are skipped, what a skipped step leaves as it was, and through a ramp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh
from test_step import compiled_step, place, random_rows

from maxramp.training.skipping import skip_bad_step
from maxramp.training.state import TrainState, initial_state

INTERVAL, FACTOR = 40, 5.0
SPIKES = (
    *("skip_step_on_spikes=True", f"skip_step_interval={INTERVAL}"),
    f"skip_step_scaling_factor={FACTOR}",
)


@functools.cache
def compiled():
    """(bad steps so far, last steps), numbers, targets -> the same after them, bad steps of each;
    with `repeats` updates on every batch."""
    keys = make_config(*SPIKES).optimizer

    def scan(state, numbers_3S, repeats):
        def step(state, numbers):
            bad = []
            for again in range(repeats):
                metrics = {"loss": numbers[0] + 0.1 * again, "grad_norm": numbers[1]}
                arguments = metrics, numbers[2], again > 0
                state, shown = skip_bad_step(keys, state, state, *arguments)
                bad.append(shown["bad_steps"])
            return state, jnp.stack(bad)

        return jax.lax.scan(step, state, numbers_3S.T)

    return jax.jit(scan, static_argnames="repeats")


def bad_steps(loss_S, norm_S, targets_S, repeats=1):
    """How many in a row were skipped after each of S steps, by maxramp: [S, repeats]."""
    zeros = jnp.zeros(INTERVAL + 1)
    recent = {name: zeros for name in ("loss", "grad_norm", "targets")}
    clock = jnp.zeros(2, jnp.uint32)
    state = TrainState(clock, {}, {}, {}, {}, jnp.uint32(0), recent)
    numbers_3S = np.stack([loss_S, norm_S, targets_S]).astype(np.float32)
    return np.asarray(compiled()(state, numbers_3S, repeats=repeats)[1])


def plain_spikes(loss_S, norm_S):
    """MaxText's arithmetic in numpy, without regard to how many targets a step has."""
    counts = []
    for step in range(len(loss_S)):
        window = slice(max(0, step - INTERVAL), step)
        is_spike = False
        for x_S in (loss_S, norm_S):
            last = x_S[window]
            if len(last) + 1 >= INTERVAL // 2:
                is_spike |= x_S[step] - last.mean() > FACTOR * last.std(ddof=1)
        counts.append(is_spike)
    return np.array(counts)


def test_steps_of_one_size_are_skipped_as_in_maxtext():
    random = np.random.default_rng(0)
    loss_S = 3 + 2 * np.exp(-np.arange(400) / 50) + random.normal(0, 0.02, 400)
    norm_S = random.lognormal(0, 0.1, 400)
    loss_S[[5, 100, 150, 151, 240]] += 4  # the first comes before there is anything to compare with
    norm_S[[60, 180]] *= 9
    loss_S[300:] += 1  # a new level
    bad_S = bad_steps(loss_S, norm_S, np.full(400, 1024))[:, 0]
    expected = plain_spikes(loss_S, norm_S)
    np.testing.assert_array_equal(bad_S > 0, expected)
    assert {60, 100, 150, 151, 180, 240} <= set(np.flatnonzero(expected)) and not expected[5]
    # 40 / (1 + 5^2) rounded up: the third loss of the new level counts as normal.
    assert bad_S[300:304].tolist() == [1, 2, 0, 0] and bad_S.max() == 2


def test_what_is_not_finite_is_no_spike_and_is_compared_with_nothing():
    loss_S, norm_S = (np.random.default_rng(s).normal(3, 0.1, 100) for s in (0, 1))
    spoilt = np.array([50, 51, 52, 70])
    whole = np.ones(100, bool)
    whole[spoilt] = False
    for x_S, value in ((loss_S, np.nan), (norm_S, np.nan), (norm_S, np.inf)):
        x_S[spoilt] = value
        x_S[80] = 9
        bad_S = bad_steps(loss_S, norm_S, np.full(100, 8))[:, 0]
        assert np.flatnonzero(bad_S).tolist() == [80]
        x_S[spoilt] = 3


@pytest.mark.parametrize("noisy", [0.0, 0.5, 1.0])
def test_a_change_of_the_batch_is_no_spike_and_hides_none(noisy):
    """Loss and gradient of rows that are alike: deviations fall with the root of the batch, and
    the squared norm has a part that falls with it: none, half or all of that of 16 rows."""
    random, sizes = np.random.default_rng(3), (16, 256, 4, 64, 16)
    targets_S = 128 * np.repeat(sizes, 200)
    rows_S = targets_S / 128
    loss_S = 2 + random.normal(0, 0.4, 1000) / np.sqrt(rows_S)
    norm_S = np.sqrt(1 - noisy + noisy * 16 / rows_S)
    norm_S += random.normal(0, 0.1, 1000) / np.sqrt(rows_S)
    assert not bad_steps(loss_S, norm_S, targets_S).any()
    assert plain_spikes(loss_S, norm_S).any()
    # Seven deviations above the mean, soon after the batch has grown 16 times.
    loss_S[210] = 2 + 7 * 0.4 / np.sqrt(256)
    assert np.flatnonzero(bad_steps(loss_S, norm_S, targets_S)[:, 0]).tolist() == [210]
    assert not plain_spikes(loss_S, norm_S)[210]


def test_every_update_on_a_batch_is_compared_with_the_steps_before_it():
    """Four updates count once, though a loss higher by 0.1 follows each."""
    loss_S = np.random.default_rng(0).normal(3, 0.3, 60)
    loss_S[40] = 20
    counts = bad_steps(loss_S, np.full(60, 1.0) + loss_S / 9, np.full(60, 8), repeats=4)
    once = bad_steps(loss_S, np.full(60, 1.0) + loss_S / 9, np.full(60, 8))
    assert once[40] == 1
    np.testing.assert_array_equal(counts[:, :1], once)
    assert counts[40].tolist() == [1, 1, 1, 1]


SMALL = ("skip_step_interval=6", "skip_step_scaling_factor=3")
EXPERTS = (
    *("decoder_block=dots1", "use_qk_norm=True", "num_experts=8", "num_experts_per_tok=2"),
    *("base_moe_mlp_dim=16", "routed_score_func=sigmoid", "routed_bias=True"),
    *("routed_bias_update_rate=0.01", "load_balance_loss_weight=0.01"),
)
PIPELINE = ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=-1")


@pytest.mark.parametrize(
    ("keys", "accumulation"),
    [
        ((), 1),
        pytest.param(("opt_type=muon",), 2, marks=pytest.mark.slow),
        pytest.param(EXPERTS, 1, marks=pytest.mark.slow),
        pytest.param(PIPELINE, 1, marks=pytest.mark.slow),
    ],
)
def test_a_spike_changes_nothing_but_the_clock(keys, accumulation):
    config = make_config(*SPIKES, *SMALL, "warmup_steps_fraction=0", *keys)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        step, state = compiled_step(config), initial_state(config)
        for number, rows_RS in enumerate(random_rows(5, 16)):
            batch = place(rows_RS.reshape(accumulation, -1, rows_RS.shape[-1]), mesh)
            if number == 3:  # as if all steps so far had been far better
                recent = state.recent | {"loss": state.recent["loss"] / 2}
                state = TrainState(**vars(state) | {"recent": recent})
            before, (state, metrics) = state, step(state, batch)
            is_bad = number == 3
            assert metrics["bad_steps"] == state.bad_steps == is_bad
            assert state.consumed_samples[0] == 16 * (number + 1)
            for name in ("trained", "frozen", "buffers", "opt_state"):
                pairs = zip(
                    *(jax.tree.leaves(getattr(s, name)) for s in (before, state)), strict=True
                )
                same = [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs]
                assert all(same) if is_bad or not same else not all(same), name
            for name in ("loss", "grad_norm"):
                assert state.recent[name][-1] == metrics[name]
