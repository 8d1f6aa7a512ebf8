"""Every kernel of attention computes what plain products and a softmax compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.errors import ConfigError
from maxramp.model.parts import attention, splash_attention
from maxramp.model.parts.attention import AttentionMask, attend, select_for
from maxramp.model.parts.positions import Positions
from maxramp.parallel.sharding import X_BTHh


def reference(q_BTHh, k_BSKh, v_BSKh, segments_BT, window=0, scale=None, cap=0):
    """Row by row, head by head, token by token, in float64."""
    B, T, H, h = q_BTHh.shape
    group = H // k_BSKh.shape[2]
    out = np.zeros((B, T, H, h))
    for b, t, n in np.ndindex(B, T, H):
        first = max(0, t + 1 - window) if window else 0
        seen = [s for s in range(first, t + 1) if segments_BT[b, s] == segments_BT[b, t]]
        scores = k_BSKh[b, seen, n // group] @ q_BTHh[b, t, n] * (scale or h**-0.5)
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v_BSKh[b, seen, n // group]
    return out


def inputs(T, h=16, B=2, H=4, K=2):
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(B, T, n, h)) for n in (H, K, K))
    # Documents that end at different tokens in every row.
    segments = np.cumsum(random.random((B, T)) < 4 / T, axis=1, dtype=np.int32)
    return q, k, v, segments


def on_mesh(function, tensor, *arrays):
    """`function` of float32 arrays whose rows and heads are spread over 2 x `tensor` devices."""
    config = make_config(
        "ici_data_parallelism=2",
        f"ici_tensor_parallelism={tensor}",
        "per_device_batch_size=2",
        "enable_rampup_batch_size=False",
        devices=2 * tensor,
    )
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, X_BTHh)
        return jax.jit(function)(*(jax.device_put(x.astype(np.float32), sharding) for x in arrays))


@pytest.mark.parametrize(
    "kernel, T, tensor, documents",
    [
        ("dot_product", 24, 2, False),
        ("dot_product", 24, 2, True),
        ("splash_interpreted", 128, 1, False),
        ("splash_interpreted", 128, 1, True),
        ("splash_interpreted", 256, 2, False),
        ("splash_interpreted", 256, 2, True),
        ("packed_interpreted", 100, 2, True),
    ],
)
def test_equals_the_definition(kernel, T, tensor, documents):
    q, k, v, segments = inputs(T)
    if not documents:
        segments = np.zeros_like(segments)

    def found(q, k, v):
        return attend(q, k, v, AttentionMask(Positions(segments if documents else None)), kernel)

    out = on_mesh(found, tensor, q, k, v)
    np.testing.assert_allclose(out, reference(q, k, v, segments), atol=2e-5)


BITING = {"window": 50, "scale": 0.5, "cap": 2.0}


@pytest.mark.parametrize("documents", (False, True))
@pytest.mark.parametrize("kernel", ("dot_product", "splash_interpreted", "packed_interpreted"))
def test_windows_scales_and_caps(kernel, documents):
    q, k, v, segments = inputs(256)
    if not documents:
        segments = np.zeros_like(segments)

    def found(q, k, v):
        mask = AttentionMask(Positions(segments if documents else None), **BITING)
        return attend(q, k, v, mask, kernel)

    out = on_mesh(found, 2, q, k, v)
    np.testing.assert_allclose(out, reference(q, k, v, segments, **BITING), atol=2e-5)


@pytest.mark.parametrize("mask", [{}, {"window": 150}])
def test_rows_whose_masks_do_not_fit_are_taken_in_parts(monkeypatch, mask):
    """Gradients too, of documents; as rows of 1,048,576 tokens are on TPUs."""
    q, k, v, segments = inputs(512)
    towards = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    masks, taken = splash_attention._masks, []
    monkeypatch.setattr(splash_attention, "_LARGEST_BLOCK", 128)
    monkeypatch.setattr(splash_attention, "_MOST_STEPS", 8)
    monkeypatch.setattr(splash_attention, "_masks", lambda *x: taken.append(len(x[1])) or masks(*x))

    def run(kernel, *qkv):
        seen = AttentionMask(Positions(segments), **mask)
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, seen, kernel), *qkv)
        return out, *pull(towards)

    kernels = ("splash_interpreted", "dot_product")
    found = (on_mesh(functools.partial(run, kernel), 1, q, k, v) for kernel in kernels)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(other).max())
    assert {*taken} == {256}


@pytest.mark.parametrize("window", [2, 30, 200])
def test_windows_of_packed_rows_on_gpus(window):
    """Gradients too: those of plain products, which the definition checks."""
    q, k, v, segments = inputs(200)
    towards = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def outputs(kernel):
        def found(q, k, v):
            attention = functools.partial(
                attend, mask=AttentionMask(Positions(segments), window), kernel=kernel
            )
            out, pull = jax.vjp(attention, q, k, v)
            return out, *pull(jax.reshard(towards, jax.typeof(out).sharding.spec))

        return on_mesh(found, 2, q, k, v)

    plain = outputs("dot_product")
    np.testing.assert_allclose(plain[0], reference(q, k, v, segments, window), atol=2e-5)
    for a, b in zip(outputs("packed_interpreted"), plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize(
    "kernel, T, h, documents, mask",
    [
        ("splash_interpreted", 128, 16, False, {}),
        ("splash_interpreted", 128, 16, True, {}),
        ("splash_interpreted", 256, 256, True, BITING | {"scale": 0.1}),
        ("packed_interpreted", 200, 16, True, {}),
        ("packed_interpreted", 200, 16, False, BITING),
        ("packed_interpreted", 200, 256, True, BITING | {"scale": 0.1}),
    ],
)
def test_gradients_equal_those_of_plain_products(kernel, T, h, documents, mask):
    q, k, v, segments = inputs(T, h)
    towards = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def gradients(kernel):
        def objective(q, k, v):
            seen = AttentionMask(Positions(segments if documents else None), **mask)
            return (attend(q, k, v, seen, kernel) * towards).sum()

        return on_mesh(jax.grad(objective, argnums=(0, 1, 2)), 2, q, k, v)

    for a, b in zip(gradients(kernel), gradients("dot_product"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


WINDOW = ("decoder_block=mistral", "sliding_window_size=8")


@pytest.mark.parametrize(
    "platform, keys, chosen",
    [
        ("cpu", (), "dot_product"),
        (None, ("dtype=bfloat16",), "dot_product"),
        ("cuda", ("dtype=bfloat16",), "cudnn_flash"),
        ("gpu", ("dtype=bfloat16", "head_dim=12"), "dot_product"),
        ("cuda", ("dtype=float32",), "dot_product"),
        ("rocm", ("dtype=bfloat16",), "dot_product"),
        ("tpu", ("max_target_length=256",), "splash"),
        ("tpu", ("max_target_length=100",), "dot_product"),
        ("tpu", ("max_target_length=256", "attention=dot_product"), "dot_product"),
        ("tpu", ("max_target_length=256", *WINDOW), "splash"),
        ("cuda", ("dtype=bfloat16", *WINDOW), "cudnn_flash"),
    ],
)
def test_what_is_chosen(platform, keys, chosen):
    assert select_for(make_config(*keys).model, platform) == chosen


@pytest.mark.parametrize(
    "platform, keys, reason",
    [
        ("cpu", ("attention=cudnn_flash",), "NVIDIA GPUs, not cpu devices"),
        ("cuda", ("attention=cudnn_flash", "dtype=float32"), "needs dtype=bfloat16, not float32"),
        ("cuda", ("attention=splash",), "TPUs, not cuda devices"),
        ("tpu", ("attention=splash", "max_target_length=100"), "multiple of 128, not 100"),
    ],
)
def test_what_cannot_work_is_refused(platform, keys, reason):
    with pytest.raises(ConfigError, match=f"attention=.*{reason}.*use attention=autoselected"):
        select_for(make_config(*keys).model, platform)


@pytest.mark.parametrize("documents", (False, True))
def test_cudnn_is_given_rows_and_heads_of_one_device(monkeypatch, documents):
    """Its kernel runs on GPUs only; what it is asked for can be compared anywhere."""
    q, k, v, segments = inputs(24)
    if not documents:
        segments = np.zeros_like(segments)
    plain = jax.nn.dot_product_attention
    shapes = []

    def without_cudnn(*arguments, implementation, **options):
        assert implementation == "cudnn"
        shapes.append([x.shape for x in arguments])
        return plain(*arguments, implementation="xla", **options)

    def found(q, k, v):
        return attend(
            q, k, v, AttentionMask(Positions(segments if documents else None)), "cudnn_flash"
        )

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    monkeypatch.setattr(attention, "select", lambda *_: "cudnn_flash")
    out = on_mesh(found, 2, q, k, v)
    np.testing.assert_allclose(out, reference(q, k, v, segments), atol=2e-5)
    assert shapes == [[(1, 24, 2, 16), (1, 24, 1, 16), (1, 24, 1, 16)]]
    assert out.dtype == jnp.float32


def test_packing_costs_only_where_its_kernel_is_not(monkeypatch):
    assert not any(map(attention.cost_of_packing, ("cudnn_flash", "splash", "dot_product")))
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    assert "no Pallas for Triton" in attention.cost_of_packing("cudnn_flash")
