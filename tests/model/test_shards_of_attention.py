"""Tokens that lie on several devices, each of which has all keys, attend as those of whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxramp.model.parts.attention import KERNELS, AttentionMask
from maxramp.model.parts.positions import Positions

BITING = {"window": 50, "scale": 0.5, "cap": 2.0}
# Of 5 runs of each row those that a device has.
CUTS = ([[0, 3, 4], [1, 2, 3]], [[1, 2], [0, 4]])


def inputs(T, h=16, B=2, H=2, K=1):
    random = np.random.default_rng(0)
    arrays = (random.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K, H))
    return *arrays, np.cumsum(random.random((B, T)) < 6 / T, axis=1, dtype=np.int32)


def shards(T):
    """The index of each device's tokens, [B, t]; a run has a fifth of the row."""
    runs = np.arange(T).reshape(5, T // 5)
    return [np.stack([runs[row].reshape(-1) for row in cut]).astype(np.int32) for cut in CUTS]


def outputs(kernel, q, k, v, mask, shards):
    """The output of all devices, in the order of the rows."""
    out = jnp.zeros(q.shape, q.dtype)
    rows, run = np.arange(len(q))[:, None], q.shape[1] // 5
    for index_Bt in shards:
        own = KERNELS[kernel](q[rows, index_Bt], k, v, mask, jnp.asarray(index_Bt), run)
        out = out.at[rows, index_Bt].set(own)
    return out


@pytest.mark.parametrize(
    "kernel, T, documents, mask",
    [
        ("dot_product", 45, True, BITING | {"window": 7}),
        ("packed_interpreted", 205, True, BITING),
        ("splash_interpreted", 640, True, BITING),
        pytest.param("packed_interpreted", 640, False, {}, marks=pytest.mark.slow),
        pytest.param("splash_interpreted", 640, False, {"window": 150}, marks=pytest.mark.slow),
    ],
)
def test_together_they_find_what_whole_rows_do(kernel, T, documents, mask):
    q, k, v, towards, segments = inputs(T)
    mask = AttentionMask(Positions(segments if documents else None), **mask)
    whole = [np.tile(np.arange(T, dtype=np.int32), (2, 1))]

    def run(kernel, shards):
        out, pull = jax.vjp(lambda *qkv: outputs(kernel, *qkv, mask, shards), q, k, v)
        return out, *pull(towards)

    cut = jax.jit(lambda: run(kernel, shards(T)))()
    for one, other in zip(cut, jax.jit(lambda: run("dot_product", whole))(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())
