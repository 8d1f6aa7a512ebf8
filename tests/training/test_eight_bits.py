"""Products in 8 bits: what they compute, and scales that no split of a batch changes.

Splits are compared in float32 and with gradients of e4m3: there sums in another order turn no value
of these rows to its neighbour among the few that 8 bits have.
"""

import functools
import math
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import BASE, OPTIMIZED, TINY, batch_of, complete, make_config, make_mesh, steps_of
from jax.sharding import NamedSharding
from one_step import by_name

from maxramp.data.rows import PADDING
from maxramp.model.parts import products
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import BATCH_ABT, X_BTD, merge_spec
from maxramp.training.eight_bits import EXPONENTS
from maxramp.training.state import init_state
from maxramp.training.step import make_exponent_count, make_train_step

ROWS, LENGTH = 16, 16
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture
def fine_gradients(monkeypatch):
    monkeypatch.setitem(products.FORMATS, "fp8_full", products.Format(E4M3, E4M3))


def random_rows(steps):
    return np.random.default_rng(0).integers(0, 264, (steps, ROWS, LENGTH + 1), dtype=np.int32)


class Run:
    """A model in 8 bits, and steps of SGD on it that may each be split in another way."""

    def __init__(self, *keys, devices=1, quantization="fp8_full"):
        own = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS / devices}")
        own += ("opt_type=sgd", "gradient_clipping_threshold=0", "base_num_decoder_layers=4")
        config = make_config(*own, f"quantization={quantization}", *keys, devices=devices)
        self.recipe, self.mesh = config.recipe, make_mesh(config)
        with jax.set_mesh(self.mesh):
            self.state = jax.jit(functools.partial(init_state, config.recipe))()

    def _call(self, make, rows_RS, accumulation):
        program = make(self.recipe, lambda samples, rows: jnp.float32(0.1))
        batch = batch_of(rows_RS.reshape(accumulation, -1, LENGTH + 1))
        with jax.set_mesh(self.mesh):
            return jax.jit(program)(
                self.state, jax.device_put(batch, NamedSharding(self.mesh, BATCH_ABT))
            )

    def count(self, rows_RS, accumulation=1):
        self.state = self._call(make_exponent_count, rows_RS, accumulation)

    def step(self, rows_RS, accumulation=1):
        """Takes a step; returns what it adds to each weight."""
        before = self.weights
        self.state, self.metrics = self._call(make_train_step, rows_RS, accumulation)
        return {name: x - before[name] for name, x in self.weights.items()}

    @property
    def weights(self):
        return by_name(order_by_layer(self.state.model))

    @property
    def exponents(self):
        return np.asarray(self.state.buffers[EXPONENTS])


def difference(actual, expected):
    """The norm of the difference of two trees, relative to that of the second."""
    square = sum(float(((actual[n] - x) ** 2).sum()) for n, x in expected.items())
    return math.sqrt(square / sum(float((x**2).sum()) for x in expected.values()))


@functools.cache
def whole(steps):
    """The last of so many steps of 16 rows in one pass on one device, and the exponents."""
    run, rows = Run(), random_rows(2)
    run.count(rows[0])
    updates = [run.step(x) for x in rows[:steps]]
    return updates[-1], run.exponents


SPLITS = [(1, (), 4)] + [
    pytest.param(
        devices, tuple(f"ici_{key}" for key in keys.split()), passes, marks=pytest.mark.slow
    )
    for devices, keys, passes in (
        (1, "", 16),
        (2, "fsdp_parallelism=2", 2),
        (2, "pipeline_parallelism=2", 1),
        (4, "data_parallelism=2 fsdp_parallelism=2", 2),
        (4, "context_parallelism=2 fsdp_parallelism=2", 1),
        (4, "pipeline_parallelism=2 fsdp_parallelism=2", 2),
    )
]


@pytest.mark.parametrize("devices, keys, accumulation", SPLITS)
def test_any_split_is_the_same_update(devices, keys, accumulation, fine_gradients):
    run, rows = Run(*keys, devices=devices), random_rows(1)[0]
    run.count(rows, accumulation)
    update, (expected, exponents) = run.step(rows, accumulation), whole(1)
    assert difference(update, expected) < 1e-5
    np.testing.assert_array_equal(run.exponents, exponents)


@pytest.mark.slow
def test_the_next_step_may_be_split_in_another_way(fine_gradients):
    run, rows = Run(), random_rows(2)
    run.count(rows[0])
    run.step(rows[0])
    other = Run("ici_fsdp_parallelism=2", devices=2)
    with jax.set_mesh(other.mesh):
        other.state = jax.tree.map(
            lambda x, like: jax.device_put(np.asarray(x), like.sharding), run.state, other.state
        )
    update, (expected, exponents) = other.step(rows[1], accumulation=4), whole(2)
    assert difference(update, expected) < 1e-5
    np.testing.assert_array_equal(other.exponents, exponents)


def test_the_first_step_is_near_that_of_float32(fine_gradients):
    """A clamp would change the update by more than 8 bits do, and nothing at all means no bits."""
    update, exponents = whole(1)
    plain = Run(quantization="")
    assert EXPONENTS not in plain.state.buffers
    assert 0.03 < difference(update, plain.step(random_rows(1)[0])) < 0.3
    assert exponents.shape == (7 * 4, 2)
    assert (exponents > 110).all()


@pytest.mark.slow
def test_padding_changes_no_scale(fine_gradients):
    run, rows = Run(), random_rows(1)[0]
    padded = np.full((2 * ROWS, LENGTH + 1), PADDING, np.int32)
    padded[::2] = rows
    run.count(padded, accumulation=2)
    run.step(padded, accumulation=2)
    np.testing.assert_array_equal(run.exponents, whole(1)[1])
    before = run.exponents
    run.step(np.full_like(padded, PADDING))
    np.testing.assert_array_equal(run.exponents, before)


def test_products_are_those_of_rounded_numbers():
    """y = x w, dx and dw of numbers that numpy rounds to 8 bits, clamped where they are too large;
    and the exponents of what has a gradient."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape).astype("f4") for shape in ((6, 8), (8, 4), (6, 4)))
    x[1] *= 1e4  # clamped
    dy[2] = 0
    x[2] = 2.0**20  # counts nothing
    scales = np.array([2.0**-6, 2.0**-12, 2.0**-7], "f4")

    formats, by_row = products.FORMATS["fp8_full"], merge_spec(X_BTD)

    def multiply(x, w, counts):
        axes = "ND", "DF", "NF"
        arguments = x, w, jnp.asarray(scales), counts
        return products.product_in_8_bits(formats, axes, by_row, *arguments)

    def rounded(x, scale, dtype, most):
        return np.clip(x / scale, -most, most).astype(dtype).astype("f4") * scale

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)  # which must leave out no rounding
    def compute(x, w, dy):
        x, dy = (jax.reshard(array, by_row) for array in (x, dy))
        y, pull = jax.vjp(multiply, x, w, jnp.zeros((2, products.BUCKETS)))
        return y, *pull(dy)

    with jax.set_mesh(make_mesh(make_config(devices=1))):
        y, dx, dw, counts = compute(x, w, dy)
    x8, w8 = rounded(x, scales[0], E4M3, 448), rounded(w, scales[2], E4M3, 448)
    dy8 = rounded(dy, scales[1], ml_dtypes.float8_e5m2, 57344)
    for actual, expected in ((y, x8 @ w8), (dx, dy8 @ w8.T), (dw, x8.T @ dy8)):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    tops = [np.abs(x[1]).max(), np.abs(dy).max()]
    expected = np.floor(np.log2(tops)).astype(int) + 127
    np.testing.assert_array_equal(products.top_exponents(3 * counts), expected)
    for dtype in (E4M3, ml_dtypes.float8_e5m2):  # room for 1.75 to 3.5 times as much
        scale = products.scale_of(products.exponent_of(jnp.float32(1.5)), dtype)
        assert 1.5 / scale == 0.75 * 2.0 ** math.floor(math.log2(float(ml_dtypes.finfo(dtype).max)))


@pytest.mark.slow
def test_a_run_counts_once_and_continues_with_its_scales(tmp_path):
    """A run that is stopped is the same run; one that was not in 8 bits counts at its restart."""
    keys = [BASE, *TINY, f"base_output_directory={tmp_path}", "run_name=a", "checkpoint_period=2"]
    keys += ["enable_rampup_batch_size=False", "per_device_batch_size=4", "dataset_type=synthetic"]
    counts, folder = "the first scales of 8 bits", tmp_path / "a"
    assert counts not in complete(*keys, "steps=2").stdout
    keys += ["quantization=fp8_full", "steps=6"]
    assert counts in complete(*keys).stdout
    before = steps_of(folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    assert counts not in complete(*keys).stdout
    assert [x["loss"] for x in steps_of(folder)] == [x["loss"] for x in before]
