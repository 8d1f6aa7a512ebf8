"""Products of rows with the matrices of their experts, beside a plain loop in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxramp.errors import ConfigError
from maxramp.model.parts import grouped
from maxramp.parallel.collectives import map_shards

E, K, N = 4, 96, 160
# Rows of each expert, of as many rows: those behind all groups are nobody's.
CASES = {
    "uneven": (300, [100, 3, 57, 120]),
    "an empty group": (300, [0, 130, 0, 170]),
    "all rows of one": (300, [0, 0, 300, 0]),
    "fewer rows than experts": (3, [1, 0, 1, 0]),
    "no rows": (3, [0, 0, 0, 0]),
}
KERNELS = ["blocks", "megablox_interpreted", "triton_interpreted"]


def loop(x_MK, w_EKN, dy_MN, sizes_E):
    """The products of every expert with its rows, and the gradients to rows and matrices."""
    y_MN, dx_MK, dw_EKN = np.zeros_like(dy_MN), np.zeros_like(x_MK), np.zeros_like(w_EKN)
    ends_E = np.cumsum(sizes_E)
    for e, rows in enumerate(map(slice, ends_E - sizes_E, ends_E)):
        y_MN[rows], dx_MK[rows] = x_MK[rows] @ w_EKN[e], dy_MN[rows] @ w_EKN[e].T
        dw_EKN[e] = x_MK[rows].T @ dy_MN[rows]
    return y_MN, dx_MK, dw_EKN


@functools.cache
def load(name):  # jitted, so that cases of the same shapes are compiled once
    product, gradient = grouped.load_kernel(name)
    return jax.jit(product, static_argnames="is_transposed"), jax.jit(gradient)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kernel", [*KERNELS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in KERNELS[2:])]
)
def test_products_and_both_gradients(kernel, dtype):
    for M, sizes in CASES.values():
        check(*load(kernel), M, sizes, dtype)


def check(product, gradient, M, sizes, dtype):
    rng, sizes_E, count = np.random.default_rng(0), jnp.array(sizes, jnp.int32), sum(sizes)
    arrays = [jnp.asarray(rng.normal(size=s), dtype) for s in ((M, K), (E, K, N), (M, N))]
    x_MK, w_EKN, dy_MN = arrays
    expected = loop(*(np.asarray(a, np.float64) for a in arrays), np.array(sizes))
    # What is nobody's must reach nothing.
    x_MK, dy_MN = (a.at[count:].set(jnp.nan) for a in (x_MK, dy_MN))
    actual = (
        product(x_MK, w_EKN, sizes_E)[:count],
        product(dy_MN, w_EKN, sizes_E, is_transposed=True)[:count],
        gradient(x_MK, dy_MN, sizes_E),
    )
    expected = expected[0][:count], expected[1][:count], expected[2]
    for one, right in zip(actual, expected, strict=True):
        assert one.shape == right.shape
        tolerance = 1e-6 if dtype == "float32" else 8e-3
        largest = max(1.0, abs(right).max(initial=0))
        scaled = np.asarray(one, np.float64) / largest
        np.testing.assert_allclose(scaled, right / largest, atol=tolerance)


def test_every_platform_has_its_kernel():
    kernels = {"tpu": "megablox", "gpu": "triton", "cuda": "triton"}
    kernels |= {"cpu": "blocks", None: "blocks"}
    assert {name: grouped.select("autoselected", name) for name in kernels} == kernels


@pytest.mark.parametrize("kernel, needed", [("megablox", "TPUs"), ("triton", "NVIDIA GPUs")])
def test_a_kernel_that_the_devices_lack_is_an_error(kernel, needed):
    says = f"^grouped_matmul={kernel} needs {needed}, not cpu devices; use"
    with pytest.raises(ConfigError, match=says):
        grouped.select(kernel, "cpu")


@pytest.mark.parametrize("experts, devices", [(2, 8), (8, 8), (8, 4)])
def test_shards_of_no_whole_tiles_are_exchanged_for_whole_experts(monkeypatch, experts, devices):
    """What devices gather stays the same, as do their parts of a sum."""
    mesh = make_mesh(make_config(f"ici_fsdp_parallelism={devices}", devices=devices))
    w_EKN = np.random.default_rng(0).normal(size=(experts, 5 * devices, 6)).astype(np.float32)
    shards = P(None, grouped.SHARDS_OF_EXPERT, None)

    def gather_and_scatter(w_EKN):
        whole_EKN = grouped._gather((w_EKN,), shards)
        number = 1 + jax.lax.axis_index("fsdp")
        return whole_EKN[None], grouped._scatter(whole_EKN * number)

    def run():
        with jax.set_mesh(mesh):
            spread = jax.device_put(w_EKN, NamedSharding(mesh, shards))
            return jax.jit(map_shards(gather_and_scatter, shards, (P("fsdp"), shards)))(spread)

    gathered, parts = run()
    monkeypatch.setattr(grouped, "_TILE_ROWS", 1)
    for one, right in zip((gathered, parts), run(), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6)
    np.testing.assert_array_equal(gathered, np.broadcast_to(w_EKN, (devices, *w_EKN.shape)))
