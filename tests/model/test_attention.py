"""Every kernel of attention computes what plain products and a softmax compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.errors import ConfigError
from maxramp.model.parts import attention, splash_attention
from maxramp.model.parts.attention import AttentionMask, attend, select, select_for
from maxramp.model.parts.packed_attention import packed_attention
from maxramp.model.parts.positions import Positions, starts
from maxramp.parallel.sharding import SPLIT_D, X_BTHh


def reference(q_BTHh, k_BSKh, v_BSKh, segments_BT, window=0, scale=None, cap=0, sinks_H=None):
    """Row by row, head by head, token by token, in float64."""
    B, T, H, h = q_BTHh.shape
    group = H // k_BSKh.shape[2]
    out = np.zeros((B, T, H, h))
    for b, t, n in np.ndindex(B, T, H):
        first = max(0, t + 1 - window) if window else 0
        seen = [s for s in range(first, t + 1) if segments_BT[b, s] == segments_BT[b, t]]
        scores = k_BSKh[b, seen, n // group] @ q_BTHh[b, t, n] * (scale or h**-0.5)
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights, sink = np.exp(scores), 0 if sinks_H is None else np.exp(sinks_H[n])
        out[b, t, n] = weights / (weights.sum() + sink) @ v_BSKh[b, seen, n // group]
    return out


def inputs(T, h=16, B=2, H=4, K=2):
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(B, T, n, h)) for n in (H, K, K))
    # Documents that end at different tokens in every row.
    segments = np.cumsum(random.random((B, T)) < 4 / T, axis=1, dtype=np.int32)
    return q, k, v, segments


def on_mesh(function, tensor, *arrays):
    """`function` of float32 arrays whose rows and heads are spread over 2 x `tensor` devices."""
    rows = ("per_device_batch_size=2", "enable_rampup_batch_size=False")
    axes = ("ici_data_parallelism=2", f"ici_tensor_parallelism={tensor}")
    mesh = make_mesh(make_config(*rows, *axes, devices=2 * tensor))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, X_BTHh)
        return jax.jit(function)(*(jax.device_put(x.astype(np.float32), sharding) for x in arrays))


def mask_of(segments, documents, **rule):
    return AttentionMask(Positions(segments if documents else None), **rule)


BITING = {"window": 50, "scale": 0.5, "cap": 2.0}
SINKS = {"sinks_H": np.float32([1, -2, 3, 50]), "window": 50}  # the last leaves nothing


def split_sinks(mask: AttentionMask, sinks_H) -> AttentionMask:
    """The mask with sinks, each on the devices of its head."""
    if sinks_H is None:
        return mask
    return dataclasses.replace(mask, sinks_H=jax.reshard(jnp.asarray(sinks_H), SPLIT_D))


@pytest.mark.parametrize(
    "T, documents, rule", [(24, False, {}), (24, True, SINKS), (256, True, BITING)]
)
def test_plain_products_equal_the_definition(T, documents, rule):
    q, k, v, segments = inputs(T)
    mask = mask_of(segments, documents, **rule)

    def run(q, k, v):
        return attend(q, k, v, split_sinks(mask, mask.sinks_H), "dot_product")

    out = on_mesh(run, 2, q, k, v)
    seen = segments if documents else np.zeros_like(segments)
    np.testing.assert_allclose(out, reference(q, k, v, seen, **rule), atol=2e-5)


@pytest.mark.parametrize(
    "kernel, T, h, documents, rule",
    [
        ("splash_interpreted", 128, 16, False, {}),
        ("splash_interpreted", 128, 16, True, {}),
        ("splash_interpreted", 256, 16, False, BITING),
        ("splash_interpreted", 256, 256, True, BITING | {"scale": 0.1}),
        *((f"{name}_interpreted", 256, 16, True, SINKS) for name in ("splash", "packed")),
        *(("packed_interpreted", 200, 16, True, {"window": window}) for window in (0, 2, 30)),
        ("packed_interpreted", 200, 16, False, BITING),
        ("packed_interpreted", 200, 256, True, BITING | {"scale": 0.1}),
    ],
)
def test_outputs_and_gradients_equal_those_of_plain_products(kernel, T, h, documents, rule):
    q, k, v, segments = inputs(T, h)
    assert_equals_plain_products(kernel, 2, q, k, v, mask_of(segments, documents, **rule))


@pytest.mark.parametrize("rule", [{}, {"window": 150}])
def test_rows_whose_masks_do_not_fit_are_computed_in_parts(monkeypatch, rule):
    """As rows of 1,048,576 tokens are on TPUs."""
    q, k, v, segments = inputs(512)
    masks, sizes = splash_attention._masks, []
    monkeypatch.setattr(splash_attention, "_LARGEST_BLOCK", 128)
    monkeypatch.setattr(splash_attention, "_MOST_STEPS", 8)
    monkeypatch.setattr(splash_attention, "_masks", lambda *x: sizes.append(len(x[1])) or masks(*x))
    mask = mask_of(segments, True, **rule)
    assert_equals_plain_products("splash_interpreted", 1, q, k, v, mask)
    assert {*sizes} == {256}


def assert_equals_plain_products(kernel, tensor, q, k, v, mask):
    towards = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def run(kernel, *qkv):
        def function(q, k, v, sinks_H):
            return attend(q, k, v, split_sinks(mask, sinks_H), kernel)

        out, pull = jax.vjp(function, *qkv, mask.sinks_H)
        return out, *pull(jax.reshard(towards, jax.typeof(out).sharding.spec))

    runs = (functools.partial(run, name) for name in (kernel, "dot_product"))
    outputs = (on_mesh(function, tensor, q, k, v) for function in runs)
    for actual, expected in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


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
def test_the_best_kernel_is_chosen(platform, keys, chosen):
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
def test_a_kernel_that_cannot_work_is_refused(platform, keys, reason):
    with pytest.raises(ConfigError, match=f"attention=.*{reason}.*use attention=autoselected"):
        select_for(make_config(*keys).model, platform)


def test_kernels_want_tokens_in_order():
    """One place says so: autoselected falls back to the plain products."""
    gpu = ("gpu", "bfloat16", 64, 128)
    assert select("autoselected", *gpu) == "cudnn_flash"
    assert select("autoselected", *gpu, in_order=False) == "dot_product"
    for kernel, where in (("cudnn_flash", gpu), ("splash", ("tpu", *gpu[1:]))):
        with pytest.raises(ConfigError, match=f"attention={kernel} needs tokens that lie in order"):
            select(kernel, *where, in_order=False)


@pytest.mark.parametrize("documents", (False, True))
def test_cudnn_gets_rows_and_heads_of_one_device(monkeypatch, documents):
    """Its kernel runs on GPUs only; what it is asked for can be compared anywhere."""
    q, k, v, segments = inputs(24)
    plain, shapes = jax.nn.dot_product_attention, []

    def without_cudnn(*arguments, implementation, **options):
        assert implementation == "cudnn"
        shapes.append([x.shape for x in arguments])
        return plain(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    monkeypatch.setattr(attention, "select", lambda *_: "cudnn_flash")
    mask = mask_of(segments, documents)
    out = on_mesh(lambda q, k, v: attend(q, k, v, mask, "cudnn_flash"), 2, q, k, v)
    seen = segments if documents else np.zeros_like(segments)
    np.testing.assert_allclose(out, reference(q, k, v, seen), atol=2e-5)
    assert shapes == [[(1, 24, 2, 16), (1, 24, 1, 16), (1, 24, 1, 16)]]
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("kernel", ["splash_interpreted", "packed_interpreted", "dot_product"])
def test_sinks_have_float32_gradients_whatever_the_queries(kernel):
    q, k, v, _ = (jnp.bfloat16(x) for x in inputs(128))

    def total(sinks_H):
        return attend(q, k, v, split_sinks(AttentionMask(), sinks_H), kernel).sum()

    with jax.set_mesh(make_mesh(make_config(devices=1))):
        assert jax.eval_shape(jax.grad(total), jnp.zeros(4)).dtype == jnp.float32


def test_sinks_are_refused_where_cudnn_would_leave_them_out(monkeypatch):
    q, k, v, _ = inputs(24)
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="attention=cudnn_flash takes no sinks: .*dot_product"):
        attention.KERNELS["cudnn_flash"](q, k, v, AttentionMask(sinks_H=np.zeros(4)))


def test_packing_costs_only_without_its_kernel(monkeypatch):
    assert not any(map(attention.cost_of_packing, ("cudnn_flash", "splash", "dot_product")))
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    assert "no Pallas for Triton" in attention.cost_of_packing("cudnn_flash")


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


def packed_inputs(T, h, v, H, K, dtype, document):
    """Makes two rows: documents of about this length, and one that fills the row."""
    random = np.random.default_rng(0)
    sizes = ((H, h), (K, h), (K, v), (H, v))
    arrays = (jnp.asarray(random.normal(size=(2, T, *size)), dtype) for size in sizes)
    segments = np.cumsum(random.random((2, T)) < 1 / document, axis=1, dtype=np.int32)
    segments[0] = 7
    return *arrays, starts(segments), jnp.broadcast_to(jnp.arange(T), (2, T))


@pytest.mark.parametrize(
    "T, h, v, H, K, dtype, document, cap, all_queries, error",
    [
        # several blocks, and documents inside one
        (256, 64, 64, 4, 2, "float32", 40, 0, True, 2e-6),
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
    q, k, v, towards, *seen = packed_inputs(T, h, v, H, K, dtype, document)
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
