"""Tokens reach their experts, and come back, on every mesh. E experts, k of a token."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import NamedSharding
from test_experts import ALL, EXPERT, EXPERTS, PER_TOKEN, config_of, slow_but
from test_step import LENGTH, ROWS, initial_state

from maxramp.model.parts import dispatch, grouped
from maxramp.model.parts.weights import new_weight
from maxramp.parallel.sharding import (
    EXPERTS_IN_EDF,
    EXPERTS_OUT_EFD,
    STREAM_BTD,
    X_BTD,
    CHOICES_BTk,
)


def choices(name):
    """Experts of tokens [B, T, 2] by how they are spread; EXPERTS: none."""
    random = np.random.default_rng(2)
    chosen = random.permuted(np.tile(np.arange(EXPERTS), (16, 8, 1)), axis=-1)[..., :PER_TOKEN]
    if name == "all to two of a device":
        chosen[:] = 4, 5
    if name == "few":
        chosen = np.where(np.isin(chosen, (1, 6)), chosen, EXPERTS)
    if name == "dropped":
        chosen = np.where(random.random(chosen.shape) < 0.4, EXPERTS, chosen)
    if name == "none":
        chosen[:] = EXPERTS
    return chosen.astype(np.int32)


def emulate_ragged_all_to_all(x, out, begins, sizes, lands, received, *, axis_name):
    """What XLA has on TPUs and GPUs alone: every piece from its place here to its place there."""
    devices = jax.lax.axis_size(axis_name)
    pieces, number = len(begins) // devices, jax.lax.axis_index(axis_name)
    arguments = x, jnp.stack([begins, sizes, lands])
    every, theirs = (jax.lax.all_gather(a, axis_name) for a in arguments)
    for device, piece in itertools.product(range(devices), range(pieces)):
        begin, size, land = theirs[device, :, number * pieces + piece]
        assert received.shape == sizes.shape
        at = jnp.arange(len(x))
        to = jnp.where((at >= begin) & (at < begin + size), at - begin + land, len(out))
        out = out.at[to].set(every[device], mode="drop")
    return out


def plain_mixture(x_BTD, weights_BTk, in_EDF, out_EFD, chosen_BTk):
    made_BTED = jnp.einsum("BTD,EDF,EFG->BTEG", x_BTD, in_EDF, out_EFD)
    is_chosen_BTkE = chosen_BTk[..., None] == np.arange(EXPERTS)
    return jnp.einsum("BTk,BTkE,BTED->BTD", weights_BTk, is_chosen_BTkE.astype(float), made_BTED)


@pytest.mark.parametrize("mesh", slow_but((EXPERT, ALL), ALL), ids=("expert 4", "expert 2, tensor"))
def test_every_way_to_the_experts_is_that_of_a_plain_product(mesh, monkeypatch):
    """Forward and backward, also where one device's experts take all tokens, or none."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulate_ragged_all_to_all)
    monkeypatch.setattr(dispatch, "_BLOCK", 20)  # rows: a device has up to 4 of such blocks
    random = np.random.default_rng(3)
    shapes = (16, 8, 32), (16, 8, PER_TOKEN), (EXPERTS, 32, 16), (EXPERTS, 16, 32)
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    specs = X_BTD, CHOICES_BTk, EXPERTS_IN_EDF, EXPERTS_OUT_EFD
    weigh_BTD = random.normal(size=shapes[0]).astype(np.float32)

    def weigh(y_MF, weights_M):
        return y_MF * weights_M[:, None]

    @functools.partial(jax.jit, static_argnames="way")
    def mix(x_BTD, weights_BTk, in_EDF, out_EFD, chosen_BTk, way):
        def total(x_BTD, weights_BTk, in_EDF, out_EFD):
            plan = dispatch.plan(chosen_BTk, EXPERTS, way)
            x_MD, weights_M = dispatch.spread(x_BTD, weights_BTk, plan)
            into = new_weight(in_EDF, "matrix", "D F", "E")
            out = new_weight(out_EFD, "matrix", "F D", "E")
            y_MF = grouped.product(x_MD, (into,), plan.sizes_E, "blocks")
            y_MF = dispatch.map_rows(weigh, plan, y_MF, weights_M)
            y_MD = grouped.product(y_MF, (out,), plan.sizes_E, "blocks")
            y_BTD = dispatch.collect(y_MD, plan)
            return (y_BTD * jax.reshard(weigh_BTD, STREAM_BTD)).sum(), y_BTD

        arrays = x_BTD, weights_BTk, in_EDF, out_EFD
        return jax.grad(total, range(4), has_aux=True)(*arrays)

    def defined(*arrays, chosen):
        y_BTD = plain_mixture(*arrays, chosen)
        return (y_BTD * weigh_BTD).sum(), y_BTD

    with jax.set_mesh(devices := make_mesh(config_of(*mesh, devices=8))):
        placed = [
            jax.device_put(a, NamedSharding(devices, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        for name in ("spread", "all to two of a device", "few", "dropped", "none"):
            chosen = choices(name)
            expected = jax.grad(functools.partial(defined, chosen=chosen), range(4), has_aux=True)
            expected = jax.tree.map(np.asarray, expected(*arrays))
            for way in ("gather", "ragged"):
                results = mix(*placed, jax.reshard(chosen, CHOICES_BTk), way=way)
                for a, b in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4, err_msg=f"{name} {way}")


def test_routers_compute_in_float32():
    """What bfloat16 would round decides and weighs nothing."""
    config = config_of("dtype=bfloat16")
    with jax.set_mesh(make_mesh(config)):
        model = initial_state(config).model.cast("bfloat16").one_by_one()
        mlp = model.layers[0].mlp
        assert mlp.gate_EDF[...].dtype == jnp.bfloat16
        x_BTD = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 32), jnp.bfloat16)
        (experts_BTk, weights_BTk), _ = mlp.router(x_BTD, None)
    logits = np.asarray(x_BTD, np.float64) @ np.asarray(mlp.router.matrix_DE[...], np.float64)
    top = np.sort(logits)[..., ::-1][..., :PER_TOKEN]
    weights = np.exp(top) / np.exp(top).sum(-1, keepdims=True)
    assert weights_BTk.dtype == jnp.float32
    np.testing.assert_allclose(weights_BTk, weights, rtol=3e-6)
    np.testing.assert_array_equal(experts_BTk, np.argsort(-logits)[..., :PER_TOKEN])


def test_no_token_is_dropped_where_nothing_is_trained():
    """Generation and tasks read rows of other lengths than training."""
    config = config_of(capacity_factor=0.5)
    with jax.set_mesh(make_mesh(config)):
        router = initial_state(config).model.one_by_one().layers[0].mlp.router
        x_BTD = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 32))
        (read_BTk, _), _ = router(x_BTD, None)
        (trained_BTk, _), _ = router(x_BTD, jnp.ones((ROWS, LENGTH)))
    assert (read_BTk < EXPERTS).all() and (trained_BTk == EXPERTS).any()
