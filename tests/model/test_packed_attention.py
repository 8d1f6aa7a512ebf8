"""The kernels of packed rows, interpreted, compute what plain products and a softmax compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxramp.model.parts.packed_attention import packed_attention
from maxramp.model.parts.positions import starts


def plain(q_BTHh, k_BTKh, v_BTKh, first_BT, at_BT, scale, cap):
    """In float32, with a dense mask."""
    heads = q_BTHh.shape[2] // k_BTKh.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q_BTHh, k_BTKh, v_BTKh))
    k, v = jnp.repeat(k, heads, axis=2), jnp.repeat(v, heads, axis=2)
    scores_BHTS = jnp.einsum("BTHh,BSHh->BHTS", q, k) * scale
    scores_BHTS = cap * jnp.tanh(scores_BHTS / cap) if cap else scores_BHTS
    at_S = jnp.arange(k.shape[1])
    sees_BTS = (at_S <= at_BT[:, :, None]) & (at_S >= first_BT[:, :, None])
    scores_BHTS = jnp.where(sees_BTS[:, None], scores_BHTS, -jnp.inf)
    return jnp.einsum("BHTS,BSHh->BTHh", jax.nn.softmax(scores_BHTS), v)


def inputs(T, h, v, H, K, dtype, document):
    """Two rows: documents of about so many tokens, and one that fills the row."""
    random = np.random.default_rng(0)
    sizes = ((H, h), (K, h), (K, v), (H, v))
    arrays = (jnp.asarray(random.normal(size=(2, T, *size)), dtype) for size in sizes)
    segments = np.cumsum(random.random((2, T)) < 1 / document, axis=1, dtype=np.int32)
    segments[0] = 7
    return *arrays, starts(segments), jnp.broadcast_to(jnp.arange(T), (2, T))


@pytest.mark.parametrize(
    "T, h, v, H, K, dtype, document, cap, all_queries, error",
    [
        (
            256,
            64,
            64,
            4,
            2,
            "float32",
            40,
            0,
            True,
            2e-6,
        ),  # several blocks, and documents inside one
        (256, 16, 16, 2, 2, "float32", 150, 1.0, False, 2e-6),
        (100, 24, 24, 3, 1, "float32", 1, 0, True, 2e-6),  # sizes no powers of two; a token each
        (256, 192, 128, 2, 2, "bfloat16", 60, 0, True, 2e-2),  # latent attention
        (256, 48, 24, 2, 1, "float32", 60, 0, False, 2e-6),
        (256, 128, 128, 4, 1, "bfloat16", 60, 0, True, 2e-2),
        (512, 256, 256, 2, 1, "bfloat16", 60, 1.0, False, 2e-2),
    ],
)
def test_output_and_gradients_equal_plain_products(
    T, h, v, H, K, dtype, document, cap, all_queries, error
):
    q, k, v, towards, *seen = inputs(T, h, v, H, K, dtype, document)
    if not all_queries:  # those that a device may have, of each row others
        mine = jnp.stack([jnp.r_[: T // 4, T // 2 : T * 3 // 4], jnp.r_[T // 4 : T * 3 // 4]])
        q, towards, *seen = (jax.vmap(lambda x, i: x[i])(x, mine) for x in (q, towards, *seen))

    def outputs(attend):
        def function(*qkv):
            return attend(*qkv, *seen, h**-0.5, cap).astype(jnp.float32)

        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(towards.astype(jnp.float32))

    kernel = jax.jit(lambda: outputs(functools.partial(packed_attention, interpret=True)))()
    for a, b in zip(kernel, jax.jit(lambda: outputs(plain))(), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=error * np.abs(b).max())
