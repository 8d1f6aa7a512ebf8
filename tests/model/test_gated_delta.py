"""The gated delta rule beside a loop over the tokens of each document in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.model.mixers.gated_delta import _prepare
from maxramp.model.parts import gated_delta as rule
from maxramp.model.parts import gated_delta_kernel
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.sharding import REPLICATED, TOKENS_BT, X_BTF, X_BTHh

B, T, K, H, k, v = 2, 150, 2, 4, 8, 16
# First tokens of documents: inside chunks, at their edges, alone, and several in one chunk.
STARTS = [0, 5, 6, 63, 64, 100], [0, 128]
SEGMENTS = np.stack([np.searchsorted(starts, np.arange(T), "right") for starts in STARTS])


def inputs(scale=1.0, tokens=T, k=k, v=v):
    keys = iter(jax.random.split(jax.random.key(0), 6))
    q, key = (rule.normalize(jax.random.normal(next(keys), (B, tokens, K, k))) for _ in "qk")
    values = jax.random.normal(next(keys), (B, tokens, H, v))
    g = -jnp.exp(jax.random.normal(next(keys), (B, tokens, H)) * 2 - 3) * scale
    beta = jax.nn.sigmoid(jax.random.normal(next(keys), (B, tokens, H)))
    return (q * k**-0.5, key, values, g, beta), jax.random.normal(next(keys), (B, tokens, H, v))


def by_token(q, key, values, g, beta, segments):
    """The rule as its paper writes it; a document begins with an empty state."""
    is_new = jnp.diff(segments, axis=1, prepend=-1) != 0
    q, key = (jnp.repeat(x, H // K, 2) for x in (q, key))

    def read(S, xs):
        q, key, values, g, beta, is_new = xs
        S = jnp.where(is_new[:, None, None, None], 0, S * jnp.exp(g)[..., None, None])
        error = beta[..., None] * (values - jnp.einsum("bhkv,bhk->bhv", S, key))
        S += key[..., None] * error[..., None, :]
        return S, jnp.einsum("bhkv,bhk->bhv", S, q)

    xs = [jnp.moveaxis(x, 1, 0) for x in (q, key, values, g, beta, is_new)]
    empty = jnp.zeros((B, H, q.shape[-1], values.shape[-1]), q.dtype)
    S, o = jax.lax.scan(read, empty, xs)
    return jnp.moveaxis(o, 0, 1), S


@functools.partial(jax.jit, static_argnums=0)
def derive(function, arrays, weights, segments):
    def total(*arrays):
        o, S = function(*arrays, segments)
        return (o * weights).sum(), (o, S)

    return jax.grad(total, range(5), has_aux=True)(*arrays)


def results(function, arrays, weights, segments):
    """Its results, and the gradients of a sum of these to its five arrays."""
    gradients, values = derive(function, arrays, weights, segments)
    return [np.asarray(x, np.float64) for x in (*values, *gradients)]


def exact_results(arrays, weights, segments):
    with jax.enable_x64(True):
        arrays, weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (arrays, weights))
        return results(by_token, arrays, weights, segments)


def assert_close(actual, expected, tolerance=2e-6):
    for one, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, right, atol=tolerance * max(1, abs(right).max()))


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e9])
def test_chunks_are_the_loop_over_tokens(scale):
    arrays, weights = inputs(scale)
    expected = exact_results(arrays, weights, SEGMENTS)
    assert_close(results(rule.gated_delta, arrays, weights, SEGMENTS), expected)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels, without a TPU."""
    kernels = functools.partial(gated_delta_kernel.scan_chunks, interpret=True)
    monkeypatch.setattr(gated_delta_kernel, "scan_chunks", kernels)
    monkeypatch.setattr(rule, "platform", lambda: "tpu")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_kernels_are_the_loop_over_tokens(dtype, tolerance, interpreted):
    (q, key, values, *gates), weights = inputs(k=128, v=128)
    arrays = (q, key, values.astype(dtype), *gates)
    actual = results(rule.gated_delta, arrays, weights, SEGMENTS)
    assert_close(actual, exact_results(arrays, weights, SEGMENTS), tolerance)


@pytest.mark.slow
def test_kernels_on_parts_of_rows_are_whole_rows(interpreted):
    assert_parts_are_whole(devices=2, tokens=300, k=128, v=128)


def test_parts_of_rows_are_whole_rows():
    """A document goes on through several parts, and parts are no whole chunks."""
    assert_parts_are_whole(devices=4, tokens=152)


def assert_parts_are_whole(devices, tokens, **widths):
    arrays, weights = inputs(tokens=tokens, **widths)
    segments = np.pad(SEGMENTS, ((0, 0), (0, tokens - T)), mode="edge")
    expected = exact_results(arrays, weights, segments)
    keys = f"ici_context_parallelism={devices}"
    mesh = make_mesh(make_config(keys, devices=devices))

    def parts(*arrays):
        specs = (*(X_BTHh,) * 3, *(X_BTF,) * 2, TOKENS_BT)
        arrays = [jax.reshard(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        rule_of_part = functools.partial(rule.gated_delta, axis="context")
        # of the states only the last part's is that of the rows
        o, S = map_shards(rule_of_part, specs, (X_BTHh, X_BTHh))(*arrays)
        return jax.reshard(o, X_BTHh), jax.reshard(S, REPLICATED)[:, -H:]

    with jax.set_mesh(mesh):
        assert_close(results(parts, arrays, weights, segments), expected)


def test_nothing_passes_from_one_document_to_another():
    """Gradients of the results of one document are 0 for all tokens of the others."""
    arrays, weights = inputs()
    for row, starts in enumerate(STARTS):
        for start, end in zip(starts, [*starts[1:], T], strict=True):
            own = np.zeros((B, T), bool)
            own[row, start:end] = True
            only = weights * own[..., None, None]
            _, _, *gradients = results(rule.gated_delta, arrays, only, SEGMENTS)
            for gradient in gradients[:3]:  # decays of a single token change nothing
                assert not gradient[~own].any() and gradient[own].any()


def test_convolutions_stop_at_documents():
    x, taps = (np.random.default_rng(0).normal(size=s) for s in ((B, T, H, k), (4, H, k)))
    before = np.zeros((B, 3, H, k))
    actual = jax.jit(rule.causal_conv)(
        *map(jnp.asarray, (x, taps, SEGMENTS, before, np.zeros((B, 3))))
    )
    expected = np.zeros_like(x)
    for row, t, back in np.ndindex(B, T, 4):
        if t >= back and SEGMENTS[row, t] == SEGMENTS[row, t - back]:
            expected[row, t] += x[row, t - back] * taps[3 - back]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_backward_pass_keeps_no_more_than_a_convolution_reads():
    width = 2 * k + H // K * v
    shapes = (B, T, K, width), (B, T, K, H // K), (B, T, K, H // K), (1, 4, K, width), (H,), (H,)
    qkv, b, a, *weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    before = jax.ShapeDtypeStruct((B, 3, K, width), jnp.float32)

    def pull_back(qkv, b, a, before, *weights):
        def run(qkv, b, a, *weights):
            segments = SEGMENTS, np.zeros((B, 3), int)
            arrays = qkv, b, a, segments[0], before, segments[1]
            return _prepare(*arrays, *weights, (k, k, H // K * v))

        return jax.vjp(run, qkv, b, a, *weights)[1]

    def size(tree):
        return sum(x.size for x in jax.tree.leaves(tree))

    arguments = qkv, b, a, before, *weights
    kept = size(jax.eval_shape(pull_back, *arguments))
    assert kept <= size(arguments) + 2 * SEGMENTS.size


def test_tokens_one_by_one_are_the_chunks():
    arrays, _ = inputs()
    chunks, step = jax.jit(rule.gated_delta), jax.jit(rule.gated_delta_token)
    o, S = chunks(*arrays, jnp.zeros((B, T), int))
    state = jnp.zeros((B, H, k, v))
    for t in range(T):
        one, state = step(*(x[:, t] for x in arrays), state)
        np.testing.assert_allclose(one, o[:, t], atol=1e-5)
    np.testing.assert_allclose(state, S, atol=1e-5)
    half = [x[:, :70] for x in arrays], [x[:, 70:] for x in arrays]
    first, state = chunks(*half[0], jnp.zeros((B, 70), int))
    second, state = chunks(*half[1], jnp.zeros((B, 80), int), state)
    np.testing.assert_allclose(np.concatenate([first, second], 1), o, atol=1e-5)
    np.testing.assert_allclose(state, S, atol=1e-5)
