"""The kernels of packed rows, interpreted, compute what plain products and a softmax compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxramp.model.parts.packed_attention import packed_attention
from maxramp.model.parts.positions import starts


def plain(q_BTHh, k_BTKh, v_BTKh, start_BT):
    """In float32, with a dense mask."""
    T, h = q_BTHh.shape[1], q_BTHh.shape[3]
    heads = q_BTHh.shape[2] // k_BTKh.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q_BTHh, k_BTKh, v_BTKh))
    k, v = jnp.repeat(k, heads, axis=2), jnp.repeat(v, heads, axis=2)
    scores_BHTS = jnp.einsum("BTHh,BSHh->BHTS", q, k) / h**0.5
    at_T = jnp.arange(T)
    sees_BTS = (at_T <= at_T[:, None]) & (at_T >= start_BT[:, :, None])
    scores_BHTS = jnp.where(sees_BTS[:, None], scores_BHTS, -jnp.inf)
    return jnp.einsum("BHTS,BSHh->BTHh", jax.nn.softmax(scores_BHTS), v)


def inputs(T, h, H, K, dtype, document):
    """Two rows: documents of about so many tokens, and one that fills the row."""
    random = np.random.default_rng(0)
    arrays = (jnp.asarray(random.normal(size=(2, T, n, h)), dtype) for n in (H, K, K, H))
    segments = np.cumsum(random.random((2, T)) < 1 / document, axis=1, dtype=np.int32)
    segments[0] = 7
    return *arrays, starts(segments)


@pytest.mark.parametrize(
    "T, h, H, K, dtype, document, error",
    [
        (256, 64, 4, 2, "float32", 40, 2e-6),  # several blocks, and documents inside of one
        (256, 16, 2, 2, "float32", 150, 2e-6),
        (100, 24, 3, 1, "float32", 1, 2e-6),  # sizes that are no powers of two; a token each
        (256, 128, 4, 1, "bfloat16", 60, 2e-2),
    ],
)
def test_output_and_gradients_equal_plain_products(T, h, H, K, dtype, document, error):
    q, k, v, towards, start_BT = inputs(T, h, H, K, dtype, document)

    def outputs(attend):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, start_BT).astype(jnp.float32), q, k, v)
        return out, *pull(towards.astype(jnp.float32))

    kernel = jax.jit(lambda: outputs(lambda *x: packed_attention(*x, interpret=True)))()
    for a, b in zip(kernel, jax.jit(lambda: outputs(plain))(), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=error * np.abs(b).max())


def test_what_a_token_does_not_see_does_not_reach_it():
    """Not even where it is no number."""
    q, k, v, _, _ = inputs(128, 16, 2, 1, "float32", 1)
    segments = jnp.arange(128)[None].repeat(2, 0) >= 70
    before = packed_attention(q, k, v, starts(segments), interpret=True)
    k, v = (x.at[:, :70].set(1e4) for x in (k, v))
    after = packed_attention(q, k, v, starts(segments), interpret=True)
    np.testing.assert_array_equal(before[:, 70:], after[:, 70:])


def test_starts():
    segments = jnp.array([[0, 0, 3, 3, 3, 4], [1, 2, 2, 2, 2, 2]])
    np.testing.assert_array_equal(starts(segments), [[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1]])
